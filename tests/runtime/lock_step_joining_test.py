"""Tests of ranks in lock step that are killed and restarted at any time, on a virtual clock: all get the same means.

In each step, a process contributes 1 in a place of its own. So a mean shows which processes have a part in it.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.errors import DeadlineExceededError, MismatchError, PeerLostError
from hop_tf.membership.waiting import LeftBehind
from hop_tf.runtime.admissions import Admissions
from hop_tf.runtime.autotuning import Autotuner, Pace
from hop_tf.runtime.averaging_exchange import AveragingExchange
from hop_tf.runtime.exchange import Request, Result
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.joiner import State
from hop_tf.runtime.joining import Joining
from hop_tf.runtime.replica_state import sign
from hop_tf.strategies.dts.exchange import DTSExchange, DTSSettings
from hop_tf.strategies.dts.windows import Schedule
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate.virtual import VirtualCluster, VirtualMonitor
from support import IS_STRESS
from support.logs import logging_disabled

_GROUP = "group"
_NUM_RANKS = 4
_NUM_STEPS = 16
_MAX_PROCESSES = 4  # Per rank.
_DETECTION_SECONDS = 0.002
_PATIENCE_SECONDS = 0.01
_LIMIT_SECONDS = 100.0
_NUM_PARTS = 8
_PACKING = Packing(
    [TensorSpec("parts", (_NUM_RANKS, _MAX_PROCESSES), tf.float64), Admissions.spec(_NUM_RANKS)],
)
_SETTINGS = DTSSettings(delay="auto", interval="auto", codec=codecs.Identity(), algorithm="auto")
_PACKING_OF_CHOICES = Packing([*_PACKING.specs, Autotuner.spec(_NUM_RANKS)])
_SCHEDULES = {
    "at once": Schedule(delay=0, interval=1),
    "next step": Schedule(delay=1, interval=1),
    "late": Schedule(delay=3, interval=1),
    "windows": Schedule(delay=3, interval=2),
    "chosen": _SETTINGS.schedule_of(1),
}


class _InTurn(AveragingExchange):
    """An exchange that makes one mean after the other, some steps late, like exchanges of gradients."""

    def __init__(self, context, algorithm, schedule):
        admissions = Admissions(context.membership, _GROUP, context.session)
        place, lead = _PACKING.place(1), schedule.num_slots
        super().__init__(context, algorithm=algorithm, admissions=admissions, votes_place=place, lead=lead)

    def step(self, request):
        return Result(request.step, 0, tuple(self.mean(request.step, request.buckets, decides_of=request.step)))


def _at_the_same_time(context, algorithm, schedule):
    """Makes DTS's exchange, with several windows of steps at a time."""
    settings = DTSSettings(
        delay=schedule.delay, interval=schedule.interval, codec=codecs.Identity(), algorithm=algorithm
    )
    return DTSExchange(context, settings)


class _HastyDTSExchange(DTSExchange):
    """DTS's exchange with schedules that change all the time."""

    pace = Pace(skipped=0, measured=1, block=1)


def _with_choices(context, algorithm, schedule):
    """Makes an exchange of DTS that chooses its schedules."""
    return _HastyDTSExchange(context, _SETTINGS)


