"""Tests of DTS between processes, over a link that stalls."""

import json
import os
import subprocess
import sys
import threading
import time
import unittest

import keras
import numpy as np
import pytest
import tensorflow as tf

import hop_tf
from hop_tf.tools.testing import network

_BATCH_SIZE = 4
_NUM_STEPS = 50
_RATE, _MOMENTUM = 0.01, 0.9
_ADDRESSES = "HOP_TF_TEST_ADDRESSES"
_PORT = 23000
_STALL_SECONDS = 5.0
_TRACED = 3  # Number of first steps that may take long for another reason.
_REASON = network.available()


def _data():
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 4)).astype("float32")
    return x, np.ones(len(x), "float32")


def _wait_for_a_line():
    print("waiting", flush=True)
    sys.stdin.readline()


def _run():
    """Trains; rank 0 waits for a line when it has made some steps.

    Returns:
      The weights, the error of `fit`, and the longest time between two steps, in seconds.
    """
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    os.environ["HOP_TF_STEP_SECONDS"] = "0.03"
    options = hop_tf.CommunicationOptions(timeout_seconds=20)
    strategy = hop_tf.DTSStrategy(delay=6, interval=4, communication_options=options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        # The gradient does not depend on the weights.
        model.compile(keras.optimizers.SGD(_RATE, momentum=_MOMENTUM), loss=lambda y, y_pred: y_pred)
    error, begins = "", []
    try:
        wait = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda step, logs: _wait_for_a_line() if (rank, step) == (0, 15) else None
        )
        clock = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda step, logs: begins.append(time.monotonic()))
        model.fit(*_data(), batch_size=_BATCH_SIZE, shuffle=False, verbose=0, callbacks=[wait, clock])
    except hop_tf.errors.HopError as raised:
        error = f"{type(raised).__name__}: {raised}"
    strategy.shutdown()
    return model.get_weights()[0].ravel().tolist(), error, max(np.diff(begins[_TRACED:]), default=0.0)


def _expected():
    w, v = np.zeros(4), np.zeros(4)
    for rows in _data()[0].astype(np.float64).reshape(_NUM_STEPS, _BATCH_SIZE, 4):
        v = _MOMENTUM * v - _RATE * rows.mean(0)
        w += v
    return w


class DTSProcessesTest(tf.test.TestCase):
    @unittest.skipIf(_REASON is not None, f"needs an emulated network ({_REASON})")
    @pytest.mark.slow
    @pytest.mark.stress
    def test_a_link_that_stalls_costs_time_only(self):
        with network.EmulatedNetwork(2, relay=True, round_trip_seconds=0.05) as net:
            workers = [f"{host}:{_PORT}" for host in net.addresses]
            processes = [self._start(net, workers, rank) for rank in range(2)]
            self.assertIn("waiting\n", processes[0].stdout)  # Reads until this line.
            net.stall(1, _STALL_SECONDS)
            outputs = [self._read(process) for process in processes]
        for weights, error, pause in outputs:
            self.assertEqual(error, "")
            self.assertGreater(pause, _STALL_SECONDS / 2)  # Otherwise the stall did not stop any rank.
            self.assertAllClose(weights, _expected(), rtol=1e-5, atol=1e-6)

    def _start(self, net, workers, rank):
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            _ADDRESSES: "1",
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return net.popen(rank, [sys.executable, __file__], env=environment, text=True, **pipes)

    def _read(self, process):
        """Lets a waiting process go on; returns its last output."""
        timer = threading.Timer(90, process.kill)
        timer.start()
        output, _ = process.communicate("\n")
        timer.cancel()
        self.assertEqual(process.returncode, 0, output)
        return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    if _ADDRESSES in os.environ:
        print(json.dumps(_run()))
    else:
        tf.test.main()
