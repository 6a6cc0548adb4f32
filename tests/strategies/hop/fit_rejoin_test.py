"""Tests that a rank that was killed and restarted joins the others at their present step.

The rank, its last step, and the time until the restart are random: `HOP_TF_SCHEDULE_SEED` is the seed. `make stress`
sets it, and runs all cases.
"""

import dataclasses
import os
import random
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.records import Kind, recorder
from hop_tf.records.log import read_job
from hop_tf.tools.diagnosis import diagnose
from hop_tf.tools.testing import MultiProcessRunner

_SEED = int(os.environ.get("HOP_TF_SCHEDULE_SEED", "0"))
_BATCH_SIZE = 8
_NUM_STEPS = 60  # Per epoch.
_NUM_EPOCHS = 3
_NUM_OUTLIERS = 5 * _BATCH_SIZE
_MEETING = 70
_SETTINGS = {
    "backup": {"num_backup_workers": 1},
    "hybrid_with_skip": {"num_backup_workers": 1, "max_staleness": 3, "skip": hop_tf.SkipIterations()},
    "standard": {"on_peer_loss": "continue"},
    "interval": {"num_backup_workers": 1, "interval": 3},
}


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The death and return of a rank.

    Attributes:
      victim: The rank that dies.
      last_step: The victim's last step, in the first epoch.
      restart_seconds: Time from the kill to the restart.
      host: A rank that waits for the victim.
      mark: A file that the restarted victim makes.
    """

    victim: int
    last_step: int
    restart_seconds: float
    host: int
    mark: str

    @classmethod
    def draw(cls, name, world_size, directory):
        rng = random.Random(f"{_SEED}/{name}")
        victim = rng.randrange(world_size)
        return cls(
            victim=victim,
            last_step=rng.randrange(3, 50),
            restart_seconds=rng.choice([0.0, rng.uniform(0.0, 4.0)]),
            host=(victim + world_size // 2) % world_size,
            mark=os.path.join(directory, f"{name} was started again"),
        )


class _Progress(keras.callbacks.Callback):
    """Records steps and losses. One rank waits at a step until the victim is back, however long that takes."""

    def __init__(self, rank, plan):
        super().__init__()
        self.num_steps = 0
        self.ended_epochs = []
        self.losses = []
        self._is_victim = rank == plan.victim
        self._is_host = rank == plan.host
        self._mark = plan.mark

    def on_train_begin(self, logs=None):
        if self._is_victim:
            was_here = f"{self._mark}, before"
            open(self._mark if os.path.exists(was_here) else was_here, "w").close()

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        self.losses.append(logs["loss"])
        print("step", self.num_steps, flush=True)
        while self._is_host and self.num_steps == _MEETING and not os.path.exists(self._mark):
            time.sleep(0.05)

    def on_epoch_end(self, epoch, logs=None):
        self.ended_epochs.append(epoch)


def _run(topology, settings, plan):
    os.environ["HOP_TF_STEP_SECONDS"] = "0.05"  # The restarted rank is back before the second epoch ends.
    recorder._PERIOD_SECONDS = 0.05  # So that a rank that is killed early has written its records.
    options = hop_tf.CommunicationOptions(timeout_seconds=20, log_dir=f"{plan['mark']}, logs")
    strategy = hop_tf.HopStrategy(topology=topology, communication_options=options, **settings)
    keras.utils.set_random_seed(strategy.rank)
    with strategy.scope():
        frozen = keras.layers.Dense(4, trainable=False, name="frozen")
        model = keras.Sequential([keras.layers.Input((4,)), frozen, keras.layers.Dense(1, use_bias=False)])
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 1000, 0.9)
        model.compile(keras.optimizers.Adam(schedule), "mse")
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 4)).astype("float32")
    y = x @ np.arange(4, dtype="float32")[:, None]
    # Adam's slots keep the large gradients of its first steps for long.
    y[:_NUM_OUTLIERS] *= 1000
    progress = _Progress(strategy.rank, _Plan(**plan))
    history = model.fit(
        x, y, batch_size=_BATCH_SIZE, epochs=_NUM_EPOCHS, shuffle=False, verbose=0, callbacks=[progress]
    )
    before = model.get_weights()
    loss = model.evaluate(x[_NUM_OUTLIERS:], y[_NUM_OUTLIERS:], verbose=0)
    strategy.synchronize(model)
    result = {
        "report": strategy.report(),
        "iterations": int(model.optimizer.iterations),
        "second_moment": model.optimizer._velocities[0].numpy(),
        "before": before,
        "after": model.get_weights(),
        "loss": loss,
        "losses": progress.losses,
        "ended_epochs": progress.ended_epochs,
        "history": history.history["loss"],
    }
    strategy.shutdown()
    return result


class HopFitRejoinTest(tf.test.TestCase, parameterized.TestCase):
    def _values(self, name, topology, world_size, settings):
        """Runs the job; returns the ranks' results, that of the restarted one first."""
        plan = _Plan.draw(name, world_size, self.get_temp_dir())
        print(plan)
        arguments = (topology, settings, dataclasses.asdict(plan))
        with MultiProcessRunner(_run, num_workers=world_size, args=arguments, timeout_seconds=150) as runner:
            runner.wait_for_output(plan.victim, f"step {plan.last_step}$")
            runner.kill(plan.victim)
            time.sleep(plan.restart_seconds)
            runner.restart(plan.victim)
            values = runner.join().raise_for_errors().values
        self._check_records(plan, world_size)
        return [values.pop(plan.victim), *values]

    def _check_records(self, plan, world_size):
        """Checks that the records contain both processes of the rank, in the same session."""
        job = read_job(f"{plan.mark}, logs")
        of_victim = [process.of_kind(Kind.COMPUTE) for process in job.processes if process.number == plan.victim]
        self.assertEqual([np.unique(events["session"]).tolist() for events in of_victim], [[1], [1]])
        names = [f"rank {rank}" for rank in range(world_size)]
        names[plan.victim] += " (restarted)"
        self.assertEqual(list(diagnose(job).shares), names)

    def _check_steps(self, values):
        """Checks that all ranks have averaged and count the same steps, of which the victim has made only a part."""
        for value in values:
            self.assertEqual(value["iterations"], _NUM_EPOCHS * _NUM_STEPS)
            for weights, of_first in zip(value["after"], values[0]["after"], strict=True):
                self.assertAllEqual(weights, of_first)
        restarted, *others = values
        self.assertBetween(restarted["report"]["steps"], 20, _NUM_EPOCHS * _NUM_STEPS - 20)
        # Callbacks are called neither for skipped steps, nor at the end of epochs with such steps.
        self.assertBetween(len(restarted["losses"]), restarted["report"]["steps"], _NUM_EPOCHS * _NUM_STEPS - 20)
        self.assertAllInSet(np.isfinite(restarted["losses"]), [True])
        self.assertEqual(restarted["ended_epochs"], np.flatnonzero(np.isfinite(restarted["history"])).tolist())
        for value in others:
            self.assertLen(value["losses"], _NUM_EPOCHS * _NUM_STEPS)

    @pytest.mark.stress
    def test_joins(self):
        self._check_joins("backup")

    @parameterized.parameters("hybrid_with_skip", "standard", "interval")
    @pytest.mark.stress
    def test_joins_under_other_settings(self, name):
        self._check_joins(name)

    @pytest.mark.stress
    def test_joins_seven_others(self):
        restarted, *others = values = self._values("eight", "ring_based", 8, {"num_backup_workers": 1})
        self._check_steps(values)
        for value in others:
            self.assertAllClose(restarted["loss"], value["loss"], rtol=0.2)

    def _check_joins(self, name):
        values = self._values(name, "ring", 4, _SETTINGS[name])
        self._check_steps(values)
        restarted, *others = values
        # Weights that are not trained differ from those that this process had drawn.
        self.assertAllEqual(restarted["before"][0], others[0]["before"][0])
        for weights, of_other in zip(restarted["before"], others[0]["before"], strict=True):
            self.assertAllClose(weights, of_other, atol=0.2)
        if "skip" not in _SETTINGS[name]:  # Otherwise ranks may have skipped the large first steps.
            for value in values:  # A new optimizer's slots would not contain them.
                self.assertGreater(value["second_moment"].min(), 1000)
        # The first epoch was missed, at least in part. So was the second one, unless this rank came before the others.
        missed = np.isnan(restarted["history"])
        self.assertTrue(missed[0])
        if "skip" not in _SETTINGS[name]:  # Otherwise a rank may jump past the last step on a busy machine.
            self.assertFalse(missed[-1])


if __name__ == "__main__":
    tf.test.main()
