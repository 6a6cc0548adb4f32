"""`benchmarks/benchmark_delay.py`: its tasks, its kinds of training, and whole runs in the small."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import unittest

import delay_peers
import delay_ranks
import delay_tasks
import numpy as np
import pytest
import results
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.tools.commands import launch  # noqa: F401  (marks this module as one that starts processes)

_SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "benchmark_delay.py"
_HAS_SOURCES = len(list(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))) > 100
_needs_sources = unittest.skipIf(not _HAS_SOURCES, "needs the sources of Python's standard library")
_TIMEOUT_SECONDS = 480


def _data(num_rows, x=None):
    groups = np.arange(num_rows) % 10
    x = np.zeros((num_rows, 1), np.float32) if x is None else x
    return delay_tasks.Data((x, groups.astype(np.int32)), (x, groups), groups)


def _order(num_rows=100, **changes):
    sizes = {"epochs": 3, "batch_size": 6, "world_size": 3, "shards": "identical", "seed": 0, **changes}
    return delay_tasks.order(_data(num_rows), **sizes)


def _run(folder, *arguments):
    """Runs the benchmark. Returns the noted values, by quantity and case, and the output."""
    command = [sys.executable, str(_SCRIPT), "--world_size=2", "--seeds=3", f"--output={folder}", *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return {tuple(key): values for *key, values in results.noted(pathlib.Path(folder))}, done.stdout


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
        data, rows = _data(100, np.arange(100, dtype=np.float32)[:, None]), _order()
        for (x, y), expected in zip(delay_tasks.batches(data, rows, False, 0), rows, strict=True):
            self.assertAllEqual(x[:, 0], expected)
            self.assertAllEqual(y, expected % 10)

    @pytest.mark.slow
    def test_augmented_images_are_the_same_moved_or_mirrored(self):
        image = np.random.default_rng(0).uniform(1, 2, (16, 16, 3)).astype(np.float32)
        data, rows = _data(100, np.broadcast_to(image, (100, 16, 16, 3))), _order()[:2]
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
        moved = [padded[i : i + 16, j : j + 16] for i in range(5) for j in range(5)]
        moved += [
            np.pad(image[:, ::-1], ((2, 2), (2, 2), (0, 0)))[i : i + 16, j : j + 16] for i in range(5) for j in range(5)
        ]
        first, second = (x.numpy() for x, _ in delay_tasks.batches(data, rows, True, 0))
        for x in [*first, *second]:
            self.assertTrue(any(np.array_equal(x, each) for each in moved))
        self.assertNotAllEqual(first, second)
        again, _ = (x.numpy() for x, _ in delay_tasks.batches(data, rows, True, 0))
        self.assertAllEqual(first, again)

    @_needs_sources
    def test_text(self):
        data = delay_tasks.TASKS["transformer"].load(500, 50, None)
        (x, y), (x_test, _) = data.train, data.test
        self.assertEqual((x.shape, x_test.shape), ((500, 64), (50, 64)))
        self.assertAllEqual(x[:, 1:], y[:, :-1])
        self.assertAllEqual(np.sort(data.groups), data.groups)
        self.assertGreater(len(np.unique(data.groups)), 20)


class KindTest(parameterized.TestCase):
    @parameterized.parameters(
        ("synchronous", hop_tf.PipeSGDStrategy, {"pipeline_width": 1, "codec": None, "algorithm": "mesh"}),
        (
            "pipe:3:codec=int8",
            hop_tf.PipeSGDStrategy,
            {"pipeline_width": 3, "codec": "int8", "algorithm": "mesh"},
        ),
        ("auto", hop_tf.PipeSGDStrategy, {}),
        ("dts:20:12", hop_tf.DTSStrategy, {"delay": 20, "interval": 12, "codec": None, "algorithm": "mesh"}),
        ("dts_auto", hop_tf.DTSStrategy, {}),
        ("canary:bsp", hop_tf.CanaryStrategy, {"consistency": "bsp"}),
        ("canary:codec=null", hop_tf.CanaryStrategy, {"codec": None}),
        ("hop", hop_tf.HopStrategy, {}),
        ("shat:0.5", hop_tf.SHATParameterServerStrategy, {"mixing": 0.5}),
    )
    def test_parse(self, label, make_strategy, settings):
        kind = delay_ranks.parse_kind(label)
        self.assertEqual((kind.make_strategy, kind.settings), (make_strategy, settings))
        self.assertEqual(kind.num_servers, int(label.startswith("shat")))

    @parameterized.parameters(
        ("alike", "alike", 1), ("slow", "slow", 10), ("slow:4", "slow", 4), ("link:2.5", "link", 2.5)
    )
    def test_parse_ranks(self, label, name, factor):
        self.assertEqual(delay_ranks.parse_ranks(label), (name, factor))

    @parameterized.parameters(
        ("ddp:powersgd:4:2", "torch", 1),
        ("diloco:20:9:2", "torchft", 2),
        ("hivemind:20", "hivemind", 2),
        ("dts", None, 1),
    )
    def test_peers(self, label, package, num_ports):
        self.assertEqual((delay_peers.package_of(label), delay_peers.num_ports_of(label)), (package, num_ports))

    @parameterized.parameters("ring", "dts:1:1:1", "pipe:width=2")
    def test_refuses(self, label):
        with self.assertRaisesRegex(ValueError, label):
            delay_ranks.parse_kind(label)


class RunTest(parameterized.TestCase):
    @_needs_sources
    @parameterized.parameters((["synchronous"],), (["synchronous", "shat"],))
    @pytest.mark.stress
    def test_accuracy(self, kinds):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        sizes = ["--num_rows=48", "--test_rows=20", "--epochs=2", "--batch_size=8"]
        noted, output = _run(
            folder, "--tasks=transformer", f"--kinds={','.join(reversed(kinds))}", "--shards=skewed", *sizes
        )
        cases = [f"transformer, sgd, ranks alike, shards skewed, {kind}" for kind in kinds]
        self.assertEqual([case for quantity, case in noted if quantity == "accuracy"], cases)
        for case in cases:
            self.assertEqual(noted["steps", case], [12, 12, 12])
            self.assertLen([accuracy for accuracy in noted["accuracy", case] if accuracy > 0], 3)
        self.assertIn("points", output)

    @pytest.mark.stress
    def test_time(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        sizes = ["--num_rows=480", "--epochs=2", "--batch_size=48", "--target=0.5"]
        noted, output = _run(
            folder, "--experiments=time", "--link=loopback", "--tasks=digits", "--kinds=synchronous", *sizes
        )
        to_target, seconds = (noted[name, "digits synchronous"] for name in ("seconds to target", "seconds"))
        for first, last in zip(to_target, seconds, strict=True):
            self.assertBetween(first, 0.0, last)
        self.assertNotIn("failed", output)


if __name__ == "__main__":
    tf.test.main()
