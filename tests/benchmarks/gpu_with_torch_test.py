"""`benchmarks/gpu_with_torch.py` where there is no device: how it ends, its processes, and its table."""

import contextlib
import io
import json
import pathlib
import tempfile
import time
from unittest import mock

import gpu_with_torch
from absl.testing import absltest

_NO_DEVICE = mock.patch.object(gpu_with_torch.harness, "Device", side_effect=RuntimeError("there is no CUDA driver"))


def _ending(*endings):
    """Patches the processes: each ending is the number of parts that one runs, and the text about its end."""
    remaining = list(endings)

    def run(command, deadline):
        del deadline
        options = dict(each.removeprefix("--").split("=", 1) for each in command[2:])
        number, how = remaining.pop(0)
        with pathlib.Path(options["lines"]).open("a") as file:
            for name in options["parts"].split(",")[:number]:
                print(json.dumps({"part": name, "result": "looked at"}), file=file)
        return how, "Segmentation fault"

    return mock.patch.object(gpu_with_torch, "_run_until", run)


class GpuWithTorchTest(absltest.TestCase):
    def run_all(self, seconds=60):
        parts = ["one", "two", "three", "four"]
        folder = self.enter_context(tempfile.TemporaryDirectory())
        return list(gpu_with_torch.run_all(parts, "library", folder, time.monotonic() + seconds))

    def test_ends_without_a_device(self):
        output = io.StringIO()
        with _NO_DEVICE, contextlib.redirect_stdout(output):
            self.assertEqual(gpu_with_torch.main([]), 0)
        self.assertEqual(output.getvalue(), "no device: there is no CUDA driver\n")

    def test_a_part_that_ends_its_process_stops_no_other(self):
        with _ending((1, "exit code -11"), (1, "exit code 3"), (1, "exit code 0")):
            results = self.run_all()
        self.assertEqual([each["part"] for each in results], ["one", "two", "three", "four"])
        self.assertEqual(
            [each.get("failed") for each in results], [None, "exit code -11: Segmentation fault"] + 2 * [None]
        )

    def test_parts_are_left_out_when_time_is_over(self):
        self.assertEqual({each["failed"] for each in self.run_all(0)}, {"left out: there was no time"})

    def test_shows_all_parts(self):
        results = {
            "memcpy": {"result": {"host": 10.0}},
            "pcie": {"result": {"GB/s": {"pinned": {"up": 50.0, "down beside": 49.0}}, "register ms/MB": 0.2}},
            "way out": {"result": {"encode ms": 0.1}},
            "way back": {"result": {"A": {"behind 0 ms": {"total ms": 3.0, "added ms": 2.0, "blocked ms": 0.0}}}},
            "graphs": {"result": "10 kernels"},
            "order": {"failed": "AssertionError:\n Copy"},
        }
        shown = "\n".join(gpu_with_torch.table(results))
        for text in ("host 10.0", "down beside 49.0", "encode ms 0.10", "added 2.00", "ok 10 kernels"):
            self.assertIn(text, shown)
        self.assertRegex(shown, "order +FAILED AssertionError: Copy")


if __name__ == "__main__":
    absltest.main()
