"""The layouts that a rank under Canary contributes to, and the messages that tell when a layout is complete.

A rank contributes to one layout at a time: the layout of the ranks that take part. When these ranks change, the rank
moves to the next layout. It then announces its number of contributions to the previous layout. At its last step it
announces the number for the present layout. A layout is settled when all ranks have announced their numbers and all
contributions have arrived. A rank that joins late may miss contributions in flight, until the next resync.

Only the roots of a layout can announce its end. A root may not know the layout, if the ranks that contributed to it
have died. So a rank that learns of a layout announces it to the layout's ranks. The rank does so even if it takes no
part in the layout, or knows it only from another rank's state.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection, Sequence

import numpy as np
from absl import logging

from hop_tf.errors import ProtocolError
from hop_tf.membership.session import Membership
from hop_tf.strategies.canary.held import Held
from hop_tf.strategies.canary.layout import Layout, Ledger, Piece
from hop_tf.strategies.canary.messages import Channel, Header, MessageKind
from hop_tf.strategies.canary.peers import Peers, is_past
from hop_tf.strategies.canary.pieces import PieceThread
from hop_tf.strategies.canary.replica import Replica
from hop_tf.transport.base import Message

# A rank announces its move to a new layout this many iterations later. Until then, contributions of a rank that has
# left still count if they arrive.
_LINGER = 8


class Contributions:
    """The contributions of one rank, and the numbers of contributions that the others have announced.

    Args:
      membership: The ranks that take part.
      replica: The layouts, and the record of merged contributions.
      peers: The state of the other ranks.
      channel: Sends messages.
      threads: The threads that wait for contributions.
      held: Own contributions that are kept back.
      num_colayers: k.

    Attributes:
      layout: The layout that this rank contributes to. None before its first iteration.
    """

    def __init__(
        self,
        membership: Membership,
        replica: Replica,
        peers: Peers,
        channel: Channel,
        threads: Sequence[PieceThread],
        held: Held,
        num_colayers: int,
    ):
        self._membership = membership
        self._monitor = membership.monitor
        self._replica = replica
        self._peers = peers
        self._channel = channel
        self._threads = threads
        self._held = held
        self._num_colayers = num_colayers
        self._num_lost_before = 0
        self._settled: list[tuple[Ledger, np.ndarray]] = []
        self.reset()

    def reset(self) -> None:
        """Forgets the previous session."""
        self._num_lost_before, self._settled = self.num_lost, []
        self._told: set[tuple[bytes, int]] = set()  # Layouts, and the ranks to which they were announced.
        self._looked_at: tuple[dict[bytes, None], bytes] | None = None  # The layouts and ranks at the last check.
        self.layout: Layout | None = None
        self._known_present: bytes | None = None
        self._moves: collections.deque[tuple[int, bytes | None, bytes]] = collections.deque()  # Not announced yet.
        # The number of own contributions by layout and colayer, until the layout is settled.
        self._sent: collections.defaultdict[bytes, list[int]] = collections.defaultdict(
            lambda: [0] * self._num_colayers
        )

    def add(self, colayer: int) -> None:
        """Counts a contribution of this rank to a colayer of the present layout."""
        self._sent[self.layout.key][colayer] += 1

    # Ranks that leave, or join late.

    def look_at_departures(self) -> None:
        """Stops waiting for ranks that have left, even if new processes took their place before this rank noticed."""
        if (present := self._peers.present_key()) != self._known_present:
            self._known_present = present
            with self._replica.lock:
                for rank in self._membership.departed():
                    self._replica.gei.exclude(rank)
            self.recheck()

    def admit(self, rank: int) -> None:
        """Takes account of a rank that joins again."""
        with self._replica.lock:
            self._replica.gei.include(rank)
        self.recheck()

    def move(self, k: int) -> Layout:
        """Contributes to the layout of the ranks that take part, from iteration k on. Returns this layout."""
        before = self.layout
        if before is None or not self._peers.are_all_in(before):
            self.layout = self._replica.layout(self._peers.present_key())
            self.recheck()
            if max(self.layout.key) > 1:  # Otherwise there was no earlier layout.
                self._moves.append((k, None if before is None else before.key, self.layout.key))
        return self.layout

    def free_layouts(self, *, gives_up: bool = False) -> None:
        """Frees the layouts that this rank has left, if no further message of them can arrive here.

        Args:
          gives_up: True if roots could not fill gaps. Then layouts with gaps are freed, too.
        """
        with self._monitor:
            for layout in self._replica.layouts() if self.layout is not None else []:
                if is_past(layout.key, self.layout.key) and self._is_settled(layout):
                    if roots := self._roots_of_gaps(layout):
                        if not gives_up:
                            continue
                        _warn_of_gaps(self._membership.rank, roots)
                    self._settle(layout)
                    self._replica.free(layout)
                    self._peers.forget(layout.key)
                    for thread in self._threads:
                        thread.forget(layout.key)

    # Messages between ranks.

    def tell_old_moves(self, k: int) -> None:
        """Announces, in iteration k, the moves that this rank made more than `_LINGER` iterations ago."""
        while self._moves and self._moves[0][0] < k - _LINGER:
            self._tell_move()

    def tell_end(self) -> None:
        """Tells the others that this rank has made its last step and contributes nothing more."""
        while self._moves:
            self._tell_move()
        key, rank = self.layout.key, self._membership.rank
        with self._monitor:
            self._peers.has_contributed(rank, key, tuple(self._sent[key]))
            self._peers.done.add(rank)
            others = self._peers.present()
        self._tell(others, MessageKind.DONE, key, self._sent[key])
        self.recheck()

    def tell_newcomer_of_end(self, newcomer: int) -> None:
        """Tells a rank that joined after this rank's last step that this rank contributes to no common layout.

        The message has no counts and makes no layout known.
        """
        self._tell([newcomer], MessageKind.DONE, self._peers.present_key(), [])

    def _tell_move(self) -> None:
        """Tells how often this rank has contributed to a layout that it left, and the layout that it moved to."""
        _, before, key = self._moves.popleft()
        rank = self._membership.rank
        with self._monitor:
            if before is not None:
                self._peers.has_contributed(rank, before, tuple(self._sent[before]))
            self._peers.has_moved(rank, key)
            others = self._peers.present()
        if before is None:
            self._tell(others, MessageKind.MOVED, key, [])
        else:
            self._tell(others, MessageKind.MOVED, key, self._sent[before], [np.frombuffer(before, np.uint8)])
        self.recheck()

    def _tell(
        self,
        ranks: Sequence[int],
        kind: MessageKind,
        key: bytes,
        counts: Sequence[int],
        payload: Sequence[np.ndarray] = (),
    ) -> None:
        contributions = tuple((count, colayer) for colayer, count in enumerate(counts))
        header = self._channel.header(kind, key, contributions=contributions)
        for rank in ranks:
            self._channel.send(rank, header, payload)

    def receive(self, header: Header, message: Message) -> None:
        """Takes another rank's message about how often it has contributed to a layout. The monitor must be held."""
        key = message.payload.tobytes()
        if header.kind is MessageKind.DONE and header.contributions:
            key = header.key
        if len(key) not in (0, len(header.key)) or len(header.contributions) != (self._num_colayers if key else 0):
            raise ProtocolError(
                f"rank {message.sender} announces contributions to {len(header.contributions)} colayers. Expected: "
                f"{self._num_colayers}."
            )
        rank = self._membership.rank
        # No message of other layouts arrives here.
        if key and key[rank] == self._peers.key_of(rank) and not self._replica.is_freed(key):
            self.hear_of(key)
            self._peers.has_contributed(message.sender, key, [count for count, _ in header.contributions])
        if header.kind is MessageKind.DONE:
            self._peers.done.add(message.sender)
        else:
            self._peers.has_moved(message.sender, header.key)
        self.recheck()

    def hear_of(self, key: bytes) -> Layout:
        """Returns the layout of a key, which may be new here.

        Raises:
          ProtocolError: As `Replica.layout` does.
        """
        is_new = not self._replica.is_known(key)
        layout = self._replica.layout(key)
        if is_new:
            self.recheck()
        return layout

    def recheck(self) -> None:
        """Checks again which pieces are complete, after news of a rank or a layout.

        Announced numbers may belong to a layout that was unknown here until now.
        """
        with self._monitor:
            self._tell_of_layouts()
        for thread in self._threads:
            thread.recheck()

    def _tell_of_layouts(self) -> None:
        """Announces each layout to its ranks, once. The monitor must be held."""
        keys, present = dict.fromkeys(self._replica.known_keys()), self._peers.present_key()
        if (keys, present) == self._looked_at:
            return
        self._looked_at = keys, present
        for key in keys:
            if new := [rank for rank in self._peers.alive(key) if (key, rank) not in self._told]:
                self._told.update((key, rank) for rank in new)
                # On another thread, because a thread that receives must not wait for sending.
                self._threads[0].put(functools.partial(self._tell, new, MessageKind.HEARD, key, []))

    # Contributions in flight.

    def late_ranks(self, most: int) -> set[int]:
        """The ranks on the paths of pieces with at least `most` own contributions in flight.

        Empty while this rank lacks sums, because the missing sums may contain its own contributions. The monitor must
        be held.
        """
        layout, rank = self.layout, self._membership.rank
        if layout is None or not self._peers.are_all_in(layout) or self._replica.gaps:
            return set()
        num_in_flight = np.array(self._sent[layout.key])[layout.colayers] - layout.ledger.merged[:, rank]
        late = [layout.pieces[index] for index in np.flatnonzero(num_in_flight >= most)]
        return {each for piece in late if self._binds(layout, piece) for each in layout.path(piece, rank)}

    def _binds(self, layout: Layout, piece: Piece) -> bool:
        """True if the window limits a piece: contributions are sent at once, or no further one can be kept back."""
        num_held = self._held.num_iterations(layout, piece)
        if self._held.is_silent(layout, piece):
            return num_held >= self._held.max_iterations
        return num_held == 0

    def unsettled_ranks(self) -> set[int]:
        """The ranks, including this one, that may still send something for a piece. The monitor must be held."""
        is_settled = self._peers.is_settled
        pieces = ((layout, piece) for layout in self._replica.layouts() for piece in layout.pieces)
        unsettled = ((layout, piece) for layout, piece in pieces if not is_settled(layout, piece))
        return {rank for layout, piece in unsettled for rank in self._sources(layout, piece)}

    def _sources(self, layout: Layout, piece: Piece) -> Sequence[int]:
        """The ranks on the path from this rank to the root of a piece. At the root, all ranks that take part."""
        if piece.root == self._membership.rank:
            return [rank for rank in layout.ranks if self._peers.takes_part(layout, rank)]
        return layout.path(piece, self._membership.rank)

    def _is_settled(self, layout: Layout) -> bool:
        return all(self._peers.is_settled(layout, piece) for piece in layout.pieces)

    def _roots_of_gaps(self, layout: Layout) -> set[int]:
        """The roots that have merged messages that this rank lacks, in one layout. Omits roots that have left."""
        pieces = self._replica.pieces_with_gaps()
        return self._peers.roots_that_take_part(each for each in pieces if each[0] is layout)

    def settle(self) -> None:
        """Records that no layout gets further contributions."""
        for layout in self._replica.layouts():
            self._settle(layout)

    def _settle(self, layout: Layout) -> None:
        if (sent := self._sent.pop(layout.key, None)) is not None:
            self._settled.append((layout.ledger, np.array(sent)[layout.colayers]))

    @property
    def num_lost(self) -> int:
        """The number of pieces of own contributions that were not merged here and can no longer come.

        A piece that is merged after its layout was settled does not count. Nor does a piece in a state that is taken
        later.
        """
        rank = self._membership.rank
        return self._num_lost_before + sum(int(np.sum(sent - ledger.merged[:, rank])) for ledger, sent in self._settled)


def _warn_of_gaps(rank: int, roots: Collection[int]) -> None:
    logging.warning(
        "rank %d: while this rank was silent and others left, ranks %s summed steps that did not arrive here. Some "
        "ranks lack these steps, because no rank has all of them.",
        rank,
        sorted(roots),
    )
