"""Searches by KerasTuner: all ranks make the same trials, or are told what to change."""

import importlib.util
import pathlib
import tempfile
import unittest
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import HopError
from support import MEMBERS

_HAS_TUNER = importlib.util.find_spec("keras_tuner") is not None
if _HAS_TUNER:
    import keras_tuner

_X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
_Y = _X @ np.float32([[1.0], [-1.0], [0.5]])


def _build(parameters):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    rate = parameters.Float("rate", 0.001, 0.1, sampling="log")
    model.compile(keras.optimizers.SGD(rate), "mse", run_eagerly=True)
    return model


@unittest.skipUnless(_HAS_TUNER, "needs keras-tuner")
class KerasTunerTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # Keras counts names for each thread, but this would begin anew on all: a rank has a process of its own.
        self.enter_context(mock.patch.object(keras.backend, "clear_session"))
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def search(self, name, seed, directory, **arguments):
        """The hyperparameters and scores of each rank's trials, and the best ones."""

        def search(strategy):
            tuner = keras_tuner.RandomSearch(
                _build,
                objective="val_loss",
                max_trials=2,
                seed=seed(strategy.rank),
                directory=directory(strategy.rank),
                distribution_strategy=strategy,
                max_consecutive_failed_trials=9,
            )
            tuner.search(_X, _Y, batch_size=8, epochs=1, validation_data=(_X, _Y), verbose=0, **arguments)
            trials = [(trial.hyperparameters.values, trial.score) for trial in tuner.oracle.trials.values()]
            return trials, tuner.get_best_hyperparameters()[0].values

        return MEMBERS[name].run(search)

    @parameterized.parameters("pipe_sgd", "dts", "hop")
    def test_all_ranks_find_the_same(self, name):
        callbacks = [hop_tf.callbacks.MetricAverage()] if name == "hop" else []
        first, other = self.search(
            name, seed=lambda rank: 1, directory=lambda rank: self.folder / str(rank), callbacks=callbacks
        )
        self.assertEqual(first, other)
        trials, best = first
        self.assertLen({score for _, score in trials}, 2)
        self.assertEqual(best, min(trials, key=lambda trial: trial[1])[0])

    @parameterized.parameters("pipe_sgd", "hop")
    def test_other_hyperparameters_end_the_search(self, name):
        with self.assertRaisesRegex(HopError, "rank 1 tries other hyperparameters than rank 0.*same `seed`") as raised:
            self.search(name, seed=lambda rank: rank + 1, directory=lambda rank: self.folder / str(rank))
        self.assertIsInstance(raised.exception, keras_tuner.errors.FatalError)

    def test_one_directory_for_all_ranks_ends_the_search(self):
        with self.assertRaisesRegex(HopError, "`directory` of a tuner must be different on each rank"):
            self.search("pipe_sgd", seed=lambda rank: 1, directory=lambda rank: self.folder)

    def test_an_error_of_the_job_ends_the_search(self):
        class Breaks(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                raise HopError("broken on purpose")

        with self.assertRaisesRegex(HopError, "broken on purpose"):
            self.search(
                "pipe_sgd",
                seed=lambda rank: 1,
                directory=lambda rank: self.folder / str(rank),
                callbacks=[Breaks()],
            )


if __name__ == "__main__":
    tf.test.main()
