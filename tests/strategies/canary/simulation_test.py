"""The asynchronous exchange of Canary on a virtual clock: exact sums in random schedules, and its invariants.

`HOP_TF_NUM_SCHEDULES` is the number of random schedules. All changes are whole multiples of the number of ranks, so
that sums are exact in any order.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.collectives import get_network
from hop_tf.membership import membership_pb2
from hop_tf.options import CommunicationOptions
from hop_tf.runtime.exchange import Request
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.canary.exchange import AsyncSettings, CanaryExchange
from hop_tf.strategies.canary.gei import Thresholds, bit_of
from hop_tf.strategies.canary.layout import Layout
from hop_tf.strategies.canary.messages import CONTRIBUTION_BYTES, Channel, MessageKind
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate.virtual import VirtualCluster
from hop_tf.transport.framing import MAX_HEADER_BYTES

_NUM_SCHEDULES = int(os.environ.get("HOP_TF_NUM_SCHEDULES", "40"))
_GROUP = "simulated"
_NETWORKS = (("mesh", 2), ("mesh", 3), ("mesh", 5), ("bcube:2,2", 4), ("bcube:3,2", 9), ("bcube:2,3", 8), ("tree", 5))
# Most random schedules have few ranks, because many ranks take long.
_PROBABILITIES = (0.3, 0.25, 0.07, 0.25, 0.01, 0.02, 0.1)
_SHAPES = ((5,), (20, 2), (30,), (1,))
_MEMBERS = ((3, 2), (1, 0))


@dataclasses.dataclass
class Job:
    """Ranks that train with given changes.

    Attributes:
      durations: Array [n, num_steps]: the computing time of each step.
      freezes: Tuples of a frozen rank, the time at which it freezes, and the duration.
      drops: By rank, the iterations and colayers that it has dropped.
      made: By rank, the iterations that it has made.
      submitted: By rank and colayer, the number of values that the graph enqueues.
      left: By rank, the number of colayers that have left in each iteration of `made`.
      at_rest: By rank, the weights when all is merged, before they become the mean over ranks.
      finals: By rank, the final weights.
      seconds: By rank, the time at which it had made its last step.
    """

    network: str
    world_size: int
    durations: np.ndarray
    changes: np.ndarray  # [n, num_steps, values of all colayers, one after the other]
    thresholds: Thresholds = dataclasses.field(default_factory=lambda: Thresholds(16, len(_MEMBERS)))
    codec: codecs.Codec = dataclasses.field(default_factory=codecs.Identity)
    sync_interval: int | None = None
    link_seconds: object = None
    leaves_at: dict = dataclasses.field(default_factory=dict)  # By rank, the step before which it leaves.
    merge_seconds: dict = dataclasses.field(default_factory=dict)  # By rank, the time for merging a message.
    inbox_bytes: int | None = None
    max_in_flight: int = 2
    shapes: tuple = _SHAPES
    stops_at: dict = dataclasses.field(default_factory=dict)  # By rank, the step before which it ends and waits.
    inspect: object = None
    freezes: tuple = ()
    options: CommunicationOptions = dataclasses.field(
        default_factory=lambda: CommunicationOptions(timeout_seconds=1e9, progress_timeout_seconds=1e9)
    )

    def __post_init__(self):
        self.packing = _packing(self.shapes)
        # Silence wakes no rank: waiting ranks have to look.
        limit_seconds = 1e4 if self.freezes else None
        self.cluster = VirtualCluster(
            self.world_size, self.link_seconds, options=self.options, limit_seconds=limit_seconds
        )
        for rank, begin, seconds in self.freezes:
            self.cluster.scheduler.call_at(begin, functools.partial(self.cluster.freeze, rank, seconds))
        self.exchanges = {}
        self.drops = {rank: [] for rank in range(self.world_size)}
        self.made = {rank: [] for rank in range(self.world_size)}
        self.submitted = {rank: {} for rank in range(self.world_size)}
        self.left = {rank: [] for rank in range(self.world_size)}
        self.at_rest, self.finals, self.seconds, self.counters = {}, {}, {}, {}

    def run(self):
        self.cluster.run(self._train)
        return self

    def _train(self, rank):
        membership = self.cluster.memberships[rank]
        membership.begin_session()
        context = ExchangeContext(
            _GROUP,
            1,
            self.packing,
            membership,
            BufferPool(),
            start_thread=functools.partial(self.cluster.start_thread, rank),
            trained=[tf.Variable(tf.zeros(spec.shape)) for spec in self.packing.specs],
        )
        settings = AsyncSettings(
            network=get_network(self.network),
            thresholds=self.thresholds,
            codec=self.codec,
            sync_interval=self.sync_interval,
            inbox_bytes=self.inbox_bytes,
            max_in_flight=self.max_in_flight,
        )
        exchange = self.exchanges[rank] = CanaryExchange(context, _MEMBERS, settings)
        self._record_rest(rank, exchange.replica)
        if rank in self.merge_seconds:
            self._slow_down(exchange.replica, self.merge_seconds[rank])
        with contextlib.closing(exchange):
            self.take_steps(rank, exchange)
            membership.leave(sent_rounds={_GROUP: exchange.sent_rounds}, reason="done")

    def _record_rest(self, rank, replica):
        begin = replica.begin

        def record(means):  # The last call is the one with the final mean.
            self.at_rest[rank] = replica.weights and [values.copy() for values in replica.weights]
            begin(means)

        replica.begin = record

    def max_distance(self):
        """Returns the largest difference between a replica and that of rank 0, when all is merged."""
        return max(np.max(np.abs(self.at_rest[rank][0] - self.at_rest[0][0])) for rank in self.finals)

    def _slow_down(self, replica, seconds):
        merge = replica.merge
        replica.merge = lambda *args: (self.cluster.scheduler.sleep(seconds), merge(*args))[1]

    def take_steps(self, rank, exchange):
        empty = (np.empty(0, np.float32),)
        exchange.step(Request(0, exchange.start_segment, (np.zeros(exchange.parts[-1].sizes[0], np.float32),)))
        step, leaves_at = 0, self.leaves_at.get(rank, np.inf)
        while step < min(leaves_at, self.stops_at.get(rank, self.durations.shape[1])):
            self.cluster.scheduler.sleep(float(self.durations[rank, step]))
            self.made[rank].append(step)
            change = self.changes[rank, step].astype(np.float32)
            for colayer, values in enumerate(np.split(change, _ends(exchange)[:-1])):
                before = exchange.counters()["overtime_drops"]
                (bucket,) = exchange.emit_encode(colayer, [tf.constant(values)])
                self.submitted[rank][colayer] = int(bucket.shape[0])
                result = exchange.step(Request(step, colayer, (bucket.numpy(),)))
                if exchange.counters()["overtime_drops"] > before:
                    self.drops[rank].append((step, colayer))
            self.left[rank].append(len(_MEMBERS) - result.num_dropped)
            if self.inspect is not None:
                self.inspect(self, rank, step, result.buckets[0])
            step += 1 + result.num_skipped
        if step >= leaves_at:
            return
        self.seconds[rank] = self.cluster.scheduler.now
        self.finals[rank] = exchange.step(Request(step, exchange.finish_segment, empty)).buckets[0]
        self.counters[rank] = {**exchange.counters(), **exchange.gauges()}

    def expected(self, ranks=None):
        """Returns the expected final weights: the sum of all contributions that were not dropped."""
        total = np.zeros(self.changes.shape[2])
        ends = _ends(next(iter(self.exchanges.values())))
        for rank in ranks or range(self.world_size):
            for step in self.made[rank]:
                for colayer, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
                    if (step, colayer) not in self.drops[rank]:
                        total[start:end] += self.changes[rank, step, start:end] / self.world_size
        return total


def _packing(shapes=_SHAPES):
    return Packing([TensorSpec(str(i), shape, tf.float32) for i, shape in enumerate(shapes)])


def _ends(exchange):
    return np.cumsum([part.sizes[0] for part in exchange.parts[: len(_MEMBERS)]])


_NUM_VALUES = sum(_packing().part(each).sizes[0] for each in _MEMBERS)


def _job(network, world_size, num_steps, rng, **settings):
    durations = (rng.exponential(size=(world_size, 1)) + 0.1) * (0.5 + rng.random((world_size, num_steps)))
    links = rng.exponential(0.2, size=(world_size, world_size))
    changes = world_size * rng.integers(-9, 10, size=(world_size, num_steps, _NUM_VALUES))
    settings = {"link_seconds": lambda a, b, num_bytes: links[a, b], **settings}
    return Job(network, world_size, durations, changes, **settings)


class ExactSumTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_NETWORKS)
    @pytest.mark.stress(after=3)
    def test_equal_ranks(self, network, world_size):
        """Each message holds the contributions of all ranks, as in an all-reduce."""
        num_messages = {}
        for num_steps in (10, 20):
            rng = np.random.default_rng(0)
            changes = world_size * rng.integers(-9, 10, size=(world_size, num_steps, _NUM_VALUES))
            job = Job(network, world_size, np.ones((world_size, num_steps)), changes).run()
            for rank in range(world_size):
                self.assertEqual(job.made[rank], list(range(num_steps)))
                self.assertAllEqual(job.finals[rank], job.expected())
                self.assertAllEqual(job.finals[rank], changes.sum(axis=(0, 1)) / world_size)
            num_messages[num_steps] = [job.counters[rank]["messages_merged"] for rank in range(world_size)]
        num_pieces = len(job.exchanges[0].replica.layout(b"\x01" * world_size).pieces)
        # A piece may take a few more messages at first, until it knows when ranks contribute, and in the end.
        self.assertAllLess(num_messages[10], 16 * num_pieces)
        self.assertAllEqual(np.subtract(num_messages[20], num_messages[10]), [10 * num_pieces] * world_size)

    @parameterized.parameters(("mesh", 5), ("bcube:2,2", 4), ("tree", 5))
    @pytest.mark.stress(but=2)
    def test_one_slow_rank(self, network, world_size):
        """The others do not wait for the slow rank, and the slow rank skips the steps that it has missed."""
        rng = np.random.default_rng(1)
        durations = np.ones((world_size, 30))
        durations[0] = 10.0
        changes = world_size * rng.integers(-9, 10, size=(world_size, 30, _NUM_VALUES))
        job = Job(network, world_size, durations, changes, link_seconds=lambda a, b, num_bytes: 0.01).run()
        for rank in range(1, world_size):
            self.assertEqual(job.made[rank], list(range(30)))
            self.assertLess(job.seconds[rank], 30 * 1.05)
        self.assertLess(job.seconds[0], 51)
        self.assertLess(len(job.made[0]), 6)
        for rank in range(world_size):
            self.assertAllEqual(job.finals[rank], job.expected())

    @parameterized.parameters(("bcube:2,3", 8), ("tree", 9), ("tree:1", 7))
    @pytest.mark.stress
    def test_nobody_waits_where_several_are_slow(self, network, world_size):
        """On a long path, messages may wait for a slow rank at each edge."""
        durations = 1 + 0.3 * np.random.default_rng(0).random((world_size, 30))
        durations[::2] *= 17.3
        changes = np.zeros((world_size, 30, _NUM_VALUES))
        job = Job(network, world_size, durations, changes, link_seconds=lambda a, b, num_bytes: 0.01).run()
        for rank in range(1, world_size, 2):
            self.assertEqual(job.counters[rank]["window_waits"], 0)

    @parameterized.parameters(("bcube:2,2", 4, 2), ("bcube:2,3", 8, 3), ("mesh", 3, 1))
    @pytest.mark.stress(but=1)
    def test_all_interfaces_carry_as_much(self, network, world_size, num_interfaces):
        """Each interface has a lane of its own. Lane 0 carries no values."""
        changes = np.zeros((world_size, 6, 960))
        shapes = ((240,), (240, 1), (240,), (240,))
        job = Job(network, world_size, np.ones((world_size, 6)), changes, shapes=shapes)
        lanes = collections.Counter()
        for membership in job.cluster.memberships:

            def send(peer, queue, header=b"", payload=(), lane=0, send=membership.transport.send, **arguments):
                if queue == f"canary/{_GROUP}":
                    lanes[lane] += sum(array.nbytes for array in payload)
                send(peer, queue, header, payload, lane, **arguments)

            membership.transport.send = send
        job.run()
        self.assertEqual(sorted(lanes), list(range(1, 1 + num_interfaces)))
        self.assertAllClose(list(lanes.values()), [lanes[1]] * num_interfaces, rtol=0.1)

    @pytest.mark.stress
    def test_random_schedules(self):
        for seed in range(_NUM_SCHEDULES):
            rng = np.random.default_rng([4, seed])
            network, world_size = _NETWORKS[rng.choice(len(_NETWORKS), p=_PROBABILITIES)]
            job = _job(
                network,
                world_size,
                int(rng.integers(1, 5)),
                rng,
                thresholds=Thresholds(int(rng.choice([0, 1, 3, 16])), int(rng.integers(0, len(_MEMBERS) + 1))),
                sync_interval=[None, 2, 5][rng.integers(3)],
                inspect=_check_now_and_then,
            ).run()
            for rank in range(world_size):
                self.assertAllEqual(job.finals[rank], job.expected(), msg=f"seed {seed}")
                self.assertEqual(job.counters[rank]["overtime_drops"], len(job.drops[rank]))
                dropped = collections.Counter(step for step, _ in job.drops[rank])
                self.assertEqual(job.left[rank], [len(_MEMBERS) - dropped[step] for step in job.made[rank]])
            self.assertLessEqual(job.max_distance(), 1e-4, msg=f"seed {seed}")

    @parameterized.product(network=(("mesh", 3), ("bcube:2,2", 4), ("tree", 5)), sync_interval=(5, None))
    @pytest.mark.stress(after=2)
    def test_replicas_are_alike_when_all_is_merged(self, network, sync_interval):
        """Also if the sketch has changed sent values, and a rank is so slow that it drops iterations."""
        rng, (name, world_size), shapes = np.random.default_rng(5), network, ((4000,), (40, 100), (5000,), (1,))
        changes = rng.normal(size=(world_size, 20, _packing(shapes).sizes[0]))
        durations = 0.5 + rng.random((world_size, 20))
        durations[0] *= 5
        job = Job(
            name,
            world_size,
            durations,
            changes,
            shapes=shapes,
            thresholds=Thresholds(1, 2),
            codec=codecs.get("sketch"),
            sync_interval=sync_interval,
            link_seconds=lambda a, b, num_bytes: 0.1,
        ).run()
        expected = job.expected()
        lost = np.linalg.norm(job.finals[0] - expected) / np.linalg.norm(expected)
        self.assertBetween(lost, 1e-4, 2e-2)  # The sketch is not exact.
        self.assertGreater(job.counters[0]["pulls"], 0)
        self.assertLessEqual(job.max_distance(), 1e-4)

    @parameterized.parameters(
        (1, (9, 9), 2),  # No colayer has left.
        (2, (9, 9), 2),
        (1, (0, 9), 0),
        (2, (0, 9), 1),
        (0, (9, 9), 0),
    )
    def test_how_many_colayers_must_have_left(self, min_colayers, staleness, num_dropped):
        """Others start iterations while this rank sends its colayers: p is the number of colayers that have left."""
        job = Job("mesh", 2, np.ones((2, 4)), np.zeros((2, 4, _NUM_VALUES)), thresholds=Thresholds(3, min_colayers))
        first = job.take_steps

        def take_steps(rank, exchange):
            if rank == 0:
                seen = itertools.cycle(staleness)
                exchange.replica.gei.staleness = lambda iteration: next(seen)
            first(rank, exchange)

        job.take_steps = take_steps
        job.run()
        self.assertEqual([len(job.drops[rank]) for rank in range(2)], [num_dropped * len(job.made[0]), 0])

    def test_headers_tell_how_far_others_are(self):
        """In its second iteration rank 1 knows of a much later one, and its messages tell rank 0."""

        def jump(job, rank, step, weights):
            if (rank, step) == (1, 0):
                job.exchanges[1].replica.gei.start(30)

        links = {"link_seconds": lambda a, b, num_bytes: 0.01}
        job = Job("mesh", 2, np.ones((2, 34)), np.zeros((2, 34, _NUM_VALUES)), inspect=jump, **links).run()
        self.assertEqual(job.made[0], [0, 1, *range(30, 34)])

    def test_small_colayers_are_encoded_in_pieces_or_not_at_all(self):
        """A mesh of two cuts 600 values into pieces that are sent unencoded, because their sketches would be longer."""
        shapes, changes = ((600,), (16,), (1200,), (1,)), np.random.default_rng(0).normal(size=(2, 4, 1840))
        for codec in (codecs.get("sketch"), codecs.QuantileSketch(error_feedback=True)):
            job = Job("mesh", 2, np.ones((2, 4)), changes, shapes=shapes, codec=codec).run()
            is_encoded = not codec.error_feedback
            self.assertEqual(job.exchanges[0].replica.encoding.is_encoded, [[is_encoded], [False]])
            self.assertEqual(job.submitted[0], {0: 256 + 1216 // 4 if is_encoded else 1216, 1: 624})
            expected = job.expected()
            start = 1216  # Start of the colayer that is sent unencoded.
            self.assertAllClose(job.finals[0][start:], expected[start:], rtol=1e-5, atol=1e-5)
            self.assertLess(np.linalg.norm(job.finals[0] - expected) / np.linalg.norm(expected), 2e-2)


def _check_now_and_then(job, rank, step, weights):
    if (step + rank) % 4 == 0:  # The check takes longer than all the rest.
        _check_invariants(job, rank, step, weights)


def _check_invariants(job, rank, step, weights):
    """Checks that a replica is the sum that its ledger lists, and that bits belong to fully merged contributions.

    Also checks that the graph computes with the replica plus this rank's own unmerged changes at their full size.
    """
    replica = job.exchanges[rank].replica
    layout = replica.layout(b"\x01" * job.world_size)
    merged = layout.ledger.merged
    for piece in layout.pieces:
        total = np.zeros(piece.where.stop - piece.where.start)
        for other in range(job.world_size):
            sent = [i for i in job.made[other] if (i, piece.colayer) not in job.drops[other]]
            for iteration in sent[: merged[piece.index, other]]:
                total += job.changes[other, iteration, piece.where] / job.world_size
        np.testing.assert_array_equal(replica.weights[0][piece.where], total)
        sent = [i for i in job.made[rank] if (i, piece.colayer) not in job.drops[rank]]
        for iteration in sent[merged[piece.index, rank] :]:
            total += job.changes[rank, iteration, piece.where]
        np.testing.assert_array_equal(weights[piece.where], total)
    if not job.freezes:
        _check_bits(job, replica, layout)


def _check_bits(job, replica, layout):
    merged = layout.ledger.merged
    matrix = replica.gei.matrix()
    for other in range(job.world_size):
        for colayer, pieces in enumerate(layout.by_colayer):
            sent = [i for i in job.made[other] if (i, colayer) not in job.drops[other]]
            num_merged = min(merged[piece.index, other] for piece in pieces)
            bits = {iteration for iteration, row in matrix.items() if row[colayer] & bit_of(other)}
            assert bits == matrix.keys() & set(sent[:num_merged])


def _disturb(job, rank, step, weights):
    """Makes the ranks' replicas differ."""
    del step, weights
    replica = job.exchanges[rank].replica
    with replica.lock:
        replica.weights[0] += 1e-3 * rank


