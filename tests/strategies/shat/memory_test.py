"""Tests of the memory of a parameter server, in vectors of its model."""

import ctypes
import gc
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from hop_tf import codecs
from hop_tf.keras_hook.optimizers import serialized_for_server
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server import wire
from hop_tf.strategies.shat.server.server import CONFIGURE, PULL, PUSH, ParameterServer
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.tensors import payloads
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.testing import MultiProcessRunner
from hop_tf.transport.base import Message

_NUM_WORKERS = 3
# Small layers, so that temporary arrays of an update are small parts of a vector.
_NUM_LAYERS, _NUM_VALUES = 40, 10_400_000
_MOMENTUM = 0.5
_M_MMAP_THRESHOLD = -3  # Of malloc.h.


class _Wire:
    """A transport whose messages arrive, and stay in flight, as the test decides."""

    def __init__(self):
        self.pool = BufferPool()
        self.in_flight = []
        self._handlers = {}

    def register(self, queue, handler):
        self._handlers[queue] = handler

    def send(self, peer, queue, header=b"", payload=(), lane=0):
        del peer, queue, lane
        self.in_flight.append((header, payload))

    def receive(self, parts):
        """Delivers bytes as they come from a socket."""
        arrays = payloads.join(parts)
        payload = self.pool.take(sum(array.nbytes for array in arrays))
        np.concatenate(arrays, out=payload)
        return payload

    def receive_ones(self, packing):
        """Delivers a gradient of ones, because zeros that were never written take no memory."""
        payload = self.receive(packing.zeros())
        for part in payloads.split(payload):
            part.view(np.float32)[:] = 1
        return payload

    def deliver(self, sender, queue, header, payload=None):
        self._handlers[queue](Message(sender, queue, header, self.receive([]) if payload is None else payload))


def _push_and_pull(num_values, num_rounds):
    """Lets all workers push at the same time, then pull; returns the first weight in each answer."""
    net = _Wire()
    ParameterServer(transport=net, num_workers=_NUM_WORKERS, pool=net.pool)
    packing = Packing([TensorSpec(str(i), (num_values // _NUM_LAYERS,), tf.float32) for i in range(_NUM_LAYERS)])
    for worker in range(_NUM_WORKERS):
        configure = _configure(packing, has_state=worker == 0)
        parts = [np.frombuffer(configure.SerializeToString(), np.uint8)]
        net.deliver(worker, CONFIGURE, b"", net.receive(parts + _first_state(packing) if worker == 0 else parts))
    for sequence in range(1, num_rounds + 1):
        net.in_flight.clear()
        pushes = [net.receive_ones(packing) for _ in range(_NUM_WORKERS)]
        for worker in range(_NUM_WORKERS):
            push = pb.Push(group="g", session=1, sequence=sequence, rate=1.0, is_applied=True)
            net.deliver(worker, PUSH, push.SerializeToString(), pushes.pop())
    net.in_flight.clear()
    for worker in range(_NUM_WORKERS):
        net.deliver(worker, PULL, pb.Pull(group="g", number=1).SerializeToString())
    # The lengths, the manifest, the model, each with its padding.
    return [float(payload[4].view(np.float32)[0]) for _, payload in net.in_flight]


def _configure(packing, *, has_state):
    pieces = [pb.Tensor(name=spec.name, dtype="float32", shape=spec.shape) for spec in packing.specs]
    return pb.Configure(
        group="g",
        session=1,
        settings={"consistency": "async", "max_staleness": "16", "interval": "1"},
        optimizer=serialized_for_server(keras.optimizers.SGD(momentum=_MOMENTUM)),
        codec=wire.codec_to_json(codecs.Identity()),
        pieces=pieces,
        has_state=has_state,
    )


def _first_state(packing):
    slots = {("momentums", i): np.zeros(spec.shape, np.float32) for i, spec in enumerate(packing.specs)}
    return ShardState(packing.zeros(), slots).to_parts()


def _resident_bytes(field):
    """Returns this process's resident bytes: now (VmRSS), or the peak (VmHWM). `getrusage` may return the parent's."""
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB$", file.read(), re.MULTILINE)[1])


def _growth():
    """Returns the number of vectors by which the process grows at most, and the final answers to workers."""
    # What a layer needs goes back to the system at once: else each of TensorFlow's threads has a heap that keeps it.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 18)
    _push_and_pull(16 * _NUM_LAYERS, 3)  # Loads code and starts threads.
    gc.collect()
    before = _resident_bytes("VmRSS")
    told = _push_and_pull(_NUM_VALUES, 4)
    return (_resident_bytes("VmHWM") - before) / (4 * _NUM_VALUES), told


class ShatMemoryTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_holds_its_state_and_a_message_of_each_worker(self):
        with MultiProcessRunner(_growth, num_workers=1) as runner:
            ((growth, told),) = runner.join().raise_for_errors().values
        velocity = value = 0.0
        for _ in range(4 * _NUM_WORKERS):
            velocity = _MOMENTUM * velocity - 1.0
            value += velocity
        self.assertAllClose(told, [value] * _NUM_WORKERS)
        # The model and a slot; a push or an answer of each worker, and both of the one whose push is being applied.
        self.assertLess(growth, 2 + _NUM_WORKERS + 1 + 0.7)


if __name__ == "__main__":
    tf.test.main()
