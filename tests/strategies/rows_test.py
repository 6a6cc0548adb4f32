"""Counts how often each row is trained on if a rank fails, is killed, or comes back, under every strategy.

Inputs are unit vectors, the model is a kernel, and its loss is linear. So each row moves a value of the kernel of its
own, in proportion to its weight: training itself counts the rows.

The step at which a rank dies is random: `HOP_TF_SCHEDULE_SEED` is the seed. `make stress` sets it, and runs all cases.
"""

import os
import pathlib
import random
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner
from support import StopRank1, in_process, linear_loss

_SEED = int(os.environ.get("HOP_TF_SCHEDULE_SEED", "0"))
_NUM_RANKS = 3
_BATCH_SIZE = 6
_SHARES = [3, 1, 2]
_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=20)
_RATE = 1 / 16


# By name: a function that makes the strategy, its arguments, and the number of steps without the rows of a lost rank,
# until the first mean without that rank is merged.
_LOCK_STEP = {
    "pipe_sgd": (hop_tf.PipeSGDStrategy, {"pipeline_width": 2}, 2),
    "pipe_sgd_sync": (hop_tf.PipeSGDStrategy, {"pipeline_width": 1}, 1),
    "canary": (hop_tf.CanaryStrategy, {"consistency": "bsp", "codec": None}, 1),
    "dts": (hop_tf.DTSStrategy, {"delay": 2, "interval": 2}, 4),
    "pipe_sgd_shares": (hop_tf.PipeSGDStrategy, {"pipeline_width": 2, "batch_shares": _SHARES}, 2),
    "pipe_sgd_as_printed": (hop_tf.PipeSGDStrategy, {"pipeline_width": 2, "compensation": "none"}, 2),
    "pipe_sgd_segments": (hop_tf.PipeSGDStrategy, {"pipeline_width": 3, "num_segments": 2, "algorithm": "ring"}, 3),
}
_OTHERS = {
    "hop": (hop_tf.HopStrategy, {"num_backup_workers": 1, "topology": "complete"}, 0),
    "hop_shares": (hop_tf.HopStrategy, {"max_staleness": 2, "topology": "complete", "batch_shares": _SHARES}, 0),
    "canary": (hop_tf.CanaryStrategy, {}, 0),
    "shat": (hop_tf.SHATParameterServerStrategy, {}, 1),
}


class Recorder(keras.Model):
    """A kernel that records the rows that it has trained on."""

    def __init__(self, num_rows):
        super().__init__()
        self.kernel = self.add_weight(shape=(num_rows, 1), initializer="zeros")
        self.rows = []

    def call(self, inputs):
        return inputs @ self.kernel

    def train_step(self, data):
        tf.numpy_function(lambda x: self.rows.append(np.argmax(x, axis=1).tolist()), [data[0]], [])
        return super().train_step(data)


class Fail(keras.callbacks.Callback):
    """Raises an error on one rank, after a batch of an epoch."""

    def __init__(self, fails, batch):
        super().__init__()
        self._batch = batch if fails else None

    def on_train_batch_end(self, batch, logs=None):
        if batch == self._batch:
            raise OSError("the disk has failed")


def _model(num_rows, **arguments):
    model = Recorder(num_rows)
    model.compile(keras.optimizers.SGD(_RATE), linear_loss, **arguments)
    return model


def _data(num_rows):
    return np.eye(num_rows, dtype=np.float32), np.ones((num_rows, 1), np.float32)


def _counts(kernel):
    """Returns how often each row has counted, by batch."""
    return (-kernel / _RATE * _BATCH_SIZE).reshape(-1, _BATCH_SIZE)


def _run(make, settings, train, num_ps=0):
    return in_process(make, _NUM_RANKS, num_ps, communication_options=_OPTIONS, **settings).run(train)


def _fit(model, x, y, callbacks=(), **arguments):
    try:
        model.fit(x, y, batch_size=_BATCH_SIZE, shuffle=False, verbose=0, callbacks=[*callbacks], **arguments)
    except OSError as error:
        return str(error)
    return ""


