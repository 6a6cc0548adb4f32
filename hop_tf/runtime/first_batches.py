"""`FirstBatches`: checks that ranks train on the same data."""

from __future__ import annotations

import struct

from absl import logging

from hop_tf.membership.session import Membership, tree_neighbors
from hop_tf.transport.base import Message

_QUEUE = "first_batch"
_HEADER = struct.Struct("<qq")  # The session, and the digest.


class FirstBatches:
    """Compares the first global batch of a `fit` on all ranks, and warns, once, if two ranks differ.

    No rank waits: each rank sends its digest to its parent in the tree of all ranks. The parent compares when it has
    its own batch.

    Args:
      membership: This rank's membership.
    """

    def __init__(self, membership: Membership):
        self._membership = membership
        self._parent, _ = tree_neighbors(membership.rank, membership.world_size)
        self._own: int | None = None
        self._of_children: dict[int, int] = {}
        membership.transport.register(_QUEUE, self._on_message)

    def reset(self) -> None:
        """Forgets everything, for a session that this rank is about to enter."""
        with self._membership.monitor:
            self._own = None
            self._of_children.clear()

    def note(self, digest: int) -> None:
        """Records the digest of a batch, if it is the first. Does not block. May be called from any thread."""
        with self._membership.monitor:
            if self._own is not None:
                return
            self._own = digest
            self._compare()
        if self._parent is not None:
            self._membership.notify(self._parent, _QUEUE, _HEADER.pack(self._membership.session, digest))

    def _on_message(self, message: Message) -> None:
        if len(message.header) != _HEADER.size:
            raise message.unexpected()
        session, digest = _HEADER.unpack(message.header)
        with self._membership.monitor:
            if session == self._membership.session:
                self._of_children[message.sender] = digest
                self._compare()

    def _compare(self) -> None:
        if self._own is None:
            return
        others = [rank for rank, digest in self._of_children.items() if digest != self._own]
        self._of_children.clear()
        for rank in others:
            logging.warning(
                "rank %d trains on other data than rank %d: the targets of the first batch, or the seeds of shuffles, "
                "differ. `fit` needs the same data in the same order on all ranks, because each rank trains on its "
                "part of every batch. Give Dataset.shuffle the same seed on all ranks. For different data on each "
                "rank, use strategy.distribute_datasets_from_function.",
                *(rank, self._membership.rank),
            )
