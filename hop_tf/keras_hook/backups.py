"""Backups of training that are always whole, and those of Keras's `BackupAndRestore`, which may be damaged."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Mapping

import h5py
import keras
import tensorflow as tf
from absl import logging
from keras.src.saving import saving_lib

from hop_tf.keras_hook.shared_paths import flat_callbacks

_WEIGHTS, _METADATA, _CHECKSUMS = "latest.weights.h5", "training_metadata.json", "checksums.json"
_UNFINISHED = "unfinished"
_CHUNK_BYTES = 1 << 24

# The epoch that training continues with, and the last batch of this epoch before the backup (0 at its beginning).
Position = tuple[int, int]


class AtomicBackupAndRestore(keras.callbacks.BackupAndRestore):
    """Keras's `BackupAndRestore` with backups that stay whole if the process or the machine dies at any moment.

        model.fit(x, y, epochs=5, callbacks=[hop_tf.callbacks.AtomicBackupAndRestore("backup")])

    A backup is written to a folder of its own. The folder gets its name, `backup_<n>`, when all of it is on the disk.
    The last two backups are kept. Training continues from the newest backup whose checksums are right. A damaged backup
    is ignored, with a warning. Ranks continue from the newest backup that all ranks with backups have in common. If
    there is none, they continue from the newest backup of any rank. A rank that lacks the chosen backup gets a copy. If
    there is no other backup, a backup that Keras's own callback has left in the same folder is restored.

    If a backup cannot be written, as on a full disk, the callback logs a warning. Training continues, and the previous
    backup stays. A backup is built in memory first. It takes as much memory as the weights and the optimizer state.

    Args:
      backup_dir: A folder that nothing else uses, on a file system. Addresses such as gs:// are refused.
      save_freq: "epoch" for a backup at the end of each epoch, or the number of batches from one backup to the next.
        After a backup within an epoch, training continues from the beginning of the epoch, as with Keras's callback.
        Default "epoch".
      delete_checkpoint: True to remove the folder when `fit` has ended. Default True.

    Raises:
      ValueError: If an argument is none of these.
      OSError: In `fit`, if there are backups, and all of them are damaged.
    """

    def __init__(self, backup_dir: str | os.PathLike, save_freq: str | int = "epoch", delete_checkpoint: bool = True):
        if "://" in os.fspath(backup_dir):
            raise ValueError(
                f"`backup_dir` must be a directory in a file system, not a URL. Received: backup_dir={backup_dir!r}."
            )
        super().__init__(backup_dir, save_freq=save_freq, delete_checkpoint=delete_checkpoint)
        self._chosen: Position | None = None

    def _use(self, folder: pathlib.Path) -> None:
        """Makes Keras's callback read its files from `folder`."""
        self._weights_path = str(folder / _WEIGHTS)
        self._training_metadata_path = str(folder / _METADATA)

    def _backups(self) -> list[pathlib.Path]:
        """The backups, the newest first."""
        paths = pathlib.Path(self.backup_dir).glob("backup_*")
        return sorted((path for path in paths if re.fullmatch(r"backup_\d+", path.name)), key=_number_of, reverse=True)

    def positions(self) -> list[Position]:
        """The positions that training can continue from, the newest first. Empty without a backup."""
        if not self._backups():
            return positions_of_files(self.backup_dir)
        return [_position_of(path) for path in self._whole_backups()]

    def choose(self, position: Position) -> None:
        """Makes the next `fit` continue from `position` instead of the newest backup."""
        self._chosen = position if self._backups() else None

    def weights_at(self, position: Position) -> bytes:
        """The file with the weights of a backup that `positions` lists."""
        paths = [path for path in self._whole_backups() if _position_of(path) == position]
        return weights_of_files(paths[0] if paths else self.backup_dir)

    def adopt(self, position: Position, weights: bytes) -> None:
        """Makes another rank's backup the newest one of this rank.

        Raises:
          OSError: If the backup cannot be written.
        """
        self._write_newest({_WEIGHTS: weights, _METADATA: _metadata_of(position)})

    def _whole_backups(self) -> list[pathlib.Path]:
        """The undamaged backups, the newest first. Raises OSError if there are backups and all of them are damaged."""
        backups = self._backups()
        problems = {path: problem for path in backups if (problem := _problem_of_backup(path)) is not None}
        for path, problem in problems.items():
            logging.warning(
                "The backup %s is damaged (%s). hop_tf uses the previous backup, if there is one.", path, problem
            )
        if problems and len(problems) == len(backups):
            raise OSError(
                f"all backups in {self.backup_dir} are damaged: {', '.join(path.name for path in backups)}. Remove the "
                "directory to start over, or restore a copy of a backup."
            )
        return [path for path in backups if path not in problems]

    def _load_model(self) -> None:
        chosen, self._chosen = self._chosen, None
        if not self._backups():
            folder = pathlib.Path(self.backup_dir)
            _check_files(folder)
            self._use(folder)
            super()._load_model()
            return
        path, *_ = [path for path in self._whole_backups() if chosen in (None, _position_of(path))]
        self._use(path)
        super()._load_model()
        for each in self._backups():
            if _number_of(each) > _number_of(path):  # Otherwise it would count as the newest one.
                shutil.rmtree(each, ignore_errors=True)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        # Keras sets this at the end of an epoch only. Without this line, a backup within the first epoch after a
        # restart would be labeled epoch 0.
        self._current_epoch = epoch

    def _save_model(self) -> None:
        metadata = _metadata_of((self._current_epoch, self._last_batch_seen))
        try:
            self._write_newest({_WEIGHTS: _weights_of(self.model), _METADATA: metadata})
        except OSError as error:
            logging.warning(
                "Cannot write the backup in %s: %s. Training continues; %s.",
                *(self.backup_dir, error, "the previous backup stays" if self._backups() else "there is no backup yet"),
            )

    def _write_newest(self, contents: Mapping[str, bytes | memoryview]) -> None:
        folder = pathlib.Path(self.backup_dir)
        unfinished = folder / _UNFINISHED
        newest, *older = self._backups() or [None]
        try:
            for path in (unfinished, *older):
                if path.exists():
                    shutil.rmtree(path)
            unfinished.mkdir(parents=True)
            _write(unfinished, contents)
            unfinished.rename(folder / f"backup_{_number_of(newest) + 1 if newest else 1}")
            _sync(folder)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)  # An unfinished backup only takes disk space.
            raise