class Job:
    """Ranks that average window by window, and merge means some steps late.

    Args:
      make_exchange: Makes a rank's exchange.
      algorithm: Algorithm of the all-reduce.
      schedule: Name in `_SCHEDULES` of the times at which windows end, and are merged.
      num_steps: Number of steps of each rank.
      seed: Seed of the durations of messages and steps.
      newcomers_train: Optimizer of restarted processes.
      has_patience: True if ranks that are stopped are left behind, and join again.

    Attributes:
      means: means[rank, incarnation][window]: the mean that a process has got.
      ended: By rank and incarnation, the sum of merged means of a process that has made all steps.
      num_windows: Number of windows of such a process.
      widths: All pipeline widths that processes had.
      first_steps: By rank and incarnation, the first window of a process.
      errors: Errors that have ended restarted processes: they came too late, or disagreed.
    """

    def __init__(
        self,
        *,
        make_exchange=_InTurn,
        algorithm="mesh",
        schedule="next step",
        num_steps=_NUM_STEPS,
        seed=0,
        newcomers_train="sgd",
        has_patience=False,
    ):
        random = np.random.default_rng(seed)
        self.cluster = VirtualCluster(
            _NUM_RANKS,
            lambda sender, receiver, num_bytes: random.exponential(0.02 if random.random() < 0.1 else 0.001),
            continue_without_lost=True,
            detection_seconds=_DETECTION_SECONDS,
            patience_seconds=_PATIENCE_SECONDS if has_patience else None,
        )
        self.make_exchange, self.algorithm, self.schedule = make_exchange, algorithm, _SCHEDULES[schedule]
        self.chooses = make_exchange is _with_choices
        self.num_slots = _SETTINGS.num_slots if self.chooses else self.schedule.num_slots
        self.packing = _PACKING_OF_CHOICES if self.chooses else _PACKING
        self.newcomers_train = newcomers_train
        self.pauses = random.exponential(0.004, (_NUM_RANKS, num_steps))
        self.num_steps = num_steps
        self.means, self.ended, self.first_steps = {}, {}, {}
        self.num_windows, self.widths = 0, set()
        self.dead, self.errors = set(), []
        self.num_events_of_start = 0
        self.ranks = [_Rank(self, rank) for rank in range(_NUM_RANKS)]

    def run(self):
        self.cluster.run(lambda rank: self.ranks[rank].train())
        return self

    def kill_before_event(self, number, rank, reaches=None, restart_seconds=0.01, load_seconds=0.0):
        """Kills a rank before an event. Its new process hears of others at once, and takes part when it has data."""
        kill = functools.partial(self._kill, rank, reaches, restart_seconds, load_seconds)
        self.cluster.scheduler.call_before_event(number, kill)

    def _kill(self, rank, reaches, restart_seconds, load_seconds):
        if self.cluster.kill(rank, reaches):
            self.dead.add(self.ranks[rank].name)
            scheduler = self.cluster.scheduler
            scheduler.call_at(scheduler.now + restart_seconds, lambda: self._restart(rank, load_seconds))

    def freeze_before_event(self, number, rank, seconds, keeps):
        self.cluster.scheduler.call_before_event(number, lambda: self._freeze(rank, seconds, keeps))

    def _freeze(self, rank, seconds, keeps):
        if self.ranks[rank].name not in self.ended:
            self.cluster.freeze(rank, seconds, keeps)

    def _restart(self, rank, load_seconds):
        self.cluster.restart(rank)
        self.ranks[rank] = _Rank(self, rank, was_restarted=True, load_seconds=load_seconds)
        self.cluster.start(rank, self.ranks[rank].train)


