"""Ranks of Canary that die and come back, in simulation: no rank waits for ever, and nothing is merged twice.

`HOP_TF_NUM_SCHEDULES` is the total number of random schedules.
"""

import collections
import functools
import itertools
import os

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.collectives import get_network
from hop_tf.errors import DeadlineExceededError, PeerLostError
from hop_tf.runtime.exchange import Request
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.joiner import State
from hop_tf.runtime.joining import Joining
from hop_tf.runtime.replica_state import sign
from hop_tf.strategies.canary.exchange import AsyncSettings, CanaryExchange
from hop_tf.strategies.canary.gei import Thresholds, bit_of
from hop_tf.strategies.canary.layout import Layout
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate import Fault
from hop_tf.tools.simulate.rejoining import catch_up
from hop_tf.tools.simulate.virtual import VirtualCluster

_NUM_SCHEDULES = int(os.environ.get("HOP_TF_NUM_SCHEDULES", "40"))
_GROUP, _SESSION = "simulated", 1
_DETECTION_SECONDS = 2.0
_ATTEMPT_SECONDS = 0.5
_MEMBERS = ((1,), (0,))
_EXACT, _LOSSY = 40, 1200  # Values of each variable. Few values are sent unencoded with any codec.
_SHARES = 12  # A contribution among n ranks adds a whole number: 12 / n.
_BASE = 4096  # Base of the digits that separate the ranks' contributions, exact in float64.


class _Job:
    """Ranks that train, and die.

    Attributes:
      made: By rank, iteration and colayer, the number of contributions, in all incarnations.
      sent: By rank and colayer, the sum of the shares of contributions.
      at_rest: By rank, the weights when all is merged, before they become the mean over ranks.
      finals: By rank, the final weights. Only ranks that have ended have an entry.
      begun: Ranks that train or have trained.
      has_frozen: True if ranks stand still for some time.
      late: Ranks that came back after the others had ended, and ranks that could not end because one died just then.
    """

    def __init__(
        self,
        network,
        world_size,
        durations,
        links,
        *,
        codec=None,
        size=_EXACT,
        sync_interval=None,
        limit_seconds=None,
        **thresholds,
    ):
        self.world_size, self.num_steps = durations.shape
        self.durations = durations
        self.settings = AsyncSettings(
            network=get_network(network),
            thresholds=Thresholds(**{"max_staleness": 16, "min_colayers": len(_MEMBERS), **thresholds}),
            codec=codec or codecs.Identity(dtype=np.float64),
            sync_interval=sync_interval,
            max_in_flight=2,
        )
        self.packing = Packing([TensorSpec(str(i), (size,), tf.float32 if codec else tf.float64) for i in range(2)])
        self.cluster = VirtualCluster(
            world_size,
            links,
            continue_without_lost=True,
            detection_seconds=_DETECTION_SECONDS,
            limit_seconds=limit_seconds,
        )
        self.sent = np.zeros((world_size, len(_MEMBERS)), int)
        self.made = collections.defaultdict(int)
        self.at_rest, self.finals, self.late = {}, {}, []
        self.begun = set()
        self.has_frozen = False
        self.ranks = [_Rank(self, rank, was_restarted=False) for rank in range(world_size)]

    def schedule(self, fault):
        self.cluster.scheduler.call_at(fault.seconds, lambda: self._kill(fault))

    def freeze(self, rank, begin, seconds):
        """Lets a rank stand still for `seconds`, from time `begin` on."""
        self.has_frozen = True
        self.cluster.scheduler.call_at(begin, lambda: self.cluster.freeze(rank, seconds))

    def _kill(self, fault):
        if len(self.begun) < self.world_size:
            return  # If a rank dies before all have begun, all ranks fail.
        if not self.cluster.kill(fault.rank, fault.reaches):
            return
        if fault.restart_seconds is not None:
            scheduler = self.cluster.scheduler
            scheduler.call_at(scheduler.now + fault.restart_seconds, lambda: self._restart(fault.rank))

    def _restart(self, rank):
        self.cluster.restart(rank)
        self.ranks[rank] = _Rank(self, rank, was_restarted=True)
        self.cluster.start(rank, self.ranks[rank].train)

    def run(self):
        self.cluster.run(lambda rank: self.ranks[rank].train())
        return self


