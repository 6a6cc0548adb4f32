"""Tests of TensorFlow's profiler for some steps, as with `hop_tf launch --profile_steps`."""

import os
import pathlib
import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.options import PROFILE_VARIABLE, parse_profile_steps
from hop_tf.tools.commands.launch_options import make_parser, read_options


class ProfilingTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        self.enter_context(mock.patch.dict(os.environ, {PROFILE_VARIABLE: "2:3"}))

    def test_writes_what_tensorboard_shows(self):
        started = []
        start, stop = tf.profiler.experimental.start, tf.profiler.experimental.stop
        with (
            mock.patch.object(
                tf.profiler.experimental, "start", lambda folder: (started.append(count.num), start(folder))
            ),
            mock.patch.object(tf.profiler.experimental, "stop", lambda: (started.append(count.num), stop())),
        ):
            count = _Count()
            strategy = hop_tf.HopStrategy(communication_options=hop_tf.CommunicationOptions(log_dir=self.directory))
            with strategy.scope():
                model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            model.fit(
                np.ones((6, 4), "float32"), np.ones((6, 1), "float32"), batch_size=1, verbose=0, callbacks=[count]
            )
            strategy.shutdown()
        self.assertEqual(started, [2, 3])  # Number of ended steps: stops after the fourth, before its callbacks.
        profiles = list(pathlib.Path(self.directory).glob("rank_0/plugins/profile/*/*.xplane.pb"))
        self.assertLen(profiles, 1)

    def test_needs_a_directory(self):
        with self.assertLogs("absl", "WARNING") as logs:
            hop_tf.HopStrategy().shutdown()
        self.assertIn("cannot profile steps without a directory: set CommunicationOptions(log_dir=...)", logs.output[0])

    def test_the_launcher_passes_it_on(self):
        arguments = make_parser("launch").parse_args(["--num_workers=2", "--profile_steps=10:12", __file__])
        self.assertEqual(read_options(arguments).environment[PROFILE_VARIABLE], "10:12")

    @parameterized.parameters("10", "12:10", "a:b", "")
    def test_refuses(self, text):
        with self.assertRaisesRegex(
            ValueError, f"must be the first and the last step.*Received: profile_steps='{text}'"
        ):
            parse_profile_steps(text)


class _Count(keras.callbacks.Callback):
    """Counts the steps that have ended."""

    num = 0

    def on_train_batch_end(self, batch, logs=None):
        self.num += 1


if __name__ == "__main__":
    tf.test.main()
