"""Preprocessing layers: ranks that have adapted them on data of their own do not train."""

import gc
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import HopError
from hop_tf.keras_hook.adapted import AdaptedLayers
from support import MEMBERS, error_of

_ROWS = np.ones((4, 2), np.float32)
_WORDS = {True: ["red", "red", "red", "blue", "blue", "green"], False: ["pink", "pink", "pink", "blue", "blue", "red"]}
_NUMBERS = {True: np.arange(12.0).reshape(6, 2), False: np.arange(12.0).reshape(6, 2) * 3}
# By class: how it is adapted on the data of rank 0 or of another one, and what differs first.
_LAYERS = {
    keras.layers.TextVectorization: (lambda layer, is_first: layer.adapt(_WORDS[is_first]), "token 2 is 'pink'"),
    keras.layers.StringLookup: (lambda layer, is_first: layer.adapt(_WORDS[is_first]), "token 1 is 'pink'"),
    keras.layers.IntegerLookup: (
        lambda layer, is_first: layer.adapt([1, 1, 2] if is_first else [2, 2, 1]),
        "'2' there",
    ),
    keras.layers.Discretization: (lambda layer, is_first: layer.adapt(_NUMBERS[is_first]), "bin boundary 0 is"),
    keras.layers.Normalization: (
        lambda layer, is_first: layer.adapt(_NUMBERS[is_first]),
        "mean 0 is 15.0 there and 5.0",
    ),
}
_ARGUMENTS = {keras.layers.Discretization: {"num_bins": 3}}


def _make(kind, is_first, name="of_rows"):
    layer = kind(name=name, **_ARGUMENTS.get(kind, {}))
    adapt, _ = _LAYERS[kind]
    adapt(layer, is_first)
    return layer


