"""Compares the times of simulated steps with closed forms, and with `hop_tf.simulate.hop`."""

import itertools
import math
import pathlib
import tempfile
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from hop_tf import codecs
from hop_tf.records import Kind, make_recorder
from hop_tf.records.log import read_job
from hop_tf.strategies.hop.settings import SkipIterations
from hop_tf.tools import timing
from hop_tf.tools.diagnosis.steps import steps_of
from hop_tf.tools.simulate import VirtualTransport, hop
from hop_tf.tools.simulate.rank_loops import OwnSeconds
from hop_tf.tools.simulate.training import Links, simulate_training

_WORLD_SIZE = 4
_NUM_VALUES = 1_000_000
_NUM_BYTES = 4 * _NUM_VALUES
_LATENCY, _RATE = 2e-3, 400e6
_OWN = OwnSeconds(compute=0.05, input=1e-3, update=2e-3, callbacks=3e-3)
_BESIDE = _OWN.input + _OWN.update + _OWN.callbacks
# Of a whole vector, and of a rank's piece of it.
_WHOLE = _LATENCY + _NUM_BYTES / _RATE
_PIECE = _LATENCY + _NUM_BYTES / _WORLD_SIZE / _RATE
# Headers have bytes, too.
_TOLERANCE = 0.01


def _simulate(
    strategy,
    own=lambda rank: itertools.repeat(_OWN),
    recorders=None,
    num_steps=40,
    rates=(_RATE, math.inf),
    num_values=_NUM_VALUES,
    **settings,
):
    """Seconds of a step. `rates`: of a link, and of a card."""
    shape = (_WORLD_SIZE, _WORLD_SIZE)
    return simulate_training(
        strategy,
        settings,
        world_size=_WORLD_SIZE,
        num_steps=num_steps,
        own=own,
        links=Links(np.full(shape, _LATENCY), np.full(shape, rates[0]), np.full(_WORLD_SIZE, rates[1])),
        num_values=num_values,
        **({} if recorders is None else {"recorders": recorders}),
    ).step_seconds


class TrainingTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("mesh", "PipeSGDStrategy", {"pipeline_width": 1}, _BESIDE + _OWN.compute + 2 * _PIECE),
        (
            "ring",
            "PipeSGDStrategy",
            {"pipeline_width": 1, "algorithm": "ring"},
            _BESIDE + _OWN.compute + 2 * (_WORLD_SIZE - 1) * _PIECE,
        ),
        ("hidden", "PipeSGDStrategy", {"pipeline_width": 2}, _BESIDE + _OWN.compute),
        ("hidden in a ring", "PipeSGDStrategy", {"pipeline_width": 2, "algorithm": "ring"}, _BESIDE + _OWN.compute),
        ("windows", "DTSStrategy", {"delay": 4, "interval": 4}, _BESIDE + _OWN.compute),
        (
            "local steps",
            "DTSStrategy",
            {"delay": 0, "interval": 4},
            _BESIDE + _OWN.compute + 2 * _PIECE / 4,
        ),
        ("hop", "HopStrategy", {"topology": "ring"}, _BESIDE + _OWN.compute),
        ("serial hop", "HopStrategy", {"topology": "ring", "update_order": "serial"}, _BESIDE + _OWN.compute + _WHOLE),
    )
    def test_a_step(self, strategy, settings, expected):
        self.assertAlmostEqual(_simulate(strategy, **settings) / expected, 1.0, delta=_TOLERANCE)

    @parameterized.named_parameters(
        ("mesh", "PipeSGDStrategy", {"pipeline_width": 1}, 2 * (_LATENCY + 3 * (_PIECE - _LATENCY))),
        ("ring", "PipeSGDStrategy", {"pipeline_width": 1, "algorithm": "ring"}, 2 * (_WORLD_SIZE - 1) * _PIECE),
        ("two neighbors", "HopStrategy", {"topology": "ring", "update_order": "serial"}, 2 * _WHOLE - _LATENCY),
        ("three", "HopStrategy", {"topology": "complete", "update_order": "serial"}, 3 * _WHOLE - 2 * _LATENCY),
    )
    def test_a_card_carries_what_goes_to_all(self, strategy, settings, expected):
        """Links are as fast as the card, or ten times as fast."""
        for rates in ((_RATE, _RATE), (10 * _RATE, _RATE)):
            seconds = _simulate(strategy, rates=rates, **settings)
            self.assertAlmostEqual(seconds / (_BESIDE + _OWN.compute + expected), 1.0, delta=_TOLERANCE)

    @parameterized.product(compute=(0.05, 0.005), num_segments=(1, 2, 4), width=(1, 2))
    @pytest.mark.stress(but=3)
    def test_segments_are_what_the_model_says(self, compute, num_segments, width):
        """As of a machine without an update."""
        plan = timing.predict(
            timing.NetworkCosts(latency_seconds=_LATENCY, seconds_per_byte=1 / _RATE),
            timing.Step.of_computing(compute),
            world_size=_WORLD_SIZE,
            num_bytes=_NUM_BYTES,
            pipeline_width=width,
            num_segments=num_segments,
        )
        seconds = _simulate(
            "PipeSGDStrategy",
            lambda rank: itertools.repeat(OwnSeconds(compute)),
            rates=(_RATE, _RATE),
            pipeline_width=width,
            num_segments=num_segments,
        )
        self.assertAlmostEqual(seconds / plan.step_seconds, 1.0, delta=2 * _TOLERANCE)

    @parameterized.parameters(1 / 8, 1 / 128)
    def test_sparse_pieces_stand_for_longer_ones_however_small_they_are(self, ratio):
        """Values and their indices, in an all-gather."""
        num_values = 100 * _NUM_VALUES
        codec = codecs.TopK(ratio=ratio)
        settings = {"delay": 0, "interval": 1, "codec": codec}
        seconds = _simulate("DTSStrategy", rates=(_RATE, _RATE), num_values=num_values, **settings)
        expected = _BESIDE + _OWN.compute + _LATENCY + (_WORLD_SIZE - 1) * codec.bytes_per_value * num_values / _RATE
        self.assertAlmostEqual(seconds / expected, 1.0, delta=0.05)

    def test_communication_that_computing_cannot_hide(self):
        """An all-reduce in a ring takes 2 (n - 1) pieces, and with K = 2 a step takes no less."""
        short = OwnSeconds(compute=0.01)
        seconds = _simulate("PipeSGDStrategy", lambda rank: itertools.repeat(short), pipeline_width=2, algorithm="ring")
        self.assertAlmostEqual(seconds / (2 * (_WORLD_SIZE - 1) * _PIECE), 1.0, delta=_TOLERANCE)

    @parameterized.product(delay_interval=((4, 2), (4, 4), (16, 8)), times=(0.8, 1.2, 1.5, 3.0))
    @pytest.mark.stress(but=7)
    def test_windows_that_computing_cannot_hide(self, delay_interval, times):
        """A window's bytes take so many times as long as its steps; what its delay gives once is soon used up."""
        delay, interval = delay_interval
        num_values = 100 * _NUM_VALUES
        window = 2 * (_WORLD_SIZE - 1) / _WORLD_SIZE * 4 * num_values / _RATE
        compute = window / interval / times
        seconds = _simulate(
            "DTSStrategy",
            lambda rank: itertools.repeat(OwnSeconds(compute)),
            num_steps=25 * interval,
            rates=(_RATE, _RATE),
            num_values=num_values,
            delay=delay,
            interval=interval,
        )
        self.assertAlmostEqual(seconds / compute / max(1.0, times), 1.0, delta=0.03)

    def test_a_rank_that_jumps_over_all_other_steps(self):
        """In its first step, the others make all of theirs."""
        found = simulate_training(
            "HopStrategy",
            {"max_iteration_gap": 60, "num_backup_workers": 1, "skip": SkipIterations(max_jump=50)},
            world_size=_WORLD_SIZE,
            num_steps=25,
            own=lambda rank: itertools.repeat(OwnSeconds(1.0 if rank else 100.0)),
            links=Links(np.zeros((_WORLD_SIZE,) * 2), np.full((_WORLD_SIZE,) * 2, math.inf)),
            num_values=_NUM_VALUES,
        )
        np.testing.assert_allclose(found.rank_seconds, [100 / 50, 1, 1, 1], rtol=_TOLERANCE)

    @parameterized.parameters("ring", "complete")
    def test_hop_takes_what_its_own_simulation_says(self, topology):
        def durations(rank):
            generator = np.random.default_rng(rank)
            return (float(generator.lognormal(np.log(0.05), 0.3)) for _ in itertools.count())

        result = hop(
            topology=topology,
            world_size=_WORLD_SIZE,
            num_steps=100,
            compute=durations,
            link_seconds=lambda sender, receiver, num_bytes: _WHOLE,
        )
        entered = result.entered_seconds
        expected = np.mean(entered[:, -1] - entered[:, 3]) / (100 - 4)
        seconds = _simulate("HopStrategy", lambda rank: map(OwnSeconds, durations(rank)), None, 96, topology=topology)
        self.assertAlmostEqual(seconds / expected, 1.0, delta=_TOLERANCE)

    def test_work_grows_as_the_ranks_do(self):
        """No rank sends to all others: a rank sends as many messages in a large ring, an update to each neighbor."""
        sent = []
        for world_size in (8, 32):
            with mock.patch.object(VirtualTransport, "send", autospec=True, side_effect=VirtualTransport.send) as send:
                simulate_training(
                    "HopStrategy",
                    {"topology": "ring"},
                    world_size=world_size,
                    num_steps=16,
                    own=lambda rank: itertools.repeat(_OWN),
                    links=Links(np.full((world_size,) * 2, _LATENCY), np.full((world_size,) * 2, _RATE)),
                    num_values=_NUM_VALUES,
                )
            sent.append(send.call_count / world_size)
        self.assertAlmostEqual(sent[1] / sent[0], 1.0, delta=0.05)
        self.assertBetween(sent[1], 20 * 2, 22 * 2 + 10)

    def test_ranks_record_what_they_do(self):
        with tempfile.TemporaryDirectory() as directory:
            recorders = []

            def make(rank, scheduler):
                about = {"number": rank, "num_ranks": _WORLD_SIZE, "num_servers": 0, "strategy": "PipeSGDStrategy"}
                folder = pathlib.Path(directory) / f"rank_{rank}"
                recorders.append(make_recorder(folder, now=lambda: 1e9 + scheduler.now, **about))
                return recorders[-1]

            _simulate("PipeSGDStrategy", recorders=make, pipeline_width=1)
            for recorder in recorders:
                recorder.close()
            job = read_job(directory)
        num_steps = 3 + 40 + 1
        for process in job.processes:
            steps = steps_of(process)
            for name, expected in (("compute", 0.05), ("input", 1e-3), ("callbacks", 3e-3), ("result", 2 * _PIECE)):
                np.testing.assert_allclose(getattr(steps, name), expected, rtol=_TOLERANCE)
            waits = process.of_kind(Kind.WAIT)
            np.testing.assert_allclose(np.sum(waits["seconds"]) / num_steps, 2 * _PIECE, rtol=0.1)
        large = [each for each in job.transfers if each.num_bytes > 1000]
        self.assertLen(large, num_steps * 2 * _WORLD_SIZE * (_WORLD_SIZE - 1))
        for transfer in large:
            self.assertAlmostEqual(transfer.num_bytes / (_NUM_BYTES / _WORLD_SIZE), 1.0, delta=_TOLERANCE)
            self.assertAlmostEqual((transfer.come_at - transfer.sent_at) / _PIECE, 1.0, delta=_TOLERANCE)

    def test_an_unknown_strategy(self):
        with self.assertRaisesRegex(ValueError, "`strategy` must be.*Received.*Other"):
            _simulate("Other")


if __name__ == "__main__":
    absltest.main()
