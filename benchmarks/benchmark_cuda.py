"""Checks the CUDA kernels on the device of this machine, and measures what they cost. Prints a table.

    python benchmarks/benchmark_cuda.py
    python benchmarks/benchmark_cuda.py --checks=none --sizes=100M --data=gaussian,half_equal
    python benchmarks/benchmark_cuda.py --library=new=new.so --library=old=old.so --json=run.json

Needs a CUDA device, nvcc and g++, and of Python's packages only NumPy and absl-py. Nothing else should run on the
device.

The checks compare every kernel with the kernel for processors, which is built from `ops/kernels`: 8-bit blocks and
16-bit truncation must be equal to the last bit. Sketch codes may differ by one where a bin lies on the boundary of two
buckets. The exit code is 1 if anything differs.

All kernels and a copy within the device's memory take turns within every round. Several calls of a kernel run between
two events on one stream, and begin when the host has enqueued them all: the figures do not contain the host's time.
The table shows medians over the rounds, and the share of the copy's bandwidth: once with the bytes that the kernel
really moves, once with the fewest bytes that its arguments and results take.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import tempfile
import time

import cuda_checks
import cuda_data
import cuda_table
import cuda_timings
from absl import app, flags
from cuda_data import harness

_SIZES = flags.DEFINE_list("sizes", ["1M", "100M", "1G"], "Bytes of the values as float32; may be empty.")
_DATA = flags.DEFINE_list("data", list(cuda_data.TO_MEASURE), "Distributions of the values.")
_SECONDS = flags.DEFINE_float("seconds", 60, "Time for all measurements; each has three rounds at least.")
_ROUNDS = flags.DEFINE_integer("rounds", 20, "The most rounds of a measurement.", lower_bound=1)
_CHECKS = flags.DEFINE_enum("checks", "full", list(cuda_checks.SIZES), "Checks before the measurements.")
_CHECK_SIZES = flags.DEFINE_list("check_sizes", None, "Numbers of values to check with, instead of those of --checks.")
_CHECK_DATA = flags.DEFINE_list("check_data", list(cuda_data.TO_CHECK), "Distributions of the values to check with.")
_LIBRARIES = flags.DEFINE_multi_string(
    "library",
    [],
    "NAME=PATH: use this library and build none. Several take turns; verdicts are the first one's.",
)
_PROCESSOR = flags.DEFINE_string("processor", None, "The library for processors; built if not given.")
_JSON = flags.DEFINE_string("json", None, "A file for all results; written after each measurement.")
_ONCE = flags.DEFINE_bool("once", False, "Only run each kernel once, for a profiler.")
_SHOW = flags.DEFINE_string("show", None, "Only print the table of such a file.")

_MOST_DIFFERENCES = 50  # Of one version: after a bad access to memory, everything fails.
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _num_values(size: str) -> int:
    """The number of float32 values in a number of bytes such as "100M"."""
    return int(float(size.rstrip("KMG")) * _UNITS.get(size[-1], 1)) // 4


class _Run:
    """The device, the libraries, and the results so far."""

    def __init__(self, folder: str):
        self._device, self._folder = harness.Device(), folder
        paths = dict(each.split("=", 1) for each in _LIBRARIES.value) or {"today": self._build()}
        self._versions = {name: harness.Kernels(harness.load(path), self._device) for name, path in paths.items()}
        self._begin = time.monotonic()
        self.results = {
            "device": f"{self._device.name}, compute capability {self._device.architecture}",
            "libraries": {name: str(path) for name, path in paths.items()},
            "seconds": {},
            "differences": [],
            "rows": [],
        }

    def _build(self) -> pathlib.Path:
        return harness.build(self._folder, self._device.architecture)

    def _save(self, phase: str) -> None:
        self.results["seconds"][phase] = round(time.monotonic() - self._begin, 1)
        if _JSON.value is not None:
            pathlib.Path(_JSON.value).write_text(json.dumps(self.results, indent=1))

    def check(self) -> None:
        sizes = [int(size) for size in _CHECK_SIZES.value or cuda_checks.SIZES[_CHECKS.value]]
        if not sizes:
            return
        build = cuda_data.Processor.build
        processor = cuda_data.Processor(_PROCESSOR.value) if _PROCESSOR.value else build(self._folder)
        for name, kernels in self._versions.items():
            differences = cuda_checks.differences(kernels, processor, sizes, _CHECK_DATA.value)
            for difference in itertools.islice(differences, _MOST_DIFFERENCES):
                self._differs(f"{name}, {difference}")
            self._save(f"checks, {name}")

    def measure(self) -> None:
        cases = [(data, size) for data in _DATA.value for size in _SIZES.value]
        drawn = {}
        begin = time.monotonic()
        for number, (data, size) in enumerate(cases):
            if data not in drawn:
                drawn = {data: cuda_data.draw(cuda_data.TO_MEASURE[data], max(map(_num_values, _SIZES.value)))}
            left = _SECONDS.value - (time.monotonic() - begin)
            arguments = drawn[data][: _num_values(size)], _num_values(size)
            rows, faults = cuda_timings.measure(
                *arguments,
                self._versions,
                self._device,
                max_seconds=left / (len(cases) - number),
                max_rounds=_ROUNDS.value,
                with_decoders=data == _DATA.value[0],
            )
            self.results["rows"] += [{"data": data, "size": size, **row} for row in rows]
            for fault in faults:
                self._differs(f"{data}, {size}: {fault}")
            self._save("measurements")

    def run_once(self) -> None:
        for data in _DATA.value:
            for size in map(_num_values, _SIZES.value):
                drawn = cuda_data.draw(cuda_data.TO_MEASURE[data], size)
                for kernels in self._versions.values():
                    cuda_timings.enqueue_once(drawn, size, kernels, self._device)

    def _differs(self, difference: str) -> None:
        self.results["differences"].append(difference)
        print(f"DIFFERS: {difference}", flush=True)


def _run(folder: str) -> int:
    try:
        run = _Run(folder)
    except RuntimeError as error:
        print(f"This measures a CUDA device, and cannot: {error}.")
        return 1
    if _ONCE.value:
        run.run_once()
        return 0
    run.check()
    run.measure()
    print(cuda_table.table(run.results))
    return 1 if run.results["differences"] else 0


def main(_) -> int:
    if _SHOW.value is not None:
        print(cuda_table.table(json.loads(pathlib.Path(_SHOW.value).read_text())))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return _run(folder)


if __name__ == "__main__":
    app.run(main)
