"""`benchmarks/benchmark_delay.py`: its tasks, its kinds of training, and whole runs in the small."""

import os
import pathlib
import subprocess
import sys
import tempfile

import delay_peers
import delay_ranks
import delay_tasks
import numpy as np
import pytest
import results
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.tools.commands import launch  # noqa: F401  (marks this module as one that starts processes)

_SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "benchmark_delay.py"
_TIMEOUT_SECONDS = 480


def _order(num_rows=100, **changes):
    sizes = {"epochs": 3, "batch_size": 6, "world_size": 3, "shards": "identical", "seed": 0, **changes}
    return delay_tasks.order(np.arange(num_rows) % 10, **sizes)


def _run(folder, *arguments):
    """Runs the benchmark. Returns the kept values, by quantity and case."""
    command = [sys.executable, str(_SCRIPT), "--world_size=2", "--seeds=3,4", f"--output={folder}", *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return {tuple(key): values for *key, values in results.kept(pathlib.Path(folder))}


class OrderTest(parameterized.TestCase):
    @parameterized.parameters("identical", "skewed")
    def test_shape_and_determinism(self, shards):
        rows = _order(shards=shards)
        self.assertEqual(rows.shape, (48, 6))
        np.testing.assert_array_equal(rows, _order(shards=shards))
        self.assertFalse(np.array_equal(rows, _order(shards=shards, seed=1)))

    @parameterized.parameters("identical", "skewed")
    def test_an_epoch_has_no_row_twice(self, shards):
        for epoch in np.split(_order(shards=shards), 3):
            self.assertLen(np.unique(epoch), epoch.size)

    def test_ranks_of_skewed_shards_have_their_own_classes(self):
        parts = np.split(_order(num_rows=90, shards="skewed"), 3, axis=1)
        classes = [set(np.unique(part % 10)) for part in parts]
        self.assertEqual(classes, [{0, 1, 2, 3}, {3, 4, 5, 6}, {6, 7, 8, 9}])

    def test_ranks_of_identical_shards_have_all(self):
        for part in np.split(_order(), 3, axis=1):
            self.assertLen(np.unique(part % 10), 10)


class BatchesTest(tf.test.TestCase):
    def test_yields_the_rows(self):
        part, rows = (np.arange(100, dtype=np.float32)[:, None], np.arange(100) % 10), _order()
        for (x, y), expected in zip(delay_tasks.batches(part, rows), rows, strict=True):
            self.assertAllEqual(x[:, 0], expected)
            self.assertAllEqual(y, expected % 10)


class KindTest(parameterized.TestCase):
    @parameterized.parameters(
        ("synchronous", "PipeSGDStrategy(pipeline_width=1, codec=None, algorithm='mesh')"),
        ("pipe:3:codec=int8", "PipeSGDStrategy(pipeline_width=3, codec='int8', algorithm='mesh')"),
        ("auto", "PipeSGDStrategy()"),
        ("dts:20:12", "DTSStrategy(delay=20, interval=12, codec=None, algorithm='mesh')"),
        ("dts_auto", "DTSStrategy()"),
        ("canary:bsp", "CanaryStrategy(consistency='bsp')"),
        ("canary:codec=null", "CanaryStrategy(codec=None)"),
        ("hop", "HopStrategy()"),
        ("shat:0.5", "SHATParameterServerStrategy(mixing=0.5)"),
    )
    def test_call(self, label, call):
        self.assertEqual(delay_ranks.call_of(label), call)

    @parameterized.parameters(
        ("alike", "alike", 1), ("slow", "slow", 10), ("slow:4", "slow", 4), ("link:2.5", "link", 2.5)
    )
    def test_parse_ranks(self, label, name, factor):
        self.assertEqual(delay_ranks.parse_ranks(label), (name, factor))

    @parameterized.parameters(
        ("ddp:powersgd:4:2", "torch"), ("diloco:20:9:2", "torchft"), ("hivemind:20", "hivemind"), ("dts", None)
    )
    def test_peers(self, label, package):
        self.assertEqual(delay_peers.package_of(label), package)

    @parameterized.parameters("ring", "dts:1:1:1", "pipe:width=2")
    def test_refuses(self, label):
        with self.assertRaisesRegex(ValueError, label):
            delay_ranks.call_of(label)


class RunTest(parameterized.TestCase):
    @parameterized.parameters(["identical", "synchronous"], ["skewed", "shat"])
    @pytest.mark.stress
    def test_values_of_all_seeds(self, shards, kind):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        sizes = ["--num_rows=480", "--epochs=2", "--batch_size=48", "--link=loopback"]
        kept = _run(folder, f"--kinds={kind}", f"--shards={shards}", *sizes)
        for case in {"digits, alike, synchronous", f"digits, alike, {kind}"}:
            self.assertLen([accuracy for accuracy in kept["accuracy", case] if accuracy > 0], 2)
            for first, last in zip(kept["seconds to target", case], kept["seconds", case], strict=True):
                self.assertTrue(0 <= first <= last or first == np.inf)
        self.assertEqual(kept["points", "digits, alike, synchronous"], [0.0, 0.0])


if __name__ == "__main__":
    tf.test.main()
