"""`hop_tf.timing.measure` over live links, and `hop_tf plan`."""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.tools import timing
from hop_tf.tools.commands import plan
from hop_tf.tools.commands.plan_report import describe
from hop_tf.tools.testing import InProcessCluster
from hop_tf.tools.timing import measurement

_MEASUREMENT = timing.Measurement(
    world_size=4,
    num_bytes=100_000_000,
    network=timing.NetworkCosts(latency_seconds=1e-4, seconds_per_byte=8e-9),
    step=timing.Step(forward_seconds=0.1, backward_seconds=0.2),
    codec_seconds_per_byte={"identity": 0.0, "truncate16": 1e-10, "int8": 1e-10, "top_k": 1e-10, "sketch": 1e-10},
)
# Rank 2 takes three times as long; rank 0 in one step of four twice as long.
_UNEVEN = dataclasses.replace(
    _MEASUREMENT, rank_seconds=((0.3, 0.3, 0.6, 0.3), (0.3,) * 4, (0.9,) * 4, (0.3,) * 4), num_bytes=1_000_000
)
_GIVEN = ("--num_workers=4", "--num_parameters=25e6", "--step_seconds=0.3", "--bits_per_second=1e9")


def _make_strategy(cluster_resolver):
    return hop_tf.PipeSGDStrategy(cluster_resolver=cluster_resolver)


def _train(strategy, callbacks=()):
    with strategy.scope():
        model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(50)])
        model.compile("sgd", "mse")
    model.fit(np.zeros((80, 100)), np.zeros((80, 50)), batch_size=8, verbose=0, callbacks=list(callbacks))


class FakeCluster:
    """A strategy whose all-reduces take, on a clock of its own, what a model says.

    Args:
      world_size: p.
      seconds: `seconds(algorithm, num_values, turn)`: how long an all-reduce takes; `turn` counts those of its kind.
    """

    num_exchanged_bytes = 4000
    num_exchanged_values = 1000
    rank = 0

    def __init__(self, world_size, seconds):
        self.world_size = world_size
        self.num_values = []
        self._seconds = seconds
        self._now = 0.0

    def report(self):
        return {"compute_seconds": 0.25}

    def latest_step_seconds(self):
        return np.array([0.25, 0.25])

    def perf_counter(self):
        return self._now

    def make_all_reduce(self, algorithm, num_values):
        turns = itertools.count()
        self.num_values.append(num_values)

        def mean(step, vectors, delivers):
            self._now += self._seconds(algorithm, num_values, next(turns))
            return vectors

        return mock.Mock(mean=mean)

    def measure(self, reduce_seconds_per_byte=0.0):
        with (
            mock.patch.object(measurement, "time", self),
            mock.patch.object(measurement, "_codec_seconds_per_byte", return_value=1e-9),
            mock.patch.object(measurement, "_reduce_seconds_per_byte", return_value=reduce_seconds_per_byte),
        ):
            return timing.measure(self)


