"""A rank that was killed and started again joins the others where they are."""

import math
import os
import time

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.testing import MultiProcessRunner

_WORLD_SIZE = 4
_BATCH_SIZE = 8
_NUM_STEPS = 60  # In an epoch.
_NUM_EPOCHS = 3
_MEETING = 70
_RESTARTED = 2
_SETTINGS = {
    "backup": {"num_backup_workers": 1},
    "hybrid_with_skip": {"num_backup_workers": 1, "max_staleness": 3, "skip": hop_tf.SkipIterations()},
    "standard": {"on_peer_loss": "continue"},
}


class _Progress(keras.callbacks.Callback):
    """Records steps and losses; rank 0 waits at a step until a rank was started again, however long that takes."""

    def __init__(self, rank, mark):
        super().__init__()
        self.num_steps = 0
        self.losses = []
        self._rank = rank
        self._mark = mark

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        self.losses.append(logs["loss"])
        print("step", self.num_steps, flush=True)
        if self._rank == _RESTARTED and math.isnan(logs["loss"]):
            open(self._mark, "w").close()
        while self._rank == 0 and self.num_steps == _MEETING and not os.path.exists(self._mark):
            time.sleep(0.05)


def _run(settings, mark):
    os.environ["HOP_TF_STEP_SECONDS"] = "0.02"
    options = hop_tf.CommunicationOptions(timeout_seconds=10)
    strategy = hop_tf.HopStrategy(topology="ring", communication_options=options, **settings)
    keras.utils.set_random_seed(strategy.rank)
    with strategy.scope():
        frozen = keras.layers.Dense(4, trainable=False, name="frozen")
        model = keras.Sequential([keras.layers.Input((4,)), frozen, keras.layers.Dense(1, use_bias=False)])
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 1000, 0.9)
        model.compile(keras.optimizers.Adam(schedule), "mse")
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 4)).astype("float32")
    y = x @ np.arange(4, dtype="float32")[:, None]
    # Adam remembers the large gradients of its first steps for long.
    y[: 5 * _BATCH_SIZE] *= 1000
    progress = _Progress(strategy.rank, mark)
    history = model.fit(
        x, y, batch_size=_BATCH_SIZE, epochs=_NUM_EPOCHS, shuffle=False, verbose=0, callbacks=[progress]
    )
    before = model.get_weights()
    strategy.synchronize(model)
    result = {
        "report": strategy.report(),
        "iterations": int(model.optimizer.iterations),
        "second_moment": model.optimizer._velocities[0].numpy(),
        "before": before,
        "after": model.get_weights(),
        "losses": progress.losses,
        "history": history.history["loss"],
    }
    strategy.shutdown()
    return result


class HopFitRejoinTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_SETTINGS)
    def test_joins(self, name):
        mark = os.path.join(self.get_temp_dir(), f"{name} was started again")
        arguments = (_SETTINGS[name], mark)
        with MultiProcessRunner(_run, num_workers=_WORLD_SIZE, args=arguments, timeout_seconds=150) as runner:
            runner.wait_for_output(_RESTARTED, "step 10$")
            runner.kill(_RESTARTED)
            runner.restart(_RESTARTED)
            results = runner.join().raise_for_errors()
        values = results.values
        for value in values:
            # All have taken part in the average, and count their steps alike.
            self.assertEqual(value["iterations"], _NUM_EPOCHS * _NUM_STEPS)
            self.assertLen(value["losses"], _NUM_EPOCHS * _NUM_STEPS)
            for weights, of_first in zip(value["after"], values[0]["after"], strict=True):
                self.assertAllEqual(weights, of_first)
        restarted = values[_RESTARTED]
        self.assertGreater(restarted["report"]["steps"], 20)
        self.assertLess(restarted["report"]["steps"], _NUM_EPOCHS * _NUM_STEPS - 20)
        # What is not trained is not as this process had drawn it.
        self.assertAllEqual(restarted["before"][0], values[0]["before"][0])
        for weights, of_first in zip(restarted["before"], values[0]["before"], strict=True):
            self.assertAllClose(weights, of_first, atol=0.2)
        for value in values:  # An optimizer that had begun by itself would know nothing of the first steps.
            self.assertGreater(value["second_moment"].min(), 1000)
        # The first epoch was missed, the second one in part.
        self.assertAllEqual(np.isnan(restarted["history"]), [True, True, False])
        self.assertAllEqual(np.isnan(restarted["losses"]).reshape(_NUM_EPOCHS, -1).all(1), [True, True, False])


if __name__ == "__main__":
    tf.test.main()
