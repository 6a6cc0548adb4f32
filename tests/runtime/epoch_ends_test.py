"""Tests of agreements at the end of an epoch: on a virtual clock, in all orders of events, also with lost ranks."""

import math
import struct
import types

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from hop_tf.errors import MismatchError
from hop_tf.membership.session_queue import SessionQueue
from hop_tf.runtime.epoch_ends import EPOCH_END, EpochEnds
from hop_tf.runtime.metrics import EpochMetrics, means_of, numeric, sums_of
from hop_tf.tools.simulate import VirtualCluster
from support import IS_STRESS
from support.logs import logging_disabled

_STEP = struct.Struct("<q")
_STRIDE = 1 if IS_STRESS else 5  # `make test` tries every fifth event.


class _Rank:
    """A `fit` of one rank. With `lock_step`, a step waits for a message from every rank that has not left."""

    def __init__(self, membership, *, lock_step=True, takes_part=True, pause=lambda: None):
        self._membership = membership
        self._lock_step = lock_step
        self._pause = pause
        self._begun = -1
        self.num_steps = 0
        self.epochs = []  # Per epoch, the loss that callbacks see, and the number of steps made by then.
        self.model = types.SimpleNamespace(stop_training=False)
        self._received = {}
        self._steps = SessionQueue(membership, "steps", membership.session)
        self.ends = EpochEnds(
            membership,
            progress=lambda: {"group": self.num_steps},
            has_passed=lambda progress: self._begun >= progress["group"],
        )
        session = membership.session + 1
        self._steps.session = session
        self._steps.start(self._on_step)
        self.ends.reset(session)
        membership.begin_session(claims=[EPOCH_END] if takes_part else [])
        self.ends.check(membership.owners, agrees=takes_part)

    def _on_step(self, message):
        self._received.setdefault(message.sender, set()).add(_STEP.unpack(message.header)[0])

    def fit(self, lengths, *, knows_length=True, stops_after=(), stops_at_end=()):
        """Makes epochs of these lengths.

        Args:
          lengths: Number of steps of each epoch.
          knows_length: True if the number of steps is known before data end.
          stops_after: Steps after which a callback stops the training.
          stops_at_end: Epochs at whose ends a callback stops the training.
        """
        self.ends.begin_fit(agrees=True, in_lock_step=self._lock_step)
        self.ends.begin_training(self.model)
        for epoch, length in enumerate(lengths):
            self.ends.begin_epoch()
            num_made = self._make_steps(length, knows_length, stops_after)
            logs = {"loss": 10.0**self._membership.rank}
            self.ends.end_epoch(logs, num_made, weight=1.0, has_step=True)
            self.model.stop_training |= epoch in stops_at_end
            self._pause()
            self.ends.agree_to_stop()
            self.epochs.append((logs["loss"], self.num_steps))
            if self.model.stop_training:
                break
        self.ends.finish_training()

    def _make_steps(self, length, knows_length, stops_after):
        num_made = 0
        while not (knows_length and num_made == length) and self.ends.begin_steps(1) and num_made < length:
            self._exchange()
            num_made += 1
            if self.num_steps in stops_after:
                self.model.stop_training = True
                self.ends.ask_to_stop()
            if self.model.stop_training:
                break
        return num_made

    def _exchange(self):
        step, membership = self.num_steps, self._membership
        self._pause()
        self._begun = step
        if self.ends.rounds.is_asked:
            self.ends.rounds.look_again()
        if self._lock_step:
            for rank in self.ends.rounds.others:
                self._steps.send(rank, _STEP.pack(step), step=step)
            self._sent = step + 1
            membership.wait(lambda: self._missing(step), operation="step", step=step)
        self.num_steps += 1

    def _missing(self, step):
        others, has = self.ends.rounds.others, self._received
        return [r for r in others if step not in has.get(r, ()) and self._membership.delivers(r, "steps", step)]

    def leave(self):
        sent = {**self.ends.sent_rounds, "steps": self._begun + 1}
        self._membership.leave(sent_rounds=sent, reason="")