def _error(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "none"


class MeasureTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.mark.slow
    def test_measures(self):
        def run(strategy):
            errors = [_error(lambda: timing.measure(strategy))]
            within = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: errors.append(_error(lambda: timing.measure(strategy)))
            )
            _train(strategy, [within])
            return timing.measure(strategy), errors

        (measurement, errors), *others = InProcessCluster(3, _make_strategy).run(run)
        for other, _ in others:
            self.assertEqual(measurement, other)
        self.assertEqual(measurement.world_size, 3)
        self.assertEqual(measurement.num_bytes, 4 * (5008 + 64))  # Tensors begin at multiples of 64 bytes.
        self.assertBetween(measurement.step.seconds, 1e-5, 10)
        self.assertBetween(measurement.network.seconds_per_byte, 1e-12, 1e-6)
        self.assertBetween(measurement.network.reduce_seconds_per_byte, 1e-12, 1e-7)
        self.assertEqual(
            list(measurement.codec_seconds_per_byte), ["identity", "truncate16", "int8", "top_k", "sketch", "bits4"]
        )
        self.assertIn("Call it after a `fit`", errors[0])
        self.assertIn("`measure` was called while a `fit`", errors[1])

    @parameterized.parameters(*itertools.product((2, 4), (1e-4, 0.035, 0.14, 0.5), (1e-9, 8e-8), (0.0, 1e-10)))
    def test_finds_what_a_model_says(self, p, alpha, beta, gamma):
        """Though connections send 1 MB slowly at first, and every other all-reduce is held up."""
        share = (p - 1) / p

        def seconds(algorithm, num_values, turn):
            num_messages = min(2, p - 1) if algorithm == "mesh" else 2 * (p - 1)
            latency = num_messages * alpha * (2.5 if turn % 5 == 3 else 1)
            beta_ = beta * (3 if algorithm == "mesh" and num_values > 100 else 1)
            slow_start = alpha if num_values > 10_000 else 0
            adding = gamma * (1 if num_messages == 1 else share)
            return latency + slow_start + 4 * num_values * (2 * share * beta_ + adding)

        cluster = FakeCluster(p, seconds)
        network = cluster.measure(gamma).network
        self.assertAllClose(network.latency_seconds, alpha, rtol=1e-3)
        self.assertAllClose(network.reduce_seconds_per_byte, gamma)
        self.assertAllClose(network.synchronization_seconds, 0, atol=1e-6)
        num_values = max(cluster.num_values)
        sending = 4 * num_values * share * 2 * beta
        if num_values < 1 << 24:
            self.assertGreater(1.05 * sending + alpha, max(0.2, 2 * (p - 1) * alpha))
        self.assertBetween(network.seconds_per_byte / beta, 0.999, 1.001 + alpha / sending)

    def test_a_slow_ring(self):
        """One of its links is slower than the others, which a mesh notices less."""

        def seconds(algorithm, num_values, turn):
            return 1e-3 + 2 * (3 / 4) * 4 * num_values * (3e-8 if algorithm == "ring" else 1e-8)

        network = FakeCluster(4, seconds).measure().network
        for algorithm in ("ring", "mesh"):
            found = timing.communication_seconds(network, algorithm=algorithm, world_size=4, num_bytes=4e8)
            self.assertAllClose(found, seconds(algorithm, 1e8, 0), rtol=0.02)

    @parameterized.parameters(2, 3)
    def test_rates_are_finite_on_a_busy_machine(self, p):
        """Long vectors seem to take no longer than short ones, or than to be added."""
        network = FakeCluster(p, lambda algorithm, num_values, turn: 0.05).measure().network
        self.assertGreater(network.seconds_per_byte, 0)
        cluster = FakeCluster(p, lambda algorithm, num_values, turn: 1e-3 + 1e-9 * num_values)
        self.assertGreater(cluster.measure(reduce_seconds_per_byte=1e-8).network.seconds_per_byte, 0)

    @pytest.mark.slow
    def test_all_raise_where_one_has_no_steps(self):
        def run(strategy):
            _train(strategy)
            report = strategy.report
            if strategy.rank == 1:
                strategy.report = lambda: {**report(), "compute_seconds": 0.0}
            return _error(lambda: timing.measure(strategy))

        for error in InProcessCluster(3, _make_strategy).run(run):
            self.assertIn("needs the durations of some steps of every rank", error)

    @pytest.mark.slow
    def test_values_of_two_bytes(self):
        """Without a codec they travel as they are; a codec makes as much of a value as it does of float32."""

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(50, dtype="bfloat16")])
                model.compile("sgd", "mse")
            model.fit(np.zeros((80, 100)), np.zeros((80, 50)), batch_size=8, verbose=0)
            return timing.measure(strategy)

        found = InProcessCluster(2, _make_strategy).run(run)[0]
        num_values = 5024 + 64
        self.assertEqual((found.num_bytes, found.bytes_per_value), (2 * num_values, 2))
        links = timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=1.0)
        found = dataclasses.replace(found, network=links, codec_seconds_per_byte={"identity": 0, "int8": 0})
        for codec, bytes_per_value in ((None, 2), ("int8", 1 + 4 / 512)):
            plan, dts_plan = found.predict(codec=codec), found.predict_dts(codec=codec)
            self.assertAllClose(plan.communication_seconds, bytes_per_value * num_values)
            self.assertAllClose(dts_plan.bytes_per_step, bytes_per_value * num_values / 4)
        plan = found.recommend(codec_names=("identity",))
        self.assertAllClose(plan.communication_seconds, 2 * num_values)
        self.assertAllClose(found.recommend_dts(codec_names=("identity",)).bytes_per_step * 12, 2 * num_values)

    def test_world_of_one(self):
        with self.assertRaisesRegex(RuntimeError, "one rank alone has no all-reduce to measure"):
            timing.measure(hop_tf.PipeSGDStrategy())

    def test_refuses_codecs_that_were_not_measured(self):
        for call in (_MEASUREMENT.predict, _MEASUREMENT.predict_dts):
            with self.assertRaisesRegex(ValueError, "`codec` must be one of identity, .* Received: codec='sparse'"):
                call(codec="sparse")
        for call in (_MEASUREMENT.recommend, _MEASUREMENT.recommend_dts):
            with self.assertRaisesRegex(ValueError, "`codec_names` must be one of identity, .* Received: .*'sparse'"):
                call(codec_names=["int8", "sparse"])

    def test_plans_as_the_functions_say(self):
        self.assertEqual(
            _MEASUREMENT.predict(pipeline_width=2, codec="int8"),
            timing.predict(
                _MEASUREMENT.network,
                _MEASUREMENT.step,
                world_size=4,
                num_bytes=100_000_000,
                codec="int8",
                codec_seconds_per_byte=1e-10,
            ),
        )
        self.assertEqual(_MEASUREMENT.recommend().codec, "int8")
        self.assertEqual(
            _MEASUREMENT.predict_dts(delay=1, interval=2, codec="int8"),
            timing.predict_dts(
                _MEASUREMENT.network,
                _MEASUREMENT.step,
                world_size=4,
                num_bytes=100_000_000,
                delay=1,
                interval=2,
                codec="int8",
                codec_seconds_per_byte=1e-10,
            ),
        )
        self.assertEqual(_MEASUREMENT.recommend_dts(max_interval=2).codec, "int8")