class _Rank(State):
    """One process of a rank, which calls an exchange as the training graph does."""

    def __init__(self, job, rank, was_restarted=False, load_seconds=0.0):
        self._job, self._rank, self._was_restarted = job, rank, was_restarted
        self._load_seconds = load_seconds
        self._clock = job.cluster.scheduler
        self._membership = job.cluster.memberships[rank]
        self._joining = Joining(self._membership, self, timeout_seconds=0.5)
        self._merged = np.zeros((_NUM_RANKS, _MAX_PROCESSES))
        self._first_window = 0  # The first one that is not merged yet.
        self._schedule = job.schedule
        self._width = None  # The width in the last mean.
        self._monitor = VirtualMonitor(self._clock)
        self._results = {}  # Means by window.
        self._meet_at = 0
        self._exchange = None
        self._takes_part = False
        self._num_steps_in_flight = 0

    @property
    def name(self):
        return self._rank, self._membership.present_incarnation

    def signature(self, groups):
        trains = self._job.newcomers_train if self._was_restarted else "sgd"
        return sign(groups, trains, self._job.packing.specs)

    def read(self):
        return [self._merged.copy().reshape(-1)]

    def write(self, payload):
        self._merged = payload.copy().view(np.float64).reshape(self._merged.shape)

    def train(self):
        try:
            self._train()
        except (PeerLostError, DeadlineExceededError, MismatchError) as error:
            # The others have ended or died before this process begins, or it disagrees with them.
            self._job.errors.append(error)
            assert self._was_restarted and not self._takes_part, error
            self._membership.leave(sent_rounds={}, reason=str(error), final=True)
            self._job.cluster.close(self._rank)

    def _train(self):
        self._clock.sleep(self._load_seconds)
        self._membership.require_all("to begin")
        self._membership.begin_session()
        session, pool = self._membership.session, self._job.cluster.pool
        context = ExchangeContext(_GROUP, session, self._job.packing, self._membership, pool)
        make_exchange = functools.partial(self._job.make_exchange, context, self._job.algorithm, self._job.schedule)
        self._exchange = self._joining.attach(_GROUP, make_exchange)
        if not self._was_restarted:
            self._job.num_events_of_start = self._clock.num_events
        self._num_steps = int(self._membership.joining)
        while True:
            try:
                self._train_on()
                break
            except LeftBehind as error:
                self._begin_again(error)
        self._job.ended[self.name] = self._merged
        self._end()

    def _begin_again(self, error):
        """Prepares a rank that was left behind to join again, as `fit` does between two steps."""
        while self._num_steps_in_flight:
            self._monitor.wait(0.0)
        self._job.dead.add(self.name)
        self._was_restarted, self._takes_part = True, False
        self._results.clear()
        self._meet_at = 0
        if self._num_steps >= self._job.num_steps:
            raise PeerLostError(str(error))
        self._joining.begin_again()
        self._num_steps += 1

    def _train_on(self):
        step = self._num_steps
        while self._was_restarted and not self._takes_part and (num := self._joining.catch_up(_GROUP, step)):
            self._clock.sleep(0.0002 * num)
            step += num
            self._num_steps = step
        if self._job.chooses:
            width, window = self._exchange.width_at(step), self._exchange.number_of(step)
            self._schedule = _SETTINGS.schedule_of(width, step, window)
        self._first_window = self._schedule.num_ended(step)
        self._job.first_steps[self.name] = self._first_window
        self._takes_part = True
        while step < self._job.num_steps:
            self._clock.sleep(self._job.pauses[self._rank, step])
            step += 1
            self._num_steps = step
            self._job.widths.add(self._schedule.delay + 1)
            has_ended, ended = self._schedule.ended(step)
            if has_ended:
                self._submit(ended)
            is_due, due = self._schedule.due(step)
            if is_due and self._merge_until(due + 1) not in (None, self._schedule.delay + 1):
                self._begin_windows(step, ended + 1)
            if step == self._meet_at:
                self._begin_windows(step, ended + 1, width=1)
                self._joining.meet(_GROUP, step)
        self._merge_until(self._schedule.num_ended(step))
        self._job.num_windows = self._schedule.num_ended(step)

    def _begin_windows(self, step, window, width=None):
        """Merges all windows, as the graph does. The last mean contains the width from now on."""
        self._width = self._merge_until(window)
        if self._job.chooses:
            self._schedule = _SETTINGS.schedule_of(width or self._width, step, window)

    def _submit(self, window):
        (bucket,) = self._job.packing.zeros()
        _, where = _PACKING.place(0)
        own = np.zeros((_NUM_RANKS, _MAX_PROCESSES))
        own[self.name] = 1
        bucket[where] = own.reshape(-1)
        step = functools.partial(self._step, Request(window, 0, (bucket,)))
        self._num_steps_in_flight += 1
        if self._exchange.num_threads == 1:
            step()
        else:
            self._job.cluster.start_thread(self._rank, f"window {window}", step)

    def _step(self, request):
        try:
            self._make_step(request)
        except LeftBehind:
            if self._exchange.num_threads == 1:
                raise
        finally:
            self._num_steps_in_flight -= 1
            self._monitor.notify_all()

    def _make_step(self, request):
        self._joining.at_step(self._exchange.steps_of(request.step)[-1])
        (mean,) = self._exchange.step(request).buckets
        _, where = _PACKING.place(0)
        self._job.means.setdefault(self.name, {})[request.step] = mean[where].reshape(self._merged.shape).copy()
        self._results[request.step] = mean

    def _merge_until(self, end):
        (_, where), (_, where_votes) = _PACKING.place(0), _PACKING.place(1)
        for window in range(self._first_window, end):
            while window not in self._results:
                if self._membership.is_left_behind:
                    raise self._membership.failure
                self._monitor.wait(0.0)
            mean = self._results.pop(window)
            self._merged = self._merged + mean[where].reshape(self._merged.shape)
            if (distance := int(mean[where_votes][:_NUM_RANKS].max())) > 0:
                self._meet_at = max(self._meet_at, self._schedule.begin_of(window) + distance)
            if self._job.chooses:
                self._width = round(mean[self._job.packing.place(2)[1]][0])
        self._first_window = max(self._first_window, end)
        return self._width

    def _end(self):
        """Ends the process, as at the end of a script."""
        self._membership.leave(sent_rounds={_GROUP: self._exchange.sent_rounds}, reason="")
        self._joining.end_session()
        self._exchange.settle(_LIMIT_SECONDS)
        self._membership.flush(_LIMIT_SECONDS)
        self._membership.leave(sent_rounds={}, reason="its process ended", final=True)
        self._membership.flush(_LIMIT_SECONDS)
        self._exchange.close()
        self._job.cluster.close(self._rank)


