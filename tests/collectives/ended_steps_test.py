"""All-reduces of ranks that go on without a lost one, on a virtual clock: whenever that is, the same means on all."""

import functools
import itertools
import struct

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.collectives import get_algorithm
from hop_tf.errors import HopError, ProtocolError
from hop_tf.membership.waiting import Interrupted
from hop_tf.tools.simulate.virtual import VirtualCluster
from hop_tf.transport.base import Message
from support import IS_STRESS
from support.logs import logging_disabled

_GROUP = "group"
_NUM_RANKS = 4
_NUM_STEPS = 3
_DETECTION_SECONDS = 0.002
_LIMIT_SECONDS = 100.0
_KINDS = {
    "mesh": ("mesh", codecs.Identity()),
    "ring": ("ring", codecs.Identity()),
    "bcube": ("bcube:2,2", codecs.Identity()),
    "mesh with feedback": ("mesh", codecs.Int8(error_feedback=True)),
    "ring with feedback": ("ring", codecs.Int8(error_feedback=True)),
    "sparse with feedback": ("mesh", codecs.TopK(ratio=0.05, error_feedback=True)),
}
_NUM_PARTS = 8
_STRIDE = 1 if IS_STRESS else 4  # `make test` tries every fourth event of a part.


class Job:
    """Ranks that average two vectors step by step, and go on without lost ranks.

    Args:
      kind: Key of `_KINDS`.
      seed: Seed of the durations of messages, and of computations between steps.
      num_steps: Number of steps of each rank.
      link_seconds: Travel time of a message, see `VirtualCluster`. Default: random.

    Attributes:
      means: means[rank, step]: the means that a rank has got.
      errors: By rank, the error that has ended its job.
      dead: Ranks that were killed.
      interrupted: Ranks that were to leave.
      settled_at: By rank, the time at which it could end.
      num_events_of_start: Number of events until all ranks had begun.
    """

    def __init__(self, kind, *, seed=0, num_steps=(_NUM_STEPS,) * _NUM_RANKS, link_seconds=None):
        random = np.random.default_rng(seed)
        self.cluster = VirtualCluster(
            _NUM_RANKS,
            # Some messages are in flight for longer than ranks need to hear of a loss.
            link_seconds
            or (lambda sender, receiver, num_bytes: random.exponential(0.03 if random.random() < 0.1 else 0.001)),
            continue_without_lost=True,
            detection_seconds=_DETECTION_SECONDS,
        )
        self._pauses = random.exponential(0.002, (_NUM_RANKS, max(num_steps)))
        self._algorithm, self._codec = _KINDS[kind]
        self._num_steps = num_steps
        self.means, self.errors, self.settled_at = {}, {}, {}
        self.dead, self.interrupted = set(), set()
        self.num_events_of_start = 0

    def run(self):
        self.cluster.run(self._run_rank)
        return self

    def _run_rank(self, rank):
        membership, sent = self.cluster.memberships[rank], 0
        reduction = get_algorithm(self._algorithm)(
            membership,
            "test",
            sizes=[500, 3],
            codecs=[self._codec, codecs.Identity(dtype=np.float64)],
            pool=self.cluster.pool,
            chunk_values=64,
            recovers=True,
        )
        try:
            reduction.reset(membership.session + 1)
            membership.begin_session()
            self.num_events_of_start = self.cluster.scheduler.num_events
            for step in range(self._num_steps[rank]):
                self.cluster.scheduler.sleep(self._pauses[rank, step])
                means = reduction.mean(
                    step,
                    [_values(rank, step), np.full(3, rank, np.float64)],
                    lambda other, step: membership.delivers(other, _GROUP, step),
                )
                self.means[rank, step] = [mean.copy() for mean in means]
                for mean in means:
                    mean.fill(np.nan)  # A caller may write to the means.
                sent = step + 1
        except Interrupted:
            pass
        except HopError as error:
            self.errors[rank] = error
        membership.leave(sent_rounds={_GROUP: sent}, reason="")
        # The process ends, as at the end of a script.
        reduction.settle(_LIMIT_SECONDS)
        self.settled_at[rank] = self.cluster.scheduler.now
        membership.flush(_LIMIT_SECONDS)
        membership.leave(sent_rounds={}, reason="its process ended", final=True)
        membership.flush(_LIMIT_SECONDS)
        reduction.close()
        self.cluster.close(rank)

    # Faults.

    def before_event(self, number, act, *arguments):
        self.cluster.scheduler.call_before_event(number, functools.partial(act, *arguments))
        return self

    def kill(self, rank, reaches=None):
        if self.cluster.kill(rank, reaches):
            self.dead.add(rank)

    def interrupt(self, rank):
        if not self.cluster.memberships[rank].has_left:
            self.interrupted.add(rank)
            self.cluster.memberships[rank].interrupt()

    # Results.

    def num_made(self, rank):
        return len([step for each, step in self.means if each == rank])


def _values(rank, step):
    return np.random.default_rng([rank, step]).normal(size=500).astype(np.float32)


@functools.cache
def _events(kind, **arguments):
    """Returns the events between the start of all ranks and the end."""
    job = Job(kind, **arguments).run()
    return range(job.num_events_of_start, job.cluster.scheduler.num_events)


