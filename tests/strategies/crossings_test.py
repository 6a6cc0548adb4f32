"""Tests how much crosses between the host and a GPU in a step: each bucket once there and once back, and little else.

With a codec, encoded buckets cross.

The second processor of `make_two_devices` stands for a GPU. TensorFlow divides a step into a graph for each device. For
each tensor that one device computes and another one needs, it adds a pair of operations, `_Send` and `_Recv`. So what
crosses can be counted without a GPU. A pair without values keeps an order. To the host, each pair costs an event of
the GPU.
"""

import math
import re
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized
from tensorflow.python.eager import context

from hop_tf.runtime import graph_encoding
from hop_tf.tools.testing import MultiProcessRunner
from support import MEMBERS, NUM_RANKS, make_two_devices, noting_operations

_HOST, _DEVICE = "CPU:0", "CPU:1"
_BRANCHES = {"true": "then", "false": "else", None: ""}
_BATCH_SIZE, _WIDTH = 8, 64
_SENDS, _RECEIVES = ("_Send", "_HostSend"), ("_Recv", "_HostRecv")
_NUM_LAYERS = 2, 6
_MOST_OF_AN_OPERATION = 10  # Nodes of the graph of a single operation, with its arguments and results.
_BESIDE = 1024  # Bytes of scalars, and of a few values for each variable.


class _Traced:
    """Keeps all tensors that are traced."""

    def __init__(self):
        self._tensors = {}

    def keep(self, operation):
        branch = re.search(r"_(true|false)_\d+$", getattr(operation.graph, "name", ""))
        for index, tensor in enumerate(operation.outputs):
            self._tensors[_BRANCHES[branch and branch[1]], operation.name, index] = tensor

    def num_bytes(self, name):
        """Returns the size of a tensor of a divided graph, or None if it was not traced.

        Its name begins with those of the calls that have led to it. That of a branch ends with "then" and a number.
        """
        operation, _, index = name.partition(":")
        parts = operation.split("/")
        for first in range(len(parts)):
            branch = parts[first - 2] if first > 1 and parts[first - 2] in _BRANCHES.values() else ""
            tensor = self._tensors.get((branch, "/".join(parts[first:]), int(index or 0)))
            if tensor is not None:
                return tensor.dtype.size * math.prod(_BATCH_SIZE if size is None else size for size in tensor.shape)
        return None


class _Divided:
    """The graphs of a training, for each device. Only a step has values for several devices."""

    def __init__(self, metadata, traced):
        graphs = [graph for function in metadata.function_graphs for graph in function.partition_graphs]
        # Threads run single operations meanwhile. TensorFlow has a graph for each, with arguments on the host.
        large = [graph for graph in graphs if len(graph.node) > _MOST_OF_AN_OPERATION]
        self._parts = [{node.name: node for node in graph.node} for graph in large]
        self._traced = traced

    def crossings(self):
        """Yields whether a tensor crosses to the host, and its bytes, or 0 if it only keeps an order."""
        for part in self._parts:
            for node in part.values():
                if node.op in _SENDS:
                    (tensor,) = node.input
                    to_host = node.attr["recv_device"].s.decode().endswith(_HOST)
                    yield to_host, 0 if "/ctrl/" in tensor else self._size(part, tensor)

    def _size(self, part, tensor):
        """Returns the bytes of a tensor: those of the traced one that it is, behind operations that pass it on."""
        while (size := self._traced.num_bytes(tensor)) is None:
            node = part[tensor.partition(":")[0]]
            if node.op == "Const":
                return tf.make_ndarray(node.attr["value"].tensor).nbytes
            if node.op in _RECEIVES:
                key = node.attr["tensor_name"]
                part, node = next(
                    (part, each)
                    for part in self._parts
                    for each in part.values()
                    if each.op in _SENDS and each.attr["tensor_name"] == key
                )
            tensor = node.input[0]
        return size