class _Rank(State):
    """One process of a rank, which calls an exchange as the training graph does."""

    def __init__(self, job, rank, was_restarted):
        self._job, self._rank, self._was_restarted = job, rank, was_restarted
        self._clock = job.cluster.scheduler
        self._membership = job.cluster.memberships[rank]
        self._weights = np.zeros(job.packing.sizes[0], job.packing.dtypes[0].as_numpy_dtype)
        self._joining = Joining(self._membership, self, timeout_seconds=0.0)
        self._merged = set()
        self.exchange = None

    def signature(self, groups):
        return sign(groups, "", self._job.packing.specs)

    def read(self):
        return [self._weights]

    def write(self, payload):
        self._weights = payload.view(self._weights.dtype).copy()

    def train(self):
        try:
            self._train()
        except (PeerLostError, DeadlineExceededError) as error:
            if not self._was_restarted and "has ended step" not in str(error):
                raise
            self._job.late.append(self._rank)
            self._membership.leave(sent_rounds={}, reason=str(error), abort=not self._membership.is_given_up)
            self._job.cluster.close(self._rank)
        finally:
            if self.exchange is not None:
                self.exchange.close()

    def _train(self):
        self._membership.begin_session()
        context = ExchangeContext(
            _GROUP,
            _SESSION,
            self._job.packing,
            self._membership,
            self._job.cluster.pool,
            start_thread=functools.partial(self._job.cluster.start_thread, self._rank),
            trained=[tf.Variable(tf.zeros(spec.shape)) for spec in self._job.packing.specs],
        )
        self.exchange = self._joining.attach(_GROUP, lambda: CanaryExchange(context, _MEMBERS, self._job.settings))
        self._job.begun.add(self._rank)
        self._observe(self.exchange.replica)
        step = catch_up(self._membership, self._joining, _GROUP, self._clock, attempt_seconds=_ATTEMPT_SECONDS)
        while step < self._job.num_steps:
            step = self._take_step(step)
        if step == int(self.exchange.start_step):
            self._submit(step, self.exchange.start_segment, self._weights)
        (self._weights,) = self._submit(step, self.exchange.finish_segment).buckets
        self._membership.leave(sent_rounds={_GROUP: self.exchange.sent_rounds}, reason="done")
        self._joining.end_session()
        self._job.finals[self._rank] = self._weights

    def _observe(self, replica):
        merge, begin = replica.merge, replica.begin

        def merge_once(layout, piece, header, data):
            next_one = layout.ledger.sequences[piece.index] + 1
            if not self._job.has_frozen:  # Otherwise others may have sent nothing to a frozen rank.
                assert header.sequence <= next_one or replica.is_freed(layout.key), "something before it was lost"
            is_merged = merge(layout, piece, header, data)
            if is_merged:
                new = {(layout.key, piece.index, *each) for each in header.contributions}
                assert len(new) == len(header.contributions) and not new & self._merged
                self._merged |= new
            self._check(replica)
            return is_merged

        def begin_again(weights):
            if replica.weights is not None:
                self._job.at_rest[self._rank] = replica.weights[0].copy()
            begin(weights)

        replica.merge, replica.begin = merge_once, begin_again

    def _check(self, replica):
        """Checks that bits belong to contributions that ranks have made, and that rows are no more than iterations."""
        matrix = replica.gei.matrix()
        assert len(matrix) <= self._job.num_steps + 1
        for iteration, row in matrix.items():
            for colayer, element in enumerate(row):
                ranks = [rank for rank in range(element.bit_length()) if element & bit_of(rank)]
                assert all(self._job.made[rank, iteration, colayer] for rank in ranks)

    def _take_step(self, step):
        exchange, before = self.exchange, self._weights
        self._clock.sleep(float(self._job.durations[self._rank, step]))
        if step == int(exchange.start_step):
            self._submit(step, exchange.start_segment, before)
        self._joining.at_step(step)
        for colayer, part in enumerate(exchange.parts[: len(_MEMBERS)]):
            num_drops = exchange.counters()["overtime_drops"]
            self._job.made[self._rank, step, colayer] += 1
            change = tf.fill([part.sizes[0]], tf.constant(_SHARES * _BASE**self._rank, before.dtype))
            (bucket,) = exchange.emit_encode(colayer, [change])
            result = self._submit(step, colayer, bucket.numpy())
            if exchange.counters()["overtime_drops"] == num_drops:
                self._job.sent[self._rank, colayer] += _SHARES // len(exchange._contributions.layout.ranks)
        (self._weights,) = result.buckets
        return step + 1 + result.num_skipped

    def _submit(self, step, segment, *buckets):
        return self.exchange.step(Request(step, segment, buckets or (np.empty(0, self._weights.dtype),)))


def _random_job(rng, **settings):
    world_size = int(rng.integers(2, 5))
    network = "bcube:2,2" if world_size == 4 and rng.random() < 0.4 else str(rng.choice(["mesh", "tree"]))
    durations = (rng.exponential(0.5, size=(world_size, 1)) + 0.1) * (0.5 + rng.random((world_size, 16)))
    means = rng.exponential(0.2, size=(world_size, world_size))
    job = _Job(
        network,
        world_size,
        durations,
        lambda a, b, num_bytes: 2 * rng.random() * means[a, b],
        max_staleness=int(rng.choice([0, 1, 16])),
        **settings,
    )
    for _ in range(int(rng.integers(1, 4))):
        job.schedule(
            Fault(
                rank=int(rng.integers(world_size)),
                seconds=float(rng.uniform(3, 14)),
                restart_seconds=float(rng.uniform(0.05, 3)) if rng.random() < 0.8 else None,
                reaches=None if rng.random() < 0.5 else np.flatnonzero(rng.random(world_size) < 0.5).tolist(),
            )
        )
    return job