class _Job:
    """Ranks that train on a virtual clock.

    Args:
      body: Each rank calls `body(fit, rank)`.
      num_ranks: Number of ranks.
      seed: Seed of the random times of messages and callbacks. None: messages and callbacks take no time.
      **settings: Arguments of `_Rank`.
    """

    def __init__(self, body, num_ranks, seed=None, **settings):
        random = np.random.default_rng(seed)
        self._body, self._settings = body, settings
        self._draw = (lambda: 0.0) if seed is None else (lambda: random.exponential(1.0))
        link_seconds = None if seed is None else (lambda *_: random.exponential(1.0))
        self.cluster = VirtualCluster(num_ranks, link_seconds, continue_without_lost=True, detection_seconds=0.5)
        self.fits, self.dead = {}, set()
        self.first_event = 0

    def run(self):
        self.cluster.run(self._run_rank)
        return self

    def _run_rank(self, rank):
        pause = lambda: self.cluster.scheduler.sleep(self._draw())  # noqa: E731
        fit = _Rank(self.cluster.memberships[rank], pause=pause, **self._settings)
        self.first_event = self.cluster.scheduler.num_events
        self.fits[rank] = fit
        self._body(fit, rank)
        fit.leave()  # Unless it was killed.

    def kill_before(self, event, rank):
        """Kills a rank in the session: unless a rank is still to enter it, or this one has left it."""

        def kill():
            if len(self.fits) == len(self.cluster.memberships) and self.cluster.kill(rank):
                self.dead.add(rank)

        self.cluster.scheduler.call_before_event(event, kill)
        return self

    def epochs(self):
        """Returns the epochs of each rank, with the losses that callbacks have seen."""
        return [self.fits[rank].epochs for rank in sorted(self.fits)]


def _losses(job):
    return [[loss for loss, _ in epochs] for epochs in job.epochs()]


def _num_steps(job):
    return [job.fits[rank].num_steps for rank in sorted(job.fits) if rank not in job.dead]


class MetricsTest(parameterized.TestCase):
    @parameterized.product(num_ranks=(2, 5), knows_length=(True, False), lock_step=(True, False))
    def test_all_ranks_get_the_mean(self, num_ranks, knows_length, lock_step):
        mean = np.mean([10.0**rank for rank in range(num_ranks)])
        for seed in range(3):
            job = _Job(
                lambda fit, rank: fit.fit([3, 2], knows_length=knows_length), num_ranks, seed, lock_step=lock_step
            ).run()
            self.assertEqual(job.epochs(), [[(mean, 3), (mean, 5)]] * num_ranks)

    @parameterized.parameters(True, False)
    def test_ranks_that_have_made_all_epochs_are_not_awaited(self, lock_step):
        job = _Job(lambda fit, rank: fit.fit([2] * (3 - rank)), 3, 0, lock_step=lock_step).run()
        self.assertEqual(_losses(job), [[37.0, 5.5, 1.0], [37.0, 5.5], [37.0]])

    @parameterized.product(knows_length=(True, False), lock_step=(True, False))
    def test_ranks_whose_epochs_are_longer_are_not_awaited(self, knows_length, lock_step):
        """A rank with longer epochs needs the next step of the others. The last epochs of all ranks end together."""
        for seed in range(5):
            with self.assertLogs(level="WARNING") as logs:
                job = _Job(
                    lambda fit, rank: fit.fit([6, 6] if rank == 1 else [4, 4, 4], knows_length=knows_length),
                    3,
                    seed,
                    lock_step=lock_step,
                ).run()
            self.assertEqual(_losses(job), [[50.5, 50.5, 37.0], [10.0, 37.0], [50.5, 50.5, 37.0]])
            self.assertLen(logs.records, 3)
        self.assertIn(
            "rank 1: metrics are not averaged over all ranks. This rank has ended an epoch after 6", str(logs)
        )

    def test_an_epoch_without_a_step(self):
        job = _Job(lambda fit, rank: fit.fit([2, 0, 2]), 2, 0).run()
        self.assertEqual(_losses(job), [[5.5, 10.0**rank, 5.5] for rank in range(2)])

    def test_one_rank_alone(self):
        def body(fit, rank):
            if rank == 0:
                fit.fit([1])

        cluster = VirtualCluster(2)

        def run(rank):
            fit = _Rank(cluster.memberships[rank], takes_part=rank == 0)
            body(fit, rank)
            fit.leave()

        with self.assertRaisesRegex(MismatchError, "Pass hop_tf.callbacks.MetricAverage to `fit` on all ranks"):
            cluster.run(run)

    def test_a_rank_is_lost_at_any_moment(self):
        """The others go on, with the lost rank's metrics or without."""
        num_killed = 0
        undisturbed = _Job(lambda fit, rank: fit.fit([2, 2]), 3, 1).run()
        for event in range(undisturbed.first_event, undisturbed.cluster.scheduler.num_events, _STRIDE):
            job = _Job(lambda fit, rank: fit.fit([2, 2]), 3, 1).kill_before(event, 2)
            with logging_disabled():
                job.run()
            num_killed += bool(job.dead)
            for rank in range(2):
                self.assertContainsSubset(_losses(job)[rank], [37.0, 5.5])
                self.assertLen(job.fits[rank].epochs, 2)
        self.assertGreater(num_killed, 10)