class FrozenTest(tf.test.TestCase, parameterized.TestCase):
    """A rank stands still for ten seconds. Meanwhile the others make a hundred steps."""

    def _run(self, network, world_size, num_steps=200, freezes=((1, 3.03, 10.0),), **settings):
        rng = np.random.default_rng(0)
        changes = world_size * rng.integers(-9, 10, size=(world_size, num_steps, _NUM_VALUES))
        durations = 0.1 * np.ones((world_size, num_steps))
        settings = {"link_seconds": lambda a, b, num_bytes: 0.001, **settings}
        job = Job(network, world_size, durations, changes, freezes=freezes, **settings).run()
        for rank in range(world_size):
            self.assertAllEqual(job.finals[rank], job.expected())
        self.assertEqual(job.max_distance(), 0.0)
        return job

    @parameterized.parameters(("mesh", 3), ("mesh", 2), ("tree", 5), ("bcube:2,2", 4))
    @pytest.mark.stress(after=2)
    def test_the_others_do_not_wait(self, network, world_size):
        """The frozen rank is the root of pieces. All contributions count in the end, and the rank catches up."""
        job = self._run(network, world_size)
        for rank in (rank for rank in range(world_size) if rank != 1):
            self.assertGreater(len(job.made[rank]), 197)
            self.assertLess(job.seconds[rank], 20.0 + 0.05 * 10.0)
            self.assertEqual(job.counters[rank]["silences"], 1)
        self.assertLess(job.seconds[1], 20.0 + 0.05 * 10.0)
        self.assertBetween(len(job.made[1]), 100, 106)
        self.assertEqual(job.counters[1]["pulls_rejected"], 0)

    def test_memory_does_not_grow(self):
        """The others keep one sum for each piece, and send the silent rank nothing."""
        num_sent, num_sent_before, num_kept = collections.Counter(), {}, []

        def send(sender, receiver, num_bytes):
            num_sent[sender, receiver] += 1
            return 0.001

        def inspect(job, rank, step, weights):
            num_sent_before[rank, step] = num_sent[rank, 1]
            num_kept.append(max(len(own.latest) for own in job.exchanges[rank].replica._own.values()))

        self._run("mesh", 3, link_seconds=send, inspect=inspect)
        for rank in (0, 2):
            self.assertEqual(num_sent_before[rank, 50], num_sent_before[rank, 120])
            self.assertGreater(num_sent_before[rank, 190], num_sent_before[rank, 140] + 50)
        self.assertLess(max(num_kept), 6)

    def test_a_silent_rank_is_waited_for_in_the_end(self):
        """The others send the messages that they kept back, and the rank takes the sums that it missed from them."""
        job = self._run("mesh", 3, num_steps=60)
        self.assertEqual([len(job.made[rank]) for rank in (0, 2)], [60, 60])
        self.assertGreater(min(job.seconds.values()), 6.0)
        self.assertEqual(job.counters[1]["pulls_rejected"], 0)

    def test_ranks_that_lack_the_same_do_not_ask_each_other(self):
        """Rank 2 freezes, and passes sums on to rank 0. Rank 2 ends last, so each is the fastest rank for the other."""
        job = self._run("bcube:2,2", 4, num_steps=60, freezes=[(2, 3.03, 10.0)], stops_at={0: 58, 1: 58, 3: 58})
        for rank in range(4):
            self.assertEqual(job.counters[rank]["contributions_lost"], 0)
            self.assertLess(job.counters[rank]["pulls"], 4)

    def test_a_rank_hears_in_the_end_how_many_sums_there_were(self):
        """The message with which a root ends a piece may come before the one about sums that the root left out.

        Rank 1 freezes when it has made its last step.
        """
        send = Channel.send

        def lose_missed(channel, rank, header, *arguments, **keywords):
            if header.kind is not MessageKind.MISSED:
                send(channel, rank, header, *arguments, **keywords)

        with mock.patch.object(Channel, "send", lose_missed):
            job = self._run("mesh", 3, num_steps=60, freezes=[(1, 4.0, 10.0)], stops_at={1: 30})
        self.assertGreater(job.counters[1]["pulls"], 0)

    @pytest.mark.slow
    def test_what_a_message_can_tell_of_bounds_what_is_kept_back(self):
        """A message's header lists its contributions. When the header is full, the others wait."""
        longest = MAX_HEADER_BYTES // 2 // CONTRIBUTION_BYTES // 3
        job = self._run("mesh", 3, num_steps=longest + 300, freezes=((1, 3.03, 0.1 * longest + 10.0),))
        for rank in (0, 2):
            self.assertEqual(len(job.made[rank]), longest + 300)
            self.assertBetween(job.seconds[rank], 0.1 * (longest + 300) + 5.0, 0.1 * (longest + 300) + 11.0)

    @pytest.mark.slow
    def test_random_schedules(self):
        """Several ranks freeze, also at the same time and repeatedly, and links are slow."""
        for seed in range(_NUM_SCHEDULES // 2):
            rng = np.random.default_rng([6, seed])
            network, world_size = _NETWORKS[rng.choice(len(_NETWORKS), p=_PROBABILITIES)]
            freezes = [
                (int(rng.integers(world_size)), rng.uniform(0, 15), rng.exponential(4.0))
                for _ in range(rng.integers(1, 4))
            ]
            job = _job(
                network,
                world_size,
                int(rng.integers(5, 20)),
                rng,
                thresholds=Thresholds(int(rng.choice([0, 3, 16])), int(rng.integers(0, len(_MEMBERS) + 1))),
                sync_interval=[None, 2, 5][rng.integers(3)],
                inspect=_check_now_and_then,
                freezes=freezes,
            ).run()
            for rank in range(world_size):
                self.assertAllEqual(job.finals[rank], job.expected(), msg=f"seed {seed}")
            self.assertLessEqual(job.max_distance(), 1e-4, msg=f"seed {seed}")


class DepartureTest(tf.test.TestCase, parameterized.TestCase):
    """The last of three ranks leaves. Weights show how often each rank's changes were merged: see `_counts`."""

    def _run(self, num_steps, leaves_at, slow_link, last_seconds=1.0, also=None, **settings):
        def inspect(job, rank, step, weights):
            seen[rank, step] = weights
            if also is not None:
                also(job, rank, step)

        changes = np.broadcast_to(6.0 * 100.0 ** np.arange(3)[:, None, None], (3, num_steps, _NUM_VALUES))
        durations, seen = np.ones((3, num_steps)), {}
        durations[2, leaves_at - 1] = last_seconds
        job = Job(
            "mesh",
            3,
            durations,
            changes,
            leaves_at={2: leaves_at},
            inspect=inspect,
            link_seconds=lambda a, b, num_bytes: 2.0 if (a, b) == slow_link else 0.1,
            **settings,
        ).run()
        self.assertAllEqual(job.finals[0], job.finals[1])
        return job, seen

    def _counts(self, weights, rank):
        """Returns the part of `rank` in each value: 2 for each iteration among three ranks, 3 for each among two."""
        self.assertAllEqual(weights, np.round(weights))
        return weights.astype(int) // 100**rank % 100

    def _pieces(self, job):
        """Returns each piece among all ranks, and True if its root is the rank that has left."""
        parts = job.exchanges[0].parts[: len(_MEMBERS)]
        layout = Layout(b"\x01" * 3, get_network("mesh"), 0, [part.sizes for part in parts], job.codec.granularity)
        return [(piece.where, piece.root == 2) for piece in layout.pieces]

    def test_what_was_sent_before_others_knew_is_passed_on(self):
        """Rank 0 is the first to know that rank 2 has left. Rank 1 still contributes to the layout with rank 2."""
        job, seen = self._run(20, leaves_at=5, slow_link=(2, 1))
        for where, is_lost in self._pieces(job):
            for rank in (0, 1):
                num_merged = self._counts(seen[rank, 19][where], 2)
                self.assertAllEqual(num_merged, np.full_like(num_merged, num_merged[0] if is_lost else 2 * 5))

    def test_contributions_are_means_of_those_that_are_there(self):
        """Rank 2 leaves after 5 iterations. When a rank has heard of that, its contributions are means over two."""
        job, _ = self._run(20, leaves_at=5, slow_link=(2, 1))
        for where, is_lost in self._pieces(job):
            for rank in () if is_lost else (0, 1):
                among_two = self._counts(job.finals[0][where], rank) - 2 * len(job.made[rank])
                self.assertAllEqual(among_two, np.full_like(among_two, among_two[0]))
                self.assertBetween(among_two[0], 11, 15)

    def test_what_is_in_flight_between_others_at_the_end_is_waited_for(self):
        """Rank 2 leaves when the others have made their last step. Nothing is lost of pieces with other roots."""
        job, _ = self._run(20, leaves_at=19, slow_link=(0, 1), last_seconds=3.2)
        for where, is_lost in self._pieces(job):
            for rank in range(3):
                counts = self._counts(job.finals[0][where], rank)
                expected = counts[0] if is_lost else 2 * len(job.made[rank])
                self.assertAllEqual(counts, np.full_like(counts, expected))

    @parameterized.parameters(*itertools.product(range(4, 9), ((2, 1), (0, 1), (1, 0))))
    @pytest.mark.stress(after=5)
    def test_resyncs_wait_for_what_is_in_flight_among_other_ranks(self, leaves_at, slow_link):
        """If only one rank had merged a contribution, the mean of replicas would hold half, and then get it again."""
        job, _ = self._run(leaves_at + 6, leaves_at, slow_link, sync_interval=4)
        self.assertLess(job.max_distance(), 1e-4)

    def test_what_a_rank_that_has_left_was_to_sum_up_is_counted(self):
        job, _ = self._run(40, leaves_at=5, slow_link=(2, 1))
        pieces = self._pieces(job)
        for rank in (0, 1):
            of_pieces = [(self._counts(job.finals[0][where], rank), is_lost) for where, is_lost in pieces]
            (most,) = {int(count) for counts, is_lost in of_pieces if not is_lost for count in counts}
            num_lost = sum((most - int(counts[0])) // 2 for counts, is_lost in of_pieces if is_lost)
            self.assertGreater(num_lost, 0)
            self.assertEqual(job.counters[rank]["contributions_lost"], num_lost)

    def test_layouts_of_the_past_are_freed(self):
        """A layout is freed when no more messages of it can come, long before the end."""
        job, _ = self._run(40, leaves_at=5, slow_link=(2, 1))
        for rank in (0, 1):
            self.assertEqual(job.counters[rank]["layouts"], 1)
            self.assertLess(job.counters[rank]["gei_rows"], 10)  # Although a late contribution of rank 2 is merged.
            self.assertEqual([bytes(layout.key) for layout in job.exchanges[rank].replica.layouts()], [b"\x01\x01\x02"])

    def test_what_comes_of_a_layout_that_was_freed_is_counted(self):
        def send(job, rank, step):
            if (rank, step) == (0, 35):
                channel, key = job.exchanges[0]._channel, b"\x01" * 3
                channel.send(
                    1, channel.header(MessageKind.UP, key, contributions=((0, 1), (2, 1))), [np.zeros(4, np.uint8)]
                )

        numbers = []
        for also in (None, send):
            job, _ = self._run(40, leaves_at=5, slow_link=(2, 1), also=also)
            numbers.append(job.counters[1]["contributions_late"])
        self.assertEqual(numbers[1], numbers[0] + 2)

    def test_who_stops_early_waits_as_long_as_others_get_on(self):
        rng = np.random.default_rng(0)
        changes = 3 * rng.integers(-9, 10, size=(3, 40, _NUM_VALUES))
        options = CommunicationOptions(progress_timeout_seconds=10)
        job = Job("mesh", 3, np.ones((3, 40)), changes, stops_at={0: 5}, options=options).run()
        self.assertEqual([len(job.made[rank]) for rank in range(3)], [5, 40, 40])
        for rank in range(3):
            self.assertAllEqual(job.finals[rank], job.expected())

    def test_a_newcomer_hears_who_has_made_the_last_step(self):
        """Rank 0 has ended before rank 1 joins again, and has told only the former process of rank 1."""
        job = Job("mesh", 2, np.ones((2, 1)), np.zeros((2, 1, _NUM_VALUES)))

        take_steps = job.take_steps
        job.take_steps = lambda rank, exchange: (self._rejoin(job, 5.0) if rank else None, take_steps(rank, exchange))
        job.run()
        self.assertEqual(sorted(job.finals), [0, 1])

    def test_a_newcomer_makes_no_step_of_its_own(self):
        """Rank 0 is at its last step when rank 1 asks for its step."""
        job = Job("mesh", 2, np.ones((2, 1)), 2 * np.ones((2, 1, _NUM_VALUES)))

        take_steps = job.take_steps

        def join_at_the_end(rank, exchange):
            if rank == 0:
                return take_steps(rank, exchange)
            self._rejoin(job, 5.0)
            exchange.begin_at(1)
            exchange.meet(0, 0)
            state = job.exchanges[0].replica.read()
            exchange.step(Request(1, exchange.start_segment, state))
            empty = (np.empty(0, np.float32),)
            job.finals[rank] = exchange.step(Request(1, exchange.finish_segment, empty)).buckets[0]

        job.take_steps = join_at_the_end
        job.run()
        self.assertAllEqual(job.finals[0], job.finals[1])
        # Sums that the former process of rank 1 should have made are lost.
        self.assertEqual(set(job.finals[0]), {0.0, 1.0})

    def _rejoin(self, job, seconds):
        """Replaces the process of rank 1, of two ranks, after some seconds."""
        job.cluster.scheduler.sleep(seconds)
        job.cluster.memberships[1].incarnation = 1
        job.exchanges[1].reset(1)
        incarnation = job.cluster.memberships[1].transport.incarnation
        join = membership_pb2.Join(rank=1, session=1, incarnation=1, transport_incarnation=incarnation)
        self.assertTrue(job.cluster.memberships[0].readmit(join))
        job.exchanges[0].admit(1, 0)

    def test_a_state_is_pulled_of_a_rank_that_has_joined_within_the_iteration(self):
        """The joined rank drops messages for its former process, so the request must be for the new one."""
        job = Job("mesh", 2, np.ones((2, 10)), np.zeros((2, 10, _NUM_VALUES)), thresholds=Thresholds(0, 2))
        first, states = job.take_steps, []

        def take_steps(rank, exchange):
            if rank == 1:
                self._rejoin(job, 0.5)
                return first(rank, exchange)
            adopt = exchange.replica.adopt
            exchange.replica.adopt = lambda state, *args, **kwargs: (
                states.append(state),
                adopt(state, *args, **kwargs),
            )[1]
            whole, empty = np.zeros(exchange.parts[-1].sizes[0], np.float32), np.empty(0, np.float32)
            exchange.step(Request(0, exchange.start_segment, (whole,)))
            for colayer, part in enumerate(exchange.parts[: len(_MEMBERS)]):
                result = exchange.step(Request(0, colayer, (whole[: part.sizes[0]],)))
                job.cluster.scheduler.sleep(5.0)  # Then rank 1 is ahead.
            step = 1 + result.num_skipped
            return exchange.step(Request(step, exchange.finish_segment, (empty,)))

        job.take_steps = take_steps
        job.run()
        self.assertNotEmpty(states)

    def test_newcomers_do_not_wait_for_each_others_state(self):
        """Each newcomer believes that the other is the furthest rank, as if a former process's message came late."""
        changes, links = 2 * np.ones((2, 3, _NUM_VALUES)), (lambda a, b, num_bytes: 0.1)
        are_complete = []
        job = Job(
            "mesh",
            2,
            np.ones((2, 3)),
            changes,
            link_seconds=links,
            inspect=lambda job, rank, step, weights: are_complete.append(job.exchanges[rank].replica.is_complete),
        )
        first = job.take_steps

        def take_steps(rank, exchange):
            exchange.begin_at(0)
            exchange.meet(1 - rank, 5)
            job.cluster.scheduler.sleep(5.0 - job.cluster.scheduler.now)  # Both begin at the same moment.
            first(rank, exchange)

        job.take_steps = take_steps
        job.run()
        for rank in range(2):
            self.assertAllEqual(job.finals[rank], job.expected())
            self.assertEqual(job.counters[rank]["pulls_rejected"], 1)
        self.assertEqual(are_complete, [False] * 6)  # Neither can give a state, because it does not know what it lacks.

    def test_the_next_rank_is_asked_where_the_fastest_one_lacks_something(self):
        """Messages of rank 3 reach rank 1, the fastest one, late: rank 0 has merged contributions that rank 1 lacks."""
        durations = np.array([[4.0], [0.5], [0.6], [0.6]]) * np.ones(40)
        changes = 4 * np.ones((4, 40, _NUM_VALUES))
        links = np.full((4, 4), 0.01)
        links[3, 1] = 1.0
        job = Job("mesh", 4, durations, changes, Thresholds(0, 2), link_seconds=lambda a, b, num_bytes: links[a, b])
        job.run()
        self.assertGreater(job.counters[0]["pulls"], 3)
        self.assertEqual(job.counters[0]["pulls_rejected"], 0)
        for rank in range(4):
            self.assertAllEqual(job.finals[rank], job.expected())

    def test_a_new_session_waits_for_what_is_being_worked_on(self):
        """A message that is being merged belongs to the old session, and changes nothing in the new one."""
        job = Job("mesh", 2, np.ones((2, 1)), np.zeros((2, 1, _NUM_VALUES)), merge_seconds={0: 5.0})
        scheduler = job.cluster.scheduler

        def take_steps(rank, exchange):
            start = Request(0, exchange.start_segment, (np.zeros(exchange.parts[-1].sizes[0], np.float32),))
            exchange.step(start)
            scheduler.sleep(1.0)  # Rank 1 has left by then: sent values are merged at once.
            exchange.step(Request(0, 0, (np.ones(exchange.parts[0].sizes[0], np.float32),)))
            scheduler.sleep(1.0)
            exchange.reset(2)
            self.assertEqual(scheduler.now, 1.0 + 5.0)
            exchange.step(start)
            scheduler.sleep(20.0)
            self.assertAllEqual(exchange.replica.read()[0], start.buckets[0])

        job.take_steps = lambda rank, exchange: take_steps(rank, exchange) if rank == 0 else None
        job.run()


class InboxTest(tf.test.TestCase, parameterized.TestCase):
    def _largest(self, inbox_bytes):
        """Returns the largest size of rank 0's inbox, and the job. Rank 0 merges slowly, and is no piece's root."""
        sizes = []
        job = Job(
            "mesh",
            5,
            np.ones((5, 200)),
            5 * np.random.default_rng(0).integers(-9, 10, size=(5, 200, _NUM_VALUES)),
            link_seconds=lambda a, b, num_bytes: 0.1,
            merge_seconds={0: 0.7},
            codec=codecs.get("int8"),  # Int8 neither cuts nor encodes such small pieces.
            inbox_bytes=inbox_bytes,
            inspect=lambda job, rank, *_: sizes.append(job.exchanges[0].gauges()["inbox_bytes"]),
        ).run()
        for rank in range(5):
            self.assertAllEqual(job.finals[rank], job.expected())
        return max(sizes), job

    @pytest.mark.slow
    def test_others_wait_for_a_rank_that_merges_slowly(self):
        largest, job = self._largest(inbox_bytes=4000)
        self.assertBetween(largest, 2000, 6000)
        self.assertGreater(job.counters[1]["inbox_waits"], 0)
        self.assertEqual(job.counters[0]["inbox_bytes"], 0)

    def test_nobody_waits_before_an_inbox_is_full(self):
        largest, job = self._largest(inbox_bytes=10**6)
        self.assertGreater(largest, 20_000)
        self.assertEqual([job.counters[rank]["inbox_waits"] for rank in range(5)], [0] * 5)

    @parameterized.parameters(
        ("mesh", 2, 0.4, 2, 20),
        ("mesh", 2, 6.0, 2, 9 * 12 + 2),
        ("mesh", 2, 6.0, 3, 6 * 12 + 2),
        ("tree:1", 7, 0.4, 2, 20),
    )
    @pytest.mark.stress(but=3)
    def test_who_has_much_in_flight_waits_until_it_is_merged(self, network, world_size, seconds, most, duration):
        """In a round trip to a root a rank makes `max_in_flight` iterations, and more on a long path."""
        changes, durations = np.zeros((world_size, 20, _NUM_VALUES)), np.ones((world_size, 20))
        link = {"link_seconds": lambda a, b, num_bytes: seconds}
        job = Job(network, world_size, durations, changes, max_in_flight=most, **link).run()
        for rank in range(world_size):
            # Until all have begun, a message goes from rank to rank.
            self.assertBetween(job.seconds[rank], duration, duration + (world_size + 1.01) * seconds)
            self.assertEqual(job.counters[rank]["window_waits"] > 0, duration > 20)


class ResyncTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(True, False)
    @pytest.mark.stress(but=1)
    def test_values_go_only_where_replicas_differ(self, are_alike):
        """A resync costs as much as an exchange in float32, and next to nothing if replicas are equal, to the bit."""
        shapes, world_size, num_steps = ((4000,), (40, 100), (5000,), (1,)), 3, 20
        num_values = _packing(shapes).sizes[0]
        changes = np.random.default_rng(0).normal(size=(world_size, num_steps, num_values))
        num_bytes = {}
        for interval in (None, 5):
            sizes = []
            job = Job(
                "mesh",
                world_size,
                np.ones((world_size, num_steps)),
                changes,
                shapes=shapes,
                codec=codecs.get("sketch"),
                sync_interval=interval,
                link_seconds=lambda a, b, size, sizes=sizes: sizes.append(size) or 0.1,
                inspect=None if are_alike else _disturb,
            ).run()
            num_bytes[interval] = sum(sizes)
        num_pieces = len(job.exchanges[0].replica.layout(b"\x01" * world_size).pieces)
        self.assertEqual(job.counters[0]["resyncs"], 3 * num_pieces)  # The fourth one is given up: training ends.
        one_way = 3 * (world_size - 1) * 4 * num_values
        most = 0.02 * one_way if are_alike else 2.7 * one_way
        self.assertBetween(num_bytes[5] - num_bytes[None], 0 if are_alike else 2 * one_way, most)

    def test_goes_on_without_a_rank_that_has_pulled_past_the_mark(self):
        """Messages of rank 1 reach rank 0 late. Before, rank 0 gets their contents with a state that it pulls."""
        rng = np.random.default_rng(1)
        durations = np.ones((3, 40))
        durations[0] = 4.5
        changes = 3 * rng.integers(-9, 10, size=(3, 40, _NUM_VALUES))
        job = Job(
            "mesh",
            3,
            durations,
            changes,
            thresholds=Thresholds(0, 2),
            sync_interval=2,
            inspect=_check_invariants,
            link_seconds=lambda a, b, num_bytes: 3.0 if (a, b) == (1, 0) else 0.1,
        ).run()
        num_pieces = len(job.exchanges[0].replica.layout(b"\x01" * 3).pieces)
        of_root_1 = [piece for piece in job.exchanges[1].replica.layout(b"\x01" * 3).pieces if piece.root == 1]
        self.assertGreater(job.counters[0]["pulls"], 0)
        self.assertGreater(job.counters[0]["duplicates"], 0)
        # With root 1 a resync takes some 6 s: the slow link's 3 s, and those of the snapshot and of what precedes it.
        at_least = (num_pieces - len(of_root_1)) * 15 + len(of_root_1) * 6
        for rank in (1, 2):
            self.assertGreaterEqual(job.counters[rank]["resyncs"], at_least)
        for rank in range(3):
            self.assertAllEqual(job.finals[rank], job.expected())


if __name__ == "__main__":
    tf.test.main()
