"""Tests of Canary between processes: two interfaces, a slow rank, and a rank that is killed and restarted."""

import json
import os
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner

_NUM_STEPS = 60
_BATCH_SIZE = 12
_MEETING = 40


class _Progress(keras.callbacks.Callback):
    """Records losses. The others wait at a step until the victim was restarted, and are slow until it trains."""

    def __init__(self, is_victim, mark):
        super().__init__()
        self.losses = []
        self._is_victim, self._mark = is_victim, mark

    def on_train_begin(self, logs=None):
        if self._mark and self._is_victim:
            self._write("started again" if self._is_written("started") else "started")

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        print("step", batch, flush=True)
        if not self._mark:
            return
        if self._is_victim and self._is_written("started again"):
            self._write("trains again")
        while not self._is_victim and batch == _MEETING and not self._is_written("started again"):
            time.sleep(0.05)
        if not self._is_victim and batch >= _MEETING and not self._is_written("trains again"):
            time.sleep(0.5)

    def _write(self, event):
        open(f"{self._mark}.{event}", "w").close()

    def _is_written(self, event):
        return os.path.exists(f"{self._mark}.{event}")


def _run(settings, victim=None, mark="", slow_rank=None, num_interfaces=0):
    """Trains; returns the final weights, the losses, and the report."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    os.environ["HOP_TF_STEP_SECONDS"] = "0.1" if rank == slow_rank else "0.02"
    if num_interfaces:
        addresses = [f"127.0.{1 + level}.{1 + rank}" for level in range(num_interfaces)]
        os.environ["HOP_TF_INTERFACES"] = ",".join(addresses)
    options = hop_tf.CommunicationOptions(timeout_seconds=20)
    strategy = hop_tf.CanaryStrategy(communication_options=options, **settings)
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 256)).astype("float32")
    y = x @ np.random.default_rng(1).normal(size=(256, 64)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(64, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.3, momentum=0.5), "mse")
    progress = _Progress(rank == victim, mark)
    model.fit(x, y, batch_size=_BATCH_SIZE, shuffle=False, verbose=0, callbacks=[progress])
    report = strategy.report()
    strategy.shutdown()
    return model.get_weights()[0], progress.losses, report


class CanaryProcessesTest(tf.test.TestCase):
    def _values(self, num_workers, *args, **kwargs):
        with MultiProcessRunner(_run, num_workers=num_workers, args=args, timeout_seconds=150, **kwargs) as runner:
            return runner.join().raise_for_errors().values

    @pytest.mark.stress
    def test_two_interfaces_and_a_slow_rank(self):
        """Both interfaces carry the same number of bytes, and all ranks end with the same weights."""
        settings = {"algorithm": "bcube:2,2", "num_colayers": 2}
        values = self._values(4, settings, None, "", 1, 2)
        for weights, losses, report in values:
            self.assertAllEqual(weights, values[0][0])
            self.assertLen(losses, _NUM_STEPS)
            self.assertLess(losses[-1], losses[0])
            lanes = [report[f"bytes_sent_on_lane_{lane}"] for lane in (1, 2)]
            # Messages that are sent once, at the start and in the end, use the first interface.
            once = (2 * 2 + 2 * 3 / 4) * 4 * (256 * 64 + 64)
            self.assertBetween(lanes[1], 0.9 * (lanes[0] - once), 1.1 * lanes[0])
            self.assertBetween(report["steps"], 1, _NUM_STEPS)

    @pytest.mark.stress
    def test_synchronous_ranks_with_two_interfaces_choose(self):
        """Choices depend on real times, and are the same on all ranks."""
        values = self._values(4, {"consistency": "bsp", "num_colayers": 2}, None, "", None, 2)
        for weights, losses, report in values:
            self.assertAllEqual(weights, values[0][0])
            self.assertLess(losses[-1], losses[0])
            self.assertEqual(report["steps"], _NUM_STEPS)
            for name in ("uses_ring", "uses_bcube"):
                self.assertEqual(report[name], values[0][2][name])

    @pytest.mark.stress
    def test_a_rank_that_is_started_again_joins(self):
        mark = os.path.join(self.get_temp_dir(), "victim")
        with MultiProcessRunner(_run, num_workers=3, args=({}, 1, mark), timeout_seconds=150) as runner:
            runner.wait_for_output(1, "step 10$")
            runner.kill(1)
            runner.restart(1)
            values = runner.join().raise_for_errors().values
        for rank, (weights, losses, _) in enumerate(values):
            self.assertAllEqual(weights, values[0][0])
            # The rank has skipped the steps that it missed, and trained the rest.
            self.assertBetween(len(losses), 1 if rank == 1 else _NUM_STEPS, _NUM_STEPS - (10 if rank == 1 else 0))


if __name__ == "__main__":
    tf.test.main()
