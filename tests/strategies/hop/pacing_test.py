"""Tests of a rank that joins after another rank has waited, and before that rank acts."""

import numpy as np
import tensorflow as tf

from hop_tf.runtime.exchange import Request
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.hop.absence import Absence
from hop_tf.strategies.hop.exchange import HopExchange
from hop_tf.strategies.hop.pacing import TokenPacing
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.fifo import Fifo, SimulatedFifo
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate import Scheduler, VirtualMonitor
from hop_tf.topology import resolve
from hop_tf.transport.base import PeerStatus

_SETTINGS = HopSettings(max_iteration_gap=2, num_backup_workers=1)
_NOBODY_TOLERATED = HopSettings(max_iteration_gap=2)
_TOPOLOGY = resolve("complete", 3)
_NEWCOMER = 1


class _Membership:
    """The membership of rank 0. Rank 1 is gone until it joins. Tests decide what happens when a wait is over."""

    rank = 0
    incarnation = 0
    joining = has_left = False

    def __init__(self):
        self.monitor = VirtualMonitor(Scheduler())
        self.transport = self
        self.departed = {_NEWCOMER}
        self.after_waits = []
        self.on_look = None
        self.sent = []

    def departure(self, rank):
        on_look, self.on_look = self.on_look, None
        if on_look is not None:
            on_look()
        return "lost" if rank in self.departed else None

    def incarnation_of(self, rank):
        return 1 if rank == _NEWCOMER else 0

    def wait(self, missing, *, operation, step):
        self.missing = missing()
        self.after_waits.pop(0)()

    def send(self, peer, queue, header, payload=(), lane=0, step=None, supersedes=False):
        self.sent.append(peer)
        return False

    def register(self, queue, handler):
        pass

    def status(self, rank):
        return PeerStatus("", True, 0.0, None)


def _context(membership, make_fifo=SimulatedFifo):
    packing = Packing([TensorSpec("x", (3,), tf.float32)])
    return ExchangeContext("group", 1, packing, membership, BufferPool(), make_fifo)


class WindowTest(tf.test.TestCase):
    def test_a_rank_joins_when_there_are_tokens_of_all_others(self):
        membership = _Membership()
        pacing = TokenPacing(_context(membership), _TOPOLOGY, _SETTINGS, Absence(membership, "group", _SETTINGS))
        pacing.reset(1, start=5)
        pacing.admit(2, start=6)

        def join():
            membership.departed.clear()
            pacing.admit(_NEWCOMER, start=4)  # Two iterations behind: no token is left.

        def enter():
            self.assertEqual(membership.missing, [_NEWCOMER])
            pacing._note(_NEWCOMER, 4)

        membership.after_waits = [join, enter]
        self.assertEqual(pacing.advance(5), 1)
        self.assertEmpty(membership.after_waits)

    def test_a_second_rank_joins_when_the_first_is_no_more_behind(self):
        membership = _Membership()
        exchange = HopExchange(_context(membership), topology=_TOPOLOGY, settings=_SETTINGS)
        exchange.reset(1, start=5)
        exchange.admit(2, 2)

        def join():
            self.assertEqual(membership.missing, [2])
            exchange._pacing._note(2, 4)
            membership.departed.clear()
            exchange.admit(_NEWCOMER, 2)

        def enter():
            self.assertEqual(exchange.iteration, 4)
            self.assertEqual(membership.missing, [_NEWCOMER])
            exchange._pacing._note(_NEWCOMER, 4)

        membership.after_waits = [join, enter]
        exchange._enter(5)
        self.assertEmpty(membership.after_waits)
        self.assertEqual(exchange.iteration, 5)

    def test_a_neighbor_is_replaced_while_an_update_is_sent(self):
        """The new process does not get the update, because it was told that it gets those of later iterations."""
        membership = _Membership()
        membership.departed.clear()
        exchange = HopExchange(_context(membership), topology=_TOPOLOGY, settings=_SETTINGS)
        exchange._enter(0)
        membership.sent.clear()
        membership.on_look = lambda: [exchange.admit(rank, 1) for rank in (1, 2)]
        exchange._send(Request(0, 0, (np.zeros(3, np.float32),)).buckets, 0)
        self.assertNotIn(2, membership.sent)

    def test_neighbors_join_together_in_a_long_session(self):
        """The neighbor that is still joining makes no room for the other, because it does not know the distance."""
        membership = _Membership()
        membership.joining = True
        exchange = HopExchange(_context(membership, Fifo), topology=_TOPOLOGY, settings=_SETTINGS)
        self.assertEqual(exchange.admit(_NEWCOMER, 1000), -1)
        exchange.begin_at(1002)
        membership.joining = False
        exchange.meet(_NEWCOMER, 1000)
        exchange.meet(2, 1001)
        self.assertEqual([exchange._pacing._tokens[j].size for j in (_NEWCOMER, 2)], [0, 1])


class ToldByUpdatesTest(tf.test.TestCase):
    """If no stragglers are tolerated, updates of a neighbor in both directions carry its tokens."""

    def _pacing(self, settings, topology=_TOPOLOGY):
        self.membership = _Membership()
        self.membership.departed.clear()
        pacing = TokenPacing(_context(self.membership), topology, settings, Absence(self.membership, "group", settings))
        pacing.reset(1)
        return pacing

    def test_only_others_are_told(self):
        # Rank 1 is a neighbor in both directions, rank 2 only sends to rank 0.
        directed = resolve(np.array([[0.4, 0.6, 0.0], [0.3, 0.4, 0.3], [0.3, 0.0, 0.7]]), 3)
        self.assertEqual((directed.in_neighbors(0), directed.out_neighbors(0)), ((1, 2), (1,)))
        for settings, topology, told in (
            (_NOBODY_TOLERATED, _TOPOLOGY, []),
            (_NOBODY_TOLERATED, directed, [2]),
            (_SETTINGS, _TOPOLOGY, [1, 2]),
        ):
            pacing = self._pacing(settings, topology)
            pacing.enter(0, {1: 1, 2: 0})
            self.assertEqual(self.membership.sent, told)

    def test_an_update_is_a_token_for_each_iteration(self):
        pacing = self._pacing(_NOBODY_TOLERATED)
        pacing.hear_update(2, 0)
        self.assertEqual(pacing._tokens[2].size, 2)  # One is there from the start.
        pacing.hear_update(2, 2)  # One was left out.
        self.assertEqual(pacing._tokens[2].size, 4)

    def test_none_counts_twice(self):
        pacing = self._pacing(_NOBODY_TOLERATED)
        for first, then in ((pacing.hear_update, pacing.meet), (pacing.meet, pacing.hear_update)):
            pacing.reset(1)
            first(2, 1)
            then(2, 1)
            self.assertEqual((pacing._tokens[2].size, pacing.known_iteration(2)), (3, 1))

    def test_an_update_is_none_if_tokens_are_sent(self):
        pacing = self._pacing(_SETTINGS)
        pacing.hear_update(2, 0)
        pacing._note(2, 0)
        self.assertEqual(pacing._tokens[2].size, 2)


if __name__ == "__main__":
    tf.test.main()
