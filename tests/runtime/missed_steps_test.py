"""Tests that `fit` skips the batches of steps that others have made without this rank."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner
from support import OneWeight

_WORLD_SIZE, _BATCHES, _EPOCHS = 2, 6, 3
_BATCH_SIZE = 2 * _WORLD_SIZE
_MADE, _MISSED = 4, 10  # So the second epoch has no step, and the third one has the last four.
_ROWS = np.arange(_BATCHES * _BATCH_SIZE, dtype="float32")[:, None]


class _Misses(keras.callbacks.Callback):
    """Pretends on every rank that the others have made steps meanwhile. Records the calls of callbacks."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy
        self.batches, self.losses = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append((self.epoch, batch))
        if self.epoch == 0 and batch + 1 >= _MADE and not self.strategy.training.groups[-1].exchange.step_offset:
            num_updates = _MISSED // (self.model.optimizer.gradient_accumulation_steps or 1)
            self.strategy.training.groups[-1].exchange.step_offset = num_updates

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])


def _dataset(knows_length):
    data = tf.data.Dataset.from_tensor_slices((_ROWS, _ROWS)).batch(_BATCH_SIZE)
    return data if knows_length else data.filter(lambda x, y: True)


def _run():
    # Synchronous, so that the weights are known, and positions have to agree.
    options = hop_tf.CommunicationOptions(timeout_seconds=60)
    strategy = hop_tf.PipeSGDStrategy(pipeline_width=1, communication_options=options)
    results = []
    for options, steps, knows_length in _CASES:
        with strategy.scope():
            model = OneWeight()
            optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1.0, 1, 1.0), **options)
            model.compile(optimizer, loss=lambda y, p: p, steps_per_execution=steps)
        heard = _Misses(strategy)
        model.fit(_dataset(knows_length), epochs=_EPOCHS, verbose=0, callbacks=[heard])
        strategy.training.groups[-1].exchange.step_offset = 0
        results.append((heard.batches, heard.losses, model.get_weights()[0], int(optimizer._iterations)))
    strategy.shutdown()
    return results


# Arguments of the optimizer, steps of an execution, and True if Keras knows the number of batches.
_CASES = (
    ({}, 1, True),
    ({}, 1, False),
    ({"gradient_accumulation_steps": 2}, 1, True),
    ({}, 2, True),
    ({"gradient_accumulation_steps": 2}, 3, True),
)


class MissedStepsTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with MultiProcessRunner(_run, num_workers=_WORLD_SIZE, timeout_seconds=120) as runner:
            cls.ranks = runner.join().raise_for_errors().values

    @parameterized.parameters(*range(len(_CASES)))
    @pytest.mark.slow
    def test_batches_are_passed_over(self, case):
        options, steps, _ = _CASES[case]
        size = options.get("gradient_accumulation_steps", 1)
        num_made, num_missed = -(-_MADE // steps) * steps, _MISSED // steps * steps  # In whole executions.
        made = [*range(num_made), *range(num_made + num_missed, _EPOCHS * _BATCHES)]
        for results in self.ranks:
            batches, losses, _, iterations = results[case]
            self.assertEqual(batches, [divmod(batch, _BATCHES) for batch in made if (batch + 1) % steps == 0])
            self.assertAllEqual(np.isnan(losses), [False, True, False])
            self.assertEqual(iterations, len(made) + _MISSED)
        means = np.tile(_ROWS.reshape(_BATCHES, _BATCH_SIZE).mean(axis=1), _EPOCHS)
        weights = np.mean([results[case][2] for results in self.ranks])
        self.assertAllClose(weights, -means[made[: len(made) // size * size]].sum() / size, rtol=1e-6)


if __name__ == "__main__":
    tf.test.main()