class PlanTest(tf.test.TestCase, parameterized.TestCase):
    def test_describes(self):
        text = describe(_MEASUREMENT, "all")
        self.assertIn("4 ranks, 100.0 MB of gradients; a step computes for 300.0 ms", text)
        self.assertIn("links: 1000 Mbit/s, latency 0.10 ms", text)
        # 2 * 3/4 * 1e8 bytes at 1 Gbit/s, and two messages' latency.
        self.assertRegex(text, r"  1 +identity +1 +mesh +1200\.2 ms +1500\.2 ms +20%")
        self.assertRegex(text, r"recommended +2 +int8 +1 +mesh +302\.5 ms +302\.5 ms +99%")
        self.assertIn("int8 shortens it to 0.3025 s.", text)
        self.assertEqual(text.count("recommended "), 2)
        # Once in four steps 2 * 3/4 * 1e8 bytes, which take 1.2 s at 1 Gbit/s.
        self.assertRegex(text, r"  4 +4 +identity +mesh +37\.500 MB +1200\.2 ms +300\.0 ms +100%")
        # The largest 1 %, each 5.01 bytes, to three ranks: 3 * 1.25e6 bytes. To select them takes 10 ms a window.
        self.assertRegex(text, r"  20 +12 +top_k +mesh +0\.313 MB +30\.2 ms +300\.8 ms +100%")
        # Four steps take 1.2 s: 0.2 ms are left, of which each of the eight steps in flight waits for a part.
        self.assertRegex(text, r"recommended +4 +4 +identity +mesh +37\.500 MB +1200\.2 ms +300\.0 ms +100%")
        self.assertIn("Synchronous SGD computes for 0.3 s a step, and waits for 1.2 s.", text)
        # All settings in one table: here 1.2 s for a pipeline of float32, and what that has cost.
        self.assertRegex(
            text,
            r"PipeSGDStrategy\(pipeline_width=2, codec=None, algorithm='mesh'\) +1200\.2 ms"
            r" +1200\.2 ms +100% +150\.0 MB +400\.0 MB +"
            r"-0\.90 to -0\.03",
        )

    @pytest.mark.slow
    def test_tables_are_of_a_rank_like_most_others(self):
        slow = dataclasses.replace(_MEASUREMENT, rank_seconds=((0.3,) * 8,) * 3 + ((1.2,) * 8,))
        slow = dataclasses.replace(slow, step=timing.Step(forward_seconds=0.175, backward_seconds=0.35))  # The mean.
        text = describe(slow, "all")
        self.assertRegex(text, r"  1 +identity +1 +mesh +1200\.2 ms +1500\.2 ms +20%")
        self.assertRegex(text, r"  4 +4 +identity +mesh +37\.500 MB +1200\.2 ms +300\.0 ms +100%")

    def test_the_best(self):
        text = describe(_UNEVEN)
        self.assertIn("rank 2 takes 3.0 times as long for a step as most others", text)
        self.assertIn("now and then a step takes longer: 6% of all steps take 2.0 times as long", text)
        self.assertRegex(text, r"The 3 best of \d+ settings of 5 strategies")
        self.assertRegex(
            text, r"1\. CanaryStrategy\(\)\n   A step takes 3\d\d\.\d ms, and \d\d% of all batches are trained on"
        )
        self.assertIn(
            'Accuracy, in points above synchronous training (docs/measurements.md, "What delay costs"):', text
        )
        self.assertIn("perceptron -0.52", text)
        self.assertNotIn("recommended", text)
        self.assertIn("`--all`", text)

    @pytest.mark.slow
    def test_json(self):
        found = json.loads(describe(_UNEVEN, "json"))
        self.assertEqual(found["measurement"]["world_size"], 4)
        self.assertLen(found["best"], 3)
        calls = {each["call"]: each for each in found["predictions"]}
        self.assertContainsSubset(found["best"], calls)
        self.assertAllClose(
            calls["DTSStrategy(delay=4, interval=4, codec=None, algorithm='mesh')"]["step_seconds"], 0.9, rtol=0.02
        )

    def _run(self, *arguments):
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                return plan.main(arguments), output.getvalue()
            except SystemExit as error:
                return error.code, errors.getvalue()

    @pytest.mark.slow
    def test_given_numbers(self):
        """If all numbers are given, `plan` measures nothing."""
        code, text = self._run(*_GIVEN, "--slowdown=3:4x")
        self.assertEqual(code, 0)
        self.assertIn("Nothing was measured: all numbers are given", text)
        self.assertIn("4 ranks, 100.0 MB of gradients; a step computes for 300.0 ms", text)
        self.assertIn("rank 3 takes 4.0 times as long", text)

    def test_refuses_given_numbers(self):
        for changed, message in (
            ("--num_workers=1", "`num_workers` must be at least 2. Received: num_workers=1"),
            ("--num_parameters=0", "`num_parameters` must be finite, and at least 1. Received: num_parameters=0.0"),
            ("--bits_per_second=inf", "`bits_per_second` must be finite, and at least 1"),
            ("--step_seconds=0", "`step_seconds` must be a positive number"),
            ("--latency_seconds=-1", "`latency_seconds` must be finite, and at least 0"),
            ("--slowdown=7:2x", "`slowdown` must name a rank below the number of workers, 4"),
            ("--hosts=a", "unrecognized arguments: --hosts=a"),
            ("script.py", "unrecognized arguments: script.py"),
        ):
            code, text = self._run(*_GIVEN, changed)
            self.assertEqual(code, 2)
            self.assertIn(message, text)

    def test_names_the_number_that_is_missing(self):
        for left_out in _GIVEN:
            code, text = self._run(*(each for each in _GIVEN if each != left_out))
            self.assertEqual(code, 2)
            self.assertIn(f"the following arguments are required: {left_out.partition('=')[0]}", text)

    def test_refuses_an_unknown_kind(self):
        message = "`HOP_TF_PLAN` must be one of 1, all, json. Received"
        with (
            mock.patch.dict(os.environ, {"HOP_TF_PLAN": "most"}),
            self.assertRaisesRegex(ValueError, message),
        ):
            hop_tf.PipeSGDStrategy()

    @pytest.mark.slow
    def test_is_shown_after_the_first_fit(self):
        """By rank 0, under any strategy."""

        def make_strategy(cluster_resolver):
            return hop_tf.HopStrategy(cluster_resolver=cluster_resolver)

        output = io.StringIO()
        with mock.patch.dict(os.environ, {"HOP_TF_PLAN": "1"}), contextlib.redirect_stdout(output):
            InProcessCluster(2, make_strategy).run(lambda strategy: [_train(strategy) for _ in range(2)])
        self.assertEqual(output.getvalue().count("1. "), 1)
        self.assertIn("2 ranks, 0.0 MB of gradients; a step computes for ", output.getvalue())

    @parameterized.parameters(([], "1"), (["--all"], "all"))
    def test_starts_the_script(self, options, kind):
        """Whatever it is called, and whatever its own arguments are."""
        own = ["--json", "--num_parameters=3"]
        with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ):
            script = pathlib.Path(directory) / "train"
            script.write_text("import os, sys; print(os.environ['HOP_TF_PLAN'], sys.argv[1:])")
            code, text = self._run(*options, "--num_workers=1", str(script), *own)
        self.assertEqual(code, 0)
        self.assertIn(f"{kind} {own}", text)

    def test_refuses_a_world_of_one(self):
        with mock.patch.dict(os.environ, {"HOP_TF_PLAN": "1"}):
            strategy = hop_tf.PipeSGDStrategy()
        with self.assertRaisesRegex(RuntimeError, "one rank alone has no all-reduce to measure"):
            _train(strategy)

    def test_refuses_like_the_launcher(self):
        command = [sys.executable, "-m", "hop_tf", "plan", "--num_workers=0", "script.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("hop_tf plan: error", done.stderr)


if __name__ == "__main__":
    tf.test.main()