def _slice(rank, shares):
    bounds = np.cumsum([0, *(_BATCH_SIZE * share // sum(shares) for share in shares)])
    return slice(bounds[rank], bounds[rank + 1])


def _expected(num_steps, missing, rank, shares):
    """Returns the expected counts if a rank is missing in some steps, and the others have not taken over its rows."""
    expected = np.ones((num_steps, _BATCH_SIZE))
    own = _slice(rank, shares)
    num_rows = own.stop - own.start
    expected[missing] = _BATCH_SIZE / (_BATCH_SIZE - num_rows)
    expected[missing, own] = 0
    return expected


def _deviating(counts):
    """Returns the range from the first to the last step in which not all rows count once."""
    steps = np.flatnonzero(~np.isclose(counts, np.round(np.median(counts)), atol=1e-4).all(axis=1)).tolist()
    return range(steps[0], steps[-1] + 1) if steps else range(0)


class FailureTest(tf.test.TestCase, parameterized.TestCase):
    """A rank fails after a known step, so that the count of each row is known."""

    @parameterized.parameters(*_LOCK_STEP)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_in_lock_step_only_the_rows_of_the_loss_are_left_out(self, name):
        make, settings, num_lost = _LOCK_STEP[name]
        num_steps, last_step, victim = 12, 3, 1
        x, y = _data(num_steps * _BATCH_SIZE)

        def train(strategy):
            with strategy.scope():
                model = _model(len(x))
            error = _fit(model, x, y, [Fail(strategy.rank == victim, last_step)])
            return error, model.get_weights()[0], model.rows, strategy.batch_shares

        values = _run(make, {**settings, "on_peer_loss": "continue"}, train)
        self.assertEqual([value[0] for value in values], ["", "the disk has failed", ""])
        shares = settings.get("batch_shares", [1] * _NUM_RANKS)
        first, _, last = values
        self.assertAllEqual(first[1], last[1])
        num_merged = num_steps - (name == "pipe_sgd_as_printed")
        counts = _counts(first[1])[:num_merged]
        missing = _deviating(counts)
        # When the rank fails, its last means may be in flight and be given up, or a segment of one.
        self.assertBetween(missing.start, last_step + 2 - num_lost, last_step + 1)
        self.assertBetween(len(missing), num_lost, num_lost + (name == "pipe_sgd_segments"))
        self.assertAllClose(counts, _expected(num_merged, missing, victim, shares), atol=1e-4)
        for step in range(num_steps):
            rows = [row for value in values for row in value[2][step : step + 1]]
            expected = np.arange(step * _BATCH_SIZE, (step + 1) * _BATCH_SIZE)
            if last_step < step in missing:
                expected = np.delete(expected, _slice(victim, shares))
            self.assertAllEqual(np.concatenate(rows), expected)

    @parameterized.product(name=["pipe_sgd_sync", "canary"], arguments=[{"steps_per_execution": 5}, {"run_eagerly": 1}])
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_ways_to_run_steps(self, name, arguments):
        make, settings, num_lost = _LOCK_STEP[name]
        num_steps, last_step = 15, 4
        x, y = _data(num_steps * _BATCH_SIZE)

        def train(strategy):
            with strategy.scope():
                model = _model(len(x), **arguments)
            _fit(model, x, y, [Fail(strategy.rank == 2, last_step)])
            return model.get_weights()[0]

        first, second, _ = _run(make, {**settings, "on_peer_loss": "continue"}, train)
        missing = range(last_step + 1, last_step + 1 + num_lost)
        self.assertAllClose(_counts(first), _expected(num_steps, missing, 2, [1] * 3), atol=1e-4)
        self.assertAllEqual(first, second)

    @pytest.mark.stress
    def test_a_rank_that_ends_early_leaves_its_rows_to_the_others_until_the_next_fit(self):
        num_steps = 60
        x, y = _data(num_steps * _BATCH_SIZE)

        def train(strategy):
            with strategy.scope():
                model = _model(len(x))
            _fit(model, x, y, [StopRank1(strategy.rank, 3)])
            _fit(model, x, y)
            return [len(rows) for rows in model.rows]

        make, settings, _ = _OTHERS["hop"]
        first, _, last = _run(make, settings, train)
        for sizes in (first, last):
            self.assertEqual([sizes[0], sizes[num_steps - 1], sizes[num_steps]], [2, 3, 2])
            self.assertEqual(sizes[num_steps:], [2] * num_steps)

    @parameterized.parameters(*_OTHERS)
    @pytest.mark.stress(after=1)
    def test_elsewhere_the_others_share_the_batch_when_they_know(self, name):
        make, settings, num_ps = _OTHERS[name]
        num_steps = 400 if name == "shat" else 60
        x, y = _data(num_steps * _BATCH_SIZE)

        def train(strategy):
            with strategy.scope():
                model = _model(len(x))
            _fit(model, x, y, [Fail(strategy.rank == 1, 3)])
            return model.rows, strategy.batch_shares

        values = _run(make, settings, train, num_ps=num_ps)
        shares = settings.get("batch_shares", [1, 1, 1])
        halves = [0, 3, 6] if shares == [1, 1, 1] else [0, 3 * 6 // 5, 6]
        for index, rank in enumerate([0, 2]):
            rows, _ = values[rank]
            own = _slice(rank, shares)
            self.assertEqual(rows[0], list(range(own.start, own.stop)))
            # Under Canary, a slow rank skips batches.
            self.assertEqual([row % _BATCH_SIZE for row in rows[-1]], list(range(halves[index], halves[index + 1])))
            for of_step in rows:
                self.assertLen({row // _BATCH_SIZE for row in of_step}, 1)
            # Batches that were read ahead keep their slices.
            places = [tuple(row % _BATCH_SIZE for row in of_step) for of_step in rows]
            self.assertEqual(set(places), {tuple(range(own.start, own.stop)), places[-1]})


_NUM_STEPS, _NUM_EPOCHS = 30, 6
# The last number is `steps_per_execution`.
_KILLED = {
    **{name: (*_LOCK_STEP[name], 1) for name in ("pipe_sgd", "canary", "dts", "pipe_sgd_shares", "pipe_sgd_segments")},
    "pipe_sgd_executions": (*_LOCK_STEP["pipe_sgd_sync"], 5),
}


class Progress(keras.callbacks.Callback):
    """Prints each step for the test. Ranks go slowly while one is missing, so that it returns before the end."""

    def __init__(self, strategy, mark, pause_seconds):
        super().__init__()
        self.num_steps = 0
        self._mark = mark
        self._pause_seconds = pause_seconds
        self._was_restarted = False
        self._strategy = strategy

    def on_train_begin(self, logs=None):
        self._was_restarted = self._strategy.training.runtime.joining

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        print("step", self.num_steps, flush=True)
        if self._was_restarted:
            self._mark.touch()
        elif not self._mark.exists():
            time.sleep(self._pause_seconds)


def _train(name, mark):
    """Trains; returns the final kernel, and the number of rows of each step."""
    make, settings, _, num_at_once = _KILLED[name]
    strategy = make(communication_options=_OPTIONS, on_peer_loss="continue", **settings)
    x, y = _data(_NUM_STEPS * _BATCH_SIZE)
    with strategy.scope():
        model = _model(len(x), steps_per_execution=num_at_once)
    _fit(model, x, y, [Progress(strategy, pathlib.Path(mark), 0.15 * num_at_once)], epochs=_NUM_EPOCHS)
    return model.get_weights()[0], list(map(len, model.rows))


class KilledTest(tf.test.TestCase, parameterized.TestCase):
    """A rank is killed in some step, and comes back. Only its rows of steps in flight are left out."""

    @parameterized.parameters(*_KILLED)
    @pytest.mark.stress
    def test_all_other_rows_count_once_in_each_epoch(self, name):
        _, settings, num_lost, num_at_once = _KILLED[name]
        shares = settings.get("batch_shares", [1] * _NUM_RANKS)
        drawn = random.Random(f"{_SEED}/{name}")
        victim, last_step = drawn.randrange(_NUM_RANKS), drawn.randrange(3, _NUM_STEPS // num_at_once)
        print("rank", victim, "is killed in step", last_step)
        mark = os.path.join(self.get_temp_dir(), f"{name}_is_back")
        with MultiProcessRunner(_train, _NUM_RANKS, args=(name, mark), timeout_seconds=150) as runner:
            runner.wait_for_output(victim, f"step {last_step}$")
            runner.kill(victim)
            runner.restart(victim)
            values = runner.join().raise_for_errors().values
        (kernel, _), *others = values
        for other, _ in others:
            self.assertAllEqual(other, kernel)
        counts = _counts(kernel)
        missing = _deviating(counts)
        self.assertLessEqual(len(missing), num_lost + (name == "pipe_sgd_segments"))
        expected = _NUM_EPOCHS - 1 + _expected(_NUM_STEPS, missing, victim, shares)
        self.assertAllClose(counts, expected, atol=2e-3)
        sizes = [rows for _, rows in values]
        self.assertLess(len(sizes[victim]), _NUM_STEPS * _NUM_EPOCHS)
        for step in range(1, len(sizes[victim]) + 1):  # From its first step on, the rank has its part again.
            self.assertEqual([of_rank[-step] for of_rank in sizes], [_BATCH_SIZE * n // sum(shares) for n in shares])
        others = [of_rank for rank, of_rank in enumerate(sizes) if rank != victim]
        for of_rank in others:
            self.assertLen(of_rank, _NUM_STEPS * _NUM_EPOCHS)
        self.assertEqual(sum(of_rank[-len(sizes[victim]) - 1] for of_rank in others), _BATCH_SIZE)


if __name__ == "__main__":
    absltest.main()
