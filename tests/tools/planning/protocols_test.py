"""The models that plans are made with, beside the strategies' own protocols on a virtual clock.

Links carry one byte after the other from each rank; what has left arrives after the latency.
"""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.collectives import get_network
from hop_tf.runtime.averaging_exchange import AveragingExchange
from hop_tf.runtime.exchange import Outgoing
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.canary.exchange import AsyncSettings, CanaryExchange
from hop_tf.strategies.canary.gei import Thresholds
from hop_tf.strategies.shat.server.server import ParameterServer
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools import timing
from hop_tf.tools.planning import candidates
from hop_tf.tools.simulate import VirtualCluster
from shat_threads import NUM_VALUES, ShatWorker

_NUM_STEPS = 40
_SHAPES, _COLAYERS = ((5000,), (5000,)), ((1,), (0,))
_PACKING = Packing([TensorSpec(str(i), shape, tf.float32) for i, shape in enumerate(_SHAPES)])
_NUM_BYTES = sum(4 * size for size in _PACKING.sizes)
_SLOW = np.array([[1.0], [1.0], [1.0], [4.0]])


def _durations(kind):
    generator = np.random.default_rng(0)
    if kind == "slow":
        return 0.3 * np.broadcast_to(_SLOW, (4, _NUM_STEPS))
    if kind == "now and then":
        return 0.3 * np.where(generator.random((4, _NUM_STEPS)) < 0.25, 4.0, 1.0)
    return np.full((4, _NUM_STEPS), 0.3)


class _Links:
    """A cluster whose ranks send one byte after the other; a server also receives so.

    Args:
      communication_seconds: How long a whole vector takes from a rank that sends it once.
    """

    def __init__(self, communication_seconds, latency_seconds, num_bytes=_NUM_BYTES, num_servers=0):
        self.network = timing.NetworkCosts(
            latency_seconds=latency_seconds, seconds_per_byte=communication_seconds / num_bytes
        )
        self._free_at = {}
        self.cluster = VirtualCluster(4, self._seconds, num_servers=num_servers)

    def _seconds(self, sender, receiver, num_bytes):
        now = self.cluster.scheduler.now
        link = "up" if receiver >= 4 else sender
        free_at = max(now, self._free_at.get(link, 0.0)) + num_bytes * self.network.seconds_per_byte
        self._free_at[link] = free_at
        return free_at - now + self.network.latency_seconds

    def outcome(self, name, durations, num_bytes=_NUM_BYTES):
        """Returns the plan's outcome for a candidate."""
        measurement = timing.Measurement(
            world_size=4,
            num_bytes=num_bytes,
            network=self.network,
            step=timing.Step(backward_seconds=0.3),
            codec_seconds_per_byte=dict.fromkeys(timing.MEASURED_CODECS, 0.0),
            rank_seconds=durations.tolist(),
        )
        return next(each for each in candidates(measurement) if each.name == name).outcome(durations)


class _Pipeline:
    """Ranks that average every step, one after the other, and take the mean `delay` steps later: Pipe-SGD."""

    def __init__(self, cluster, durations, delay):
        self._cluster, self._durations, self._delay = cluster, durations, delay
        self._num_handed_out, self._num_means = [0] * 4, [0] * 4
        self.ends = np.zeros_like(durations)
        cluster.run(self._train)

    def _train(self, rank):
        membership, scheduler = self._cluster.memberships[rank], self._cluster.scheduler
        membership.begin_session()
        context = ExchangeContext("group", membership.session, _PACKING, membership, self._cluster.pool)
        exchange = AveragingExchange(context)
        self._cluster.start_thread(rank, "communication", lambda: self._communicate(rank, membership, exchange))
        for step, seconds in enumerate(self._durations[rank], start=1):
            scheduler.sleep(float(seconds))
            with membership.monitor:
                self._num_handed_out[rank] = step
                membership.monitor.notify_all()
            membership.wait_until(lambda due=step - self._delay: self._num_means[rank] >= due, 1e9)
            self.ends[rank, step - 1] = scheduler.now
        membership.wait_until(lambda: self._num_means[rank] == _NUM_STEPS, 1e9)
        membership.leave(sent_rounds={"group": exchange.sent_rounds}, reason="")

    def _communicate(self, rank, membership, exchange):
        for step in range(_NUM_STEPS):
            membership.wait_until(lambda step=step: self._num_handed_out[rank] > step, 1e9)
            exchange.step(Outgoing(step, 0, tuple(_PACKING.zeros())))
            with membership.monitor:
                self._num_means[rank] += 1
                membership.monitor.notify_all()


