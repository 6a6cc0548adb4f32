"""Backups that are torn: recognized, and never made by `AtomicBackupAndRestore`."""

import functools
import json
import os
import pathlib
import shutil
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from disks import fill, mounted_disk
from hop_tf.callbacks import AtomicBackupAndRestore
from hop_tf.keras_hook import backups

_ROWS = np.random.default_rng(0).normal(size=(16, 30)).astype(np.float32)
_NUM_EPOCHS = 4


class _StopsError(Exception):
    pass


class _StopAt(keras.callbacks.Callback):
    """Ends training at a batch of an epoch."""

    def __init__(self, epoch, batch=0):
        super().__init__()
        self._at = (epoch, batch)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self._epoch, batch) == self._at:
            raise _StopsError


class _FillTheDisk(keras.callbacks.Callback):
    """In the epochs 1 and 2."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self._filler = fill(self._folder)
        elif epoch == 3:
            os.remove(self._filler)


def _fit(*callbacks, strategy=None):
    """The weights and slots after training, and the epochs that were made."""
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy is not None else tf.distribute.get_strategy().scope():
        model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(300), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    history = model.fit(
        *(_ROWS, _ROWS[:, :1]), batch_size=4, epochs=_NUM_EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    variables = [*model.variables, *model.optimizer.variables]
    return [variable.numpy() for variable in variables], history.epoch


@functools.cache
def _undisturbed():
    return _fit()[0]


def _write_half(folder, contents):
    """Writes the part of a file that a process leaves if it dies while writing."""
    (folder / "latest.weights.h5").write_bytes(contents["latest.weights.h5"][:100])
    raise _StopsError


class AtomicBackupAndRestoreTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.folder = self.directory / "backup"

    def make(self, **arguments):
        return AtomicBackupAndRestore(self.folder, **arguments)

    def stop(self, *callbacks):
        with self.assertRaises(_StopsError):
            _fit(*callbacks)

    def names(self):
        return sorted(os.listdir(self.folder))

    def assert_goes_on_from(self, epoch):
        """To the same end as without an interruption."""
        variables, epochs = _fit(self.make())
        self.assertEqual(epochs, list(range(epoch, _NUM_EPOCHS)))
        for expected, variable in zip(_undisturbed(), variables, strict=True):
            self.assertAllEqual(expected, variable)
        self.assertFalse(self.folder.exists())

    @pytest.mark.slow
    def test_goes_on_as_if_nothing_had_happened(self):
        self.stop(self.make(), _StopAt(3))
        self.assertEqual(self.names(), ["backup_2", "backup_3"])
        self.assert_goes_on_from(3)

    @parameterized.parameters("epoch", 3, 5)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_saves_and_restores_what_keras_does(self, save_freq):
        results = []
        for kind in (AtomicBackupAndRestore, keras.callbacks.BackupAndRestore):
            folder = self.directory / kind.__name__
            self.stop(kind(folder, save_freq=save_freq), _StopAt(2, 2))
            results.append(_fit(kind(folder, save_freq=save_freq)))
        (own, own_epochs), (of_keras, epochs) = results
        self.assertEqual(own_epochs, epochs)
        self.assertLess(len(epochs), _NUM_EPOCHS)
        for one, other in zip(own, of_keras, strict=True):
            self.assertAllEqual(one, other)

    @parameterized.parameters("write", "sync", "rename")
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_an_end_in_the_middle_of_a_write_leaves_the_backup_before(self, where):
        self.stop(self.make(), _StopAt(2))
        patched = {
            "write": mock.patch.object(backups, "_write", _write_half),
            "sync": mock.patch.object(backups, "_sync", side_effect=_StopsError),
            "rename": mock.patch.object(backups.pathlib.Path, "rename", side_effect=_StopsError),
        }
        with patched[where]:
            self.stop(self.make())
        self.assertEqual(self.names(), ["backup_2", "unfinished"])
        self.assert_goes_on_from(2)

    @parameterized.parameters("latest.weights.h5", "training_metadata.json", "checksums.json")
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_a_damaged_backup_is_left_out(self, name):
        self.stop(self.make(), _StopAt(3))
        path = self.folder / "backup_3" / name
        whole = path.read_bytes()
        flipped = whole[:8] + bytes([whole[8] ^ 1]) + whole[9:]
        for damaged in (b"", whole[:-1], flipped, bytes(len(whole)), None):
            with self.subTest(damaged=damaged and damaged[:20]):
                copy = self.directory / "copy"
                shutil.copytree(self.folder, copy)
                path.unlink() if damaged is None else path.write_bytes(damaged)
                with self.assertLogs("absl", "WARNING") as logs:
                    self.assert_goes_on_from(2)
                self.assertIn(f"The backup {self.folder}/backup_3 is damaged", logs.output[0])
                copy.rename(self.folder)

    def test_the_next_backup_does_not_take_the_place_of_the_whole_one_but_of_the_damaged(self):
        self.stop(self.make(), _StopAt(3))
        (self.folder / "backup_3" / "latest.weights.h5").write_bytes(b"")
        with mock.patch.object(backups, "_write", _write_half), self.assertLogs("absl", "WARNING"):
            self.stop(self.make())
        self.assertEqual(self.names(), ["backup_2", "unfinished"])

    def test_without_a_whole_one_it_is_an_error(self):
        self.stop(self.make(), _StopAt(3))
        for each in self.folder.iterdir():
            (each / "latest.weights.h5").write_bytes(b"")
        with (
            self.assertLogs("absl", "WARNING"),
            self.assertRaisesRegex(
                OSError,
                f"all backups in {self.folder} are damaged: backup_3, backup_2. Remove the directory to start over",
            ),
        ):
            _fit(self.make())

    def test_a_full_disk_is_a_warning_and_the_former_backup_stays(self):
        self.folder.mkdir()
        self.enter_context(mounted_disk(str(self.folder), num_bytes=1_000_000))

        with self.assertLogs("absl", "WARNING") as logs:
            self.stop(_FillTheDisk(self.folder), self.make(), _StopAt(3))
        self.assertEqual(self.names(), ["backup_1"])
        with self.assertLogs("absl", "WARNING") as logs:
            _, epochs = _fit(_FillTheDisk(self.folder), self.make(delete_checkpoint=False))
        self.assertEqual(epochs, [1, 2, 3])
        self.assertLen(logs.output, 2)  # After the epochs 1 and 2.
        for line in logs.output:
            self.assertIn(f"Cannot write the backup in {self.folder}: ", line)
            self.assertIn("No space left on device", line)
            self.assertIn("Training continues; the previous backup stays.", line)
        self.assertEqual(self.names(), ["backup_1", "backup_2"])
        metadata = json.loads((self.folder / "backup_2" / "training_metadata.json").read_text())
        self.assertEqual(metadata["epoch"], _NUM_EPOCHS)
        shutil.rmtree(self.folder / "backup_2")

    def test_a_disk_that_is_full_from_the_start(self):
        """HDF5, which Keras's own callback has write to the disk, ends the process then."""
        self.folder.mkdir()
        self.enter_context(mounted_disk(str(self.folder), num_bytes=4096))
        with self.assertLogs("absl", "WARNING") as logs:
            _, epochs = _fit(self.make(delete_checkpoint=False))
        self.assertEqual(epochs, list(range(_NUM_EPOCHS)))
        self.assertLen(logs.output, _NUM_EPOCHS)
        self.assertIn("No space left on device. Training continues; there is no backup yet.", logs.output[0])
        self.assertEmpty(self.names())

    def test_a_second_end_in_the_epoch_that_training_went_on_with_loses_no_epoch(self):
        for _ in range(2):
            self.stop(self.make(save_freq=3), _StopAt(2, 3))
            self.assertEqual(self.make().positions()[0][0], 2)
        _, epochs = _fit(self.make())
        self.assertEqual(epochs, [2, 3])

    @pytest.mark.slow
    def test_goes_on_from_a_backup_of_keras_s(self):
        self.stop(keras.callbacks.BackupAndRestore(self.folder), _StopAt(2))
        self.assert_goes_on_from(2)

    def test_refuses_addresses(self):
        with self.assertRaisesRegex(
            ValueError, "`backup_dir` must be a directory in a file system, not a URL. Received: .*gs://a"
        ):
            AtomicBackupAndRestore("gs://a/b")


