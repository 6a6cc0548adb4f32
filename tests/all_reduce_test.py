"""All-reduce against the mean in float64, on a virtual clock: any world, length, codec, and ranks that leave."""

import functools
import itertools
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.collectives import ALGORITHMS
from hop_tf.errors import PeerLostError, ProtocolError
from hop_tf.membership import Interrupted
from hop_tf.simulate.virtual import VirtualCluster

_GROUP = "group"
_CHUNK_VALUES = 1024
_CODECS = {
    "identity": codecs.Identity(),
    "truncate16": codecs.Truncate16(),
    "int8": codecs.Int8(),
    "int8 per chunk": codecs.Int8(block_size=None),
    "int8 with feedback": codecs.Int8(error_feedback=True),
    "sketch": codecs.QuantileSketch(),
}
# Relative root mean square, for n roundings of normally distributed values.
_TOLERANCES = {"identity": 1e-6, "truncate16": 0.02, "sketch": 0.06}


class Job:
    """Ranks that average vectors step by step.

    Attributes:
      means: means[rank, step]: what a rank has got.
      sent_steps: In how many steps a rank has taken part.
      num_events_of_start: How many events there were until all ranks had begun.
    """

    def __init__(self, world_size, *, algorithm="mesh", codec=None, size=5000, dtype=np.float32, link_seconds=None):
        self.cluster = VirtualCluster(world_size, link_seconds)
        self.means = {}
        self.sent_steps = dict.fromkeys(range(world_size), 0)
        self._algorithm = algorithm
        self._codec = codec or codecs.Identity(dtype=dtype)
        self._size = size
        self._dtype = dtype

    def values(self, rank, step):
        return np.random.default_rng([rank, step]).normal(size=self._size).astype(self._dtype)

    def run(self, num_steps, at_end=lambda rank: None):
        def body(rank):
            membership = self.cluster.memberships[rank]
            reduction = ALGORITHMS[self._algorithm](
                membership,
                "test",
                sizes=[self._size, 3],
                dtypes=[self._dtype, np.float64],
                codecs=[self._codec, codecs.Identity(dtype=np.float64)],
                pool=self.cluster.pool,
                chunk_values=_CHUNK_VALUES,
            )
            try:
                reduction.reset(membership.session + 1)
                membership.begin_session()
                self.num_events_of_start = self.cluster.scheduler.num_events
                for step in range(num_steps(rank)):
                    vectors = [self.values(rank, step), np.full(3, rank, np.float64)]
                    self.means[rank, step] = reduction.mean(
                        step, vectors, lambda other, step: membership.delivers(other, _GROUP, step)
                    )
                    self.sent_steps[rank] = step + 1
            except Interrupted:
                pass
            membership.leave(sent_steps={_GROUP: self.sent_steps[rank]}, reason="done")
            at_end(rank)

        self.cluster.run(body)

    def expected(self, ranks, step):
        return np.mean([self.values(rank, step).astype(np.float64) for rank in ranks], axis=0)


def _random_links(seed):
    random = np.random.default_rng(seed)
    return lambda sender, receiver, num_bytes: random.exponential(0.001)


class AllReduceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*itertools.product(ALGORITHMS, (1, 2, 3, 5, 7), (0, 1, 3, 5000)))
    def test_mean(self, algorithm, world_size, size):
        job = Job(world_size, algorithm=algorithm, size=size, link_seconds=_random_links(world_size))
        job.run(lambda rank: 2)
        for rank, step in itertools.product(range(world_size), range(2)):
            mean, of_ranks = job.means[rank, step]
            self.assertAllClose(mean, job.expected(range(world_size), step), rtol=1e-6, atol=1e-6)
            self.assertAllEqual(mean, job.means[0, step][0])
            self.assertAllClose(of_ranks, np.full(3, (world_size - 1) / 2), rtol=1e-15)

    @parameterized.parameters(*itertools.product(ALGORITHMS, _CODECS, (2, 3, 5)))
    def test_codecs(self, algorithm, name, world_size):
        """Equal to the bit on all ranks, whatever the order of messages, and as near the mean as the codec allows."""
        jobs = [
            Job(world_size, algorithm=algorithm, codec=_CODECS[name], link_seconds=links)
            for links in (None, _random_links(world_size))
        ]
        for job in jobs:
            job.run(lambda rank: 2)
        for rank, step in itertools.product(range(world_size), range(2)):
            for job in jobs:
                self.assertAllEqual(job.means[rank, step][0], jobs[0].means[0, step][0])
        expected = jobs[0].expected(range(world_size), 0)
        error = jobs[0].means[0, 0][0] - expected
        relative = np.sqrt(np.mean(error**2) / np.mean(expected**2))
        self.assertLess(relative, _TOLERANCES.get(name, 0.06))
        if name == "identity":
            self.assertAllClose(jobs[0].means[0, 0][0], expected, atol=1e-6)
        else:
            self.assertGreater(relative, 1e-4)  # It did pass through the codec.

    @parameterized.parameters(*itertools.product(ALGORITHMS, (np.float64, np.float16, tf.bfloat16.as_numpy_dtype)))
    def test_other_types(self, algorithm, dtype):
        job = Job(3, algorithm=algorithm, dtype=dtype)
        job.run(lambda rank: 1)
        resolution = {2: 2.0**-7, 8: 1e-15}[np.dtype(dtype).itemsize]
        for rank in range(3):
            mean = job.means[rank, 0][0]
            self.assertEqual(mean.dtype, dtype)
            self.assertAllClose(mean.astype(np.float64), job.expected(range(3), 0), rtol=resolution, atol=resolution)
            self.assertAllEqual(mean.astype(np.float64), job.means[0, 0][0].astype(np.float64))

    @parameterized.parameters(*itertools.product(ALGORITHMS, _CODECS))
    def test_what_is_not_finite_is_seen_by_all(self, algorithm, name):
        for bad in (np.inf, np.nan):
            job = Job(3, algorithm=algorithm, codec=_CODECS[name])
            values = job.values

            def one_bad(rank, step, values=values, bad=bad):
                array = values(rank, step)
                array[4321 if (rank, step) == (1, 0) else slice(0)] = bad
                return array

            job.values = one_bad
            job.run(lambda rank: 2)
            for rank in range(3):
                self.assertFalse(np.isfinite(job.means[rank, 0][0]).all())
                self.assertTrue(np.isfinite(job.means[rank, 1][0]).all())

    @parameterized.parameters(*ALGORITHMS)
    def test_traffic(self, algorithm):
        """Each rank sends 2 (n - 1) / n vectors."""
        job = Job(4, algorithm=algorithm, size=1 << 16)
        job.run(lambda rank: 1)
        for membership in job.cluster.memberships:
            sent = membership.transport.counters()["bytes_sent"]
            self.assertBetween(sent, 2 * 3 / 4 * 4 * (1 << 16), 1.06 * 2 * 3 / 4 * 4 * (1 << 16))

    @parameterized.parameters(*itertools.product(ALGORITHMS, ("truncate16", "int8", "sketch")))
    def test_error_feedback(self, algorithm, name):
        """Over many steps nothing is lost: the sum of all means is off by the last step's errors only."""
        plain = codecs.get(name)
        values = 1.0 + np.random.default_rng(0).random(2000).astype(np.float32)
        errors = []
        for codec in (plain, type(plain)(error_feedback=True)):
            job = Job(3, algorithm=algorithm, codec=codec, size=values.size)
            job.values = lambda rank, step: values
            job.run(lambda rank: 20)
            errors.append(np.abs(sum(job.means[0, step][0].astype(np.float64) for step in range(20)) / 20 - values))
        self.assertLess(np.mean(errors[1]), 0.2 * np.mean(errors[0]))
        largest = np.max(np.abs(job.means[0, 0][0] - values))
        self.assertLess(np.max(errors[1]), 5 * max(largest, np.max(errors[0])) / 20)

    @parameterized.parameters(*itertools.product(ALGORITHMS, (2, 3, 5)))
    def test_goes_on_without_ranks_that_end(self, algorithm, world_size):
        """Those that leave at a step's end have a part in all steps before."""
        num_steps = [3 + 2 * rank for rank in range(world_size)]
        job = Job(world_size, algorithm=algorithm, link_seconds=_random_links(0))
        job.run(lambda rank: num_steps[rank])
        for (_, step), (mean, _) in job.means.items():
            present = [rank for rank in range(world_size) if step < num_steps[rank]]
            self.assertAllClose(mean, job.expected(present, step), atol=1e-6)
        self.assertLen(job.means, sum(num_steps))

    @parameterized.parameters(*itertools.product(ALGORITHMS, range(12)))
    def test_goes_on_without_a_rank_that_is_interrupted(self, algorithm, seed):
        """Whenever that happens: all ranks that have a mean of a step have the same, of all or of all others."""
        num_events = 0
        for event in itertools.count(seed, 12):
            job = Job(3, algorithm=algorithm, size=2000, link_seconds=_random_links(seed))
            job.cluster.scheduler.call_before_event(event, job.cluster.memberships[seed % 3].interrupt)
            job.run(lambda rank: 3)
            if event >= job.cluster.scheduler.num_events:
                break
            num_events += 1
            for step in range(3):
                means = {rank: job.means[rank, step][0] for rank in range(3) if (rank, step) in job.means}
                present = [rank for rank in range(3) if step < job.sent_steps[rank]]
                self.assertContainsSubset(set(range(3)) - {seed % 3}, means)
                for mean in means.values():
                    self.assertAllClose(mean, job.expected(present, step), atol=1e-6)
                    self.assertAllEqual(mean, next(iter(means.values())))
        self.assertGreater(num_events, 10)

    @parameterized.parameters(*itertools.product(ALGORITHMS, range(8)))
    def test_a_lost_rank_is_an_error_on_all_others(self, algorithm, seed):
        """No wrong mean is returned before."""
        undisturbed = Job(4, algorithm=algorithm, size=2000)
        undisturbed.run(lambda rank: 3)
        num_events = undisturbed.cluster.scheduler.num_events
        num_lost = 0
        for event in range(undisturbed.num_events_of_start + seed, num_events, 8):
            job = Job(4, algorithm=algorithm, size=2000)
            job.cluster.scheduler.call_before_event(event, functools.partial(job.cluster.kill, 1))
            try:
                job.run(lambda rank: 3)
            except PeerLostError as error:
                self.assertIn("rank 1 at virtual:1", str(error))
                num_lost += 1
            else:  # It had sent everything.
                self.assertLen([step for rank, step in job.means if rank != 1], 9)
            for (_, step), (mean, _) in job.means.items():
                self.assertAllClose(mean, job.expected(range(4), step), atol=1e-6)
        self.assertGreater(num_lost, 5)

    def test_refuses_what_cannot_be(self):
        job = Job(2)
        handlers = {}

        def at_end(rank):
            handlers[rank] = job.cluster.memberships[rank].transport._handlers["all_reduce/test"]

        job.run(lambda rank: 1, at_end)
        message = mock.Mock(sender=1, queue="all_reduce/test", header=b"short", payload=np.zeros(0, np.uint8))
        with self.assertRaisesRegex(ProtocolError, "rank 1 sent an unexpected message"):
            handlers[0](message)


if __name__ == "__main__":
    tf.test.main()
