"""All-reduce against the mean in float64, on a virtual clock: any world, length, codec, and ranks that leave."""

import collections
import dataclasses
import functools
import itertools
import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.collectives import ALGORITHMS, all_reduce, get_algorithm
from hop_tf.collectives.vectors import goes_sparse
from hop_tf.errors import HopError, ProtocolError
from hop_tf.membership.waiting import Interrupted
from hop_tf.tools.simulate.virtual import VirtualCluster
from hop_tf.transport.base import Message

_GROUP = "group"
_CHUNK_VALUES = 1024
_CODECS = {
    "identity": codecs.Identity(),
    "truncate16": codecs.Truncate16(),
    "int8": codecs.Int8(),
    "int8 per chunk": codecs.Int8(block_size=None),
    "int8 with feedback": codecs.Int8(error_feedback=True),
    "sketch": codecs.QuantileSketch(),
    "bits4": codecs.Bits4(),
    "bits4 with feedback": codecs.Bits4(error_feedback=True),
    "bits2": codecs.Bits2(),
}
_SPARSE = {
    "top_k": codecs.TopK(ratio=0.05),
    "top_k of truncate16": codecs.TopK(ratio=0.05, values="truncate16"),
    "top_k of int8": codecs.TopK(ratio=0.05, values="int8"),
    "top_k of bits2": codecs.TopK(ratio=0.05, values="bits2"),
    "top_k with feedback": codecs.TopK(ratio=0.05, error_feedback=True),
}
# A codec for vectors in most of which the values are already selected.
_SELECTION = {"selection": codecs.Sparse(ratio=0.05)}
# Algorithms and codecs for what all have in common.
_KINDS = (("mesh", None), ("ring", None), ("mesh", "top_k"), ("ring", "top_k with feedback"))
_KINDS += (("mesh", "selection"), ("ring", "selection"))
# Relative root mean square, for n roundings of normally distributed values.
_TOLERANCES = {"identity": 1e-6, "truncate16": 0.02, "bits4": 0.2, "bits4 with feedback": 0.2, "bits2": 0.8}


class Job:
    """Ranks that average vectors step by step.

    Attributes:
      means: means[rank, step]: the mean that a rank has got.
      sent_steps: By rank, the number of steps in which it has taken part.
      errors: By rank, the error that has ended its job, such as the loss of another rank.
      num_events_of_start: Number of events until all ranks had begun.
    """

    def __init__(
        self,
        world_size,
        *,
        algorithm="mesh",
        codec=None,
        size=5000,
        size_of_ranks=3,
        dtype=np.float32,
        link_seconds=None,
        counts_commits=False,
        in_graph=lambda rank: False,
    ):
        self.cluster = VirtualCluster(world_size, link_seconds)
        self.means = {}
        self.sent_steps = dict.fromkeys(range(world_size), 0)
        self.errors = {}
        self._algorithm = algorithm
        self._codec = codec or codecs.Identity(dtype=dtype)
        # If all vectors are sparse, no rank waits for another rank's mean.
        of_ranks = codecs.Identity(dtype=np.float64)
        self._codec_of_ranks = codecs.TopK(ratio=0.3, values=of_ranks) if isinstance(codec, codecs.Sparse) else of_ranks
        self._size = size
        self._size_of_ranks = size_of_ranks
        self._dtype = dtype
        self._counts_commits = counts_commits
        self._in_graph = in_graph

    def values(self, rank, step):
        values = np.random.default_rng([rank, step]).normal(size=self._size).astype(self._dtype)
        if self._codec is _SELECTION["selection"] and (rank + step) % 3:  # Of the others everything is sent.
            values[: math.floor(0.95 * self._size)] = 0
        return values

    def run(self, num_steps, at_end=lambda rank: None, may_fail=False):
        def body(rank):
            def record_commit(step):
                if self._counts_commits:
                    self.sent_steps[rank] = step + 1

            membership = self.cluster.memberships[rank]
            reduction = get_algorithm(self._algorithm)(
                membership,
                "test",
                sizes=[self._size, self._size_of_ranks],
                codecs=[self._codec, self._codec_of_ranks],
                pool=self.cluster.pool,
                chunk_values=_CHUNK_VALUES,
                in_graph=[self._in_graph(rank), False],
            )
            try:
                reduction.reset(membership.session + 1)
                membership.begin_session()
                self.num_events_of_start = self.cluster.scheduler.num_events
                for step in range(num_steps(rank)):
                    vectors = [self._outgoing(rank, step), np.full(self._size_of_ranks, rank, np.float64)]
                    for vector in vectors:
                        vector.flags.writeable = False
                    self.means[rank, step] = reduction.mean(
                        step,
                        vectors,
                        lambda other, step: membership.delivers(other, _GROUP, step),
                        functools.partial(record_commit, step),
                    )
                    self.sent_steps[rank] = step + 1
            except Interrupted:
                pass
            except HopError as error:
                self.errors[rank] = error
                membership.leave(sent_rounds={}, reason=str(error), abort=True)
                return
            membership.leave(sent_rounds={_GROUP: self.sent_steps[rank]}, reason="done")
            at_end(rank)

        self.cluster.run(body)
        if self.errors and not may_fail:
            raise next(iter(self.errors.values()))

    def _outgoing(self, rank, step):
        """Returns the values as a training graph would submit them."""
        values = self.values(rank, step)
        return self._codec.encode(values, self.cluster.pool).view(self._dtype) if self._in_graph(rank) else values

    def mean(self, rank, step):
        """Returns the mean that a training graph would get."""
        mean, _ = self.means[rank, step]
        if not self._in_graph(rank):
            return mean
        encodings = mean.view(np.uint8).reshape(-1, self._codec.num_bytes(self._size))
        return np.mean([_decoded(self._codec, each, self._size) for each in encodings], axis=0)

    def expected(self, ranks, step):
        return np.mean([self.values(rank, step).astype(np.float64) for rank in ranks], axis=0)