class KerasBackupsTest(tf.test.TestCase, parameterized.TestCase):
    """Torn files of Keras's own callback, at the start of `fit` under a strategy."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / "backup"
        self.strategy = hop_tf.HopStrategy()
        self.addCleanup(self.strategy.shutdown)

    def fit(self, *callbacks, **arguments):
        return _fit(keras.callbacks.BackupAndRestore(self.folder, **arguments), *callbacks, strategy=self.strategy)

    def damage(self, name, how):
        path = self.folder / name
        path.write_bytes(how(path.read_bytes()))
        return path

    @parameterized.parameters(
        ("latest.weights.h5", lambda whole: b""),
        ("latest.weights.h5", lambda whole: whole[: len(whole) // 2]),
        ("latest.weights.h5", lambda whole: whole[:4096] + bytes(len(whole) - 4096)),
        ("latest.weights.h5", lambda whole: bytes(len(whole))),
        ("training_metadata.json", lambda whole: b""),
        ("training_metadata.json", lambda whole: whole[:5]),
        ("training_metadata.json", lambda whole: bytes(len(whole))),
        ("training_metadata.json", lambda whole: b"{}"),
    )
    @pytest.mark.stress(after=2)
    def test_a_torn_file_is_an_error_that_names_it(self, name, how):
        with self.assertRaises(_StopsError):
            self.fit(_StopAt(2))
        path = self.damage(name, how)
        with self.assertRaisesRegex(OSError, f"cannot restore from {self.folder}: {path} is damaged.* to start over"):
            self.fit()

    def test_weights_without_an_epoch_are_an_error(self):
        with self.assertRaises(_StopsError):
            self.fit(_StopAt(2))
        (self.folder / "training_metadata.json").unlink()
        with self.assertRaisesRegex(OSError, "latest.weights.h5 exists without .*training_metadata.json"):
            self.fit()

    @parameterized.parameters("latest.weights.h5", "training_metadata.json")
    @pytest.mark.stress(but=1)
    @pytest.mark.slow
    def test_takes_the_former_files_where_keras_has_kept_them(self, name):
        with self.assertRaises(_StopsError):
            self.fit(_StopAt(3), double_checkpoint=True)
        self.damage(name, lambda whole: whole[: len(whole) // 2])
        with self.assertLogs("absl", "WARNING") as logs:
            _, epochs = self.fit(double_checkpoint=True)
        self.assertIn(f"resumes from the previous backup: {self.folder}/{name} is damaged", logs.output[0])
        self.assertEqual(epochs, [2, 3])


if __name__ == "__main__":
    tf.test.main()
