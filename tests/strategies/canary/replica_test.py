"""The weights and ledgers of a rank under Canary, without ranks that run."""

from concurrent import futures

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.collectives import get_network
from hop_tf.errors import ProtocolError
from hop_tf.strategies.canary.encoding import PieceEncoding
from hop_tf.strategies.canary.messages import Header, MessageKind
from hop_tf.strategies.canary.replica import Replica
from hop_tf.strategies.canary.resync import Resync
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec

_WORLD_SIZE = 3
_WHOLE, _WITHOUT_2, _JOINED = b"\x01\x01\x01", b"\x01\x01\x02", b"\x01\x01\x03"


def _replica(rank, shapes=((6,), (3,))):
    specs = [TensorSpec(str(i), shape, tf.float32) for i, shape in enumerate(shapes)]
    packing = Packing(specs)
    parts = [packing.part([i]) for i in range(len(specs))]
    network, pool = get_network("mesh"), BufferPool()
    encoding = PieceEncoding(network, _WORLD_SIZE, parts, codecs.Identity(), pool)
    replica = Replica(rank, _WORLD_SIZE, network, encoding, pool)
    replica.begin([np.zeros(sum(part.sizes[0] for part in parts), np.float32)])
    return replica


def _merge(replica, key, piece, sequence, contributions, value=1.0, kind=MessageKind.DOWN):
    layout = replica.layout(key)
    piece = layout.pieces[piece]
    header = Header(kind, key, 0, piece.index, sequence, contributions)
    size = piece.where.stop - piece.where.start
    return replica.merge(layout, piece, header, replica.encoding.encode(piece, np.full(size, value, np.float32)))


def _state(replica, rank, incarnation):
    return np.concatenate([each.reshape(-1).view(np.uint8) for each in replica.state(rank, incarnation)])


def _adopt(replica, giver, incarnations=_WHOLE, **kwargs):
    """Lets a replica adopt another one's state, among ranks of those incarnations."""
    return replica.adopt(_state(giver, replica.rank, incarnations[replica.rank]), giver.rank, incarnations, **kwargs)


def _stand_in(replica, key, piece, value):
    layout = replica.layout(key)
    where = layout.pieces[piece].where
    replica.stand_in(layout, layout.pieces[piece], np.full(where.stop - where.start, value, np.float32))


class StandInTest(tf.test.TestCase):
    """A rank computes with merged contributions and its own in flight. Other ranks see merged ones only."""

    def setUp(self):
        super().setUp()
        self.replica = _replica(0)
        self.where = self.replica.layout(_WHOLE).pieces[0].where

    def _assert_value(self, expected):
        (values,) = self.replica.read()
        self.assertAllEqual(values[self.where], np.full(self.where.stop - self.where.start, expected))
        self.assertAllEqual(np.delete(values, self.where), np.zeros(values.size - (self.where.stop - self.where.start)))

    def test_until_it_is_merged(self):
        """A merged contribution of this rank replaces its oldest one in flight. Those of others replace none."""
        _stand_in(self.replica, _WHOLE, 0, 30.0)
        self._assert_value(30.0)
        _stand_in(self.replica, _WHOLE, 0, 60.0)
        _merge(self.replica, _WHOLE, 0, 1, ((1, 0),), 1.0)
        self._assert_value(91.0)
        _merge(self.replica, _WHOLE, 0, 2, ((0, 0), (2, 0)), 10.0)
        self._assert_value(71.0)
        _merge(self.replica, _WHOLE, 0, 3, ((0, 1),), 20.0)
        self._assert_value(31.0)

    def test_one_message_merges_several(self):
        for _ in range(3):
            _stand_in(self.replica, _WHOLE, 0, 30.0)
        _merge(self.replica, _WHOLE, 0, 1, ((0, 0), (0, 1)), 20.0)
        self._assert_value(50.0)

    def test_others_get_what_is_merged(self):
        other = _replica(1)
        _stand_in(self.replica, _WHOLE, 0, 30.0)
        _merge(self.replica, _WHOLE, 0, 1, ((1, 0),))
        self.assertTrue(_adopt(other, self.replica))
        self.assertAllEqual(other.read()[0], self.replica.merged()[0])
        self._assert_value(31.0)

    def test_what_a_state_holds_stands_in_no_more(self):
        other = _replica(1)
        for _ in range(2):
            _stand_in(self.replica, _WHOLE, 0, 30.0)
        _merge(other, _WHOLE, 0, 1, ((0, 0),), 10.0)
        self.assertTrue(_adopt(self.replica, other))
        self._assert_value(40.0)

    def test_what_is_lost_stands_in_until_its_layout_is_freed(self):
        _stand_in(self.replica, _WHOLE, 0, 30.0)
        _stand_in(self.replica, _WITHOUT_2, 0, 60.0)
        size = self.replica.layout(_WHOLE).pieces[0].where.stop
        self.assertAllEqual(self.replica.read()[0][:size], np.full(size, 90.0))
        self.replica.free(self.replica.layout(_WHOLE))
        self.assertAllEqual(self.replica.read()[0][:size], np.full(size, 60.0))

    def test_nothing_is_in_flight_where_it_begins(self):
        _stand_in(self.replica, _WHOLE, 0, 30.0)
        self.replica.begin(self.replica.merged())
        self._assert_value(0.0)


