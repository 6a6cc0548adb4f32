"""Tests of Pipe-SGD between processes: over real sockets, with different settings, and with a killed rank."""

import json
import os
import signal
import threading
import zlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import hop_tf
from hop_tf.collectives import all_reduce
from hop_tf.strategies.pipe_sgd.exchange import PipeSGDExchange
from hop_tf.tools.testing import MultiProcessRunner

_BATCH_SIZE = 12
_NUM_STEPS = 24


def _data():
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 4)).astype("float32")
    return x, x @ np.arange(4, dtype="float32")[:, None]


def _model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


class _KillRank1(keras.callbacks.Callback):
    def __init__(self, rank, at_step):
        super().__init__()
        self._rank, self._at_step = rank, at_step

    def on_train_batch_end(self, batch, logs=None):
        if (self._rank, batch) == (1, self._at_step):
            os.kill(os.getpid(), signal.SIGKILL)


def _run(settings, kill_at=None, data_planes=("tcp",)):
    """Trains; returns the weights after each step, and the error of `fit`."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    data_plane = data_planes[rank % len(data_planes)]
    options = hop_tf.CommunicationOptions(timeout_seconds=60 if kill_at is None else 20, data_plane=data_plane)
    own = {
        "pipeline_width": 2,
        "codec": None,
        "algorithm": "mesh",
        "compensation": "none",
        **settings[rank % len(settings)],
    }
    strategy = hop_tf.PipeSGDStrategy(communication_options=options, **own)
    with strategy.scope():
        model = _model()
    history = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: history.append(model.get_weights()[0])
    )
    error = ""
    try:
        callbacks = [record, _KillRank1(rank, kill_at)]
        model.fit(*_data(), batch_size=_BATCH_SIZE, shuffle=False, verbose=0, callbacks=callbacks)
    except hop_tf.errors.HopError as raised:
        error = f"{type(raised).__name__}: {raised}"
    strategy.shutdown()
    return np.array(history), error


def _average(size, fault_at, fault):
    """Averages vectors; returns checksums of the means, the error, and the number of broken connections.

    Args:
      size: Length of the vectors.
      fault_at: Step and chunk of the fault. The fault happens in each multiple of the step.
      fault: "dies" or "loses its connections": the fault of rank 1, which has sent a part of the step's chunks by then.
    """
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    send = all_reduce.Operation.send

    def send_under_faults(operation, to, turn, chunk, data, lane=None):
        step, of_step = fault_at
        if (rank, operation.step % step, chunk) == (1, 0, of_step) and operation.step:
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            nums_broken.append(_break_connections(strategy))
        send(operation, to, turn, chunk, data, lane)

    options = hop_tf.CommunicationOptions(timeout_seconds=20)
    strategy = hop_tf.PipeSGDStrategy(communication_options=options)
    checksums, error, nums_broken = [], "", []
    reduction = strategy.make_all_reduce("mesh", size)
    with mock.patch.object(all_reduce.Operation, "send", send_under_faults):
        try:
            for step in range(6):
                (mean,) = reduction.mean(step, [_values(rank, step, size)], lambda other, step: True)
                checksums.append(zlib.crc32(mean.tobytes()))
        except hop_tf.errors.HopError as raised:
            error = f"{type(raised).__name__}: {raised}"
    reduction.close()
    strategy.shutdown()
    return checksums, error, sum(nums_broken)


def _break_connections(strategy):
    """Breaks the connections that bring messages; returns their number."""
    servers = strategy.training.runtime._transport._sockets
    connections = [each for server in servers for each in tuple(server._connections)]
    for connection in connections:
        connection.end()
    return len(connections)


def _checksums(size, num_steps):
    """Returns the checksums of the means over four ranks."""
    sums = (sum(_values(rank, step, size) for rank in range(4)) for step in range(num_steps))
    return [zlib.crc32((total / np.float32(4)).tobytes()) for total in sums]


def _values(rank, step, size):
    """Returns whole numbers whose sums, and means over four ranks, are exact in any order."""
    return np.random.default_rng([rank, step]).integers(-1000, 1000, size).astype(np.float32)


class _WaitsInBackward(keras.layers.Layer):
    """A layer whose gradient comes when the step's first segment has reached the communication thread."""

    def __init__(self, wait):
        super().__init__()
        self._wait = wait

    def call(self, x):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda upstream: tf.py_function(
                lambda gradient: self._wait(gradient), [upstream], tf.float32
            )

        y = identity(x)
        y.set_shape(x.shape)
        return y