class SparseReference:
    """A sparse all-reduce in NumPy: largest values, sums in the order of ranks, and error feedback.

    Args:
      job: The job.
      codec: A `TopK` with uncompressed values, or a codec that sends all values.
    """

    def __init__(self, job, codec):
        self._job = job
        self._codec = codec
        self._lost = {}

    def mean(self, ranks, step):
        """Returns the mean of the next step, in which only these ranks take part."""
        if not isinstance(self._codec, codecs.TopK):
            return self._job.expected(ranks, step)
        codec = self._codec.at_step(step)
        vectors = [self._job.values(rank, step) + self._lost.get(rank, np.float32(0)) for rank in ranks]
        sent = vectors
        if len(ranks) > 1 and goes_sparse(codec, len(ranks)):
            sent = [largest(vector, codec.ratio) for vector in vectors]
        mean = sum(sent, np.zeros_like(vectors[0])) * np.float32(1 / len(ranks))
        if codec.error_feedback and np.isfinite(mean).all():
            self._lost.update((rank, vector - part) for rank, vector, part in zip(ranks, vectors, sent, strict=True))
        return mean


def largest(values, ratio):
    """The values without all but the ceil(ratio n) largest ones."""
    kept = np.zeros_like(values)
    indices = np.argsort(-np.abs(values), kind="stable")[: math.ceil(ratio * values.size)]
    kept[indices] = values[indices]
    return kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class OftenDense(codecs.TopK):
    """Sends nearly everything in steps 1, 2, 5, 6, ..., and little in the others."""

    def at_step(self, step):
        return dataclasses.replace(self, ratio=(0.05, 0.9)[(step + 1) // 2 % 2])


def _decoded(codec, data, size):
    values = np.empty(size, np.float32)
    codec.decode(data, values)
    return values


def _random_links(seed):
    random = np.random.default_rng(seed)
    return lambda sender, receiver, num_bytes: random.exponential(0.001)


class AllReduceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*itertools.product(ALGORITHMS, (1, 2, 3, 5, 7), (0, 1, 3, 5000)))
    @pytest.mark.stress(but=14)
    def test_mean(self, algorithm, world_size, size):
        job = Job(world_size, algorithm=algorithm, size=size, link_seconds=_random_links(world_size))
        job.run(lambda rank: 2)
        for rank, step in itertools.product(range(world_size), range(2)):
            mean, of_ranks = job.means[rank, step]
            self.assertAllClose(mean, job.expected(range(world_size), step), rtol=1e-6, atol=1e-6)
            self.assertAllEqual(mean, job.means[0, step][0])
            self.assertAllClose(of_ranks, np.full(3, (world_size - 1) / 2), rtol=1e-15)

    @parameterized.parameters(*itertools.product(ALGORITHMS, (2, 5)))
    def test_several_vectors_are_no_more_messages_than_one(self, algorithm, world_size):
        def num_messages(num_steps):
            job = Job(world_size, algorithm=algorithm, size=1000)
            job.run(lambda rank: num_steps)
            return np.array([each.transport.counters()["messages_sent"] for each in job.cluster.memberships])

        num_others = num_messages(0)  # Of the beginning and the end of a session.
        of_step = 1 if (algorithm, world_size) == ("mesh", 2) else 2 * (world_size - 1)
        self.assertAllEqual(num_messages(10) - num_others, np.full(world_size, 10 * of_step))

    @parameterized.parameters(*itertools.product(ALGORITHMS, _CODECS, (2, 3, 5)))
    @pytest.mark.stress(but=11)
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

    @parameterized.product(
        algorithm=tuple(ALGORITHMS),
        name=("truncate16", "int8"),
        world=((5, 1), (5, 5), (2, 1), (2, 2)),
        num_steps=(1, 2),
    )
    @pytest.mark.stress(but=12)
    def test_values_that_the_graph_encodes(self, algorithm, name, world, num_steps):
        """A rank whose graph encodes, and decodes, averages with others as if its own values had been rounded before.

        The last rank ends one step earlier.
        """
        world_size, num_encoded = world

        class Rounded(Job):
            def values(self, rank, step):
                values = super().values(rank, step)
                if rank < num_encoded:
                    values = _decoded(_CODECS[name], _CODECS[name].encode(values, self.cluster.pool), values.size)
                return values

        settings = {"algorithm": algorithm, "codec": _CODECS[name]}
        jobs = [
            Job(world_size, **settings, in_graph=lambda rank: rank < num_encoded),
            Rounded(world_size, **settings),
        ]
        for job in jobs:
            job.run(lambda rank: num_steps - (rank == world_size - 1))
        for rank, step in jobs[0].means:
            self.assertAllEqual(jobs[0].mean(rank, step), jobs[0].mean(0, step))
            self.assertAllClose(jobs[0].mean(rank, step), jobs[1].mean(rank, step), rtol=1e-6)

    @parameterized.product(
        algorithm=tuple(ALGORITHMS), dtype=(np.float64, np.float16, tf.bfloat16.as_numpy_dtype), world_size=(2, 3)
    )
    def test_other_types(self, algorithm, dtype, world_size):
        job = Job(world_size, algorithm=algorithm, dtype=dtype)
        job.run(lambda rank: 1)
        resolution = {2: 2.0**-7, 8: 1e-15}[np.dtype(dtype).itemsize]
        for rank in range(world_size):
            mean = job.means[rank, 0][0]
            self.assertEqual(mean.dtype, dtype)
            expected = job.expected(range(world_size), 0)
            self.assertAllClose(mean.astype(np.float64), expected, rtol=resolution, atol=resolution)
            self.assertAllEqual(mean.astype(np.float64), job.means[0, 0][0].astype(np.float64))

    @parameterized.parameters(*ALGORITHMS, "tree")
    def test_sums_do_not_overflow(self, algorithm):
        """The sum of three values does not fit into float16, their mean does."""
        job = Job(3, algorithm=algorithm, dtype=np.float16)
        job.values = lambda rank, step: np.full(5000, 40000, np.float16)
        job.run(lambda rank: 1)
        for rank in range(3):
            self.assertAllEqual(job.means[rank, 0][0], np.full(5000, 40000, np.float16))

    @parameterized.parameters(*ALGORITHMS, "tree")
    def test_travels_as_another_type(self, algorithm):
        job = Job(3, algorithm=algorithm, codec=codecs.Identity(dtype="bfloat16"))
        job.run(lambda rank: 1)
        mean, expected = job.means[0, 0][0], job.expected(range(3), 0)
        self.assertAllEqual(mean, mean.astype(tf.bfloat16.as_numpy_dtype).astype(np.float32))
        self.assertAllClose(mean, expected, rtol=0, atol=2.0**-8 * 2 * np.abs(expected).max())

    @parameterized.parameters("mesh", "ring")
    def test_what_cannot_be_decoded(self, algorithm):
        """It is another rank's fault, and named so."""
        send = all_reduce.Operation.send

        def send_too_little(operation, rank, turn, chunk, data, lane=None):
            is_bad = operation._membership.rank == 1 and operation.step == 1 and operation.vector == 0
            send(operation, rank, turn, chunk, data[:-4] if is_bad else data, lane)

        job = Job(3, algorithm=algorithm)
        with mock.patch.object(all_reduce.Operation, "send", send_too_little):
            job.run(lambda rank: 3, may_fail=True)
        messages = [str(error) for error in job.errors.values()]
        self.assertTrue(any("cannot decode a part of the mean 'test' in step 1" in each for each in messages))
        self.assertCountEqual(job.errors, range(3))
        self.assertEqual(max(step for _, step in job.means), 0)

    @parameterized.parameters(*itertools.product(ALGORITHMS, {**_CODECS, **_SPARSE}))
    def test_what_is_not_finite_is_seen_by_all(self, algorithm, name):
        for bad in (np.inf, np.nan):
            job = Job(3, algorithm=algorithm, codec={**_CODECS, **_SPARSE}[name])
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

    def test_one_of_two_ranks_is_not_far_ahead(self):
        """It holds few of the other's chunks, however long the vectors are."""
        send, receive, events = all_reduce.Operation.send, all_reduce.Operation.receive, collections.defaultdict(list)

        def noted_send(operation, *args, **kwargs):
            events[operation.index].append("send")
            return send(operation, *args, **kwargs)

        def noted_receive(operation, *args, **kwargs):
            events[operation.index].append("receive")
            return receive(operation, *args, **kwargs)

        job = Job(2, codec=codecs.Int8(), size=20 * 2 * _CHUNK_VALUES)
        with (
            mock.patch.object(all_reduce.Operation, "send", noted_send),
            mock.patch.object(all_reduce.Operation, "receive", noted_receive),
        ):
            job.run(lambda rank: 1)
        for rank in range(2):
            self.assertEqual(events[rank], ["send"] * 12 + ["send", "receive"] * 8 + ["receive"] * 12)
            self.assertAllClose(job.means[rank, 0][0], job.expected(range(2), 0), atol=0.03)
        self.assertAllEqual(job.means[0, 0][0], job.means[1, 0][0])

    def test_nans_are_equal_to_the_bit(self):
        """The order of its terms decides which one a sum keeps."""
        job = Job(2, size=2)
        nans = np.array([0x7FC00001, 0xFFC00002], np.uint32).view(np.float32)
        job.values = lambda rank, step: np.full(2, nans[rank])
        job.run(lambda rank: 1)
        self.assertEqual(job.means[0, 0][0].tobytes(), job.means[1, 0][0].tobytes())

    @parameterized.product(algorithm=tuple(ALGORITHMS), world_size=(2, 4))
    @pytest.mark.stress(but=8)
    def test_traffic(self, algorithm, world_size):
        """Each rank sends 2 (n - 1) / n vectors."""
        job = Job(world_size, algorithm=algorithm, size=1 << 16)
        job.run(lambda rank: 1)
        expected = 2 * (world_size - 1) / world_size * 4 * (1 << 16)
        for membership in job.cluster.memberships:
            sent = membership.transport.counters()["bytes_sent"]
            self.assertBetween(sent, expected, 1.06 * expected)

    @parameterized.product(algorithm=(*ALGORITHMS, "tree"), codec=("int8 with feedback", "top_k with feedback"))
    def test_empty_vectors_are_not_sent(self, algorithm, codec):
        """Beside another one, and where there is nothing else: ranks that end or are interrupted end all the same."""
        send, vectors = all_reduce.Operation.send, collections.Counter()

        def count(operation, *arguments, **others):
            vectors[operation.vector] += 1
            send(operation, *arguments, **others)

        with mock.patch.object(all_reduce.Operation, "send", count):
            for size_of_ranks, expected in ((3, {1}), (0, set())):
                job = Job(
                    3,
                    algorithm=algorithm,
                    codec={**_CODECS, **_SPARSE}[codec],
                    size=0,
                    size_of_ranks=size_of_ranks,
                    link_seconds=_random_links(0),
                )
                vectors.clear()
                job.run(lambda rank: 2 + rank)
                self.assertEqual(job.sent_steps, {0: 2, 1: 3, 2: 4})
                self.assertEqual(set(vectors), expected)
                for (_, step), (mean, of_ranks) in job.means.items():
                    self.assertEqual((mean.size, mean.dtype), (0, np.float32))
                    # The first of equal values is what a sparse codec sends.
                    self.assertAllClose(of_ranks[:1], np.full(size_of_ranks, (1, 1, 1.5, 2)[step])[:1])

    @parameterized.parameters(*itertools.product(ALGORITHMS, ("truncate16", "int8", "sketch", "bits4")))
    @pytest.mark.stress(but=5)
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

    # Sparse vectors.

    @parameterized.parameters(*itertools.product(ALGORITHMS, (2, 3, 5), ("top_k", "top_k of truncate16")))
    def test_sparse_mean(self, algorithm, world_size, name):
        """The very sum of each rank's largest values, in the order of ranks, whatever the order of messages."""
        for links in (None, _random_links(world_size)):
            job = Job(world_size, algorithm=algorithm, codec=_SPARSE[name], size=3000, link_seconds=links)
            values = job.values
            if name != "top_k":  # Those that truncation leaves alone.
                job.values = lambda *args, v=values: (v(*args).view(np.uint32) & 0xFFFF0000).view(np.float32)
            job.run(lambda rank: 2)
            for step in range(2):
                expected = np.zeros(3000, np.float32)
                for rank in range(world_size):
                    expected += largest(job.values(rank, step), 0.05)
                expected *= np.float32(1 / world_size)
                self.assertBetween(np.count_nonzero(expected), 151, 150 * world_size)
                for rank in range(world_size):
                    self.assertAllEqual(job.means[rank, step][0], expected)

    @parameterized.parameters(*itertools.product((2, 3, 5), (0, 1, 3, 5000)))
    def test_sparse_mean_of_int8(self, world_size, size):
        """At most half a step of 1/127 of the largest magnitude is lost of a value."""
        job = Job(world_size, codec=_SPARSE["top_k of int8"], size=size)
        job.run(lambda rank: 1)
        vectors = [largest(job.values(rank, 0), 0.05) for rank in range(world_size)]
        bound = np.mean([np.max(np.abs(vector), initial=0) for vector in vectors]) / 254
        for rank in range(world_size):
            error = np.abs(job.means[rank, 0][0] - np.mean(vectors, axis=0, dtype=np.float64))
            self.assertTrue(np.all(error <= bound * (1 + 1e-5)))
            self.assertAllEqual(job.means[rank, 0][0], job.means[0, 0][0])

    def test_sparse_mean_of_a_selection(self):
        """`TopK.selected` sends the values that the caller has selected: means and bytes equal those of `TopK`."""
        codec = codecs.TopK(ratio=0.05)
        jobs = [Job(3, codec=each) for each in (codec, codec.selected())]
        values = jobs[1].values
        jobs[1].values = lambda rank, step: largest(values(rank, step), 0.05)
        for job in jobs:
            job.run(lambda rank: 2)
        sent = [job.cluster.memberships[0].transport.counters()["bytes_sent"] for job in jobs]
        self.assertEqual(*sent)
        for key, (mean, _) in jobs[0].means.items():
            self.assertAllEqual(mean, jobs[1].means[key][0])

    @parameterized.product(dtype=(np.float64, np.float16, tf.bfloat16.as_numpy_dtype), error_feedback=(False, True))
    def test_sparse_mean_of_other_types(self, dtype, error_feedback):
        """Sums are kept in float32 at least, and rounded once."""
        wide = np.promote_types(dtype, np.float32)
        codec = codecs.TopK(ratio=0.05, values=codecs.Identity(dtype=wide), error_feedback=error_feedback)
        job = Job(3, codec=codec, dtype=dtype)
        job.run(lambda rank: 2)
        lost = np.zeros((3, 5000), wide)
        for step in range(2):
            vectors = [job.values(rank, step).astype(wide) + lost[rank] for rank in range(3)]
            sent = [largest(vector, 0.05) for vector in vectors]
            mean = sum(sent, np.zeros(5000, wide)) * wide.type(1 / 3)
            if error_feedback:
                lost = np.subtract(vectors, sent)
            for rank in range(3):
                self.assertEqual(job.means[rank, step][0].dtype, dtype)
                self.assertAllEqual(job.means[rank, step][0].astype(wide), mean.astype(dtype).astype(wide))

    @parameterized.parameters(
        (codecs.TopK(ratio=0.01), 159),  # 0.0501 n <= 8
        (codecs.TopK(ratio=0.01, values="bits2"), 82),  # 0.01295 n <= 1.0625
        (codecs.TopK(ratio=0.25), 7),  # 1.103 n <= 8
        (codecs.TopK(ratio=0.25, warmup_steps=9, error_feedback=True), 7),
        (codecs.TopK(ratio=0.25, values="truncate16"), 6),  # 0.603 n <= 4
        (codecs.TopK(ratio=0.25, values="int8"), 5),  # 0.355 n <= 2.016
        (codecs.TopK(ratio=0.9), 2),
        (codecs.TopK(ratio=0.01).selected(), 159),
        (codecs.Sparse(), 1),
    )
    def test_goes_sparse(self, codec, most_ranks):
        """Up to `most_ranks` ranks exchange sparse vectors. With more ranks, whole vectors take fewer bytes."""
        self.assertEqual([goes_sparse(codec, n) for n in (most_ranks, most_ranks + 1, 1000)], [True, False, False])

    @parameterized.parameters(*itertools.product(ALGORITHMS, (0.05, 0.1, 0.5)))
    def test_traffic_of_sparse_vectors(self, algorithm, ratio):
        """Each rank sends its selected values n - 1 times, or whole vectors in pieces if that takes fewer bytes."""
        size, codec = 1 << 17, codecs.TopK(ratio=ratio)
        job = Job(4, algorithm=algorithm, size=size, codec=codec)
        job.run(lambda rank: 1)
        expected = size * (3 * codec.bytes_per_value if ratio < 0.3 else 2 * 3 / 4 * 4)
        for membership in job.cluster.memberships:
            self.assertBetween(membership.transport.counters()["bytes_sent"], expected, 1.06 * expected)

    @parameterized.parameters(*itertools.product(ALGORITHMS, (1, 3)))
    def test_traffic_of_more_than_was_selected(self, algorithm, num_full):
        """One rank that sends everything makes all send whole vectors in pieces; what is little was sent in vain."""
        size, codec = 1 << 17, codecs.Sparse(ratio=0.01)
        job = Job(4, algorithm=algorithm, size=size, codec=codec)
        values = job.values
        num_values = [size if rank < num_full else size // 100 for rank in range(4)]
        job.values = lambda rank, step: values(rank, step) * (np.arange(size) < num_values[rank])
        job.run(lambda rank: 1)
        for rank, membership in enumerate(job.cluster.memberships):
            self.assertAllClose(job.means[rank, 0][0], job.expected(range(4), 0), atol=1e-6)
            self.assertAllEqual(job.means[rank, 0][0], job.means[0, 0][0])
            expected = size * (2 * 3 / 4 * 4 + (3 * codec.bytes_per_value if rank >= num_full else 0))
            self.assertBetween(membership.transport.counters()["bytes_sent"], expected, 1.06 * expected)

    @parameterized.parameters(*ALGORITHMS)
    def test_error_feedback_of_more_than_was_selected(self, algorithm):
        """Later vectors carry the rounding errors of int8, also in steps in which one rank's vector is dense."""
        errors = []
        for error_feedback in (False, True):
            codec = codecs.Sparse(ratio=0.05, values="int8", error_feedback=error_feedback)
            job = Job(3, algorithm=algorithm, codec=codec, size=2000)
            values = job.values(0, 0) * (np.arange(2000) % 20 == 0)
            job.values = lambda rank, step, v=values: v + np.float32((rank, step % 3) == (1, 1))
            job.run(lambda rank: 18)
            total = sum(job.means[0, step][0].astype(np.float64) - job.expected(range(3), step) for step in range(18))
            errors.append(np.sqrt(np.mean(total[::20] ** 2)))
        self.assertLess(errors[1], 0.4 * errors[0])

    @parameterized.parameters(*itertools.product(ALGORITHMS, (None, "truncate16", "int8"), (False, True)))
    def test_dense_where_that_is_less(self, algorithm, values, error_feedback):
        """The same, to the bit, as with the codec of the values."""
        feedback = {} if values is None else {"error_feedback": error_feedback}
        pair = (
            codecs.TopK(ratio=0.9, values=values, error_feedback=error_feedback),
            dataclasses.replace(codecs.get(values), **feedback),
        )
        jobs = [Job(3, algorithm=algorithm, codec=codec) for codec in pair]
        for job in jobs:
            job.run(lambda rank: 3)
        for key, (mean, _) in jobs[0].means.items():
            self.assertAllEqual(mean, jobs[1].means[key][0])

    @parameterized.parameters(*itertools.product(ALGORITHMS, (False, True)))
    def test_warm_up(self, algorithm, error_feedback):
        """The first step of five ranks is a dense one, the next ones send less and less."""
        codec = codecs.TopK(ratio=0.01, warmup_steps=3, error_feedback=error_feedback)
        job = Job(5, algorithm=algorithm, codec=codec)
        job.run(lambda rank: 6)
        ratios = [0.01**power for power in (0.25, 0.5, 0.75, 1, 1, 1)]
        reference = SparseReference(job, codec)
        for step, ratio in enumerate(ratios):
            expected = reference.mean(range(5), step)
            if step:
                self.assertBetween(np.count_nonzero(expected), ratio * 5000, 5 * (ratio * 5000 + 1))
            for rank in range(5):
                self.assertAllClose(job.means[rank, step][0], expected, atol=1e-6)

    @parameterized.product(
        algorithm=tuple(ALGORITHMS),
        world_size=(1, 2, 3),
        codec=(codecs.TopK(ratio=0.05, error_feedback=True), OftenDense(error_feedback=True)),
    )
    def test_error_feedback_of_sparse_vectors(self, algorithm, world_size, codec):
        """With v = values + e, e <- v - what was sent. Also where some steps are dense, which send all of it."""
        job = Job(world_size, algorithm=algorithm, codec=codec, size=1000)
        job.run(lambda rank: 8)
        reference = SparseReference(job, codec)
        ranks, total, gradients = range(world_size), np.zeros(1000), np.zeros(1000)
        for step in range(8):
            expected = reference.mean(ranks, step)
            total += expected
            gradients += job.expected(ranks, step)
            for rank in ranks:
                self.assertAllClose(job.means[rank, step][0], expected, atol=1e-6)
                self.assertAllEqual(job.means[rank, step][0], job.means[0, step][0])
        lost = np.mean([reference._lost[rank] for rank in ranks], axis=0)
        self.assertAllClose(total + lost, gradients, atol=1e-5)
        self.assertEqual(np.any(lost), world_size > 1)

    @parameterized.parameters("truncate16", "int8", "bits4", "bits2")
    def test_error_feedback_of_sparse_lossy_values(self, values):
        """Over many steps nothing is lost, though only one value in four is sent at a time, and rounded."""
        job = Job(2, codec=codecs.TopK(ratio=0.25, values=values, error_feedback=True), size=1000)
        constant = 1.0 + np.random.default_rng(0).random(1000).astype(np.float32)
        job.values = lambda rank, step: constant
        job.run(lambda rank: 100)
        mean = sum(job.means[0, step][0].astype(np.float64) for step in range(100)) / 100
        # A value is sent at the latest when it has grown to some times the largest one.
        self.assertLess(np.max(np.abs(mean - constant)), 8 * np.max(constant) / 100)

    @parameterized.parameters(
        codecs.TopK(ratio=0.05, error_feedback=True),
        OftenDense(error_feedback=True),
        OftenDense(values="int8", error_feedback=True),
        codecs.Int8(error_feedback=True),
    )
    @pytest.mark.stress(but=4)
    def test_error_feedback_forgets_nothing_over_a_bad_step(self, codec):
        """A step whose mean is not finite, which Keras leaves out, changes nothing on any rank, sparse or dense."""
        for bad_step in (1, 3):
            job, twin = Job(3, codec=codec, size=1000), Job(3, codec=codec, size=1000)
            values = job.values

            def one_bad(rank, step, values=values, bad_step=bad_step):
                array = values(rank, step)
                if (rank, step) == (1, bad_step):
                    array[500] = np.nan
                return array

            def none_there(rank, step, values=values, bad_step=bad_step):
                return values(rank, step) if step != bad_step else np.full(1000, np.inf, np.float32)

            job.values, twin.values = one_bad, none_there
            for each in (job, twin):
                each.run(lambda rank: 6)
            for (rank, step), (mean, _) in job.means.items():
                if step == bad_step:
                    self.assertFalse(np.isfinite(mean).all())
                else:
                    self.assertTrue(np.isfinite(mean).all())
                    self.assertAllEqual(mean, twin.means[rank, step][0])

    # Ranks that leave.

    @parameterized.parameters(*itertools.product(_KINDS, (2, 3, 5)))
    @pytest.mark.stress(but=10)
    def test_goes_on_without_ranks_that_end(self, kind, world_size):
        """Those that leave at a step's end have a part in all steps before."""
        algorithm, codec = kind[0], {**_SPARSE, **_SELECTION}.get(kind[1])
        num_steps = [3 + 2 * rank for rank in range(world_size)]
        job = Job(world_size, algorithm=algorithm, codec=codec, link_seconds=_random_links(0))
        job.run(lambda rank: num_steps[rank])
        reference = SparseReference(job, codec)
        for step in range(max(num_steps)):
            present = [rank for rank in range(world_size) if step < num_steps[rank]]
            expected = reference.mean(present, step)
            for rank in present:
                self.assertAllClose(job.means[rank, step][0], expected, atol=1e-6)
        self.assertLen(job.means, sum(num_steps))

    @parameterized.parameters(*ALGORITHMS)
    @pytest.mark.stress(but=2)
    def test_an_empty_vector_is_no_commitment(self, algorithm):
        """A rank interrupted at any time leaves the others the same mean of the vectors behind an empty one."""
        for event in itertools.count():
            job = Job(3, algorithm=algorithm, size=0, link_seconds=_random_links(1))
            job.cluster.scheduler.call_before_event(event, job.cluster.memberships[1].interrupt)
            job.run(lambda rank: 2)
            if event >= job.cluster.scheduler.num_events:
                break
            for (_, step), (_, of_ranks) in job.means.items():
                present = [rank for rank in range(3) if step < job.sent_steps[rank]]
                self.assertAllClose(of_ranks, np.full(3, np.mean(present)))
        self.assertGreater(event, 20)

    @parameterized.parameters(*itertools.product(range(12), _KINDS))
    @pytest.mark.stress(after=3)
    def test_goes_on_without_a_rank_that_is_interrupted(self, seed, kind):
        """Whenever that happens: all ranks that have a mean of a step have the same, of all or of all others."""
        algorithm, codec = kind[0], {**_SPARSE, **_SELECTION}.get(kind[1])
        num_events = 0
        for event in itertools.count(seed, 12):
            job = Job(3, algorithm=algorithm, codec=codec, size=2000, link_seconds=_random_links(seed))
            job.cluster.scheduler.call_before_event(event, job.cluster.memberships[seed % 3].interrupt)
            job.run(lambda rank: 3)
            if event >= job.cluster.scheduler.num_events:
                break
            num_events += 1
            reference = SparseReference(job, codec)
            for step in range(3):
                means = {rank: job.means[rank, step][0] for rank in range(3) if (rank, step) in job.means}
                present = [rank for rank in range(3) if step < job.sent_steps[rank]]
                expected = reference.mean(present, step)
                self.assertContainsSubset(set(range(3)) - {seed % 3}, means)
                for mean in means.values():
                    self.assertAllClose(mean, expected, atol=1e-6)
                    self.assertAllEqual(mean, next(iter(means.values())))
        self.assertGreater(num_events, 6)

    def test_one_of_two_ranks_may_leave_while_it_waits(self):
        """The other has its mean of both or, if the news came first, its own values."""
        nums_sent = set()
        for event in itertools.count():
            job = Job(2, size=2000, link_seconds=_random_links(1))
            job.cluster.scheduler.call_before_event(event, job.cluster.memberships[1].interrupt)
            job.run(lambda rank: 3)
            if event >= job.cluster.scheduler.num_events:
                break
            last = job.sent_steps[1]
            nums_sent.add(last)
            self.assertLen(job.means, 3 + last)
            for (_, step), (mean, _) in job.means.items():
                is_alone = step > last or (step == last and np.array_equal(mean, job.values(0, step)))
                self.assertAllClose(mean, job.expected([0] if is_alone else [0, 1], step), atol=1e-6)
        self.assertGreater(len(nums_sent), 2)

    @parameterized.parameters(*itertools.product((True, False), _KINDS))
    @pytest.mark.stress
    def test_goes_on_without_two_ranks_that_are_interrupted(self, counts_commits, kind):
        """The second one while those that are left begin a step again in which others may have the first's mean."""
        algorithm, codec = kind[0], {**_SPARSE, **_SELECTION}.get(kind[1])
        nums_present = set()

        def make_job():
            arguments = {"codec": codec, "size": 300, "link_seconds": _random_links(0)}
            return Job(3, algorithm=algorithm, counts_commits=counts_commits, **arguments)

        undisturbed = make_job()
        undisturbed.run(lambda rank: 2)
        events_of_job = range(undisturbed.num_events_of_start, undisturbed.cluster.scheduler.num_events, 4)
        for events in itertools.combinations_with_replacement(events_of_job, 2):
            job = make_job()
            for event, rank in zip(events, (1, 0), strict=True):
                job.cluster.scheduler.call_before_event(event, job.cluster.memberships[rank].interrupt)
            job.run(lambda rank: 2)
            reference = SparseReference(job, codec)
            for step in range(2):
                present = [rank for rank in range(3) if step < job.sent_steps[rank]]
                nums_present.add(len(present))
                expected = reference.mean(present, step)
                for rank in present:
                    self.assertAllClose(job.means[rank, step][0], expected, atol=1e-6)
        # A rank that sends all at once in the beginning of a step leaves before that, or has a part in it.
        self.assertIn(3, nums_present)
        self.assertTrue(len(nums_present) > 1 or codec is not None)

    @parameterized.parameters(
        *itertools.product(
            ALGORITHMS, (codecs.Int8(error_feedback=True), OftenDense(values="int8", error_feedback=True))
        )
    )
    @pytest.mark.stress(after=1)
    def test_error_feedback_knows_nothing_of_attempts_given_up(self, algorithm, codec):
        """Whenever a rank is interrupted, the others compute what they do where it leaves at the end of a step."""

        def make_job():
            return Job(3, algorithm=algorithm, codec=codec, size=1500, link_seconds=_random_links(0))

        @functools.cache
        def means_where_it_leaves(num_steps):
            job = make_job()
            job.run(lambda rank: num_steps if rank == 1 else 4)
            return job.means

        num_steps = set()
        for event in itertools.count(0, 3):
            job = make_job()
            job.cluster.scheduler.call_before_event(event, job.cluster.memberships[1].interrupt)
            job.run(lambda rank: 4)
            if event >= job.cluster.scheduler.num_events:
                break
            num_steps.add(job.sent_steps[1])
            expected = means_where_it_leaves(job.sent_steps[1])
            for rank, step in itertools.product((0, 2), range(4)):
                self.assertAllEqual(job.means[rank, step][0], expected[rank, step][0])
        self.assertGreater(len(num_steps), 3)

    @parameterized.parameters(
        *itertools.product(range(8), (*_KINDS[:3], _KINDS[4], ("mesh", "int8"), ("ring", "int8")))
    )
    @pytest.mark.stress(after=2)
    def test_a_lost_rank_is_an_error_on_all_others(self, seed, kind):
        """On each, unless it has all means already. No wrong mean is returned before."""
        algorithm, codec = kind[0], {**_CODECS, **_SPARSE, **_SELECTION}.get(kind[1])
        undisturbed = Job(4, algorithm=algorithm, codec=codec, size=2000)
        undisturbed.run(lambda rank: 3)
        num_events = undisturbed.cluster.scheduler.num_events
        num_lost = 0
        for event in range(undisturbed.num_events_of_start + seed, num_events, 8):
            job = Job(4, algorithm=algorithm, codec=codec, size=2000)
            job.cluster.scheduler.call_before_event(event, functools.partial(job.cluster.kill, 1))
            job.run(lambda rank: 3, may_fail=True)
            num_lost += len(job.errors) == 3
            for rank in (0, 2, 3):
                self.assertNotEqual(rank in job.errors, (rank, 2) in job.means)
            for error in job.errors.values():
                self.assertIn("rank 1 at virtual:1", str(error))
            for key, (mean, _) in job.means.items():
                self.assertAllEqual(mean, undisturbed.means[key][0])
        self.assertGreater(num_lost, 5)

    def test_refuses_what_cannot_be(self):
        job = Job(2)
        handlers = {}

        def at_end(rank):
            handlers[rank] = job.cluster.memberships[rank].transport._handlers["all_reduce/test"]

        job.run(lambda rank: 1, at_end)
        message = Message(1, "all_reduce/test", b"short", np.zeros(0, np.uint8))
        with self.assertRaisesRegex(ProtocolError, "rank 1 sent an unexpected message"):
            handlers[0](message)


_ROUTED = (("bcube:2,2", 4), ("bcube:3,2", 9), ("bcube:2,3", 8), ("bcube:5,1", 5), ("tree", 6), ("tree:3", 9))


class RoutedTest(tf.test.TestCase, parameterized.TestCase):
    """The same on the routes of networks."""

    @parameterized.parameters(*itertools.product(_ROUTED, (1, 5000)))
    @pytest.mark.stress(but=14)
    def test_mean(self, network, size):
        algorithm, world_size = network
        job = Job(world_size, algorithm=algorithm, size=size, link_seconds=_random_links(world_size))
        job.run(lambda rank: 2)
        for rank, step in itertools.product(range(world_size), range(2)):
            mean, of_ranks = job.means[rank, step]
            self.assertAllClose(mean, job.expected(range(world_size), step), rtol=1e-6, atol=1e-6)
            self.assertAllEqual(mean, job.means[0, step][0])
            self.assertAllClose(of_ranks, np.full(3, (world_size - 1) / 2), rtol=1e-15)

    @parameterized.parameters(*itertools.product(_ROUTED[:1] + _ROUTED[-1:], ("identity", "int8", "sketch")))
    @pytest.mark.stress(but=11)
    def test_codecs(self, network, name):
        """Whatever the order of messages, the result is the same to the bit; a stage costs about one rounding."""
        algorithm, world_size = network
        jobs = [
            Job(world_size, algorithm=algorithm, codec=_CODECS[name], size=20000, link_seconds=links)
            for links in (None, _random_links(1))
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
        self.assertEqual(relative > 1e-4, name != "identity")

    @parameterized.parameters("truncate16", "int8")
    @pytest.mark.stress(but=5)
    def test_error_feedback(self, name):
        values = 1.0 + np.random.default_rng(0).random(2000).astype(np.float32)
        errors = []
        for feedback in (False, True):
            job = Job(4, algorithm="bcube:2,2", codec=type(codecs.get(name))(error_feedback=feedback), size=2000)
            job.values = lambda rank, step: values
            job.run(lambda rank: 20)
            errors.append(np.abs(sum(job.means[0, step][0].astype(np.float64) for step in range(20)) / 20 - values))
        self.assertLess(np.mean(errors[1]), 0.2 * np.mean(errors[0]))

    @parameterized.parameters(*_ROUTED)
    @pytest.mark.stress(but=8)
    def test_traffic(self, algorithm, world_size):
        """2 (n - 1) / n vectors of a rank that sends as much as it gets; in a BCube as much on each interface."""
        size = 1 << 16
        job = Job(world_size, algorithm=algorithm, size=size)
        lanes = collections.Counter()
        for membership in job.cluster.memberships:
            transport = membership.transport

            def send(peer, queue, header=b"", payload=(), lane=0, send=transport.send, **arguments):
                lanes[lane] += sum(array.nbytes for array in payload)
                send(peer, queue, header, payload, lane, **arguments)

            transport.send = send
        job.run(lambda rank: 1)
        expected = world_size * 2 * (world_size - 1) / world_size * 4 * size
        self.assertBetween(sum(lanes.values()), expected, 1.06 * expected)
        num_levels = int(algorithm.split(",")[1]) if algorithm.startswith("bcube") else 1
        self.assertEqual(sorted(lanes), [0, *range(1, 1 + num_levels)])
        for level in range(num_levels):
            self.assertAllClose(lanes[1 + level], expected / num_levels, rtol=0.06)

    @parameterized.parameters(*_ROUTED[::2])
    @pytest.mark.stress(but=10)
    def test_goes_on_without_ranks_that_end(self, algorithm, world_size):
        num_steps = [2 + 2 * rank for rank in range(world_size)]
        job = Job(world_size, algorithm=algorithm, size=2000, link_seconds=_random_links(0))
        job.run(lambda rank: num_steps[rank])
        for step in range(max(num_steps)):
            present = [rank for rank in range(world_size) if step < num_steps[rank]]
            for rank in present:
                self.assertAllClose(job.means[rank, step][0], job.expected(present, step), atol=1e-6)
        self.assertLen(job.means, sum(num_steps))

    @parameterized.parameters(*itertools.product(("bcube:2,2", "tree"), range(3)))
    @pytest.mark.stress(after=3)
    def test_goes_on_without_a_rank_that_is_interrupted(self, algorithm, seed):
        num_events = 0
        for event in itertools.count(seed, 40):
            job = Job(4, algorithm=algorithm, size=500, link_seconds=_random_links(seed))
            job.cluster.scheduler.call_before_event(event, job.cluster.memberships[seed % 4].interrupt)
            job.run(lambda rank: 2)
            if event >= job.cluster.scheduler.num_events:
                break
            num_events += 1
            for step in range(2):
                means = {rank: job.means[rank, step][0] for rank in range(4) if (rank, step) in job.means}
                expected = job.expected([rank for rank in range(4) if step < job.sent_steps[rank]], step)
                self.assertContainsSubset(set(range(4)) - {seed % 4}, means)
                for mean in means.values():
                    self.assertAllClose(mean, expected, atol=1e-6)
                    self.assertAllEqual(mean, next(iter(means.values())))
        self.assertGreater(num_events, 3)


if __name__ == "__main__":
    tf.test.main()