class AdoptTest(tf.test.TestCase, parameterized.TestCase):
    def test_not_what_lacks_something_of_an_earlier_layout(self):
        """Adopting such a state would lose the contribution, because no rank sends it again."""
        own, other = _replica(0), _replica(1)
        _merge(own, _WHOLE, 0, 1, ((0, 0),))
        _merge(other, _WITHOUT_2, 0, 1, ((1, 1),))
        self.assertFalse(_adopt(own, other))
        _merge(other, _WHOLE, 0, 1, ((0, 0),))
        self.assertTrue(_adopt(own, other))
        self.assertAllEqual(own.read()[0], other.read()[0])

    def test_what_it_holds_of_an_earlier_layout_is_merged_once(self):
        own, other = _replica(0), _replica(1)
        _merge(other, _WHOLE, 0, 1, ((1, 0),))
        _merge(other, _WITHOUT_2, 0, 1, ((1, 1),))
        self.assertTrue(_adopt(own, other))
        for key, iteration in ((_WHOLE, 0), (_WITHOUT_2, 1)):  # Both are still in flight.
            self.assertFalse(_merge(own, key, 0, 1, ((1, iteration),)))
        self.assertAllEqual(own.read()[0], other.read()[0])

    @parameterized.product(freed_by_other=(False, True), freed_by_third=(False, True))
    def test_what_it_holds_of_layouts_of_others_is_told_to_these(self, freed_by_other, freed_by_third):
        """A newcomer gets no messages of those layouts, but passes their ledgers on. They may be freed at any time."""
        newcomer, other, third = _replica(2), _replica(1), _replica(0)
        _merge(other, _WITHOUT_2, 0, 1, ((1, 0),))
        _merge(other, _JOINED, 0, 1, ((1, 1),))
        if freed_by_other:
            other.free(other.layout(_WITHOUT_2))
        self.assertTrue(_adopt(newcomer, other, _JOINED))
        self.assertAllEqual(newcomer.read()[0], other.read()[0])
        _merge(third, _JOINED, 0, 1, ((1, 1),))
        if freed_by_third:
            third.free(third.layout(_WITHOUT_2))
        self.assertTrue(_adopt(third, newcomer, _JOINED))
        if not freed_by_third:
            self.assertFalse(_merge(third, _WITHOUT_2, 0, 1, ((1, 0),)))
        self.assertAllEqual(third.read()[0], other.read()[0])

    def test_not_what_lacks_something_of_a_layout_of_others(self):
        newcomer, other, third = _replica(2), _replica(1), _replica(0)
        _merge(other, _WITHOUT_2, 0, 1, ((1, 0),))
        self.assertTrue(_adopt(newcomer, other, _JOINED))
        self.assertFalse(_adopt(newcomer, third, _JOINED))
        _merge(third, _WITHOUT_2, 0, 1, ((1, 0),))
        self.assertTrue(_adopt(newcomer, third, _JOINED))

    def test_what_lacks_something_that_does_not_come_there(self):
        """Contributions that others merged after giving a newcomer their state never reach the newcomer."""
        newcomer, other, third = _replica(2), _replica(1), _replica(0)
        self.assertTrue(_adopt(newcomer, other, _JOINED))
        for replica in (other, third):
            _merge(replica, _WITHOUT_2, 0, 1, ((1, 0),))
        # Later messages of that layout may still come here, and follow the merged one.
        self.assertFalse(_adopt(other, newcomer, _JOINED, may_drop=True))
        other.free(other.layout(_WITHOUT_2))
        self.assertFalse(_adopt(other, newcomer, _JOINED))
        self.assertTrue(_adopt(other, newcomer, _JOINED, may_drop=True))
        self.assertAllEqual(other.read()[0], newcomer.read()[0])
        self.assertTrue(_adopt(newcomer, other, _JOINED))
        self.assertFalse(_adopt(third, other, _JOINED, may_drop=True))  # Its state does not name what was dropped.

    def test_not_what_lacks_something_of_a_layout_that_was_freed_here(self):
        """Unless it was freed there, too: its root died before sending to both, so the message may be dropped."""
        own, other = _replica(0), _replica(1)
        _merge(own, _WHOLE, 0, 1, ((0, 0),))
        own.free(own.layout(_WHOLE))
        self.assertFalse(_adopt(own, other, may_drop=True))
        other.free(other.layout(_WHOLE))
        self.assertFalse(_adopt(own, other))
        self.assertTrue(_adopt(own, other, may_drop=True))

    def test_a_rank_with_gaps_keeps_pieces_that_it_is_ahead_in(self):
        """Each of two ranks lacks a message that the other has. A freed layout holds the same on both."""
        own, other = _replica(0), _replica(1)
        expected = np.zeros_like(own.weights[0])
        expected[own.layout(_WHOLE).pieces[0].where] += 1.0
        for replica in (own, other):
            _merge(replica, _WHOLE, 0, 1, ((0, 0),))
            replica.free(replica.layout(_WHOLE))
        pieces = own.layout(_WITHOUT_2).pieces
        for replica, giver, piece in ((own, other, 0), (other, own, 1)):
            _merge(replica, _WITHOUT_2, piece, 1, ((0, 1), (1, 1)), value=5.0)
            giver.miss(giver.layout(_WITHOUT_2), pieces[piece], 1)
        self.assertTrue(_adopt(own, other, _WITHOUT_2))
        self.assertTrue(_adopt(other, own, _WITHOUT_2))
        for piece in pieces[:2]:
            expected[piece.where] += 5.0
        for replica in (own, other):
            self.assertAllEqual(replica.weights[0], expected)
            self.assertEmpty(replica.gaps)

    def test_nothing_is_merged_behind_what_was_dropped(self):
        """A message waited to be merged while the layout was freed. The ledger would claim the dropped one, too."""
        own, other = _replica(0), _replica(1)
        _merge(own, _WHOLE, 0, 1, ((0, 0),))
        layout = own.layout(_WHOLE)
        for replica in (own, other):
            replica.free(replica.layout(_WHOLE))
        self.assertTrue(_adopt(own, other, may_drop=True))
        header = Header(MessageKind.DOWN, _WHOLE, 0, 0, 2, ((1, 1), (2, 1)))
        where = layout.pieces[0].where
        values = own.encoding.encode(layout.pieces[0], np.ones(where.stop - where.start, np.float32))
        self.assertFalse(own.merge(layout, layout.pieces[0], header, values))
        self.assertEqual(layout.ledger.sequences[0], 0)
        self.assertEqual((own.num_late, own.num_duplicates), (2, 0))
        self.assertAllEqual(own.read()[0], other.read()[0])

    def test_bits_are_set_of_what_it_holds(self):
        """Of a partly merged contribution, the last piece sets the bit. Rows that the giver has freed are not kept."""
        own, other = _replica(0, ((600,), (3,))), _replica(1, ((600,), (3,)))
        num_pieces = [len(pieces) for pieces in own.layout(_WHOLE).by_colayer]
        self.assertGreater(num_pieces[0], 1)
        own.gei.start(1)
        for iteration in range(3):
            for rank in range(_WORLD_SIZE):
                for piece in range(1 if (iteration, rank) == (2, 2) else 0, sum(num_pieces)):
                    _merge(other, _WHOLE, piece, 3 * iteration + rank + 1, ((rank, iteration),))
        self.assertTrue(_adopt(own, other))
        self.assertEqual(own.gei.matrix(), other.gei.matrix())
        self.assertEqual(own.gei.row_vector(2), (0b011, 0b111))
        _merge(own, _WHOLE, 0, 9, ((2, 2),))
        self.assertEqual(own.gei.row_vector(2), (0b111, 0b111))

    @parameterized.parameters(
        (lambda state: state[:-4], "has no part of"),
        (lambda state: state[:0], "no valid list of parts"),
        (lambda state: _state(_replica(1, ((6,), (400,))), 0, 1), "of other weights"),
    )
    def test_not_what_is_malformed(self, change, message):
        own = _replica(0)
        with self.assertRaisesRegex(ProtocolError, message):
            own.adopt(change(_state(_replica(1), 0, 1)), 1, _WHOLE)


