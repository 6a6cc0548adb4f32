"""What holds under every strategy: one table of strategies, one test for each promise.

A new strategy is a line of `MEMBERS`. Where it cannot keep a promise, `refuses` names the test and the error that users
get in its place. Promises about whole processes (a rank that is killed, Ctrl-C) are tested where processes are started.
"""

import dataclasses
import pathlib
import runpy
import tempfile
from collections.abc import Callable, Mapping

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.errors import HopError, MismatchError
from hop_tf.testing import InProcessCluster

_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
LocalSGDStrategy = runpy.run_path(str(_EXAMPLES / "own_strategy.py"))["LocalSGDStrategy"]
_NUM_RANKS = 2
_NUM_ROWS = 24
_BATCH_SIZE = 4  # Of both ranks together.
_STEPS = _NUM_ROWS // _BATCH_SIZE
_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=60)


@dataclasses.dataclass(frozen=True)
class Member:
    """A strategy, and what it promises.

    Attributes:
      make: Makes it; called with `cluster_resolver` and `communication_options`.
      num_ps: Parameter servers that it needs.
      is_equal_after_fit: Whether what is trained is equal on all ranks, to the bit, when `fit` has ended.
      refuses: For a test, what the error says that users get in its place.
    """

    make: Callable
    num_ps: int = 0
    is_equal_after_fit: bool = False
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)


MEMBERS = {
    "hop": Member(hop_tf.HopStrategy),
    "pipe_sgd": Member(hop_tf.PipeSGDStrategy, is_equal_after_fit=True),
    "dts": Member(hop_tf.DTSStrategy, is_equal_after_fit=True),
    "canary": Member(
        hop_tf.CanaryStrategy,
        is_equal_after_fit=True,
        refuses={"test_several_optimizers": "a step must update by one optimizer only"},
    ),
    "shat": Member(
        hop_tf.SHATParameterServerStrategy,
        num_ps=1,
        refuses={"test_mixed_precision_with_clipping": "`clipnorm` must not be set in an optimizer within a LossScale"},
    ),
    "own": Member(LocalSGDStrategy),  # Equal but for rounding.
    "canary_synchronous": Member(
        lambda **arguments: hop_tf.CanaryStrategy(consistency="bsp", **arguments), is_equal_after_fit=True
    ),
}
# In `make test` without the last: Canary's synchronous form shares nearly all with others of the table.
_MOST = len(MEMBERS) - 1


def _all_members(test):
    return parameterized.parameters(*MEMBERS)(pytest.mark.stress(after=_MOST)(test))


class _Rows(keras.metrics.Metric):
    """How many rows were seen."""

    def __init__(self):
        super().__init__(name="rows")
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

    def result(self):
        return self.total


class Recorder(keras.Model):
    """A linear model that records which rows it is trained with, by their first column."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        tf.numpy_function(lambda column: self.seen.extend(column.tolist()), [data[0][:, 0]], [])
        return super().train_step(data)


class TwoOptimizers(keras.Model):
    """A custom train_step, with an optimizer for each of two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(1)
        self.other = keras.optimizers.SGD(0.02)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        for optimizer, layer in ((self.optimizer, self.first), (self.other, self.second)):
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return {"loss": loss}


class InAFunction(keras.Model):
    """A train_step that is decorated."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class _PyData(keras.utils.PyDataset):
    def __len__(self):
        return _STEPS

    def __getitem__(self, index):
        part = slice(index * _BATCH_SIZE, (index + 1) * _BATCH_SIZE)
        return tuple(each[part] for each in _data())


def _data():
    x = np.random.default_rng(0).normal(size=(_NUM_ROWS, 3)).astype(np.float32)
    x[:, 0] = np.arange(_NUM_ROWS) / _NUM_ROWS
    return x, x @ np.array([[1.0], [-2.0], [0.5]], np.float32)


def _batches():
    x, y = _data()
    for start in range(0, _NUM_ROWS, _BATCH_SIZE):
        yield x[start : start + _BATCH_SIZE], y[start : start + _BATCH_SIZE]


def _endless():
    """Keras takes batches of a generator before training begins, to build metrics."""
    while True:
        yield from _batches()


def _dataset():
    return tf.data.Dataset.from_tensor_slices(_data()).batch(_BATCH_SIZE)


def _dataset_of_unknown_length():
    specs = tuple(tf.TensorSpec([None, size], tf.float32) for size in (3, 1))
    return tf.data.Dataset.from_generator(_batches, output_signature=specs)


# Of `make test` the first two; the others are tested under Hop there.
_SOURCES = {
    "arrays": lambda: {"x": _data()[0], "y": _data()[1], "batch_size": _BATCH_SIZE, "shuffle": False},
    "dataset_of_unknown_length": lambda: {"x": _dataset_of_unknown_length()},
    "tensors": lambda: dict(zip("xy", map(tf.constant, _data()), strict=True), batch_size=_BATCH_SIZE, shuffle=False),
    "py_dataset": lambda: {"x": _PyData(), "shuffle": False},
    "generator": lambda: {"x": _endless(), "steps_per_epoch": _STEPS},
    "dataset": lambda: {"x": _dataset()},
}


def _compiled(strategy, make_model=None, optimizer=None, **arguments):
    """A model in the strategy's scope, with the same weights on all ranks."""
    with strategy.scope():
        keras_model = (make_model or _linear)()
        keras_model(np.zeros((1, 3), np.float32))  # Builds it: else Keras takes batches of a generator for that.
        arguments.setdefault("loss", "mse")
        keras_model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.02, momentum=0.5), **arguments)
    return keras_model