def _crossings(name, settings, is_loop):
    """Trains a small and a large model in a process of its own; returns what crosses in a step of each."""
    make_two_devices()
    devices = tf.config.list_logical_devices

    def with_gpu(kind=None):
        return devices("CPU")[1:] if kind == "GPU" else devices(kind)

    context.context().enable_graph_collection()
    traced, found = _Traced(), []
    seen = mock.patch.object(tf.config, "list_logical_devices", with_gpu)
    with noting_operations(traced.keep), seen, mock.patch.object(graph_encoding, "runs_on_gpu", lambda variables: True):
        strategy = MEMBERS[name].make(devices=[_DEVICE], **settings)
        for num_layers in _NUM_LAYERS:
            (_loop if is_loop else _fit)(strategy, num_layers)
            found.append(list(_Divided(context.context().export_run_metadata(), traced).crossings()))
        strategy.shutdown()
    return found


def _make_model(strategy, num_layers):
    with strategy.scope():
        layers = [keras.layers.Dense(_WIDTH) for _ in range(num_layers)]
        model = keras.Sequential([keras.Input((_WIDTH,)), *layers])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model


def _fit(strategy, num_layers):
    data = np.ones((64, _WIDTH), np.float32)
    _make_model(strategy, num_layers).fit(data, data, batch_size=_BATCH_SIZE * strategy.world_size, verbose=0)


def _loop(strategy, num_layers):
    """Trains in a loop of its own."""
    model = _make_model(strategy, num_layers)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - x)) / strategy.num_replicas_in_sync
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    run = tf.function(lambda x: strategy.run(step, [x]))
    for _ in range(8):
        run(tf.ones([_BATCH_SIZE, _WIDTH]))
    strategy.synchronize(model)


# Of encoded values.
_NUM_BYTES = {"int8": lambda size: size + 4 * math.ceil(size / 512), "truncate16": lambda size: 2 * size}


class CrossingsTest(tf.test.TestCase, parameterized.TestCase):
    # The numbers of events are those of today: a change that raises one must also change a number here.
    @parameterized.parameters(
        ("pipe_sgd", {"pipeline_width": 1}, 10),
        ("pipe_sgd", {"pipeline_width": 2, "codec": "int8"}, 13),
        ("pipe_sgd", {"pipeline_width": 2, "codec": "int8"}, 13, 3),
        ("pipe_sgd", {"pipeline_width": 1, "codec": "truncate16"}, 10, 3),
        ("pipe_sgd", {"pipeline_width": 2}, 14, NUM_RANKS, True),
        ("dts", {"delay": 4, "interval": 4}, 19),
        ("canary", {}, 18),
        ("hop", {"num_backup_workers": 1}, 8),
        ("hop", {"interval": 2}, 10),
        ("shat", {}, 8),
        ("dts", {}, 28),
        ("dts", {"delay": 4, "interval": 4}, 25, NUM_RANKS, True),
        ("dts", {"delay": 4, "interval": 2}, 24),
        ("pipe_sgd", {"pipeline_width": 3}, 13),
        ("canary_synchronous", {}, 10),
        ("hop", {"max_staleness": 3}, 8),
    )
    @pytest.mark.slow(after=6)
    def test_buckets_cross_once(self, name, settings, num_events, num_ranks=NUM_RANKS, is_loop=False):
        num_ps = MEMBERS[name].num_ps
        with MultiProcessRunner(_crossings, num_ranks, num_ps=num_ps, args=(name, settings, is_loop)) as runner:
            values = runner.join().raise_for_errors().values
        for of_rank in values:
            for num_layers, crossings in zip(_NUM_LAYERS, of_rank, strict=True):
                num_values = num_layers * (_WIDTH + 1) * _WIDTH
                to_host = to_device = 4 * num_values
                if "codec" in settings:
                    to_host = _NUM_BYTES[settings["codec"]](num_values)
                    to_device = to_host * (2 if num_ranks == 2 else 1)  # Two ranks get both encodings.
                if name == "canary":  # The weights, when training begins; and the sketch in every step.
                    to_host += num_values + 4 * 256
                batch = 4 * _BATCH_SIZE * _WIDTH * (1 if is_loop else 2)
                self.assertBetween(_num_bytes(crossings, to_host=True), to_host, to_host + _BESIDE)
                self.assertBetween(_num_bytes(crossings, to_host=False) - batch, to_device, to_device + _BESIDE)
                self.assertEqual(sum(to_host for to_host, _ in crossings), num_events)


def _num_bytes(crossings, to_host):
    return sum(num_bytes for is_to_host, num_bytes in crossings if is_to_host == to_host)


if __name__ == "__main__":
    absltest.main()
