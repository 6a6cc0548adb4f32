"""Tests of state that callbacks keep and restore: backups after a crash."""

import atexit
import functools
import pathlib
import shutil
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.callbacks import AtomicBackupAndRestore
from hop_tf.errors import HopError, PeerFailedError
from hop_tf.keras_hook import backup_agreement
from hop_tf.keras_hook.backups import write_files
from hop_tf.tools.testing import InProcessCluster
from support import MEMBERS, error_of

_ROWS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
_NUM_EPOCHS = 4
_KINDS = {"atomic": AtomicBackupAndRestore, "of_keras": keras.callbacks.BackupAndRestore}


class _CrashError(Exception):
    pass


class _Crash(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch:
            raise _CrashError


class _Note(keras.callbacks.Callback):
    """Keeps the weights and the optimizer's state with which training goes on."""

    restored = None

    def on_epoch_begin(self, epoch, logs=None):
        if self.restored is None:
            self.restored = [variable.numpy() for variable in self.model.variables + self.model.optimizer.variables]


def _fit(*callbacks, num_epochs=_NUM_EPOCHS):
    """Trains; returns the model, and the epochs that were made."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)  # Faster than making a graph.
    history = model.fit(
        *(_ROWS, _ROWS[:, :1]), batch_size=6, epochs=num_epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model, history.epoch


@functools.cache
def _crashed(kind, crashes_in, save_freq):
    """Returns the folder that a crash leaves, and the state that is restored from it."""
    note, folder = _Note(), pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    crash = functools.partial(kind, folder / "backup", save_freq=save_freq, delete_checkpoint=False)
    assert isinstance(error_of(_fit, crash(), _Crash(crashes_in)), _CrashError)
    shutil.copytree(folder / "backup", folder / "copy")
    _fit(crash(), note)
    return folder / "copy", note.restored


def _crash_with_backup(path, kind, crashes_in=2, save_freq="epoch"):
    """Writes a backup to `path`. The backup does not depend on the strategy."""
    folder, restored = _crashed(kind, crashes_in, save_freq)
    shutil.copytree(folder, path)
    return restored


@functools.cache
def _undisturbed():
    model, _ = _fit()
    return model.get_weights()


class BackupsOfSomeRanksTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def path(self, rank):
        """Returns the path for a rank's callback. All ranks get the path of rank 0."""
        return self.folder / ("backup" if rank == 0 else f"backup_rank_{rank}")

    def resume(self, run, kind=AtomicBackupAndRestore, **arguments):
        """Resumes on each rank; returns the restored values, the epochs that were made, and the weights."""

        def train(strategy):
            note = _Note()
            with strategy.scope():
                model, epochs = _fit(kind(self.path(0), **arguments), note)
            return note.restored, epochs, model.get_weights()

        return run(train)

    def assert_all_go_on(self, results, restored, epochs=(2, 3)):
        for of_rank, epochs_of_rank, _ in results:
            self.assertEqual(epochs_of_rank, list(epochs))
            for expected, variable in zip(restored, of_rank, strict=True):
                self.assertAllEqual(expected, variable)

    @parameterized.parameters(
        *((name, kind, rank) for name in MEMBERS for kind, rank in [("atomic", 0), ("of_keras", 1)]),
    )
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_a_rank_without_a_backup_goes_on_as_the_others(self, name, kind, missing):
        restored = _crash_with_backup(self.path(1 - missing), _KINDS[kind])
        self.assert_all_go_on(self.resume(MEMBERS[name].run, _KINDS[kind]), restored)

    @parameterized.product(num_ranks=[1, 3], kind=[*_KINDS])
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_another_number_of_ranks_computes_what_plain_keras_does(self, num_ranks, kind):
        for rank in range(2):
            restored = _crash_with_backup(self.path(rank), _KINDS[kind])

        def make(resolver):
            return hop_tf.PipeSGDStrategy(pipeline_width=1, cluster_resolver=resolver)

        results = self.resume(InProcessCluster(num_ranks, make).run, _KINDS[kind])
        self.assert_all_go_on(results, restored)
        for _, _, weights in results:
            self.assertAllClose(_undisturbed(), weights, rtol=1e-4, atol=1e-6)

    @pytest.mark.slow
    def test_more_ranks_than_before_where_ranks_do_not_wait_for_each_other(self):
        for rank in range(2):
            restored = _crash_with_backup(self.path(rank), AtomicBackupAndRestore)
        cluster = InProcessCluster(3, lambda resolver: hop_tf.HopStrategy(cluster_resolver=resolver))
        self.assert_all_go_on(self.resume(cluster.run), restored)

    @parameterized.parameters("pipe_sgd", "hop")
    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_without_any_backup_all_begin_anew(self, name):
        results = self.resume(MEMBERS[name].run)
        self.assertEqual([epochs for _, epochs, _ in results], [[*range(_NUM_EPOCHS)]] * 2)

    @pytest.mark.stress
    def test_backups_between_epochs(self):
        """Keras repeats the epoch of the backup from its begin."""
        restored = _crash_with_backup(self.path(1), AtomicBackupAndRestore, save_freq=3)
        self.assert_all_go_on(self.resume(MEMBERS["pipe_sgd"].run, save_freq=3), restored, epochs=[1, 2, 3])

    @parameterized.product(name=["dts", "hop", "pipe_sgd"], kind=[*_KINDS])
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(after=1)
    def test_the_newest_backup_counts_where_none_is_common(self, name, kind):
        """The ranks were further apart than their backups, or one rank has lost its newest backup."""
        _crash_with_backup(self.path(0), _KINDS[kind], crashes_in=1)
        restored = _crash_with_backup(self.path(1), _KINDS[kind], crashes_in=3)
        for path in self.path(1).glob("backup_2"):
            shutil.rmtree(path)
        with self.assertLogs("absl", "WARNING") as logs:
            self.assert_all_go_on(self.resume(MEMBERS[name].run, _KINDS[kind]), restored, epochs=[3])
        self.assertIn(
            "rank 0 has only older backups (epoch 1, batch 0). It resumes from a copy of the backup of rank 1: "
            "epoch 3, batch 0.",
            " ".join(logs.output),
        )

    @parameterized.parameters(
        # Positions of ranks 0 and 1, and the positions that ranks keep, in lock step and otherwise.
        ([(1, 30), (1, 25)], [(1, 25), (1, 20)], {0: (1, 25), 1: (1, 25)}, {0: (1, 25), 1: (1, 25)}),
        ([(1, 30), (1, 25)], [(1, 15), (1, 10)], {0: (1, 30)}, {0: (1, 30), 1: (1, 15)}),
        ([(1, 5), (0, 30)], [(2, 0), (1, 30)], {1: (2, 0)}, {1: (2, 0)}),
    )
    def test_which_backup_counts(self, first, second, in_lock_step, elsewhere):
        for expected, is_in_lock_step in ((in_lock_step, True), (elsewhere, False)):
            chosen = backup_agreement._choose({0: first, 1: second}, in_lock_step=is_in_lock_step)
            self.assertEqual(chosen, expected)

    def test_damaged_backups_are_an_error_on_all_ranks(self):
        for rank in range(2):
            _crash_with_backup(self.path(rank), AtomicBackupAndRestore)
        for path in self.path(1).rglob("*.h5"):
            path.write_bytes(b"")
        results = self.resume(lambda train: MEMBERS["hop"].run(lambda strategy: error_of(train, strategy)))
        self.assertIsInstance(results[0], PeerFailedError)
        self.assertIsInstance(results[1], OSError)
        self.assertRegex(str(results[0]), "rank 1 .*OSError: all backups in .* are damaged")

    @parameterized.parameters("pipe_sgd", "hop")
    def test_a_rank_without_the_callback_is_an_error(self, name):
        _crash_with_backup(self.path(0), AtomicBackupAndRestore)

        def train(strategy):
            with strategy.scope():
                _fit(*([AtomicBackupAndRestore(self.path(0))] if strategy.is_chief else []))

        error = "rank 0 would resume from a backup; rank 1 would begin at the first epoch, without the callback"
        with self.assertRaisesRegex(HopError, error):
            MEMBERS[name].run(train)

    @pytest.mark.slow
    def test_a_backup_at_an_address(self):
        """TensorFlow takes this file system for a bucket."""
        _crash_with_backup(self.path(0), keras.callbacks.BackupAndRestore)
        address = f"ram://{self.folder.name}"
        write_files(f"{address}/rank_1", (2, 0), (self.path(0) / "latest.weights.h5").read_bytes())

        def train(strategy):
            with strategy.scope():
                _, epochs = _fit(keras.callbacks.BackupAndRestore(f"{address}/rank_{strategy.rank}"))
            return epochs

        self.assertEqual(MEMBERS["hop"].run(train), [[2, 3], [2, 3]])


_X = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
_Y = (_X @ np.float32([[1.0], [-2.0], [0.5], [0.0]])).astype(np.float32)


class _KeepsEpochEnd(keras.callbacks.Callback):
    """A callback as users write it."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self._kept = self.model.get_weights()

    def on_train_end(self, logs=None):
        self.model.set_weights(self._kept)


def _keeping_lambda():
    kept = []
    model = _KeepsModel()
    return [
        model,
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: kept.append(model.model.get_weights()),
            on_train_end=lambda logs: model.model.set_weights(kept[0]),
        ),
    ]


class _KeepsModel(keras.callbacks.Callback):
    """A callback that only has the model of `set_model`."""


def _early_stopping():
    """Returns `EarlyStopping` that takes the first epoch for the best one."""
    return [keras.callbacks.EarlyStopping("val_loss", mode="max", patience=2, restore_best_weights=True)]


_RESTORING = {
    "early_stopping": _early_stopping,
    "callback": lambda: [_KeepsEpochEnd()],
    "lambda": _keeping_lambda,
    "swap_ema": lambda: [keras.callbacks.SwapEMAWeights()],
}


def _fit_to_restore(strategy, callbacks, optimizer=None, num_epochs=3):
    """Trains; returns the model, and the weights at the ends of epochs."""
    ends = []
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile(optimizer or keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(model.get_weights()))
    averages = hop_tf.callbacks.MetricAverage()
    model.fit(
        *(_X, _Y),
        batch_size=8,
        epochs=num_epochs,
        validation_data=(_X, _Y),
        shuffle=False,
        verbose=0,
        callbacks=[averages, note, *callbacks],
    )
    return model, ends


class WeightsOfAnEpochsEndTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(kind=[*_RESTORING], name=[name for name in MEMBERS if MEMBERS[name].is_in_lock_step])
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_are_equal_on_all_ranks_and_their_mean_in_lock_step(self, kind, name):
        def train(strategy):
            optimizer = keras.optimizers.SGD(0.05, use_ema=True) if kind == "swap_ema" else None
            model, ends = _fit_to_restore(strategy, _RESTORING[kind](), optimizer)
            return model.get_weights(), ends

        (first, ends), (other, ends_of_other) = MEMBERS[name].run(train)
        for one, another in zip(first, other, strict=True):
            self.assertAllEqual(one, another)
        if kind != "swap_ema":
            for weights, end, end_of_other in zip(first, ends[0], ends_of_other[0], strict=True):
                self.assertAllClose(weights, (end + end_of_other) / 2, rtol=1e-6)

    @pytest.mark.slow
    def test_are_equal_under_synchronous_shat(self):
        def train(strategy):
            model, _ = _fit_to_restore(strategy, _early_stopping())
            return model.get_weights()

        first, other = MEMBERS["shat"].run(train, consistency="bsp")
        for one, another in zip(first, other, strict=True):
            self.assertAllEqual(one, another)

    @parameterized.parameters("canary", "hop")
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_are_told_where_ranks_do_not_wait_for_each_other(self, name):
        with self.assertLogs("absl", "WARNING") as logs:
            MEMBERS[name].run(lambda strategy: _fit_to_restore(strategy, _early_stopping()))
        told = [line for line in logs.output if "Call `strategy.synchronize(model)` on all ranks before" in line]
        self.assertLen(told, 2)

    @pytest.mark.slow
    def test_nothing_is_changed_or_told_without_such_a_callback(self):
        with self.assertNoLogs("absl", "WARNING"):
            results = MEMBERS["dts"].run(lambda strategy: _fit_to_restore(strategy, [keras.callbacks.EarlyStopping()]))
        self.assertLen(results, 2)

    @pytest.mark.slow
    def test_a_rank_that_ends_early_waits_without_being_waited_for(self):
        def train(strategy):
            model, _ = _fit_to_restore(strategy, [_KeepsEpochEnd()], num_epochs=2 + strategy.rank)
            return model.get_weights()

        with self.assertLogs("absl", "WARNING") as logs:
            MEMBERS["pipe_sgd"].run(train)
        self.assertIn("Call `strategy.synchronize(model)`", " ".join(logs.output))

    @pytest.mark.slow
    def test_a_rank_whose_last_callback_fails_is_not_waited_for(self):
        class Fails(_KeepsEpochEnd):
            def on_train_end(self, logs=None):
                raise _CrashError

        def train(strategy):
            callback = Fails() if strategy.rank else _KeepsEpochEnd()
            return error_of(_fit_to_restore, strategy, [callback])

        with self.assertLogs("absl", "WARNING") as logs:
            first, other = MEMBERS["dts"].run(train)
        self.assertIsNone(first)
        self.assertIsInstance(other, _CrashError)
        self.assertIn(
            "rank 0: ranks do not average the weights that callbacks have restored: rank 1 has ended",
            " ".join(logs.output),
        )


if __name__ == "__main__":
    tf.test.main()