def _run_segments():
    """Trains; returns for each step True if the last layer's gradient left before the first layer's was computed."""
    submitted, in_time = threading.Event(), []

    def wait(gradient):
        in_time.append(submitted.wait(20))
        return gradient

    step = PipeSGDExchange.step

    def record_and_step(self, request):
        if request.segment == 0:
            submitted.set()
        result = step(self, request)
        if request.segment == 1:
            submitted.clear()
        return result

    with mock.patch.object(PipeSGDExchange, "step", record_and_step):
        strategy = hop_tf.PipeSGDStrategy(pipeline_width=1, num_segments=2)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(8), _WaitsInBackward(wait), keras.layers.Dense(8)]
            )
            model.compile("sgd", "mse")
        model.fit(np.zeros((8, 4)), np.zeros((8, 8)), batch_size=2, verbose=0)
        strategy.shutdown()
    return in_time


def _expected(width):
    """Returns the weights after each step, in NumPy. With equal shares, the mean is the whole batch's gradient."""
    x, y = (array.astype(np.float64) for array in _data())
    w, gradients, history = np.zeros((4, 1)), [], []
    for step in range(_NUM_STEPS):
        rows = slice(step * _BATCH_SIZE, (step + 1) * _BATCH_SIZE)
        gradients.append(2 / _BATCH_SIZE * x[rows].T @ (x[rows] @ w - y[rows]))
        if step >= width - 1:
            w = w - 0.05 * gradients[step - (width - 1)]
        history.append(w)
    return np.array(history)


class PipeSGDProcessesTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_trains(self):
        """Ranks train over any data plane."""
        arguments = ([{}], None, ("tcp", "grpc"))
        with MultiProcessRunner(_run, num_workers=3, args=arguments, timeout_seconds=120) as runner:
            values = runner.join().raise_for_errors().values
        for history, error in values:
            self.assertEqual(error, "")
            self.assertAllClose(history, _expected(2), rtol=1e-5, atol=1e-5)
            self.assertAllEqual(history, values[0][0])

    @pytest.mark.stress
    def test_a_killed_rank_is_an_error_on_all_others(self):
        """The others' weights of all steps until then are right."""
        arguments = ([{"codec": "truncate16"}], 9)
        with MultiProcessRunner(_run, num_workers=3, args=arguments, timeout_seconds=120) as runner:
            results = runner.join()
        results.raise_for_errors(except_ranks=[1])
        self.assertEqual(results[1].exit_code, -signal.SIGKILL)
        histories = [results[rank].value[0] for rank in (0, 2)]
        shortest = min(map(len, histories))
        self.assertBetween(shortest, 9, _NUM_STEPS - 1)
        for rank, history in zip((0, 2), histories, strict=True):
            self.assertRegex(results[rank].value[1], "^PeerLostError: .*rank 1")
            self.assertAllEqual(history[:shortest], histories[0][:shortest])
            self.assertAllClose(history, _expected(2)[: len(history)], atol=0.02)

    @pytest.mark.stress
    def test_a_rank_is_killed_in_the_middle_of_an_all_reduce(self):
        """Sockets hold parts of messages then. No rank gets a wrong mean, and all get an error."""
        size, fault_at = 6 << 20, (3, 2)
        with MultiProcessRunner(_average, num_workers=4, args=(size, fault_at, "dies"), timeout_seconds=120) as runner:
            results = runner.join()
        results.raise_for_errors(except_ranks=[1])
        self.assertEqual(results[1].exit_code, -signal.SIGKILL)
        for rank in (0, 2, 3):
            checksums, error, _ = results[rank].value
            self.assertEqual(checksums, _checksums(size, 3))
            self.assertRegex(error, "^PeerLostError: .*rank 1")

    @pytest.mark.stress
    def test_connections_break_in_the_middle_of_an_all_reduce(self):
        """Messages in flight are sent again, and count once."""
        arguments = (6 << 20, (1, 2), "loses its connections")
        with MultiProcessRunner(_average, num_workers=4, args=arguments, timeout_seconds=120) as runner:
            values = runner.join().raise_for_errors().values
        for checksums, error, _ in values:
            self.assertEqual(error, "")
            self.assertEqual(checksums, _checksums(6 << 20, 6))
        self.assertGreaterEqual(values[1][2], 5)

    @pytest.mark.stress
    def test_segments_leave_during_back_propagation(self):
        with MultiProcessRunner(_run_segments, num_workers=2, timeout_seconds=120) as runner:
            values = runner.join().raise_for_errors().values
        for in_time in values:
            self.assertEqual(in_time, [True] * 4)

    def test_other_settings_are_refused(self):
        arguments = ([{"codec": "int8"}, {"codec": "truncate16"}],)
        with MultiProcessRunner(_run, num_workers=2, args=arguments, timeout_seconds=120) as runner:
            values = runner.join().raise_for_errors().values
        for history, error in values:
            self.assertEmpty(history)
            self.assertRegex(error, "^MismatchError: .*codec.*Int8.*Truncate16|^MismatchError: .*Truncate16.*Int8")


if __name__ == "__main__":
    tf.test.main()
