"""Tests that a rank that was left behind in `fit` rejoins the others, with any data, and any grouping of steps.

The ranks are threads of this process. The rank does not fall silent: another rank only says so.
"""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import PeerLostError
from hop_tf.tools.testing import InProcessCluster

_NUM_RANKS, _VICTIM, _TELLER = 3, 0, 2
_BATCH_SIZE, _NUM_STEPS, _NUM_EPOCHS = 6, 24, 4
_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=60)
_MEMBERS = {
    "pipe_sgd": (hop_tf.PipeSGDStrategy, {}),
    "pipe_sgd_sync": (hop_tf.PipeSGDStrategy, {"pipeline_width": 1, "algorithm": "ring"}),
    "pipe_sgd_wide": (hop_tf.PipeSGDStrategy, {"pipeline_width": 4, "num_segments": 2}),
    "dts": (hop_tf.DTSStrategy, {"delay": 3, "interval": 2}),
    "dts_shares": (hop_tf.DTSStrategy, {"batch_shares": "auto"}),
}


class _Teller(keras.callbacks.Callback):
    """Says after some batches that a rank is silent. Then the others go slowly until that rank is back."""

    def __init__(self, strategy, batches, is_back):
        super().__init__()
        self.heard = []
        self._strategy, self._batches, self._is_back = strategy, list(batches), is_back
        self._num_batches = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.heard.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self._num_batches += 1
        membership = self._strategy.training.runtime.membership
        if self._strategy.rank == _VICTIM:
            if membership.num_left_behind and not self._strategy.training.is_behind:
                self._is_back.set()
            return
        if self._strategy.rank == _TELLER and self._batches and self._num_batches == self._batches[0]:
            self._batches.pop(0)
            membership._go_on_without(_VICTIM, membership.incarnation_of(_VICTIM), PeerLostError("it seems silent"))
        if membership.num_lost:
            self._is_back.wait(0.05)


@pytest.mark.slow
class LeftBehindFitTest(tf.test.TestCase, parameterized.TestCase):
    def _train(self, name, *, batch=5, steps_per_execution=1, accumulation=None, data=None, validates=False):
        make, settings = _MEMBERS[name]
        is_back = threading.Event()
        x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 4)).astype("float32")
        y = x[:, :1]

        def run(strategy):
            with strategy.scope():
                batch_normalization = keras.layers.BatchNormalization()
                model = keras.Sequential([keras.Input((4,)), batch_normalization, keras.layers.Dense(1)])
                optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulation)
                model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
            teller = _Teller(strategy, [batch], is_back)
            arguments = {"batch_size": _BATCH_SIZE, "shuffle": False} if data is None else {}
            inputs = (x, y) if data is None else (data(x, y),)
            if validates:
                arguments["validation_data"] = (x[:12], y[:12])
            history = model.fit(*inputs, epochs=_NUM_EPOCHS, callbacks=[teller], verbose=0, **arguments)
            dts = isinstance(strategy, hop_tf.DTSStrategy)
            variables = model.weights if dts else [*model.trainable_variables, *model.optimizer.variables]
            state = [variable.numpy() for variable in variables]
            strategy.synchronize(model)  # Takes part of all ranks.
            return state, history.history, teller.heard, strategy.report()

        def make_strategy(cluster_resolver):
            return make(
                cluster_resolver=cluster_resolver,
                communication_options=_OPTIONS,
                on_peer_loss="continue",
                patience_seconds=50,
                **settings,
            )

        results = InProcessCluster(_NUM_RANKS, make_strategy).run(run)
        self.assertTrue(is_back.is_set())
        for rank, (state, history, heard, report) in enumerate(results):
            for mine, of_first in zip(state, results[0][0], strict=True):
                self.assertAllEqual(mine, of_first)
            self.assertEqual(report["iteration"], results[0][3]["iteration"])
            losses = (0, 1) if rank == _VICTIM else (1, 0)
            self.assertEqual((report["ranks_lost"], report["times_left_behind"]), losses)
            self.assertLen(history["loss"], _NUM_EPOCHS)
            self.assertEqual(heard, sorted(set(heard)))
            if rank != _VICTIM:
                self.assertLen(heard, _NUM_EPOCHS)
                self.assertTrue(np.isfinite(history["loss"]).all())
        return results

    @parameterized.parameters(*_MEMBERS)
    @pytest.mark.stress(after=2)
    def test_it_joins_again(self, name):
        self._train(name)

    @parameterized.parameters(("pipe_sgd", 1), ("dts", 2))
    @pytest.mark.stress
    def test_within_executions(self, name, batch):
        """The rank makes the steps of its current execution in vain. Then it is ahead of the others for a while."""
        self._train(name, batch=batch, steps_per_execution=8)

    @parameterized.parameters(4, 5)
    @pytest.mark.stress(after=1)
    def test_between_two_batches_of_an_update(self, batch):
        self._train("pipe_sgd_sync", batch=batch, accumulation=3)

    def test_data_of_unknown_length_and_validation(self):
        def from_generator(x, y):
            rows = tf.TensorSpec((4,), tf.float32), tf.TensorSpec((1,), tf.float32)
            dataset = tf.data.Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=rows)
            return dataset.batch(_BATCH_SIZE)

        self._train("pipe_sgd", batch=_NUM_STEPS - 1, data=from_generator, validates=True)

    def test_eager_steps_cannot_be_passed_over(self):
        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse", run_eagerly=True)
            with self.assertRaisesRegex(ValueError, "`run_eagerly` must be False .* with `patience_seconds`"):
                model.fit(np.ones((6, 4)), np.ones((6, 1)), verbose=0)

        def make(cluster_resolver):
            return hop_tf.PipeSGDStrategy(
                cluster_resolver=cluster_resolver, on_peer_loss="continue", patience_seconds=5
            )

        InProcessCluster(2, make).run(run)


if __name__ == "__main__":
    tf.test.main()