class _Canary:
    """Ranks that train without waiting for each other: asynchronous Canary."""

    def __init__(self, cluster, durations):
        self._cluster, self._durations = cluster, durations
        self.num_made, self.begun_at, self.finished = 0, np.inf, np.inf
        cluster.run(self._train)

    def _train(self, rank):
        membership = self._cluster.memberships[rank]
        membership.begin_session()
        context = ExchangeContext(
            "group",
            1,
            _PACKING,
            membership,
            BufferPool(),
            start_thread=functools.partial(self._cluster.start_thread, rank),
            trained=[tf.Variable(tf.zeros(shape)) for shape in _SHAPES],
        )
        settings = AsyncSettings(
            network=get_network("mesh"),
            thresholds=Thresholds(1000, len(_COLAYERS)),
            codec=codecs.get(None),
            sync_interval=None,
            max_in_flight=4,
        )
        with contextlib.closing(CanaryExchange(context, _COLAYERS, settings)) as exchange:
            self._take_steps(rank, exchange)
            membership.leave(sent_rounds={"group": exchange.sent_rounds}, reason="done")

    def _take_steps(self, rank, exchange):
        empty, step = (np.empty(0, np.float32),), 0
        exchange.step(Outgoing(0, exchange.start_segment, (np.zeros(exchange.parts[-1].sizes[0], np.float32),)))
        while step < _NUM_STEPS:
            if step >= _NUM_STEPS // 2:
                self.begun_at = min(self.begun_at, self._cluster.scheduler.now)
                self.num_made += 1
            self._cluster.scheduler.sleep(float(self._durations[rank, step]))
            for colayer, part in enumerate(exchange.parts[: len(_COLAYERS)]):
                (bucket,) = exchange.emit_encode(colayer, [tf.zeros(part.sizes[0])])
                incoming = exchange.step(Outgoing(step, colayer, (bucket.numpy(),)))
            step += 1 + incoming.num_skipped
        self.finished = min(self.finished, self._cluster.scheduler.now)
        exchange.step(Outgoing(step, exchange.finish_segment, empty))


class ProtocolsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(kind=("slow", "now and then", "alike"), width=(1, 2), communication=(0.6, 0.1))
    @pytest.mark.stress(after=1)
    def test_pipe_sgd(self, kind, width, communication):
        durations = _durations(kind)
        links = _Links(communication, 0.01)
        ends = _Pipeline(links.cluster, durations, width - 1).ends
        half = _NUM_STEPS // 2
        measured = np.mean(ends[:, -1] - ends[:, half - 1]) / half
        plan = timing.predict(
            links.network,
            timing.Step(backward_seconds=0.3),
            world_size=4,
            num_bytes=_NUM_BYTES,
            pipeline_width=width,
        )
        own_share = 4 / 6 if width == 1 else 1.0
        found = timing.lock_step_seconds(
            durations, delay=width - 1, sending_seconds=plan.communication_seconds, own_share=own_share
        )
        self.assertAllClose(found, measured, rtol=0.05)

    @parameterized.product(kind=("slow", "now and then", "alike"), communication=(0.02, 0.4))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_canary(self, kind, communication):
        """If links are the bottleneck, sums are split in more ways than the model knows: the tolerance is larger."""
        durations = _durations(kind)
        links = _Links(communication, 0.01)
        canary = _Canary(links.cluster, durations)
        outcome = links.outcome("canary:float32", durations)
        num_counted = _NUM_STEPS - _NUM_STEPS // 2
        tolerance = 0.1 if communication < 0.2 else 0.3
        self.assertAllClose(outcome.step_seconds, (canary.finished - canary.begun_at) / num_counted, rtol=tolerance)
        self.assertAllClose(outcome.trained_share, canary.num_made / num_counted / 4, rtol=tolerance)

    @parameterized.product(kind=("slow", "alike"), communication=(0.02, 0.3))
    @pytest.mark.stress(after=1)
    def test_shat(self, kind, communication):
        """The virtual links serve one after the other, those of the model all at once."""
        durations = _durations(kind)
        links = _Links(communication, 0.01, 4 * NUM_VALUES, num_servers=1)
        ParameterServer(transport=links.cluster.servers[0], num_workers=4)
        ends = np.zeros_like(durations)

        def body(rank):
            worker = ShatWorker(links.cluster.memberships[rank])
            worker.exchange.state.configure(joins=False)
            for step, seconds in enumerate(durations[rank]):
                links.cluster.scheduler.sleep(float(seconds))
                worker.push(step, 1.0)
                ends[rank, step] = links.cluster.scheduler.now

        links.cluster.run(body)
        half = _NUM_STEPS // 2
        cycles = (ends[:, -1] - ends[:, half - 1]) / half
        found = links.outcome("shat", durations, 4 * NUM_VALUES).step_seconds
        self.assertAllClose(found, 4 / np.sum(1 / cycles), rtol=0.2)


if __name__ == "__main__":
    tf.test.main()