def _linear():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])


def _deep():
    kernels = [keras.initializers.RandomNormal(seed=seed) for seed in range(2)]
    dense = [keras.layers.Dense(size, kernel_initializer=kernel) for size, kernel in zip((3, 1), kernels, strict=True)]
    return keras.Sequential([keras.Input((3,)), dense[0], keras.layers.BatchNormalization(), dense[1]])


def _fit(model, epochs=1, **arguments):
    return model.fit(**{**_SOURCES["arrays"](), **arguments}, epochs=epochs, verbose=0).history


def _loss(model):
    """Of all data, as in validation."""
    x, y = _data()
    return float(tf.reduce_mean(tf.square(model(x, training=False) - y)))


def _error_of(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return error
    return None


class ContractTest(tf.test.TestCase, parameterized.TestCase):
    def run_ranks(self, name, fn):
        """What `fn(strategy)` returns on each rank; None where the strategy refuses, as its line in the table says."""
        member = MEMBERS[name]

        def make(cluster_resolver):
            return member.make(cluster_resolver=cluster_resolver, communication_options=_OPTIONS)

        cluster = InProcessCluster(_NUM_RANKS, make, num_ps=member.num_ps)
        reason = member.refuses.get(self._testMethodName.rstrip("0123456789"))
        if reason is None:
            return cluster.run(fn)
        for error in cluster.run(lambda strategy: _error_of(fn, strategy)):
            self.assertIsInstance(error, ValueError | HopError)
            self.assertRegex(str(error), reason)
        return None

    def assert_equal_weights(self, of_ranks):
        for weights in of_ranks[1:]:
            for mine, first in zip(weights, of_ranks[0], strict=True):
                self.assertAllEqual(mine, first)  # To the bit.

    # Data.

    @parameterized.product(source=list(_SOURCES), name=list(MEMBERS))
    @pytest.mark.stress(after=len(MEMBERS) + _MOST)
    def test_ranks_share_each_batch(self, name, source):
        def train(strategy):
            model = _compiled(strategy, Recorder)
            arguments = _SOURCES[source]()
            model.fit(**arguments, verbose=0)
            return model.seen

        of_ranks = self.run_ranks(name, train)
        per_rank = _BATCH_SIZE // _NUM_RANKS
        for rank, seen in enumerate(of_ranks):
            if source == "generator":
                parts = np.round(np.array(seen) * _NUM_ROWS) % _BATCH_SIZE // per_rank
                self.assertNotEmpty(parts)
                self.assertAllEqual(parts, np.full(len(parts), rank))
                continue
            own = np.arange(_NUM_ROWS).reshape(_STEPS, _NUM_RANKS, per_rank)[:, rank]
            if name == "canary" and 0 < len(seen) < own.size:  # It may pass over batches, but takes no others.
                self.assertContainsSubset(np.round(np.array(seen) * _NUM_ROWS), own.ravel())
            else:
                self.assertAllClose(np.array(seen) * _NUM_ROWS, own.ravel(), atol=1e-3)

    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress(after=1)  # Validation data is tested below, under all.
    def test_a_split_for_validation(self, name):
        def train(strategy):
            return _fit(_compiled(strategy, metrics=[_Rows()]), validation_split=0.25)["val_rows"]

        for rows in self.run_ranks(name, train):
            self.assertEqual(rows, [6.0])

    @_all_members
    def test_weights_of_samples_and_classes(self, name):
        def train(strategy):
            model = _compiled(strategy)
            before = model.get_weights()
            _fit(model, sample_weight=np.zeros(_NUM_ROWS))
            classes = {"y": np.zeros((_NUM_ROWS, 1), np.float32), "class_weight": {0: 0.0}}
            _fit(model, **classes)
            return before, model.get_weights()

        for before, after in self.run_ranks(name, train):
            self.assertAllClose(before, after)

    # Ways to train.

    @_all_members
    def test_a_step_is_traced_once(self, name):
        """Also where the optimizer and the metrics are built in the first step, as Keras does."""

        def train(strategy):
            traces = []

            class Traced(keras.Sequential):
                def train_step(self, data):
                    traces.append(None)
                    return super().train_step(data)

            model = _compiled(
                strategy,
                lambda: Traced([keras.Input((3,)), keras.layers.Dense(1)]),
                keras.optimizers.Adam,
                metrics=["mae"],
            )
            _fit(model)
            return len(traces)

        self.assertEqual(self.run_ranks(name, train), [1] * _NUM_RANKS)

    @parameterized.product(
        how=({}, {"run_eagerly": True}, {"steps_per_execution": 2}, {"metrics": ["mae"], "weighted_metrics": ["mse"]}),
        name=list(MEMBERS),
    )
    @pytest.mark.stress(after=2 * len(MEMBERS))
    def test_trains_and_counts_steps(self, name, how):
        if name == "canary" and how.get("run_eagerly"):
            self.skipTest("What is late cannot be passed over in eager steps: its synchronous form is tested.")

        def train(strategy):
            model = _compiled(strategy, _deep, **how)
            losses = [_loss(model)]
            _fit(model, 3)
            _fit(model, 3)
            strategy.synchronize(model)
            return [*losses, _loss(model)], strategy.report()["steps"], model.get_weights()

        of_ranks = self.run_ranks(name, train)
        for losses, steps, _ in of_ranks:
            self.assertLess(losses[1], losses[0])
            if name == "canary":
                self.assertBetween(steps, 1, 6 * _STEPS)
            else:
                self.assertEqual(steps, 6 * _STEPS)
        self.assert_equal_weights([weights for *_, weights in of_ranks])

    @_all_members
    def test_one_training(self, name):
        """Validation data, weights when `fit` has ended, saved models, and reports."""

        def train(strategy):
            path = f"{folder}/{strategy.rank}.keras"
            model = _compiled(strategy, _deep, metrics=[_Rows()])
            x, y = _data()
            checkpoint = keras.callbacks.ModelCheckpoint(f"{folder}/checkpoint.{strategy.rank}.keras")
            history = _fit(model, 2, validation_data=(x[:18], y[:18]), callbacks=[checkpoint])
            model.save(path)
            reports = strategy.gather_reports(accuracy=0.5)
            trained = [weight.numpy() for weight in model.trainable_weights]
            return history["val_rows"], trained, path, model.predict(x, verbose=0), reports

        with tempfile.TemporaryDirectory() as folder:
            of_ranks = self.run_ranks(name, train)
            for rows, _, path, predicted, _ in of_ranks:
                self.assertEqual(rows, [18.0, 18.0])  # Every rank sees all of it.
                with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
                    loaded = keras.models.load_model(path, compile=False)
                self.assertAllClose(loaded.predict(_data()[0], verbose=0), predicted, rtol=1e-5, atol=1e-5)
                self.assertTrue(pathlib.Path(folder, f"checkpoint.{pathlib.Path(path).name}").exists())
        if MEMBERS[name].is_equal_after_fit:
            self.assert_equal_weights([trained for _, trained, *_ in of_ranks])
        elif name == "own":
            self.assertAllClose(of_ranks[0][1], of_ranks[1][1])
        first, second = (reports for *_, reports in of_ranks)
        self.assertIsNone(second)
        for rank, report in enumerate(first):
            self.assertEqual((report["rank"], report["accuracy"]), (rank, 0.5))
            self.assertGreater(report["bytes_sent"], 0)

    @_all_members
    def test_all_start_with_rank_0s_values(self, name):
        def train(strategy):
            model = _compiled(strategy, optimizer=lambda: keras.optimizers.SGD(0.0))
            model.set_weights([weight + strategy.rank for weight in model.get_weights()])
            _fit(model)
            return model.get_weights()

        for weights in self.run_ranks(name, train):
            self.assertAllClose(weights, [np.ones((3, 1)), np.zeros(1)])

    @_all_members
    def test_several_optimizers(self, name):
        def train(strategy):
            model = _compiled(strategy, TwoOptimizers, optimizer=lambda: keras.optimizers.SGD(0.02))
            before = model.get_weights()
            _fit(model, 2)
            strategy.synchronize(model)
            return before, model.get_weights()

        of_ranks = self.run_ranks(name, train)
        if of_ranks is None:
            return
        for before, after in of_ranks:
            for one, other in zip(before, after, strict=True):
                self.assertNotAllClose(one, other)
        self.assert_equal_weights([after for _, after in of_ranks])

    @_all_members
    def test_a_decorated_train_step_is_refused(self, name):
        def train(strategy):
            return _error_of(_fit, _compiled(strategy, InAFunction))

        for error in self.run_ranks(name, train):
            self.assertIsInstance(error, ValueError)
            self.assertRegex(str(error), "must not update variables within a tf.function of its own")

    @_all_members
    def test_accumulated_gradients(self, name):
        def train(strategy):
            model = _compiled(
                strategy, optimizer=lambda: keras.optimizers.SGD(0.02, gradient_accumulation_steps=_STEPS)
            )
            before = model.get_weights()
            _fit(model)
            once = model.get_weights()
            strategy.synchronize(model)
            return before, once, strategy.report()["steps"]

        for before, once, steps in self.run_ranks(name, train):
            self.assertNotAllClose(before, once)
            self.assertEqual(steps, 1)  # Updates are counted.

    @_all_members
    def test_mixed_precision_with_clipping(self, name):
        def make_model():
            inputs = keras.Input((3,))
            return keras.Model(inputs, keras.layers.Dense(1, dtype="mixed_float16")(inputs))

        def train(strategy):
            model = _compiled(
                strategy,
                make_model,
                lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.02, clipnorm=1.0), initial_scale=8),
            )
            before = model.get_weights()
            _fit(model)
            return before, model.get_weights()

        of_ranks = self.run_ranks(name, train)
        for before, after in of_ranks or ():
            self.assertNotAllClose(before, after)
            self.assertTrue(all(np.isfinite(each).all() for each in after))

    @_all_members
    def test_frozen_layers_and_compiling_again(self, name):
        def train(strategy):
            model = _compiled(strategy, _deep)
            _fit(model)
            model.layers[0].trainable = False
            with strategy.scope():
                model.compile(keras.optimizers.SGD(0.02), "mse")
            before = [layer.get_weights() for layer in model.layers]
            _fit(model)
            return before, [layer.get_weights() for layer in model.layers]

        for before, after in self.run_ranks(name, train):
            self.assertAllEqual(before[0][0], after[0][0])
            self.assertNotAllClose(before[-1][0], after[-1][0])

    # Ends.

    @_all_members
    def test_the_others_go_on_when_one_stops_early(self, name):
        def train(strategy):
            model = _compiled(strategy)
            stop = keras.callbacks.EarlyStopping("loss", min_delta=1e9)
            return len(_fit(model, 4, callbacks=[stop] if strategy.rank == 1 else [])["loss"])

        self.assertEqual(self.run_ranks(name, train), [4, 2])

    @_all_members
    def test_an_exception_on_one_rank(self, name):
        class Fails(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                raise LookupError("on purpose")

        def train(strategy):
            return _error_of(_fit, _compiled(strategy), 3, callbacks=[Fails()] if strategy.rank == 1 else [])

        first, second = self.run_ranks(name, train)
        self.assertIsInstance(second, LookupError)
        self.assertIsNone(first)

    # What is refused.

    @_all_members
    def test_another_model_on_one_rank(self, name):
        def train(strategy):
            return _error_of(_fit, _compiled(strategy, _deep if strategy.rank else _linear))

        errors = self.run_ranks(name, train)
        self.assertTrue(any(isinstance(error, MismatchError) for error in errors), errors)
        self.assertTrue(all(isinstance(error, HopError) for error in errors), errors)

    @_all_members
    def test_xla_is_refused(self, name):
        def train(strategy):
            return _error_of(_fit, _compiled(strategy, jit_compile=True))

        for error in self.run_ranks(name, train):
            self.assertRegex(str(error), "`jit_compile` must be False or 'auto' under hop_tf")

    @_all_members
    def test_a_forgotten_scope_is_refused(self, name):
        def train(strategy):
            model = _linear()
            model.compile("sgd", "mse")
            return _error_of(_fit, model)

        for error in self.run_ranks(name, train):
            self.assertRegex(str(error), "`fit` was called on a model that was made outside of the scope")

    @_all_members
    def test_collectives_within_fit_are_refused(self, name):
        def train(strategy):
            model = _compiled(strategy)
            call = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: strategy.synchronize(model))
            return _error_of(_fit, model, callbacks=[call])

        for error in self.run_ranks(name, train):
            self.assertRegex(str(error), "`synchronize` was called while a `fit` under this strategy runs")

    # A world of one.

    @parameterized.parameters(*(name for name, member in MEMBERS.items() if not member.num_ps))
    def test_a_world_of_one_trains_as_plain_keras(self, name):
        def train(strategy):
            model = _compiled(strategy)
            _fit(model, 2)
            return model.get_weights()

        alone = MEMBERS[name].make()
        try:
            weights = train(alone)
        finally:
            alone.shutdown()
        self.assert_equal_weights([weights, train(tf.distribute.OneDeviceStrategy("/cpu:0"))])


if __name__ == "__main__":
    absltest.main()
