"""Tests callbacks, validation and saved files under HopStrategy's `fit` in two processes, against plain Keras."""

import glob
import os
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner
from support.two_classes import NUM_ROWS, data, make_model

_WORLD_SIZE = 2
_BATCH_SIZE = 8
_STEPS_PER_EPOCH = NUM_ROWS // _BATCH_SIZE
_LEARNING_RATE = 0.1

_LOAD_AND_PREDICT = """
import sys
import keras, numpy as np
model = keras.models.load_model(sys.argv[1])
np.save(sys.argv[3], model.predict(np.load(sys.argv[2]), verbose=0))
assert not [name for name in sys.modules if name.split(".")[0] == "hop_tf"]
"""


def _train(weights, num_epochs):
    """Returns each rank's weights after Figure 7 with SGD from `weights`. A lone rank trains on its own slices."""
    x, y = data()
    half = _BATCH_SIZE // _WORLD_SIZE
    model = make_model()
    for start in [*range(0, NUM_ROWS, _BATCH_SIZE)] * num_epochs:
        means = [np.mean(values, axis=0) for values in zip(*weights, strict=True)]
        gradients = []
        for rank, own in enumerate(weights):
            rows = slice(start + rank * half, start + (rank + 1) * half)
            model.set_weights(own)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x[rows]) - y[rows]))
            gradients.append(tape.gradient(loss, model.trainable_variables))
        weights = [
            [mean - _LEARNING_RATE * g.numpy() for mean, g in zip(means, rank_gradients, strict=True)]
            for rank_gradients in gradients
        ]
    return weights


# In the processes.


def _run():
    strategy = hop_tf.HopStrategy(
        topology="complete", communication_options=hop_tf.CommunicationOptions(timeout_seconds=60)
    )
    with tempfile.TemporaryDirectory() as directory:
        results = {
            "backup": _crash_and_resume(strategy, directory),
            "board": _checkpoint_and_board(strategy, directory),
            "early_stopping": _early_stopping_on_one_rank(strategy),
        }
    strategy.shutdown()
    return results


def _compiled(strategy):
    with strategy.scope():
        model = make_model()
        model.compile(keras.optimizers.SGD(_LEARNING_RATE), "mse")
    return model


def _fit(model, **fit_args):
    fit_args = {"shuffle": False, "epochs": 2} | fit_args
    return model.fit(*data(), batch_size=_BATCH_SIZE, verbose=0, **fit_args).history


class _CrashAfterSecondEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.weights = self.model.get_weights()
            raise RuntimeError("crash")


class _NoteInitialWeights(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.weights = self.model.get_weights()


def _crash_and_resume(strategy, directory):
    """Crashes and resumes. Each rank backs up to its own directory, as on machines that share none."""
    crash, note = _CrashAfterSecondEpoch(), _NoteInitialWeights()
    result = {"crashed": False}
    try:
        _fit(_compiled(strategy), epochs=4, callbacks=[keras.callbacks.BackupAndRestore(f"{directory}/backup"), crash])
    except RuntimeError as error:
        result["crashed"] = str(error) == "crash"
    model = _compiled(strategy)
    history = _fit(model, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(f"{directory}/backup"), note])
    return {
        **result,
        "saved": crash.weights,
        "restored": note.weights,
        "num_epochs": len(history["loss"]),
        "final": model.get_weights(),
        "iterations": int(model.optimizer.iterations),
    }


def _checkpoint_and_board(strategy, directory):
    path = f"{directory}/model.keras"
    model = _compiled(strategy)
    board = keras.callbacks.TensorBoard(f"{directory}/board")
    history = _fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path), board])
    with open(path, "rb") as file:
        saved = file.read()
    return {
        "losses": _logged_losses(f"{directory}/board/train"),
        "history": history["loss"],
        "weights": model.get_weights(),
        "loaded": keras.models.load_model(path).get_weights(),
        "file": saved,
        "predicted": model.predict(data()[0], verbose=0),
    }


def _logged_losses(directory):
    """Returns the epochs' losses from TensorBoard's event files."""
    losses = {}
    for path in glob.glob(f"{directory}/events.out.tfevents.*"):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                if value.tag == "epoch_loss":
                    losses[event.step] = float(tf.make_ndarray(value.tensor))
    return [losses[step] for step in sorted(losses)]


def _early_stopping_on_one_rank(strategy):
    """Trains. Rank 1 demands more progress than there is, and stops after its second epoch."""
    model = _compiled(strategy)
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=1e6 if strategy.rank == 1 else 0.0)
    history = _fit(model, epochs=4, callbacks=[stop])
    return {"num_epochs": len(history["loss"]), "weights": model.get_weights()}


@pytest.mark.slow
class HopFitCallbacksTest(tf.test.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with MultiProcessRunner(_run, num_workers=_WORLD_SIZE, timeout_seconds=300) as runner:
            cls.values = runner.join().raise_for_errors().values

    def _results(self, name):
        return [values[name] for values in self.values]

    def _assert_weights_close(self, got, want, tolerance=1e-5):
        for got_weight, want_weight in zip(got, want, strict=True):
            self.assertAllClose(got_weight, want_weight, rtol=tolerance, atol=tolerance)

    @pytest.mark.stress
    def test_backup_and_restore(self):
        results = self._results("backup")
        initial = make_model().get_weights()
        for result, expected in zip(results, _train([initial, initial], num_epochs=2), strict=True):
            self.assertTrue(result["crashed"])
            self._assert_weights_close(result["saved"], expected)
            self._assert_weights_close(result["restored"], result["saved"], tolerance=0)

    def test_training_goes_on_from_rank_0s_backup(self):
        results = self._results("backup")
        expected = _train([results[0]["restored"]] * _WORLD_SIZE, num_epochs=2)
        for result, weights in zip(results, expected, strict=True):
            self.assertEqual((result["num_epochs"], result["iterations"]), (2, 4 * _STEPS_PER_EPOCH))
            self._assert_weights_close(result["final"], weights)

    def test_checkpoint_holds_the_weights(self):
        for result in self._results("board"):
            self._assert_weights_close(result["loaded"], result["weights"], tolerance=0)

    @pytest.mark.stress
    def test_keras_files_load_without_hop_tf(self):
        result = self._results("board")[1]
        with tempfile.TemporaryDirectory() as directory:
            paths = [os.path.join(directory, name) for name in ("model.keras", "x.npy", "predicted.npy")]
            with open(paths[0], "wb") as file:
                file.write(result["file"])
            np.save(paths[1], data()[0])
            subprocess.run([sys.executable, "-c", _LOAD_AND_PREDICT, *paths], check=True, cwd=directory, timeout=120)
            self.assertAllClose(np.load(paths[2]), result["predicted"], rtol=1e-6, atol=1e-6)

    def test_tensorboard_has_each_ranks_losses(self):
        first, second = self._results("board")
        for result in (first, second):
            self.assertLen(result["losses"], 2)
            self.assertAllClose(result["losses"], result["history"], rtol=1e-6)
        self.assertNotAllClose(first["losses"], second["losses"], rtol=1e-3)

    def test_the_others_go_on_when_one_stops_early(self):
        """The receiver's own weights replace those of the stopped rank in the mean."""
        first, second = self._results("early_stopping")
        initial = make_model().get_weights()
        at_stop = _train([initial, initial], num_epochs=2)
        self.assertEqual((first["num_epochs"], second["num_epochs"]), (4, 2))
        self._assert_weights_close(second["weights"], at_stop[1])
        self._assert_weights_close(first["weights"], _train(at_stop[:1], num_epochs=2)[0])


if __name__ == "__main__":
    tf.test.main()
