"""`BackupAgreement`: the ranks of a job agree on the backup that training continues from."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import keras
from absl import logging

from hop_tf.errors import MismatchError
from hop_tf.keras_hook.backups import (
    AtomicBackupAndRestore,
    Position,
    positions_of_files,
    weights_of_files,
    write_files,
)
from hop_tf.keras_hook.shared_paths import flat_callbacks

_CLAIM = "BackupAndRestore"


class _KerasBackup:
    """The one backup of a `keras.callbacks.BackupAndRestore`, with the methods of `AtomicBackupAndRestore`."""

    def __init__(self, callback: keras.callbacks.BackupAndRestore):
        self._folder = callback.backup_dir

    def positions(self) -> list[Position]:
        return positions_of_files(self._folder)

    def choose(self, position: Position) -> None:
        """Does nothing: there is only one backup."""

    def weights_at(self, position: Position) -> bytes:
        return weights_of_files(self._folder)

    def adopt(self, position: Position, weights: bytes) -> None:
        write_files(self._folder, position, weights)


class BackupAgreement:
    """Makes all ranks continue from the same epoch.

    A rank may have died before it made its last backup, or may be new in a job with more ranks than before. All ranks
    that have backups take the newest one that they have in common. If they have none in common, they take the newest
    backup of any rank. A rank that lacks the backup gets a copy. So one rank's backup is enough for the whole job.

    Args:
      callbacks: The `callbacks` argument of `fit`.

    Attributes:
      claims: The claims for the session. If any rank makes them, all ranks have to agree.
    """

    def __init__(self, callbacks: object):
        self._callbacks = [
            each for each in flat_callbacks(callbacks) if isinstance(each, keras.callbacks.BackupAndRestore)
        ]
        self.claims = [_CLAIM] if self._callbacks else []

    def is_needed(self, owners: Collection[str]) -> bool:
        """True if any rank has a `BackupAndRestore`. `owners` are the claims of all ranks."""
        return _CLAIM in owners

    def agree(self, rank: int, share: Callable[[bytes], Sequence[bytes]], *, in_lock_step: bool) -> None:
        """Chooses the backup that the callback is about to restore. A collective.

        Args:
          rank: This rank.
          share: Sends this rank's bytes to all ranks, and returns the bytes of every rank.
          in_lock_step: True if ranks make the same updates. Then their backups must be from the same batch, too, not
            only from the same epoch.

        Raises:
          OSError: If the backups of this rank are damaged, or if it cannot write the copy that it gets.
          MismatchError: On all ranks, if there is a backup, but one rank has no `BackupAndRestore`.
        """
        backups = self._backups()
        offers = [json.loads(each) for each in share(json.dumps(backups and backups.positions()).encode())]
        known = {rank: [tuple(each) for each in offer] for rank, offer in enumerate(offers) if offer}
        if not known:  # No rank has a backup: training begins.
            return
        _require_callbacks(offers)
        chosen = _choose(known, in_lock_step=in_lock_step)
        source = min(chosen)
        if len(chosen) < len(offers):
            weights = share(backups.weights_at(chosen[source]) if rank == source else b"")[source]
            if rank not in chosen:
                logging.warning("%s", _told(rank, known.get(rank), source, chosen[source]))
                backups.adopt(chosen[source], weights)
        backups.choose(chosen.get(rank, chosen[source]))

    def _backups(self) -> AtomicBackupAndRestore | _KerasBackup | None:
        """The backups of the last callback, which restores after the others. Its folder may change after `__init__`."""
        if not self._callbacks:
            return None
        callback = self._callbacks[-1]
        return callback if isinstance(callback, AtomicBackupAndRestore) else _KerasBackup(callback)


def _require_callbacks(offers: Sequence[list | None]) -> None:
    without = [rank for rank, offer in enumerate(offers) if offer is None]
    if without:
        raise MismatchError(
            "`callbacks` must have a BackupAndRestore on all ranks or on none. Received: "
            f"{_ranks(rank for rank, offer in enumerate(offers) if offer)} would resume from a backup; "
            f"{_ranks(without)} would begin at the first epoch, without the callback. Pass the callback on all ranks. "
            "A rank without a backup gets a copy from another rank."
        )


def _choose(known: Mapping[int, Sequence[Position]], *, in_lock_step: bool) -> dict[int, Position]:
    """The backup that each rank continues from, by rank. Missing ranks need a copy of the lowest rank's backup."""
    common = set.intersection(*map(set, known.values()))
    newest = {rank: max(common or positions) for rank, positions in known.items()}
    latest = max(newest.values())
    num_fields = len(latest) if in_lock_step else 1
    return {rank: position for rank, position in newest.items() if position[:num_fields] == latest[:num_fields]}


def _told(rank: int, own: Sequence[Position] | None, source: int, position: Position) -> str:
    has = f"has only older backups ({_describe(own)})" if own else "has no backup"
    return f"rank {rank} {has}. It resumes from a copy of the backup of rank {source}: {_describe([position])}."


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _describe(positions: Sequence[Position]) -> str:
    return ", ".join(f"epoch {epoch}, batch {batch}" for epoch, batch in positions)