class LockTest(tf.test.TestCase):
    def _is_held(self, lock):
        """True if another thread could not take the lock now."""
        with futures.ThreadPoolExecutor(1) as executor:
            is_free = executor.submit(lock.acquire, blocking=False).result()
            if is_free:
                executor.submit(lock.release).result()
        return not is_free

    def _note(self, replica, owner, name):
        """Notes at each call of a method if the replica is locked."""
        method = getattr(owner, name)

        def noted(*args):
            self.held.append((name, self._is_held(replica.lock)))
            return method(*args)

        setattr(owner, name, noted)

    def test_weights_and_ledgers_are_of_the_same_moment(self):
        """Merging, copying and adopting a state each hold the lock from their first to their last call."""
        self.held = []
        own, other = _replica(0), _replica(1)
        for replica in (own, other):
            for owner, name in ((replica.encoding, "accumulate"), (replica, "merged"), (replica.gei, "snapshot")):
                self._note(replica, owner, name)
        self._note(own, own.gei, "absorb")
        _merge(other, _WHOLE, 0, 1, ((0, 0),))
        _adopt(own, other)
        self.assertEqual(self.held, [(name, True) for name in ("accumulate", "snapshot", "merged", "absorb")])
        self.assertFalse(self._is_held(own.lock) or self._is_held(other.lock))