class StopTest(parameterized.TestCase):
    @parameterized.product(knows_length=(True, False), stops_after=(1, 3, 4, 5))
    @pytest.mark.stress(but=4)
    def test_all_stop_after_the_same_step(self, knows_length, stops_after):
        for seed in range(20):
            job = _Job(
                lambda fit, rank: fit.fit(
                    [4] * 3, knows_length=knows_length, stops_after=[stops_after] if rank == 1 else []
                ),
                3,
                seed,
            ).run()
            (num_steps,) = set(_num_steps(job))
            # Ranks that have begun the next step make it.
            self.assertBetween(num_steps, stops_after, stops_after + 1)
            self.assertEqual({epochs[-1] for epochs in job.epochs()}, {(37.0, num_steps)})

    @parameterized.parameters(True, False)
    def test_where_all_are_to_stop_no_further_step_is_made(self, knows_length):
        for seed in range(10):
            job = _Job(lambda fit, rank: fit.fit([4] * 3, knows_length=knows_length, stops_after=[6]), 3, seed).run()
            self.assertEqual(job.epochs(), [[(37.0, 4), (37.0, 6)]] * 3)

    def test_several_ask_at_different_steps(self):
        for seed in range(10):
            job = _Job(lambda fit, rank: fit.fit([9, 9], stops_after=[5 + rank % 2]), 4, seed).run()
            self.assertLen(set(_num_steps(job)), 1)
            self.assertBetween(_num_steps(job)[0], 5, 6)

    @parameterized.product(knows_length=(True, False), lock_step=(True, False))
    @pytest.mark.stress(but=4)
    def test_at_the_end_of_an_epoch(self, knows_length, lock_step):
        for seed in range(10):
            job = _Job(
                lambda fit, rank: fit.fit([3] * 4, knows_length=knows_length, stops_at_end=[1] if rank == 1 else []),
                3,
                seed,
                lock_step=lock_step,
            ).run()
            self.assertEqual(job.epochs(), [[(37.0, 3), (37.0, 6)]] * 3)

    @parameterized.parameters(True, False)
    def test_where_epochs_are_of_different_lengths(self, knows_length):
        """Ranks in the middle of an epoch end it early. Ranks at the end of one may have to begin another."""
        for seed in range(20):
            with logging_disabled():
                job = _Job(
                    lambda fit, rank: fit.fit(
                        [5] * 4 if rank == 0 else [3] * 6,
                        knows_length=knows_length,
                        stops_at_end=[0] if rank == 1 else [],
                    ),
                    3,
                    seed,
                ).run()
            self.assertLen(set(_num_steps(job)), 1)
            self.assertBetween(_num_steps(job)[0], 3, 4)

    def test_ranks_that_do_not_wait_for_each_other(self):
        """A rank that is stopped within an epoch stops alone, and the others do not wait for that rank."""
        for seed in range(5):
            job = _Job(
                lambda fit, rank: fit.fit([4, 4], stops_after=[6] if rank == 1 else []), 3, seed, lock_step=False
            ).run()
            self.assertEqual(_num_steps(job), [8, 6, 8])
            self.assertEqual(_losses(job), [[37.0, 50.5], [37.0, 10.0], [37.0, 50.5]])

    @parameterized.parameters("asks", "is asked")
    def test_a_rank_is_lost_at_any_moment(self, who):
        """The others stop, after the same step unless the rank is lost while they agree."""

        def body(fit, rank):
            fit.fit([4, 4], stops_after=[3] if rank == (2 if who == "asks" else 0) else [])

        num_killed = num_alike = 0
        undisturbed = _Job(body, 3, 2).run()
        for event in range(undisturbed.first_event, undisturbed.cluster.scheduler.num_events, _STRIDE):
            job = _Job(body, 3, 2).kill_before(event, 2)
            with logging_disabled():
                job.run()
            num_killed += bool(job.dead)
            first, second = _num_steps(job)[:2]
            self.assertLessEqual(abs(first - second), 1)
            num_alike += first == second
            if who == "is asked":
                self.assertBetween(first, 3, 4)
        self.assertGreater(num_killed, 10)
        self.assertGreater(num_alike / num_killed, 0.9)

    @pytest.mark.slow
    def test_all_orders(self):
        """Random orders of epochs, of requests to stop, and of losses of ranks."""
        for seed in range(1000 if IS_STRESS else 100):
            random = np.random.default_rng(seed)
            num_ranks, alike, knows_length = int(random.integers(2, 5)), *map(bool, random.integers(2, size=2))
            lengths = [random.integers(1, 5, 4) for _ in range(num_ranks)]
            plans = [
                {
                    "lengths": lengths[0 if alike else rank],
                    "knows_length": knows_length,
                    "stops_after": [random.integers(1, 12)] if random.random() < 0.3 else [],
                    "stops_at_end": [random.integers(4)] if random.random() < 0.3 else [],
                }
                for rank in range(num_ranks)
            ]
            job = _Job(lambda fit, rank, plans=plans: fit.fit(**plans[rank]), num_ranks, seed)
            if seed % 2:
                job.kill_before(int(random.integers(20, 300)), num_ranks - 1)
            with logging_disabled():
                job.run()
            if alike and not job.dead:
                self.assertLen(set(_num_steps(job)), 1, seed)
                self.assertLen({tuple(epochs) for epochs in job.epochs()}, 1, seed)


