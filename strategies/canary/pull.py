"""How a rank under Canary takes the state of the fastest one.

A state is the weights and the ledgers of the moment, so that it holds each contribution as a whole or not at all. It is
taken only if all that was merged here was merged there, too: what is on its way then, and in the state, comes with a
number that a ledger knows, and is not merged again. Else the next one is asked; and if all lack something, it is taken
from the fastest one, provided that what that lacks never comes there.

A rank that was not sent all messages of a piece asks the root of the piece. The fastest rank may lack the same
messages: each of two such ranks would take the state of the other one, and lack them for ever.

A rank that has just joined takes the state of another one before it merges anything. Who asks it meanwhile is told that
it has none to give, at once: two such ranks would wait for each other. The state tells of layouts, too, that it has no
part in: whoever takes its state later may have.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hop_tf.membership import Membership, Silence
from hop_tf.strategies.canary.messages import Channel, MessageKind
from hop_tf.strategies.canary.peers import Peers
from hop_tf.strategies.canary.replica import Replica

_MAX_ATTEMPTS = 3


class Pulling:
    """Both sides of it at one rank.

    Args:
      membership: Waiting.
      replica: The weights.
      peers: Who is there.
      channel: Sends messages.
      silence: Ranks that are not asked.

    Attributes:
      num_pulls: How many states were taken.
      num_rejected: How often none was: this rank goes on with what it has.
    """

    def __init__(self, membership: Membership, replica: Replica, peers: Peers, channel: Channel, silence: Silence):
        self._membership = membership
        self._replica = replica
        self._peers = peers
        self._channel = channel
        self._silence = silence
        self._passes_by = False
        self._asked: int | None = None
        self._state: np.ndarray | None = None  # Empty where the rank that was asked has none to give.
        self.num_pulls = self.num_rejected = 0

    def pull(self, step: int, *, waits_for_silent: bool = False) -> None:
        """Takes the state of the fastest rank whose state may be taken; it asks three at most that have one.

        Roots of pieces that this rank lacks messages of come before all others.

        Args:
          step: For error messages.
          waits_for_silent: True if silent ranks are asked, too. A rank that has just joined always asks them.

        Blocks: until each has answered, which takes no computation of it; or it has left, and be it that another
          process has taken its place since; or it is silent, and this rank can do without.

        Raises:
          HopError: As `Membership.wait` does.
        """
        num_attempts, without, refused = 0, set(), set()
        self._passes_by = self._replica.is_complete and not waits_for_silent
        while num_attempts < _MAX_ATTEMPTS:
            with self._membership.monitor:
                # The ranks that take part may have changed since this one has last contributed.
                key, without = self._peers.present_key(), without | self._passed_by()
                fastest = self._source(without | refused)
                if may_drop := fastest is None or num_attempts == _MAX_ATTEMPTS - 1:
                    fastest = self._source(without)
                self._state, self._asked = None, fastest
            if fastest is None:
                break
            self._channel.send(fastest, self._channel.header(MessageKind.PULL, key))
            self._silence.wait(
                lambda rank=fastest, key=key: [rank] if self._is_awaited(rank, key) else [],
                operation="pull the state",
                step=step,
            )
            with self._membership.monitor:
                state, self._state, self._asked = self._state, None, None
            if state is None or not state.size:
                without.add(fastest)
                continue
            if self._replica.adopt(state, fastest, key, may_drop=may_drop):
                self.num_pulls += 1
                return
            refused.add(fastest)
            num_attempts += 1
        self.num_rejected += 1

    def roots_of_gaps(self) -> set[int]:
        """The roots that have merged what this rank lacks, without those that have left."""
        return self._peers.roots_that_take_part(self._replica.pieces_with_gaps())

    def _source(self, except_for: Collection[int]) -> int | None:
        """The rank to ask next; None if there is none."""
        root = self._peers.fastest(except_for, among=self.roots_of_gaps())
        return self._peers.fastest(except_for) if root is None else root

    def _is_awaited(self, rank: int, key: bytes) -> bool:
        return self._state is None and self._peers.key_of(rank) == key[rank] and rank not in self._passed_by()

    def _passed_by(self) -> frozenset[int]:
        """The silent ranks, if they are not asked."""
        return self._silence.ranks if self._passes_by else frozenset()

    def receive(self, sender: int, payload: np.ndarray) -> None:
        """A state has come; the monitor is held. One that was asked for earlier is of no use any more."""
        if sender == self._asked:
            self._state = payload

    def answer(self, rank: int, key: bytes, *, has_state: bool) -> None:
        """Sends this rank's state, if it has one to give."""
        state = self._replica.state(rank, key[rank]) if has_state and self._replica.is_complete else []
        self._channel.send(rank, self._channel.header(MessageKind.STATE, key), state)