class ResyncTest(tf.test.TestCase):
    """Rank 0 resyncs with rank 1, whose replica differs, and adopts its state at some moment."""

    def setUp(self):
        super().setUp()
        self.replicas = {rank: _replica(rank) for rank in range(_WORLD_SIZE)}
        self.messages, self.has_left = [], False
        self.resyncs = {rank: self._resync(rank) for rank in self.replicas}
        for rank, value in ((0, 10.0), (1, 40.0)):
            self.replicas[rank].begin([np.full_like(self.replicas[rank].read()[0], value)])
        self.piece = next(piece.index for piece in self.replicas[0].layout(_WHOLE).pieces if piece.root == 2)
        self.where = self.replicas[0].layout(_WHOLE).pieces[self.piece].where

    def _resync(self, rank):
        def send(receiver, level, kind, layout, piece, sequence, values):
            self.messages.append((rank, receiver, kind, sequence, values.copy()))

        return Resync(self.replicas[rank], rank, 1, lambda layout, rank: not (rank == 0 and self.has_left), send)

    def _mark(self, rank, sequence=1):
        is_merged = _merge(
            self.replicas[rank], _WHOLE, self.piece, sequence, ((2, sequence),), 1.0, MessageKind.MARKED_DOWN
        )
        layout = self.replicas[rank].layout(_WHOLE)
        if rank == 2:
            self.assertTrue(self.resyncs[2].is_due(layout, layout.pieces[self.piece], sequence - 1))
        self.resyncs[rank].begin(layout, layout.pieces[self.piece], takes_part=is_merged)

    def _bring(self, *ranks):
        """Delivers the messages in flight to some ranks."""
        for message in [each for each in self.messages if each[1] in ranks]:
            self.messages.remove(message)
            sender, receiver, kind, sequence, values = message
            layout = self.replicas[receiver].layout(_WHOLE)
            header = Header(kind, _WHOLE, 0, self.piece, sequence)
            piece = layout.pieces[self.piece]
            self.resyncs[receiver].receive(layout, piece, header, sender, values.view(np.uint8))

    def _gather(self):
        """Digests go to the root, which asks ranks with other digests for their values."""
        for ranks in ([2], [0, 1], [2]):
            self._bring(*ranks)

    def _values(self):
        return [self.replicas[rank].read()[0][self.where.start] for rank in range(_WORLD_SIZE)]

    def _pull(self):
        return _adopt(self.replicas[0], self.replicas[1])

    def test_replicas_that_are_alike(self):
        """Ranks send no values, and the root sends an empty mean."""
        for replica in self.replicas.values():
            replica.begin([np.full_like(replica.read()[0], 10.0)])
        for rank in (2, 0, 1):
            self._mark(rank)
        self.assertEqual(
            [(kind, values.nbytes) for _, _, kind, _, values in self.messages], [(MessageKind.DIGEST, 16)] * 2
        )
        self._bring(2)
        self.assertEqual([(kind, values.size) for _, _, kind, _, values in self.messages], [(MessageKind.MEAN, 0)] * 2)
        self._bring(0, 1)
        self.assertAllEqual(self._values(), [11] * 3)
        for rank, replica in self.replicas.items():
            self.assertEqual(replica.layout(_WHOLE).ledger.resyncs[self.piece], 1)
            self.assertEqual(self.resyncs[rank].num_resyncs, 1)
            self.assertEmpty(replica.snapshots)

    def test_what_was_merged_since_the_mark_stays(self):
        for rank in (2, 0, 1):
            self._mark(rank)
        _merge(self.replicas[0], _WHOLE, self.piece, 2, ((2, 2),), 5.0)
        self._gather()
        self._bring(0, 1)
        self.assertAllClose(self._values(), [53 / 3 + 5, 53 / 3, 53 / 3])

    def test_a_state_that_is_taken_before_the_root_asks(self):
        """Rank 0 then sends the piece's values from the adopted state."""
        for rank in (2, 0, 1):
            self._mark(rank)
        self._bring(2)
        self.assertTrue(self._pull())
        self._bring(0, 1)
        self._bring(2)
        self._bring(0, 1)
        self.assertAllClose(self._values(), [(41 + 41 + 1) / 3] * 3)

    def test_a_rank_that_has_left_before_the_root_asks(self):
        for rank in (2, 0, 1):
            self._mark(rank)
        self._bring(2)
        self.has_left = True
        self._bring(1)
        self._bring(2)
        self.resyncs[2].recheck()
        self._bring(1)
        self.assertAllClose(self._values(), [11, 42 / 2, 42 / 2])

    def test_while_the_mean_is_on_its_way(self):
        for rank in (2, 0, 1):
            self._mark(rank)
        self._gather()
        self.assertTrue(self._pull())
        self.assertAllClose(self._values(), [41, 41, 53 / 3])
        self._bring(0, 1)
        self.assertAllClose(self._values(), [53 / 3] * 3)

    def test_past_the_mark(self):
        """Rank 0 adopts a state that is past the mark. Only rank 1 sends its values, because rank 0 has no others."""
        self._mark(2)
        self._mark(1)
        self.assertTrue(self._pull())
        self._mark(0)
        self._gather()
        self._bring(0, 1)
        self.assertAllClose(self._values(), [21] * 3)

    def test_of_a_layout_that_was_freed_here(self):
        """The rank keeps no snapshot of a freed layout, because no message would end it."""
        own, other = self.replicas[0], self.replicas[1]
        self._mark(0)
        own.free(own.layout(_WHOLE))
        self._mark(1)
        self.assertTrue(self._pull())
        self.assertEmpty(own.snapshots)
        self.assertEmpty(own.layouts())
        self.assertAllEqual(own.read()[0], other.read()[0])
        with self.assertRaisesRegex(ProtocolError, "rank 0 is not a part of the layout, or no longer: 010101"):
            own.layout(_WHOLE)

    def test_a_root_that_has_no_part_in_a_resync(self):
        """The root has adopted the state of a rank without a part. Only rank 0 has one, and differs from no other.

        The next resync still has another number.
        """
        other = self.replicas[1].layout(_WITHOUT_2)  # Merges in any order with the resynced layout.
        for rank in (2, 0, 1):
            self._mark(rank)
        self.replicas[1].free(other)
        self.assertTrue(_adopt(self.replicas[2], self.replicas[1]))
        self._gather()
        self._bring(0, 1)
        self.assertAllClose(self._values(), [11, 41, 41])
        for rank in (2, 0, 1):
            self._mark(rank, 2)
        self._gather()
        self._bring(0, 1)
        self.assertAllClose(self._values(), [32] * 3)

    def test_not_of_one_that_lacks_a_resync(self):
        """The mean of the resync has arrived at rank 0, and does not come again."""
        for rank in (2, 0, 1):
            self._mark(rank)
        self._gather()
        self._bring(0)
        self.assertFalse(self._pull())
        self._bring(1)
        self.assertTrue(self._pull())
        self.assertAllClose(self._values(), [53 / 3] * 3)

    def test_a_mean_that_is_late_ends_no_later_resync(self):
        """The adopted state contains the mean, and the piece's values at the start of the next resync."""
        for rank in (2, 0, 1):
            self._mark(rank)
        self._gather()
        self._bring(1)
        late, self.messages = self.messages, []
        self._mark(2, 2)
        self._mark(1, 2)
        self.assertTrue(self._pull())
        self.messages += late
        self._bring(0)
        self._mark(0, 2)
        self._gather()
        self._bring(0, 1)
        self.assertAllClose(self._values(), [56 / 3] * 3)
        self.assertAllEqual(self.replicas[0].layout(_WHOLE).ledger.resyncs[self.piece], 2)


if __name__ == "__main__":
    tf.test.main()
