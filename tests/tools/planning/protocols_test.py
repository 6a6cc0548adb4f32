"""The models that plans are made with, beside the strategies' own protocols on a virtual clock.

Links carry one byte after the other from each rank; what has left arrives after the latency.
"""

import contextlib
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.collectives import get_network
from hop_tf.runtime.exchange import Request
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.canary.exchange import AsyncSettings, CanaryExchange
from hop_tf.strategies.canary.gei import Thresholds
from hop_tf.strategies.shat.server.server import ParameterServer
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools import timing
from hop_tf.tools.planning import candidates
from hop_tf.tools.simulate import VirtualCluster
from hop_tf.tools.simulate.rank_loops import OwnSeconds
from hop_tf.tools.simulate.training import Links, simulate_training
from shat_threads import NUM_VALUES, ShatWorker

_NUM_STEPS = 40
_SHAPES, _COLAYERS = ((5000,), (5000,)), ((1,), (0,))
_PACKING = Packing([TensorSpec(str(i), shape, tf.float32) for i, shape in enumerate(_SHAPES)])
_NUM_BYTES = sum(4 * size for size in _PACKING.sizes)
_SLOW = np.array([[1.0], [1.0], [1.0], [4.0]])


# Settings of Pipe-SGD and DTS.
_AVERAGING = (
    *({"pipeline_width": 1, "num_segments": number, "algorithm": "mesh"} for number in (1, 4)),
    {"pipeline_width": 1, "algorithm": "ring"},
    {"pipeline_width": 2},
    {"delay": 0, "interval": 4},
    {"delay": 4, "interval": 4},
    {"delay": 8, "interval": 2, "algorithm": "ring"},
)


def _durations(kind, num_steps=_NUM_STEPS):
    generator = np.random.default_rng(0)
    if kind == "slow":
        return 0.3 * np.broadcast_to(_SLOW, (4, num_steps))
    if kind == "now and then":
        return 0.3 * np.where(generator.random((4, num_steps)) < 0.25, 4.0, 1.0)
    return np.full((4, num_steps), 0.3)


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
        exchange.step(Request(0, exchange.start_segment, (np.zeros(exchange.parts[-1].sizes[0], np.float32),)))
        while step < _NUM_STEPS:
            if step >= _NUM_STEPS // 2:
                self.begun_at = min(self.begun_at, self._cluster.scheduler.now)
                self.num_made += 1
            self._cluster.scheduler.sleep(float(self._durations[rank, step]))
            for colayer, part in enumerate(exchange.parts[: len(_COLAYERS)]):
                (bucket,) = exchange.emit_encode(colayer, [tf.zeros(part.sizes[0])])
                result = exchange.step(Request(step, colayer, (bucket.numpy(),)))
            step += 1 + result.num_skipped
        self.finished = min(self.finished, self._cluster.scheduler.now)
        exchange.step(Request(step, exchange.finish_segment, empty))


def _predict_and_simulate(durations, settings, communication_seconds, latency_seconds):
    """Returns the seconds of a step under Pipe-SGD, or DTS, by the schedule and by the protocol."""
    strategy, predict = "PipeSGDStrategy", timing.predict
    if "delay" in settings:
        strategy, predict = "DTSStrategy", timing.predict_dts
    network = timing.NetworkCosts(
        latency_seconds=latency_seconds, seconds_per_byte=communication_seconds / (1.5 * _NUM_BYTES)
    )
    step = timing.Step.of_computing(0.3)
    found = predict(network, step, world_size=4, num_bytes=_NUM_BYTES, durations=durations, **settings)
    simulated = simulate_training(
        strategy,
        settings,
        world_size=4,
        num_steps=100,
        own=lambda rank: map(OwnSeconds, itertools.cycle(durations[rank].tolist())),
        links=Links.alike(4, network.latency_seconds, network.seconds_per_byte),
        num_values=_NUM_BYTES // 4,
    )
    return found.step_seconds, simulated.step_seconds


class ProtocolsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(kind=("slow", "now and then", "alike"), settings=_AVERAGING, communication=(0.6, 0.1))
    @pytest.mark.stress(but=8)
    def test_ranks_that_average_together(self, kind, settings, communication):
        """A rank's messages to several others at the same time share its card."""
        found, simulated = _predict_and_simulate(_durations(kind, 120), settings, communication, 0.01)
        self.assertAllClose(found, simulated, rtol=0.05)

    @parameterized.parameters(("mesh", 0.12), ("ring", 0.04))
    def test_windows_in_flight_wait_for_each_other(self, algorithm, latency):
        """By the closed form of Table 1, steps of 0.3 s would hide all communication."""
        settings = {"delay": 4, "interval": 2, "algorithm": algorithm}
        found, simulated = _predict_and_simulate(np.full((4, 240), 0.3), settings, 0.48, 3 * latency)
        self.assertGreater(found, 1.03 * 0.3)
        self.assertAllClose(found, simulated, rtol=0.02)

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