def _number_of(backup: pathlib.Path) -> int:
    return int(backup.name.removeprefix("backup_"))


def _weights_of(model: keras.Model) -> memoryview:
    """Returns the file that `model.save_weights` would write: weights and optimizer state.

    The file is built in memory, as Keras does for a `.keras` file, because HDF5 may end the process on a full disk.
    """
    file = io.BytesIO()
    store = saving_lib.H5IOStore(file, mode="w")
    saving_lib._save_state(model, weights_store=store, assets_store=None, inner_path="", visited_saveables=set())
    store.close()
    return file.getbuffer()


def _write(folder: pathlib.Path, contents: Mapping[str, bytes | memoryview]) -> None:
    """Writes a backup's files and their checksums. Returns when all of it is on the disk."""
    checksums = {name: zlib.crc32(each) for name, each in contents.items()}
    for name, each in {**contents, _CHECKSUMS: json.dumps(checksums).encode()}.items():
        (folder / name).write_bytes(each)
        _sync(folder / name)
    _sync(folder)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: pathlib.Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _problem_of_backup(folder: pathlib.Path) -> str | None:
    """Describes the damage to a backup that `_write` has completed; None if the backup is whole."""
    try:
        checksums = json.loads((folder / _CHECKSUMS).read_bytes())
        wrong = [name for name in (_WEIGHTS, _METADATA) if checksums[name] != _checksum(folder / name)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"the checksum of {', '.join(wrong)} is wrong" if wrong else None


def _position_of(folder: str | os.PathLike) -> Position:
    """The position of a whole backup, or of a backup by Keras's own callback."""
    metadata = json.loads(_read(folder, _METADATA))
    return metadata["epoch"], metadata.get("batch", 0)


def _metadata_of(position: Position) -> bytes:
    return json.dumps(dict(zip(("epoch", "batch"), position, strict=True))).encode()


def _read(folder: str | os.PathLike, name: str) -> bytes:
    """Reads a file of a backup. The folder may be an address such as gs://, which `pathlib` cannot read."""
    with tf.io.gfile.GFile(os.path.join(folder, name), "rb") as file:
        return file.read()


def restore(model: keras.Model, weights: str | os.PathLike) -> None:
    """Loads weights and optimizer state into a model at the start of its `fit`, as `BackupAndRestore` does.

    Args:
      model: The model, built.
      weights: A file that `model.save` or `model.save_weights` has written.
    """
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model.load_weights(weights)


def begin_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes the `fit` that is starting begin at `epoch`, not at `initial_epoch`. None undoes this for later fits."""
    model._initial_epoch = epoch


# Keras's own backups.


def positions_of_files(folder: str | os.PathLike) -> list[Position]:
    """The position of the backup that Keras's callback has left in a folder, or at an address; empty without one.

    Raises:
      OSError: If the files are damaged.
    """
    if "://" not in os.fspath(folder):
        _check_files(pathlib.Path(folder))
    return [_position_of(folder)] if tf.io.gfile.exists(os.path.join(folder, _METADATA)) else []


def weights_of_files(folder: str | os.PathLike) -> bytes:
    """The weights file of the backup that Keras's callback has left in a folder."""
    return _read(folder, _WEIGHTS)


def write_files(folder: str | os.PathLike, position: Position, weights: bytes) -> None:
    """Writes a backup as Keras's callback does. The epoch is written last, so it never refers to missing weights."""
    tf.io.gfile.makedirs(folder)
    metadata = os.path.join(folder, _METADATA)
    if tf.io.gfile.exists(metadata):
        tf.io.gfile.remove(metadata)
    for name, contents in ((_WEIGHTS, weights), (_METADATA, _metadata_of(position))):
        with tf.io.gfile.GFile(os.path.join(folder, name), "wb") as file:
            file.write(contents)


def check_backups(callbacks: object) -> None:
    """Checks the files that Keras's `BackupAndRestore` is about to restore.

    Keras writes to the same files that it later reads. If the process or the machine died during a write, a file may be
    truncated or empty. With `double_checkpoint`, the previous files then replace the damaged ones.

    Args:
      callbacks: The `callbacks` argument of `fit`.

    Raises:
      OSError: If a file is damaged. The message names the file and tells what to do.
    """
    for callback in flat_callbacks(callbacks):
        if not isinstance(callback, keras.callbacks.BackupAndRestore):
            continue
        is_own = isinstance(callback, AtomicBackupAndRestore)  # This callback checks the files before it reads them.
        if not is_own and "://" not in os.fspath(callback.backup_dir):
            _check_files(pathlib.Path(callback.backup_dir))


def _check_files(folder: pathlib.Path) -> None:
    weights, metadata = folder / _WEIGHTS, folder / _METADATA
    problem = _problem_of_files(weights, metadata)
    if problem is None:
        return
    former = [path.with_name(f"{path.name}.bkp") for path in (weights, metadata)]
    if all(path.exists() for path in former) and _problem_of_files(*former) is None:
        logging.warning("BackupAndRestore resumes from the previous backup: %s.", problem)
        for path in former:
            shutil.copy(path, path.with_suffix(""))
        return
    raise OSError(
        f"BackupAndRestore cannot restore from {folder}: {problem}. Probably the process stopped while it wrote the "
        "backup, or the disk was full. Remove the directory to start over, or restore a copy of it. "
        "hop_tf.callbacks.AtomicBackupAndRestore never leaves a half-written backup."
    )


def _problem_of_files(weights: pathlib.Path, metadata: pathlib.Path) -> str | None:
    """Describes the damage to a Keras backup; None if the backup is readable or absent. Values are not checked."""
    for path, read in ((weights, _read_outline), (metadata, _read_metadata)):
        if not path.exists():
            continue
        try:
            read(path)
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            return f"{path} is damaged ({type(error).__name__}: {error})"
    if weights.exists() and not metadata.exists():
        return f"{weights} exists without {metadata}"
    return None


def _read_outline(path: pathlib.Path) -> None:
    with h5py.File(path, "r") as file:
        file.visititems(lambda name, item: None)


def _read_metadata(path: pathlib.Path) -> int:
    return int(json.loads(path.read_bytes())["epoch"])
