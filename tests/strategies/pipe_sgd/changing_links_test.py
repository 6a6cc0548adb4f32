"""Tests of Pipe-SGD that chooses its settings in a whole training over changing links, on a virtual clock."""

import functools
import hashlib
import math
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest

from hop_tf import codecs
from hop_tf.runtime.autotuning import Setting
from hop_tf.runtime.exchange import Request
from hop_tf.runtime.gradients import specs_beside
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.ways import Way
from hop_tf.strategies.pipe_sgd.algorithm import PipelinedAlgorithm
from hop_tf.strategies.pipe_sgd.exchange import PipeSGDExchange, PipeSGDSettings
from hop_tf.tensors.fifo import SimulatedFifo
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate import VirtualCluster
from hop_tf.tools.simulate.training import Links

_GROUP, _SESSION = "group", 1
_NUM_RANKS = 3
_SETTINGS = PipeSGDSettings(pipeline_width="auto", codec="auto", algorithm="auto")
_KERNEL = TensorSpec("kernel", (128, 128), tf.float32)
# A mean takes a tenth of a step at first, and longer than computing over links that are ten times as slow.
_COMPUTE_SECONDS, _BYTES_PER_SECOND, _SLOWER = 0.05, 8e6, 10
_SLOW_FROM, _SLOW_UNTIL, _NUM_STEPS = 200, 400, 600


class _Rank:
    """A rank that calls an exchange as `fit` and the graph do: it computes for some time, and waits for means.

    Args:
      world: The world in which the rank trains.
      rank: The number of the rank.

    Attributes:
      told: The step of each choice, with the chosen setting.
      settings: By step, the setting that was chosen for the next step.
      widths: By step, K of the graph.
      digests: By step, the digest of the mean.
    """

    def __init__(self, world, rank):
        self._world, self._rank = world, rank
        self._membership = world.cluster.memberships[rank]
        self._packing = Packing([_KERNEL, *specs_beside(_NUM_RANKS, admits=False, chooses=True)])
        self._random = np.random.default_rng(rank)
        self._kernel = self._random.normal(size=_KERNEL.shape).astype(np.float32)
        self._num_out = 0
        self.told, self.settings, self.widths, self.digests = [], [], [], []

    def train(self):
        self._membership.begin_session()
        context = self._context()
        self._exchange = PipeSGDExchange(context, _SETTINGS, self._note_choice)
        group = types.SimpleNamespace(
            context=context, exchange=self._exchange, optimizer=context.optimizer, trained=context.trained
        )
        self._algorithm = PipelinedAlgorithm(group)
        self._algorithm.finish = lambda: self._wait_for(group.step)
        self._world.cluster.start_thread(self._rank, "communication", self._communicate)
        for step in range(_NUM_STEPS):
            self._world.begin_step(self._rank, step)
            self._change_graph(step)
            self.widths.append(self._exchange.width)
            self._world.cluster.scheduler.sleep(_COMPUTE_SECONDS * self._random.uniform(0.95, 1.05))
            self._num_out = step + 1
            self._membership.monitor.notify_all()
            self._wait_for(step + 1 - self._exchange.delay)
        self._wait_for(_NUM_STEPS)
        self._membership.leave(sent_rounds={_GROUP: self._exchange.sent_rounds}, reason="")

    def _context(self):
        variable = keras.Variable(np.zeros(_KERNEL.shape, np.float32))
        # Not SGD, with which ranks also try factors: their means leave out a part of each gradient until later.
        self._optimizer = keras.optimizers.Adam(1.0)
        self._optimizer.build([variable])
        return ExchangeContext(
            _GROUP,
            _SESSION,
            self._packing,
            self._membership,
            self._world.cluster.pool,
            make_fifo=SimulatedFifo,
            start_thread=functools.partial(self._world.cluster.start_thread, self._rank),
            optimizer=weakref.ref(self._optimizer),
            trained=[variable.value],
        )

    def _note_choice(self, way, width, text):
        del text
        self.told.append((len(self.digests), way, width))

    def _change_graph(self, step):
        """Changes the width of the graph as `fit` does before each step."""
        self._algorithm.group.step = step
        self._algorithm.change_graph()

    def _communicate(self):
        for step in range(_NUM_STEPS):
            self._wait(lambda step=step: self._num_out > step)
            result = self._exchange.step(Request(step, 0, self._buckets(step)))
            bucket, where = self._packing.place(0)
            mean = result.buckets[bucket][where]
            self._world.check_mean(step, mean)
            self.digests.append(hashlib.sha256(mean.tobytes()).digest())
            self.settings.append(self._exchange.tuner.setting)
            self._membership.monitor.notify_all()

    def gradient(self, step):
        """Returns this rank's gradient of a step."""
        return self._kernel * (1 + step % 5)

    def _buckets(self, step):
        buckets = self._packing.zeros()
        rates = np.stack([0.5 * np.eye(_NUM_RANKS)[self._rank], np.eye(_NUM_RANKS)[self._rank]])
        for index, values in ((0, self.gradient(step)), (len(self._packing.specs) - 1, rates)):
            bucket, where = self._packing.place(index)
            buckets[bucket][where] = values.ravel()
        return tuple(buckets)

    def _wait_for(self, num_steps):
        """Waits until the means of `num_steps` steps have come."""
        self._wait(lambda: len(self.digests) >= num_steps)

    def _wait(self, condition):
        with self._membership.monitor:
            while not condition():
                self._membership.monitor.wait(math.inf)