def _num_lost(job, rank):
    """Returns how many contributions among three ranks, of which rank 2 has died, are missing in a rank's weights.

    Checks that no contribution among two ranks is missing.
    """
    layout = Layout(b"\1\1\1", job.settings.network, 0, [[_EXACT], [_EXACT]], 1)
    values = [job.at_rest[rank][piece.where].astype(np.int64) // _BASE**rank % _BASE for piece in layout.pieces]
    assert all(np.ptp(each) == 0 for each in values)
    lost = [int(job.sent[rank, piece.colayer] - each[0]) for piece, each in zip(layout.pieces, values, strict=True)]
    assert not any(shares % (_SHARES // 3) for shares in lost)
    return sum(lost) // (_SHARES // 3)


class FaultsTest(tf.test.TestCase, parameterized.TestCase):
    def _assert_all_end_alike(self, job, msg):
        ended = sorted(job.finals)
        for rank in ended:
            self.assertAllEqual(job.finals[rank], job.finals[ended[0]], msg=msg)
            self.assertTrue(np.isfinite(job.finals[rank]).all(), msg=msg)

    @pytest.mark.slow
    def test_nothing_is_merged_twice(self):
        # 195: others announce a newcomer before the newcomer does, and before the restart of its rank is noticed.
        # 1621: a newcomer's state holds contributions that others merged before the newcomer joined.
        # 2176: a rank joins when others have made their last step.
        # 3878: a rank leaves while another one waits only for its own threads.
        for seed in [*range(_NUM_SCHEDULES // 2), 195, 1621, 2176, 3878]:
            rng = np.random.default_rng([5, seed])
            job = _random_job(rng).run()
            self._assert_all_end_alike(job, f"seed {seed}")
            self._assert_nothing_was_merged_twice(job, f"seed {seed}")

    def _assert_nothing_was_merged_twice(self, job, msg):
        starts = range(0, 3 * _EXACT, _EXACT)  # Colayers are stored one after the other.
        for weights in job.at_rest.values():
            for colayer, (start, end) in enumerate(itertools.pairwise(starts)):
                for rank in range(job.world_size):
                    merged = weights[start:end].astype(np.int64) // _BASE**rank % _BASE
                    self.assertLessEqual(merged.max(), job.sent[rank, colayer], msg=msg)

    @pytest.mark.slow
    def test_nothing_is_merged_twice_where_ranks_freeze_too(self):
        # 21: two ranks remain. Each lacks sums that the other has made, in overlapping layouts.
        for seed in [*range(_NUM_SCHEDULES // 2), 21]:
            rng = np.random.default_rng([9, seed])
            job = _random_job(rng, limit_seconds=1e4)
            for _ in range(rng.integers(1, 4)):
                job.freeze(int(rng.integers(job.world_size)), rng.uniform(2, 14), rng.exponential(3.0))
            try:
                job.run()
            except PeerLostError as error:  # A newcomer has found one rank frozen, and another one dead.
                self.assertRegex(str(error), r"start of training .*\(it never appeared", msg=f"seed {seed}")
                continue
            self._assert_all_end_alike(job, f"seed {seed}")
            self._assert_nothing_was_merged_twice(job, f"seed {seed}")

    def test_a_rank_that_joins_when_others_end(self):
        """The others end with the joining rank or without it. If without it, the rank learns that it is too late."""
        num_late = num_joined = 0
        # 91: a rank has to wait until it knows that the others end among the same ranks as itself.
        for seed in [*range(_NUM_SCHEDULES // 4), 91]:
            rng = np.random.default_rng([7, seed])
            slow = 10 ** rng.uniform(-1, 0.5, size=(3, 3))
            job = _Job(
                "mesh", 3, np.ones((3, 8)), lambda a, b, num_bytes, slow=slow, rng=rng: slow[a, b] * rng.random()
            )
            job.schedule(Fault(rank=2, seconds=4.5, restart_seconds=float(rng.uniform(0.2, 4))))
            job.run()
            self._assert_all_end_alike(job, f"seed {seed}")
            self.assertContainsSubset([0, 1], job.finals, msg=f"seed {seed}")
            num_late += 2 in job.late
            num_joined += 2 in job.finals
        self.assertGreater(num_late, 0)
        self.assertGreater(num_joined, 0)

    @parameterized.product(seconds=(6.28, 6.295), sync_interval=(None, 3))
    @pytest.mark.stress(but=3)
    def test_states_are_taken_though_a_rank_has_died_before_it_had_sent_to_all(self, seconds, sync_interval):
        """The last messages of the dead rank have reached only one of two ranks. The other rank's states lack them."""
        durations = np.full((3, 60), 0.5)
        durations[0] = 1.7
        job = _Job("mesh", 3, durations, lambda a, b, n: 0.02, max_staleness=0, sync_interval=sync_interval)
        job.schedule(Fault(rank=2, seconds=seconds, restart_seconds=None, reaches=[0]))
        job.run()
        counters = job.ranks[0].exchange.counters()
        self.assertGreater(counters["pulls"], counters["pulls_rejected"])
        self._assert_all_end_alike(job, f"{seconds} s")
        for rank in (0, 1) if sync_interval is None else ():  # Resyncs spread contributions that one of the two holds.
            self.assertEqual(job.ranks[rank].exchange.counters()["contributions_lost"], _num_lost(job, rank))

    def test_states_are_taken_though_a_layout_is_known_by_a_state_only(self):
        """Restarted rank 0 knows the layout without rank 0 from a state. Rank 1 has never heard of that layout."""
        durations = np.full((3, 120), 0.5)
        durations[0], durations[0, 12:], durations[1, 5] = 1.7, 5.0, 6.0
        job = _Job(
            "mesh",
            3,
            durations,
            lambda a, b, n: 200.0 if (a, b) == (2, 1) and job.cluster.scheduler.now > 4 else 0.02,
            max_staleness=6,
        )
        job.schedule(Fault(rank=0, seconds=4.0, restart_seconds=0.1, reaches=None))
        job.schedule(Fault(rank=2, seconds=6.3, restart_seconds=None, reaches=[0]))
        job.run()
        counters = job.ranks[0].exchange.counters()
        self.assertGreater(counters["pulls"], counters["pulls_rejected"])
        self._assert_all_end_alike(job, "")

    @parameterized.parameters(None, 5)
    @pytest.mark.stress(but=1)
    def test_newcomers_that_have_not_met(self, sync_interval):
        """Rank 3 hears of a layout with restarted rank 2 before it hears of the restart, and has to wait for that."""

        def link_seconds(sender, receiver, num_bytes):
            now = job.cluster.scheduler.now
            if (sender, receiver) == (2, 3) and 5.25 < now < 9.25:
                return 9.26 - now
            return 0.4 if (sender, receiver) == (0, 3) and num_bytes > 300 and 5.45 < now < 6.5 else 0.01

        durations = np.full((4, 40), 2.0)
        durations[:, :2] = 1.9
        job = _Job("mesh", 4, durations, link_seconds, max_staleness=16, sync_interval=sync_interval)
        job.schedule(Fault(rank=3, seconds=4.5, restart_seconds=0.1, reaches=None))
        job.schedule(Fault(rank=2, seconds=5.2, restart_seconds=0.1, reaches=None))
        job.run()
        self.assertLen(job.finals, 4)
        self._assert_all_end_alike(job, "")

    @parameterized.parameters(4.83, 4.95)
    def test_a_layout_that_only_ranks_which_have_died_had_told_of(self, seconds):
        """Ranks 0 and 1, the latter restarted, contribute to a layout. They die when only rank 3 has heard of it.

        Rank 2, a root, hears of the layout from rank 3, which waits until no more messages come.
        """
        durations = np.full((4, 16), 6.0)
        durations[0] = 0.5
        job = _Job(
            "tree",
            4,
            durations,
            lambda a, b, n: 2.0 if (a, b) == (0, 2) and job.cluster.scheduler.now > 4.2 else 0.01,
        )
        job.schedule(Fault(rank=1, seconds=3.0, restart_seconds=0.3, reaches=None))
        job.schedule(Fault(rank=0, seconds=seconds, restart_seconds=0.1, reaches=[3]))
        job.schedule(Fault(rank=1, seconds=seconds, restart_seconds=0.1, reaches=[]))
        self._assert_all_end_alike(job.run(), f"{seconds} s")

    @pytest.mark.slow
    def test_with_a_lossy_codec_and_resyncs(self):
        # 594: ranks do not wait for dead ranks, but for messages that were to come through them.
        # 866: a root is the last rank to hear of a layout: all others have announced it before.
        # 2153: a state contains a snapshot of a layout that the adopting rank has freed.
        for seed in [*range(_NUM_SCHEDULES // 4), 594, 866, 2153]:
            rng = np.random.default_rng([6, seed])
            codec = codecs.get(str(rng.choice(["sketch", "int8"])))
            job = _random_job(rng, codec=codec, size=_LOSSY, sync_interval=int(rng.integers(1, 5))).run()
            self._assert_all_end_alike(job, f"seed {seed}")


if __name__ == "__main__":
    tf.test.main()
