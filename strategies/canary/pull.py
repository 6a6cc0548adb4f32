"""`Pulling`: a rank under Canary takes the state of the fastest rank.

A state is the weights and the ledgers at one moment, so it holds each contribution as a whole or not at all. A rank
takes a state only if the state contains everything that the rank has merged. A message in flight that the state already
contains is not merged again, because the ledger has its number. If the fastest rank lacks something, the rank asks the
next one. If all lack something, the rank takes the fastest rank's state. It may do so only if the contributions that
this state lacks can no longer arrive at the fastest rank.

A rank that was not sent all messages of a piece asks the root of the piece. The fastest rank may lack the same
messages: two such ranks would take each other's state and lack the messages for ever.

A rank that has just joined takes another rank's state before it merges anything. Meanwhile it answers at once that it
has no state to give: otherwise two such ranks would wait for each other. The state also has ledgers of layouts that the
new rank takes no part in. A rank that later takes the new rank's state may take part in them.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hop_tf.membership.session import Membership
from hop_tf.membership.silence import Silence
from hop_tf.strategies.canary.messages import Channel, MessageKind
from hop_tf.strategies.canary.peers import Peers
from hop_tf.strategies.canary.replica import Replica

_MAX_ATTEMPTS = 3


class Pulling:
    """Takes other ranks' states, and gives this rank's state.

    Args:
      membership: Waits for answers.
      replica: The weights.
      peers: The state of the other ranks.
      channel: Sends messages.
      silence: The silent ranks, which are not asked.

    Attributes:
      num_pulls: The number of states that were taken.
      num_rejected: The number of calls of `pull` that took no state. This rank went on with its own.
    """

    def __init__(self, membership: Membership, replica: Replica, peers: Peers, channel: Channel, silence: Silence):
        self._membership = membership
        self._replica = replica
        self._peers = peers
        self._channel = channel
        self._silence = silence
        self._passes_by = False
        self._asked: int | None = None
        self._state: np.ndarray | None = None  # Empty if the rank that was asked has none to give.
        self.num_pulls = self.num_rejected = 0

    def pull(self, step: int, *, waits_for_silent: bool = False) -> None:
        """Takes the state of the fastest rank whose state may be taken. Looks at up to three states.

        If this rank lacks messages of pieces, it asks the roots of these pieces first.

        Args:
          step: For error messages.
          waits_for_silent: True if silent ranks are asked, too. A rank that has just joined always asks them.

        Blocks: until each rank that is asked has answered, has left (another process may have taken its place), or is
          silent and not waited for. An answer does not wait for a computation.

        Raises:
          HopError: As `Membership.wait` does.
        """
        num_attempts, without, refused = 0, set(), set()
        self._passes_by = self._replica.is_complete and not waits_for_silent
        while num_attempts < _MAX_ATTEMPTS:
            with self._membership.monitor:
                # The ranks that take part may have changed since this rank's last contribution.
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
        """The roots that have merged messages that this rank lacks, except roots that have left."""
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
        """Takes a state that has come, unless it comes from a rank asked earlier. The monitor must be held."""
        if sender == self._asked:
            self._state = payload

    def answer(self, rank: int, key: bytes, *, has_state: bool) -> None:
        """Sends this rank's state, or an empty answer if there is none to give."""
        state = self._replica.state(rank, key[rank]) if has_state and self._replica.is_complete else []
        self._channel.send(rank, self._channel.header(MessageKind.STATE, key), state)