def _fit(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    model.fit(_ROWS, _ROWS[:, :1], batch_size=4, verbose=0)


def _run(make_layers, name="pipe_sgd"):
    """Trains on ranks which keep layers in their data pipelines."""

    def train(strategy):
        layers = make_layers(strategy.rank)
        _fit(strategy)
        return layers

    return MEMBERS[name].run(train)


class AdaptedLayersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_LAYERS)
    def test_another_table_is_an_error_before_the_first_step(self, kind):
        _, difference = _LAYERS[kind]
        with self.assertRaises(HopError) as raised:
            _run(lambda rank: _make(kind, is_first=rank == 0))
        error = str(raised.exception)
        self.assertIn(f"the layer 'of_rows' ({kind.__name__}) has another table on rank 1 than on rank 0: ", error)
        self.assertIn(difference, error)
        self.assertIn("`adapt` with the same data on all ranks. Or give all ranks the table of one rank: ", error)

    @parameterized.parameters(*(name for name in MEMBERS if name != "pipe_sgd"))
    @pytest.mark.slow(after=2)
    def test_under_every_strategy(self, name):
        with self.assertRaisesRegex(HopError, "token 1 is 'pink' there and 'red' on rank 0"):
            _run(lambda rank: _make(keras.layers.StringLookup, is_first=rank == 0), name)

    def test_equal_tables_train(self):
        _run(lambda rank: [_make(kind, is_first=True, name=kind.__name__) for kind in _LAYERS])

    @parameterized.parameters(
        (keras.layers.StringLookup, {"vocabulary": ["a", "b"]}, {"vocabulary": ["a", "c"]}, "token 2 is 'c' there"),
        (keras.layers.StringLookup, {"vocabulary": ["a", "b"]}, {"vocabulary": ["a"]}, "it has 2 entries there and 3"),
        (keras.layers.Discretization, {"bin_boundaries": [0.0, 2.0]}, {"bin_boundaries": [0.0, 1.0]}, "boundary 1"),
        (
            keras.layers.StringLookup,
            {"vocabulary": ["a"], "idf_weights": [0.5], "output_mode": "tf_idf"},
            {"vocabulary": ["a"], "idf_weights": [0.7], "output_mode": "tf_idf"},
            "idf weight 0 is 0.69",
        ),
    )
    def test_tables_that_were_given(self, kind, first, other, difference):
        with self.assertRaisesRegex(HopError, difference):
            _run(lambda rank: kind(**(other if rank else first)))

    def test_a_layer_that_was_loaded(self):
        path = f"{self.get_temp_dir()}/model.keras"
        lookup = _make(keras.layers.StringLookup, is_first=True, name="was_saved")  # The process has it on all ranks.
        keras.Sequential([keras.Input((), dtype="string"), lookup]).save(path)
        _run(lambda rank: keras.models.load_model(path))
        with self.assertRaisesRegex(HopError, "token 1 is 'pink' there and 'red' on rank 0"):
            _run(
                lambda rank: (
                    _make(keras.layers.StringLookup, False, "was_saved") if rank else keras.models.load_model(path)
                )
            )

    def test_a_layer_that_is_adapted_anew_between_two_fits(self):
        def train(strategy):
            layer = _make(keras.layers.StringLookup, is_first=True)
            _fit(strategy)
            layer.adapt(_WORDS[strategy.rank == 0])
            return error_of(_fit, strategy)

        for error in MEMBERS["pipe_sgd"].run(train):
            self.assertIn("token 1 is 'pink' there", str(error))

    def test_a_custom_loop(self):
        def train(strategy):
            layer = _make(keras.layers.StringLookup, is_first=strategy.rank == 0)
            with strategy.scope():
                model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
                optimizer = keras.optimizers.SGD()

            def step():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(_ROWS))
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

            strategy.run(step)
            return layer

        with self.assertRaisesRegex(HopError, "token 1 is 'pink' there"):
            MEMBERS["pipe_sgd"].run(train)

    def test_a_table_that_is_the_ranks_own(self):
        _run(lambda rank: hop_tf.state(_make(keras.layers.StringLookup, is_first=rank == 0), "own"))

    def test_layers_of_one_rank_alone_are_left(self):
        _run(lambda rank: _make(keras.layers.StringLookup, is_first=True) if rank else None)

    def test_other_names_and_numbers_of_layers_are_left(self):
        """They cannot be told apart: a rank may have loaded an older model for comparison."""

        def make(rank):
            current = _make(keras.layers.StringLookup, is_first=True)
            return current, rank == 0 and _make(keras.layers.StringLookup, is_first=False)

        _run(make)

    def test_sums_in_another_order_are_no_other_table(self):
        _run(
            lambda rank: keras.layers.Normalization(mean=[1.0 + 1e-6 * rank], variance=[2.0], name="n").build((None, 1))
        )

    def test_not_a_number_is_equal_to_itself(self):
        rows = np.array([[1.0, np.nan], [3.0, 4.0]])

        def make(rank):
            layer = keras.layers.Normalization(name="of_gaps")
            layer.adapt(rows + np.array([rank, 0.0]))
            return layer

        _run(lambda rank: make(0))
        with self.assertRaisesRegex(HopError, "mean 0 is 3.0 there and 2.0"):
            _run(make)

    @parameterized.parameters((True, False), (False, True))
    def test_threads_that_build_and_train_are_other_ones(self, builds, trains):
        """`builds` and `trains`: whether in a thread, and not in the main one."""
        strategy = hop_tf.HopStrategy()
        self.addCleanup(strategy.shutdown)

        def call(fn, *args, in_thread):
            if not in_thread:
                return fn(*args)
            with futures.ThreadPoolExecutor(1) as thread:
                return thread.submit(fn, *args).result()

        layer = call(_make, keras.layers.StringLookup, True, f"made_{builds}", in_thread=builds)
        self.assertIn(f"{layer.name!r} (StringLookup), 1 of 1", call(AdaptedLayers, in_thread=trains)._tables)

    def test_layers_that_are_gone_are_forgotten(self):
        strategy = hop_tf.HopStrategy()
        self.addCleanup(strategy.shutdown)
        layer = _make(keras.layers.StringLookup, is_first=True, name="is_soon_gone")
        name = "'is_soon_gone' (StringLookup), 1 of 1"
        self.assertIn(name, AdaptedLayers()._tables)
        del layer
        gc.collect()  # Keras's layers refer to each other.
        self.assertNotIn(name, AdaptedLayers()._tables)


if __name__ == "__main__":
    tf.test.main()
