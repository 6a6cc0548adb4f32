"""Tests that counters of steps, and the operations of hop_tf's threads, stay on the host if a rank trains on a GPU.

A thread without a device scope would run its operations on the first GPU, if there is one. Here the second processor of
`conftest.py` stands for a GPU.
"""

import re
import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context
from tensorflow.python.framework import constant_op

import hop_tf
from hop_tf.tensors.fifo import enqueue_arrays
from hop_tf.tools.testing import MultiProcessRunner
from support import MEMBERS, NUM_RANKS, make_two_devices, noting_operations

_OWN_THREADS = "hop_tf (?!rank)"  # Those of the test have the names of ranks.
_RUN = {"TFE_Py_FastPathExecute": 1, "TFE_Py_Execute": 2}  # Index of the operation's name among the arguments.


class _EagerOperations:
    """Notes the device scope of each eager operation, and of each array that becomes a tensor."""

    def __init__(self):
        self.seen = set()  # Tuples of the thread's name, the operation's name, and the device.
        self._patches = [
            mock.patch.object(pywrap_tfe, name, self._noting(getattr(pywrap_tfe, name), place))
            for name, place in _RUN.items()
        ]
        convert = self._noting(constant_op.convert_to_eager_tensor, None)
        self._patches.append(mock.patch.object(constant_op, "convert_to_eager_tensor", convert))

    def _noting(self, run, place):
        def noted(*arguments, **keywords):
            name = "an array" if place is None else arguments[place]
            self.seen.add((threading.current_thread().name, str(name), context.context().device_name))
            return run(*arguments, **keywords)

        return noted

    def __enter__(self):
        for patch in self._patches:
            patch.__enter__()
        return self

    def __exit__(self, *exc_info):
        for patch in self._patches:
            patch.__exit__(*exc_info)


def _of_host_values(operations, device):
    """Returns the operations on `device` that compute int64 or bool only from values of the host."""
    host, constants, found = set(), set(), []
    for operation in operations:
        inputs = {id(tensor.op) for tensor in operation.inputs} - constants
        if operation.type == "Placeholder" and operation.outputs[0].dtype != tf.resource:
            if _origin(operation.outputs[0]).endswith("CPU:0"):
                host.add(id(operation))  # A condition has captured it.
        elif operation.type == "Const":
            constants.add(id(operation))
        elif operation.type == "ReadVariableOp":
            if _origin(operation.inputs[0]).endswith("CPU:0"):
                host.add(id(operation))
        elif operation.device.endswith("CPU:0"):
            host.add(id(operation))
        elif inputs and inputs <= host and {each.dtype for each in operation.outputs} <= {tf.int64, tf.bool}:
            host.add(id(operation))
            if operation.device.endswith(device):
                found.append(f"{operation.type} {operation.name}")
    return found


def _origin(handle):
    """Returns the device of a variable that a graph has captured."""
    captured = {id(inner): outer for outer, inner in getattr(handle.graph, "captures", ())}
    outer = captured.get(id(handle))
    if outer is None:
        return handle.device
    return outer.device if isinstance(outer, tf.__internal__.EagerTensor) else _origin(outer)


def _fit(strategy):
    with strategy.scope():
        normalization = keras.layers.BatchNormalization(synchronized=strategy.in_lock_step)
        model = keras.Sequential([keras.Input((8,)), normalization, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    for _ in range(2):
        model.fit(np.ones((64, 8), np.float32), np.ones((64, 1), np.float32), batch_size=8, verbose=0)


def _misplaced(name, settings):
    """Trains in a process of its own; returns the operations that should be on the host.

    If ranks were threads, each with eager operations on logical devices, TensorFlow would mix up their shapes.
    """
    make_two_devices()
    operations = []
    with noting_operations(operations.append):
        strategy = MEMBERS[name].make(devices=["CPU:1"], **settings)
        _fit(strategy)
        strategy.shutdown()
    return _of_host_values(operations, "CPU:1")


class HostPlacementTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress(but=3)
    @pytest.mark.slow(after=1)
    def test_threads_run_operations_on_the_host(self, name):
        options = hop_tf.CommunicationOptions(
            timeout_seconds=60, log_dir=self.get_temp_dir(), report_interval_seconds=0.05
        )
        with _EagerOperations() as operations:
            MEMBERS[name].run(_fit, options=options)
        own = {each for each in operations.seen if re.match(_OWN_THREADS, each[0])}
        self.assertContainsSubset({"QueueDequeueV2", "QueueEnqueueV2", "an array"}, {name for _, name, _ in own})
        self.assertEmpty([each for each in own if not (each[2] or "").endswith("device:CPU:0")])

    def test_arrays_are_enqueued_on_the_host_by_any_thread(self):
        queue = tf.queue.FIFOQueue(2, [tf.float32])
        with _EagerOperations() as operations:
            for _ in range(2):
                thread = threading.Thread(target=enqueue_arrays, args=(queue, [np.ones(3, np.float32)]), name="other")
                thread.start()
                thread.join()
        ((_, name, device),) = (each for each in operations.seen if each[0] == "other")
        self.assertEqual(name, "QueueEnqueueV2")
        self.assertEndsWith(device, "device:CPU:0")
        self.assertEqual(queue.size(), 2)

    @parameterized.parameters(
        *((name, {}) for name in MEMBERS if name != "own"),
        ("pipe_sgd", {"on_peer_loss": "continue"}),
        ("dts", {"on_peer_loss": "continue", "batch_shares": "auto"}),
    )
    @pytest.mark.stress(but=3)
    @pytest.mark.slow
    def test_steps_are_counted_on_the_host(self, name, settings):
        num_ps = MEMBERS[name].num_ps
        with MultiProcessRunner(_misplaced, NUM_RANKS, num_ps=num_ps, args=(name, settings)) as runner:
            values = runner.join().raise_for_errors().values
        self.assertEqual(values, [[]] * NUM_RANKS)


if __name__ == "__main__":
    absltest.main()