@functools.cache
def _means_where_they_end(kind, num_steps):
    """Returns the means of a job in which each rank leaves by itself, after its number of steps."""
    return Job(kind, num_steps=num_steps).run().means


class EndedStepsTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(logging_disabled())

    def check(self, kind, job, num_steps=(_NUM_STEPS,) * _NUM_RANKS):
        """Checks that the remaining ranks made all steps, as if each other one had left by itself after some step.

        Returns:
          The number of steps in which each rank took part.
        """
        self.assertEmpty(job.errors)
        gone = sorted(job.dead | job.interrupted)
        left = [rank for rank in range(_NUM_RANKS) if rank not in gone]
        for rank in left:
            self.assertEqual(job.num_made(rank), num_steps[rank])
        # A rank may be in a step with the others that it has not ended, and have ended one that they have made anew.
        made = {rank: job.num_made(rank) for rank in gone}
        ways = [range(max(0, made[rank] - 1), min(num_steps[rank], made[rank] + 1) + 1) for rank in gone]
        for numbers in itertools.product(*ways):
            of_ranks = list(num_steps)
            for rank, number in zip(gone, numbers, strict=True):
                of_ranks[rank] = number
            expected = _means_where_they_end(kind, tuple(of_ranks))
            if all(
                np.array_equal(mean, other)
                for rank in left
                for step in range(num_steps[rank])
                for mean, other in zip(job.means[rank, step], expected[rank, step], strict=True)
            ):
                return tuple(of_ranks)
        raise AssertionError(f"ranks {left} have got means that are none of legal sets of ranks.")

    @parameterized.product(part=list(range(_NUM_PARTS)), kind=list(_KINDS))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=2)
    def test_goes_on_without_a_rank_that_is_killed(self, kind, part):
        """A rank is killed at any event. Its last messages reach all, none, or one of the others."""
        num_steps = set()
        for number, event in enumerate(_events(kind, seed=part)[part % 4 :: 4 * _STRIDE]):
            rank, turn = number % _NUM_RANKS, number % 3
            reaches = (None, (), ((rank + 1) % _NUM_RANKS,))[turn]
            with self.subTest(event=event, rank=rank, reaches=reaches):
                job = Job(kind, seed=part)
                job.before_event(event, job.kill, rank, reaches).run()
                num_steps.add(min(self.check(kind, job)))
        self.assertGreater(len(num_steps), 2)

    @parameterized.product(part=list(range(_NUM_PARTS)), kind=list(_KINDS))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=2)
    def test_goes_on_without_two_ranks_that_are_killed(self, kind, part):
        """The second one soon after the first one: while the others find out who has ended the step, too."""
        random = np.random.default_rng(part)
        events = _events(kind, seed=part)
        for event in events[part % 6 :: 6 * _STRIDE]:
            first, second = random.permutation(_NUM_RANKS)[:2]
            reaches = [np.flatnonzero(random.random(_NUM_RANKS) < 0.5).tolist() for _ in range(2)]
            later = event + int(random.integers(0, 60))
            with self.subTest(events=(event, later), ranks=(first, second), reaches=reaches):
                job = Job(kind, seed=part)
                job.before_event(event, job.kill, int(first), reaches[0])
                job.before_event(later, job.kill, int(second), reaches[1]).run()
                self.check(kind, job)

    @parameterized.product(part=list(range(_NUM_PARTS)), kind=list(_KINDS))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=2)
    def test_a_rank_is_killed_and_another_one_leaves(self, kind, part):
        """By itself, as it is interrupted or as it makes fewer steps."""
        random = np.random.default_rng(part)
        num_steps = (3, 2, 3, 3)
        events = _events(kind, seed=part, num_steps=num_steps)
        for event in events[part % 6 :: 6 * _STRIDE]:
            killed, interrupted = (int(rank) for rank in random.permutation(_NUM_RANKS)[:2])
            later = event + int(random.integers(-30, 30))
            with self.subTest(events=(event, later), killed=killed, interrupted=interrupted):
                job = Job(kind, seed=part, num_steps=num_steps)
                job.before_event(event, job.kill, killed, ())
                if interrupted:
                    job.before_event(max(later, events.start), job.interrupt, interrupted)
                self.check(kind, job.run(), num_steps)

    def test_ends_over_long_links(self):
        """A rank can leave early, although an answer takes longer than the interval at which the rank asks again."""
        job = Job("mesh", num_steps=(1, 30, 30, 30), link_seconds=lambda sender, receiver, num_bytes: 0.7).run()
        self.assertEmpty(job.errors)
        self.assertLess(job.settled_at[0], job.settled_at[1] / 2)  # It need not wait until the others leave.

    def test_refuses_what_cannot_be(self):
        job = Job("mesh")
        handlers = {}
        take_handler = job.cluster.memberships[0].transport.register

        def register(queue, handler):
            handlers[queue] = handler
            take_handler(queue, handler)

        job.cluster.memberships[0].transport.register = register
        job.run()
        for header in (b"short", struct.pack("<BqqI", 9, 1, 0, 0)):
            message = Message(1, "ended_steps/test", header, np.zeros(0, np.uint8))
            with self.assertRaisesRegex(ProtocolError, "rank 1 sent an unexpected message"):
                handlers["ended_steps/test"](message)


if __name__ == "__main__":
    tf.test.main()
