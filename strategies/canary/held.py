"""`Held`: contributions that a rank under Canary keeps back while a rank on the way to a piece's root is silent.

A frozen root sums nothing up. Other ranks do not wait for it. Each rank adds up its own contributions, and sends the
sum as one message when the root is heard again. So each contribution counts once, although late, and takes no memory of
its own. Meanwhile a rank trains these pieces by its own steps, as local SGD does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from hop_tf.membership.session import Membership
from hop_tf.membership.silence import Silence
from hop_tf.strategies.canary.encoding import PieceEncoding
from hop_tf.strategies.canary.layout import Layout, Piece
from hop_tf.strategies.canary.messages import CONTRIBUTION_BYTES
from hop_tf.transport.framing import MAX_HEADER_BYTES


@dataclasses.dataclass
class _Sum:
    layout: Layout
    piece: Piece
    total: np.ndarray | None = None
    iterations: list[int] = dataclasses.field(default_factory=list)


class Held:
    """The contributions that one rank keeps back. Used by the thread that makes steps.

    Args:
      membership: The rank's membership.
      encoding: Adds contributions up.
      silence: The silent ranks.
      send: Called when a sum can be sent, with its layout, piece and iterations, the sum, and None.
    """

    def __init__(
        self,
        membership: Membership,
        encoding: PieceEncoding,
        silence: Silence,
        send: Callable[[Layout, Piece, Sequence[int], np.ndarray, None], None],
    ):
        self._rank = membership.rank
        self._encoding = encoding
        self._silence = silence
        self._send = send
        # A message's header lists all contributions in the sum. Half of the largest header is divided among all ranks.
        self.max_iterations = max(1, MAX_HEADER_BYTES // 2 // CONTRIBUTION_BYTES // membership.world_size)
        self.reset()

    def reset(self) -> None:
        """Forgets the previous session."""
        self._sums: dict[tuple[bytes, int], _Sum] = {}

    def is_silent(self, layout: Layout, piece: Piece) -> bool:
        """True if a rank on the way to the root of a piece is silent."""
        ranks = self._silence.ranks
        return bool(ranks) and not ranks.isdisjoint(layout.path(piece, self._rank))

    def num_iterations(self, layout: Layout, piece: Piece) -> int:
        """The number of contributions to a piece that are kept back."""
        held = self._sums.get((layout.key, piece.index))
        return 0 if held is None else len(held.iterations)

    def takes(self, layout: Layout, piece: Piece) -> bool:
        """True if a piece's next contribution must be kept back, because a rank is silent or earlier ones are kept."""
        return (layout.key, piece.index) in self._sums or self.is_silent(layout, piece)

    def add(
        self, layout: Layout, piece: Piece, iteration: int, *, values: np.ndarray | None, data: np.ndarray | None
    ) -> None:
        """Keeps a contribution back, given as values or encoded."""
        held = self._sums.setdefault((layout.key, piece.index), _Sum(layout, piece))
        held.total = self._encoding.add(piece, held.total, values=values, data=data)
        held.iterations.append(iteration)

    def silent_ranks(self) -> list[int]:
        """The silent ranks that must be heard before all contributions can be sent."""
        paths = [held.layout.path(held.piece, self._rank) for held in self._sums.values()]
        return sorted(self._silence.ranks.intersection(*[{rank for path in paths for rank in path}]))

    def send(self) -> None:
        """Sends each sum that is kept back, unless a rank on the way to its root is still silent."""
        for where, held in list(self._sums.items()):
            if not self.is_silent(held.layout, held.piece):
                del self._sums[where]
                self._send(held.layout, held.piece, held.iterations, held.total, None)