class _World:
    """Ranks, and links between them, whose rates change in the middle of the training."""

    def __init__(self):
        between = (_NUM_RANKS, _NUM_RANKS)
        self._links = Links(np.full(between, 1e-4), np.full(between, _BYTES_PER_SECOND))
        self.cluster = VirtualCluster(_NUM_RANKS, self._links.latency, sending_seconds=self._links.sending_seconds)
        self.ranks = [_Rank(self, rank) for rank in range(_NUM_RANKS)]

    def run(self):
        self.cluster.run(lambda rank: self.ranks[rank].train())
        return self

    def begin_step(self, rank, step):
        """Changes the links when the first rank begins the step of the change."""
        is_slow = _SLOW_FROM <= step < _SLOW_UNTIL
        if rank == 0:
            self._links.bytes_per_second[:] = _BYTES_PER_SECOND / (_SLOWER if is_slow else 1)

    def check_mean(self, step, mean):
        """Checks that the mean is that of all ranks, except for losses of a codec."""
        expected = np.mean([rank.gradient(step) for rank in self.ranks], axis=0)
        np.testing.assert_allclose(mean, expected.ravel(), atol=0.03 * np.abs(expected).max())


@pytest.mark.slow
class ChangingLinksTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.ranks = _World().run().ranks

    def test_links_that_become_slow_and_recover_are_answered(self):
        first, slow, recovered = self.ranks[0].told
        plain = Way("mesh", codecs.Identity())
        self.assertEqual(first[1:], (plain, 1))
        self.assertLess(first[0], _SLOW_FROM)
        self.assertBetween(slow[0], _SLOW_FROM, _SLOW_UNTIL - 1)
        self.assertTrue(slow[1].codec == codecs.Int8() or slow[2] == 2, slow)
        self.assertBetween(recovered[0], _SLOW_UNTIL, _NUM_STEPS - 1)
        self.assertEqual(recovered[1:], (plain, 1))
        self.assertEqual(self.ranks[0].settings[-1], Setting(0, 1))
        self.assertEqual(self.ranks[0].widths[-1], 1)

    def test_all_ranks_decide_alike_in_the_same_steps(self):
        for rank in self.ranks:
            self.assertEqual(rank.told, self.ranks[0].told)
            self.assertEqual(rank.settings, self.ranks[0].settings)
            self.assertEqual(rank.widths, self.ranks[0].widths)
        self.assertEqual(set(self.ranks[0].widths), {1, 2})

    def test_means_are_equal_to_the_bit(self):
        for rank in self.ranks:
            self.assertLen(rank.digests, _NUM_STEPS)
            self.assertEqual(rank.digests, self.ranks[0].digests)


if __name__ == "__main__":
    absltest.main()