class EpochMetricsTest(absltest.TestCase):
    def _means(self, *ranks, weights=None):
        made = [EpochMetrics(1.0 if weights is None else weights[i], numeric(logs)) for i, logs in enumerate(ranks)]
        unpacked = [EpochMetrics.unpack(each.pack()) for each in made]
        return [means_of(unpacked, numeric(logs)) for logs in ranks]

    def test_means(self):
        for means in self._means({"loss": 0.0, "of classes": np.array([0, 2.0])}, {"loss": 1, "of classes": [1, 2]}):
            self.assertEqual(means["loss"], 0.5)
            np.testing.assert_array_equal(means["of classes"], [0.5, 2.0])

    def test_weights(self):
        self.assertEqual(self._means({"loss": 0.0}, {"loss": 4.0}, weights=[3.0, 1.0]), [{"loss": 1.0}] * 2)

    def test_metrics_that_some_have(self):
        means = self._means({"loss": 0.0, "val_loss": 3.0}, {"loss": 1.0})
        self.assertEqual(means, [{"loss": 0.5, "val_loss": 3.0}, {"loss": 0.5}])

    def test_what_cannot_be_averaged_is_left_out(self):
        logs = [
            {"loss": 1.0, "a/b ü": 2, "name": "a", "rows": np.zeros(2 + i), "parts": [[1.0], [1, 2]]} for i in (0, 1)
        ]
        self.assertEqual(self._means(*logs), [{"loss": 1.0, "a/b ü": 2.0}] * 2)

    def test_what_is_no_number_stays_so(self):
        for means in self._means({"loss": math.nan}, {"loss": 1.0}):
            self.assertTrue(math.isnan(means["loss"]))

    def test_sums(self):
        states = [np.array([1.0, 2.0]), np.int64(3)]
        ranks = [EpochMetrics(1.0, {}, states, frozenset(names)) for names in (("a", "b"), ("b", "c"))]
        sums, names = sums_of([EpochMetrics.unpack(each.pack()) for each in ranks] + [EpochMetrics(1.0, {})])
        np.testing.assert_array_equal(sums[0], [2.0, 4.0])
        self.assertEqual((sums[1], names), (6, {"b"}))
        self.assertEqual(sums_of([*ranks, EpochMetrics(1.0, {}, states[:1])]), ([], frozenset()))


if __name__ == "__main__":
    absltest.main()