_STRIDE = 19 if IS_STRESS else 6 * 19 + 1  # Events between the deaths in two successive runs.
_LATER_STRIDE = 5 if IS_STRESS else 16  # The same for the second death.
_KINDS = {
    "mesh at once": {"schedule": "at once"},
    "mesh": {},
    "mesh late": {"schedule": "late"},
    "ring": {"algorithm": "ring"},
    "bcube": {"algorithm": "bcube:2,2"},
    "windows": {"make_exchange": _at_the_same_time, "schedule": "windows"},
    "windows of one step": {"make_exchange": _at_the_same_time, "algorithm": "ring", "schedule": "late"},
    "chosen": {"make_exchange": _with_choices, "schedule": "chosen", "num_steps": 3 * _NUM_STEPS},
}


@functools.cache
def _num_events(kind, seed):
    """Returns the numbers of events until all ranks have begun, and until the end."""
    job = Job(**_KINDS[kind], seed=seed).run()
    return job.num_events_of_start, job.cluster.scheduler.num_events


def _two_events(part, kind, parts=(3, 2)):
    """Returns a generator, an event in the first third of the steps, and events in the half that follows the event.

    `parts` are the reciprocals of both fractions.
    """
    random = np.random.default_rng(part)
    first, last = _num_events(kind, seed=part)
    of_first, of_later = ((last - first) // number for number in parts)
    event = first + int(random.integers(0, of_first))
    return random, event, range(event + 1 + part % 5, event + of_later, _LATER_STRIDE)


def _some_ranks(random):
    return np.flatnonzero(random.random(_NUM_RANKS) < 0.5).tolist()


class LockStepJoiningTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(logging_disabled())

    def check(self, job):
        """Checks that means and merged sums are equal to the bit, and that means are over the processes in the job.

        Returns:
          The number of processes that have joined.
        """
        total = np.zeros((_NUM_RANKS, _MAX_PROCESSES))
        takes_part = {}
        num_windows = job.num_windows
        for step in range(num_windows):
            means = {name: of_steps[step] for name, of_steps in job.means.items() if step in of_steps}
            alive = {name: mean for name, mean in means.items() if name not in job.dead}
            mean = next(iter((alive or means).values()))
            for other in alive.values():
                self.assertAllEqual(mean, other)
            parts = {(int(rank), int(process)) for rank, process in np.argwhere(mean)}
            self.assertContainsSubset(alive, parts)
            expected = np.zeros_like(mean)
            for part in parts:
                expected[part] = 1 / len(parts)
            self.assertAllClose(mean, expected, rtol=1e-12)
            total += mean
            for part in parts:
                takes_part.setdefault(part, []).append(step)
        for name, steps in takes_part.items():
            # A process has a part in all windows from its first one on. A lost process may lack windows in flight.
            is_dead, first = name in job.dead, job.first_steps[name]
            end = steps[-1] + 1 - job.num_slots if is_dead else num_windows
            self.assertContainsSubset(range(first, end), steps)
            self.assertGreaterEqual(steps[0], first)
        merged = [each for name, each in job.ended.items() if name not in job.dead]
        self.assertNotEmpty(merged)
        for each in merged:
            self.assertAllEqual(each, merged[0])
            self.assertAllClose(each, total, rtol=1e-12)
        return sum(incarnation > 0 for _, incarnation in job.ended)

    @parameterized.product(part=list(range(_NUM_PARTS)), kind=list(_KINDS))
    @pytest.mark.stress(after=1)
    def test_joins_whenever_it_was_killed(self, part, kind):
        first, last = _num_events(kind, seed=part)
        num_joined = 0
        for event in range(first + part, last, _STRIDE):
            rank, turn = event // 19 % _NUM_RANKS, event % 3
            reaches = (None, (), ((rank + 1) % _NUM_RANKS,))[turn]
            with self.subTest(event=event, rank=rank, reaches=reaches):
                job = Job(**_KINDS[kind], seed=part)
                job.kill_before_event(event, rank, reaches, restart_seconds=(0.0, 0.01, 0.03)[event % 3])
                num_joined += self.check(job.run())
        self.assertGreater(num_joined, 0)

    @parameterized.product(part=list(range(_NUM_PARTS)), kind=["mesh at once", "mesh late", "windows", "chosen"])
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_another_one_is_killed_meanwhile(self, part, kind):
        """While a rank joins, another is killed at any event, also the one that gives its state, or the same again."""
        random, event, others = _two_events(part, kind)
        num_joined = 0
        for later in others:
            ranks = random.integers(0, _NUM_RANKS, 2).tolist()
            reaches = [_some_ranks(random) for _ in range(2)]
            with self.subTest(events=(event, later), ranks=ranks, reaches=reaches):
                job = Job(**_KINDS[kind], seed=part)
                job.kill_before_event(event, ranks[0], reaches[0])
                job.kill_before_event(later, ranks[1], reaches[1])
                num_joined += self.check(job.run())
        self.assertGreater(num_joined, 0)

    @parameterized.product(part=list(range(_NUM_PARTS)), kind=["mesh at once", "mesh late", "windows", "chosen"])
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_another_one_is_killed_while_it_loads_its_data(self, part, kind):
        """The loading process has met some of the others, and hears of the loss. It still takes part."""
        random, event, others = _two_events(part, kind, parts=(4, 3))
        num_joined = 0
        for later in others:
            ranks = random.choice(_NUM_RANKS, 2, replace=False).tolist()
            reaches = [_some_ranks(random) for _ in range(2)]
            with self.subTest(events=(event, later), ranks=ranks, reaches=reaches):
                job = Job(**_KINDS[kind], seed=part)
                job.kill_before_event(event, ranks[0], reaches[0], restart_seconds=0.001, load_seconds=0.02)
                job.kill_before_event(later, ranks[1], reaches[1], load_seconds=0.005 * (later % 3))
                num_joined += self.check(job.run())
                self.assertNotIn("needs all ranks", str(job.errors))
        self.assertGreater(num_joined, 0)

    @parameterized.product(part=list(range(_NUM_PARTS)), kind=list(_KINDS))
    @pytest.mark.stress(after=1)
    def test_joins_whenever_it_was_stopped(self, part, kind):
        """A rank is stopped for longer than the patience, or for less: then no process is lost."""
        random = np.random.default_rng(part)
        first, last = _num_events(kind, seed=part)
        num_joined = 0
        for event in range(first + part, last, _STRIDE):
            rank, times = int(random.integers(_NUM_RANKS)), random.choice([0.9, 1.1, 2.0, 5.0])
            keeps = bool(random.integers(2))
            with self.subTest(event=event, rank=rank, times=times, keeps=keeps):
                job = Job(**_KINDS[kind], seed=part, has_patience=True)
                job.freeze_before_event(event, rank, times * _PATIENCE_SECONDS, keeps)
                num_joined += self.check(job.run())
                if times < 1:
                    self.assertEmpty(job.dead)
                losses = [membership.num_lost for membership in job.cluster.memberships]
                times_left = [membership.num_left_behind for membership in job.cluster.memberships]
                self.assertEqual(sum(times_left), len(job.dead))
                self.assertLessEqual(sum(losses), len(job.dead) * (_NUM_RANKS - 1))
        self.assertGreater(num_joined, 0)

    @parameterized.product(part=list(range(_NUM_PARTS)), kind=["mesh at once", "mesh late", "windows", "chosen"])
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_another_one_is_stopped_or_killed_meanwhile(self, part, kind):
        """The second rank may be the same as the first."""
        random, event, others = _two_events(part, kind)
        num_joined = 0
        for later in others:
            ranks = random.integers(0, _NUM_RANKS, 2).tolist()
            is_stopped, keeps, _ = random.random(3) < 0.5
            times = random.uniform(0.5, 4.0, 2)
            with self.subTest(events=(event, later), ranks=ranks, is_stopped=is_stopped, times=times, keeps=keeps):
                job = Job(**_KINDS[kind], seed=part, has_patience=True)
                job.freeze_before_event(event, ranks[0], times[0] * _PATIENCE_SECONDS, keeps)
                if is_stopped:
                    job.freeze_before_event(later, ranks[1], times[1] * _PATIENCE_SECONDS, not keeps)
                else:
                    job.kill_before_event(later, ranks[1], _some_ranks(random))
                num_joined += self.check(job.run())
        self.assertGreater(num_joined, 0)

    @pytest.mark.slow
    def test_schedules_change(self):
        """Ranks that choose schedules change them often."""
        widths = [Job(**_KINDS["chosen"], seed=seed).run().widths for seed in range(8)]
        self.assertGreater(min(map(len, widths)), 1, widths)
        self.assertGreater(max(map(max, widths)), 2, widths)

    @pytest.mark.stress
    def test_two_that_come_when_the_others_end(self):
        """Two newcomers do not wait for each other, and a process that has ended waits for neither."""
        for kind in ("mesh", "windows"):
            first, last = _num_events(kind, 0)
            num_late = 0
            for event in range(first + (last - first) // 3, last, (last - first) // 25):
                with self.subTest(kind=kind, event=event):
                    job = Job(**_KINDS[kind], seed=0)
                    job.kill_before_event(event, 1)
                    job.kill_before_event(event + 10, 2)
                    self.check(job.run())
                    num_late += len(job.errors) > 1
            self.assertGreater(num_late, 0)

    def test_one_that_trains_something_else_does_no_harm(self):
        job = Job(newcomers_train="adam")
        job.kill_before_event(_num_events("mesh", 0)[0] + 50, 2)
        self.assertEqual(self.check(job.run()), 0)
        (error,) = job.errors
        self.assertIsInstance(error, MismatchError)
        self.assertRegex(str(error), "rank 2 was restarted and cannot join: rank . trains another model")


if __name__ == "__main__":
    tf.test.main()
