"""Paths that several ranks' callbacks would write to."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import keras
import psutil
import tensorflow as tf
from absl import logging

# File systems that machines share. FUSE file systems count, too.
_NETWORK_FILE_SYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
    ]
)
# The attribute with a callback's path, by class. The first two write files, the others fill a folder.
_PATHS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.BackupAndRestore: "backup_dir",
}
_OF_FILES = (keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger)


def flat_callbacks(callbacks: Any) -> list:
    """The callbacks in the `callbacks` argument of `fit`: one, a structure of them, a CallbackList, or None."""
    return [] if callbacks is None else tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))


def has_callback(callbacks: Any, kind: type) -> bool:
    """True if `fit` was given a callback of that class."""
    return any(isinstance(callback, kind) for callback in flat_callbacks(callbacks))


class CallbackPaths:
    """The places that the callbacks of a `fit` write to, right before the `fit` begins.

    Args:
      callbacks: The `callbacks` argument of `fit`.

    Attributes:
      places: Names of these places. Two ranks that would write to the same place have the same name for it.
    """

    def __init__(self, callbacks: Any):
        self._writers = [
            (callback, name)
            for callback in flat_callbacks(callbacks)
            for kind, name in _PATHS.items()
            if isinstance(callback, kind)
        ]
        self.places = [place_of(os.fspath(getattr(callback, name))) for callback, name in self._writers]

    def divide(self, rank: int, owners: Mapping[str, int]) -> None:
        """Redirects callbacks whose places belong to another rank: see `_own_path`.

        Args:
          rank: This rank.
          owners: The rank that each place belongs to.
        """
        for (callback, name), place in zip(self._writers, self.places, strict=True):
            owner = owners.get(place, rank)
            if owner != rank:
                path = os.fspath(getattr(callback, name)).rstrip(os.sep)
                own = _own_path(callback, path, rank)
                logging.warning(
                    "%s of rank %d writes to %s, because rank %d writes to %s.",
                    *(type(callback).__name__, rank, own, owner, path),
                )
                setattr(callback, name, own)
                if isinstance(callback, keras.callbacks.CSVLogger):  # The others create their folders themselves.
                    tf.io.gfile.makedirs(os.path.dirname(own))
                if isinstance(callback, keras.callbacks.BackupAndRestore):
                    _redirect_files(callback, path, own)


def _redirect_files(callback: keras.callbacks.BackupAndRestore, path: str, own: str) -> None:
    """Redirects the paths of the callback's files, too."""
    for name, value in vars(callback).items():
        if isinstance(value, (str, os.PathLike)) and os.fspath(value).startswith(path + os.sep):
            setattr(callback, name, own + os.fspath(value)[len(path) :])


def _own_path(callback: keras.callbacks.Callback, path: str, rank: int) -> str:
    """The path that a callback of `rank` writes to in place of `path`.

    A file goes to a subfolder `rank_<r>` of its folder. A callback that fills a folder gets a subfolder `rank_<r>`, so
    that TensorBoard shows a run for each rank. `BackupAndRestore` removes its folder with everything in it. So another
    rank's folder is next to it.
    """
    folder = f"rank_{rank}"
    if isinstance(callback, _OF_FILES):
        return os.path.join(os.path.dirname(path), folder, os.path.basename(path))
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return f"{path}_{folder}"
    return os.path.join(path, folder)


def place_of(path: str) -> str:
    """A name of a path's place. Two ranks that would write to the same place get the same name."""
    if "://" in path:
        return path
    path = os.path.realpath(path)
    return path if _is_shared(path) else f"{_boot_id()}:{_inode(pathlib.Path(path))}"


def _is_shared(path: str) -> bool:
    """True if machines share the file system of `path`."""
    mounted = [part for part in psutil.disk_partitions(all=True) if pathlib.Path(path).is_relative_to(part.mountpoint)]
    # Of several mounts at the same place, the last one covers the others.
    kind = max(reversed(mounted), key=lambda part: len(part.mountpoint)).fstype if mounted else ""
    return kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse")


def _inode(path: pathlib.Path) -> str:
    """Names a path by the device and inode of its deepest existing folder, and the rest of the path."""
    there = next(each for each in (path, *path.parents) if each.exists())
    status = there.stat()
    return f"{status.st_dev}:{status.st_ino}:{path.relative_to(there)}"


@functools.cache
def _boot_id() -> str:
    """A name of this machine."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
