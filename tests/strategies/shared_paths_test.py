"""Tests of one path for all ranks' callbacks, as in TensorFlow's tutorials: no rank overwrites another's files."""

import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from support import MEMBERS

_ROWS = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def _train(strategy, folder, num_epochs, callbacks=None):
    """Trains; returns the numbers of the epochs that were made."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    callbacks = callbacks or [
        keras.callbacks.BackupAndRestore(f"{folder}/backup/", delete_checkpoint=False),
        keras.callbacks.ModelCheckpoint(folder / "models" / "{epoch}.keras"),
        keras.callbacks.CSVLogger(folder / "log.csv", append=True),
        keras.callbacks.TensorBoard(folder / "runs"),
    ]
    history = model.fit(_ROWS, _ROWS[:, :1], batch_size=4, epochs=num_epochs, callbacks=callbacks, verbose=0)
    return history.epoch


def _files(folder):
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted({str(path.parent if path.name.startswith("events") else path) for path in paths})


class SharedPathsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress(but=1)
    @pytest.mark.slow(after=1)
    def test_every_rank_has_its_own(self, name):
        folder = pathlib.Path(self.get_temp_dir())
        for num_epochs, epochs in ((1, [0]), (2, [1])):  # The second time each goes on from its backup.
            made = MEMBERS[name].run(lambda strategy, number=num_epochs: _train(strategy, folder, number))
            self.assertEqual(made, [epochs, epochs])
        backup = ["latest.weights.h5", "training_metadata.json"]
        of_rank_0 = [
            *(f"backup/{each}" for each in backup),
            "log.csv",
            "models/1.keras",
            "models/2.keras",
            "runs/train",
        ]
        of_rank_1 = [
            *(f"backup_rank_1/{each}" for each in backup),
            "rank_1/log.csv",
            *(f"models/rank_1/{epoch}.keras" for epoch in (1, 2)),
            "runs/rank_1/train",
        ]
        self.assertEqual([path for path in _files(folder) if ".bkp" not in path], sorted(of_rank_0 + of_rank_1))
        self.assertLen((folder / "rank_1" / "log.csv").read_text().splitlines(), 3)

    @pytest.mark.stress
    def test_atomic_backups_have_a_folder_for_each_rank(self):
        folder = pathlib.Path(self.get_temp_dir()) / "backup"

        def train(strategy, num_epochs):
            callback = hop_tf.callbacks.AtomicBackupAndRestore(folder, delete_checkpoint=False)
            return _train(strategy, folder.parent, num_epochs, [callback])

        for num_epochs, epochs in ((1, [0]), (3, [1, 2])):
            made = MEMBERS["pipe_sgd"].run(lambda strategy, number=num_epochs: train(strategy, number))
            self.assertEqual(made, [epochs, epochs])
        for path in (folder, folder.with_name("backup_rank_1")):
            self.assertEqual(sorted(each.name for each in path.iterdir()), ["backup_2", "backup_3"])

    def _fit_with_backups(self, folder, num_epochs):
        def train(strategy):
            callback = hop_tf.callbacks.AtomicBackupAndRestore(folder / "backup", delete_checkpoint=False)
            return _train(strategy, folder, num_epochs, [callback])

        return MEMBERS["pipe_sgd"].run(train)

    @pytest.mark.stress
    def test_ranks_go_on_from_the_newest_backup_that_all_have(self):
        folder = pathlib.Path(self.get_temp_dir())
        self._fit_with_backups(folder, 3)
        shutil.rmtree(folder / "backup_rank_1" / "backup_3")  # As if that rank had died before.
        for epochs in ([2, 3], [3]):
            self.assertEqual(self._fit_with_backups(folder, 4), [epochs, epochs])
            shutil.rmtree(folder / "backup" / "backup_4")  # And now the other one.

    @pytest.mark.slow
    def test_paths_of_the_ranks_own_are_left(self):
        folder = pathlib.Path(self.get_temp_dir())
        MEMBERS["pipe_sgd"].run(lambda strategy: _train(strategy, folder / str(strategy.rank), 1))
        self.assertEqual({path.split("/")[0] for path in _files(folder)}, {"0", "1"})
        self.assertNotIn("rank_1", " ".join(_files(folder)))


if __name__ == "__main__":
    tf.test.main()
