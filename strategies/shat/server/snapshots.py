"""`Snapshots`: the states of a server in files. A server that was lost goes on from them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
import os
import pathlib
import tempfile
import threading
import time
import zlib

import numpy as np
from absl import logging

from hop_tf.arguments import check_integer
from hop_tf.errors import HopError, MismatchError, ProtocolError
from hop_tf.strategies.shat.server.group import ServedGroup
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.tensors import payloads
from hop_tf.tensors.packing import Packing

_MAGIC = b"hop_tf parameter server snapshot 1\n"
_DEFAULT_SECONDS = 60.0
_UNFINISHED = ".part"
_BEGIN_ANEW = "Restore a copy of it, or remove the snapshots of all servers to start over."


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """The directory and the times of the servers' snapshots.

    Attributes:
      directory: The directory in which each server writes a file for each optimizer, `ps_<index>_<group>`. A server
        that is started again, on any machine, must find this directory. If the server is started again within
        `timeout_seconds`, it goes on with the training. Default None: no snapshots.
      every_seconds: The longest time between two snapshots, if there are pushes. The first push of each `fit` is
        written at once, before it is answered. Default 60.
      every_pushes: The largest number of pushes between two snapshots. Default None: any number.

    Raises:
      ValueError: If a value is out of range, or a time or number is given without a directory.
    """

    directory: str | os.PathLike | None = None
    every_seconds: float = _DEFAULT_SECONDS
    every_pushes: int | None = None

    def __post_init__(self):
        seconds = self.every_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not seconds > 0:
            raise ValueError(f"`every_seconds` must be a positive number. Received: every_seconds={seconds!r}.")
        if self.every_pushes is not None:
            check_integer("every_pushes", self.every_pushes, at_least=1)
        if self.directory is None and (seconds, self.every_pushes) != (_DEFAULT_SECONDS, None):
            raise ValueError(
                "`directory` must be given with `every_seconds` and `every_pushes`: without it, no snapshots are "
                f"written. Received: every_seconds={seconds!r}, every_pushes={self.every_pushes!r}."
            )


@dataclasses.dataclass
class _History:
    """The history of a group's snapshots.

    Attributes:
      num_pushes: The number of pushes in the last complete snapshot.
      tried: The number of pushes, and the time, at the last attempt to write a snapshot.
      life: `ServedGroup.life` at that attempt.
      num_failures: The number of attempts that have failed.
      error: The error of the last attempt, or "" if it succeeded.
    """

    num_pushes: int
    tried: tuple[int, float]
    life: tuple[str, int, int] = ("", 0, 0)
    num_failures: int = 0
    error: str = ""


class Snapshots:
    """The snapshots of one server.

    A file is replaced when the next one is complete and on the disk. So there is a whole file whenever the server dies.
    If a snapshot cannot be written, for example to a full disk, training goes on and the last complete one stays. The
    next attempt follows when another snapshot is due.

    `read` raises if the directory could not be made, or written to, when the server started: nothing is lost yet.

    Args:
      options: The options. The directory is made if it does not exist.
      index: The index of the server.
    """

    def __init__(self, options: SnapshotOptions, index: int):
        self._options = options
        self._index = index
        self._directory = pathlib.Path(options.directory)
        self._unusable = ""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._directory).close()
        except OSError as error:
            self._unusable = f"cannot write snapshots to {self._directory}: {error.strerror}."
            logging.error("the server %s", self._unusable)
        self._writing = threading.Lock()
        self._signatures: dict[str, bytes] = {}
        self._histories: dict[str, _History] = {}

    def path(self, group: str) -> pathlib.Path:
        """The file of a group."""
        return self._directory / f"ps_{self._index}_{group}"

    def read(self, group: str, signature: bytes, packing: Packing) -> ShardState | None:
        """Reads the snapshot of a group. Returns None if there is none.

        Args:
          group: The name of the group.
          signature: The bytes that must equal those in the snapshot.
          packing: The shard's buckets.

        Raises:
          HopError: If the directory is not usable for the next snapshots.
          MismatchError: If the snapshot is of another model.
          ProtocolError: If the file is damaged.
          OSError: If the file cannot be read.
        """
        if self._unusable:
            raise HopError(self._unusable)
        self._signatures[group] = signature
        # The first snapshot is due with the first push. If a server dies without a snapshot, the other servers'
        # snapshots are of no use.
        self._histories[group] = _History(0, (0, -math.inf))
        path = self.path(group)
        if not path.exists():
            self._check_others(group)
            return None
        found, *parts = payloads.split(_read_file(path))
        if found.tobytes() != signature:
            raise MismatchError(
                f"the snapshot {path} is of another model, or of other servers or sharding. Remove it, or choose "
                "another directory."
            )
        state = ShardState.from_parts(parts, packing)
        self._histories[group] = _History(state.num_pushes, (state.num_pushes, time.monotonic()), state.progress.life)
        logging.info("the server resumes from %s, after %d pushes.", path, state.num_pushes)
        return state

    def _check_others(self, group: str) -> None:
        """Raises MismatchError if there are snapshots of variables with other names.

        Otherwise a script with changed names, for example because Keras numbers layers differently, would silently
        begin anew.
        """
        number, _, _ = group.partition("-")
        others = [p for p in self._directory.glob(f"ps_{self._index}_{number}-*") if p.suffix != _UNFINISHED]
        if others:
            raise MismatchError(
                f"the snapshot {min(others)} is of another model: its variables have other names. Remove it, or choose "
                "another directory."
            )

    def write(self, name: str, group: ServedGroup, *, final: bool = False, waits: bool = False) -> None:
        """Writes a group's state, if it has changed and is due.

        Does nothing while another thread writes, unless `final` or `waits`. A failure is logged and counted in
        `failures`.

        Args:
          name: The name of the group.
          group: The group.
          final: True to write the state before it is due.
          waits: True to wait while another thread writes.
        """
        if not self._writing.acquire(blocking=final or waits):
            return
        try:
            self._write(name, group, final)
        finally:
            self._writing.release()

    def write_first(self, name: str, group: ServedGroup) -> None:
        """Writes the first state of a life (see `Progress.life`). Blocks until it is on the disk.

        Must be called before a push is answered. So every answered push is in a snapshot of the same life, or comes
        after such a snapshot.
        """
        if self._histories[name].life != group.life:
            self.write(name, group, waits=True)

    def failures(self, name: str) -> tuple[int, str]:
        """The number of failed snapshots of a group, and the error of the last attempt, or "" if it succeeded."""
        history = self._histories[name]
        return history.num_failures, history.error

    def _write(self, name: str, group: ServedGroup, final: bool) -> None:
        history = self._histories[name]
        if group.num_pushes == history.num_pushes or not (final or self._is_due(group, history)):
            return
        state = group.state(with_slots=True)
        try:
            self._replace(self.path(name), [np.frombuffer(self._signatures[name], np.uint8), *state.to_parts()])
            history.num_pushes, history.error = state.num_pushes, ""
        except OSError as error:
            history.error = f"{self.path(name)}: {error.strerror or error}"
            history.num_failures += 1
            logging.error(
                "the server cannot write its snapshot %s. Training continues; %s.",
                history.error,
                f"the one after {history.num_pushes} pushes stays" if history.num_pushes else "there is none yet",
            )
        history.tried = (state.num_pushes, time.monotonic())
        history.life = state.progress.life

    def _is_due(self, group: ServedGroup, history: _History) -> bool:
        if history.life != group.life:
            return True
        tried_pushes, tried_at = history.tried
        every_pushes = self._options.every_pushes
        is_due = time.monotonic() - tried_at >= self._options.every_seconds
        return is_due or (every_pushes is not None and group.num_pushes - tried_pushes >= every_pushes)

    def _replace(self, path: pathlib.Path, parts: list[np.ndarray]) -> None:
        payload = payloads.join(parts)
        checksum = 0
        for array in payload:
            checksum = zlib.crc32(array, checksum)
        unfinished = path.with_name(f"{path.name}{_UNFINISHED}")
        try:
            with open(unfinished, "wb") as file:
                file.write(_MAGIC + checksum.to_bytes(4, "little"))
                for array in payload:
                    file.write(array)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):  # The unfinished file takes room that others may need.
                unfinished.unlink()
            raise
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _read_file(path: pathlib.Path) -> np.ndarray:
    """Reads a file that `_replace` has written. Raises ProtocolError if the file was changed or is of another kind."""
    magic, checksum, data = np.split(np.fromfile(path, np.uint8), [len(_MAGIC), len(_MAGIC) + 4])
    if magic.tobytes() != _MAGIC:
        raise ProtocolError(f"{path} is damaged, or is not a snapshot of a parameter server. {_BEGIN_ANEW}")
    if zlib.crc32(data).to_bytes(4, "little") != checksum.tobytes():
        raise ProtocolError(f"the snapshot {path} is damaged: its checksum is not that of its contents. {_BEGIN_ANEW}")
    return data
