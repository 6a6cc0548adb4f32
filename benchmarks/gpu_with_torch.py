"""Measures copies between the host and a GPU, and checks the CUDA kernels among PyTorch's streams and allocator.

    python benchmarks/gpu_with_torch.py --json=torch.json

Needs a CUDA device, PyTorch and NumPy, and nvcc unless `--library` is given. Without a device it says so.

Measured for the gradients of a ResNet-50, 102 MB: copies between host and device, from memory that is pageable, pinned,
or registered; 8-bit encoding on the way out; and ways to bring a mean back to the training step:

    today    to the GPU from pageable memory, back to pageable memory, and as below
    A        staged in pinned memory, then copied
    B        copied from registered memory
    C        8-bit codes copied from registered memory, decoded on the device
    D        as C, and the copy does not wait for the kernels of the step

"added" is how much later the step can use the mean than the kernels before end, "blocked" how long the thread that
brings it stands still. Checks: capture in CUDA graphs (no kernel waits or allocates), order on a stream, memory that
the allocator uses again at once, two streams at a time, and 2^31 - 1 values.

Parts run in a process of their own. When a part ends the process, the others run in a new one. Exit code 1: a part has
failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from cuda_data import harness

_FAILED, _UNUSABLE = "failed", 3

# The module and function of each part. Only processes that run parts import PyTorch.
PARTS = {
    "memcpy": ("torch_copies", "measure_memcpy"),
    "pcie": ("torch_copies", "measure_pcie"),
    "way out": ("torch_copies", "measure_way_out"),
    "way back": ("torch_copies", "measure_way_back"),
    "graphs": ("torch_checks", "check_graphs"),
    "order": ("torch_checks", "check_order"),
    "scratch": ("torch_checks", "check_scratch"),
    "streams": ("torch_checks", "check_streams"),
    "most values": ("torch_checks", "check_most_values"),
}


def run_parts(names: list[str], library: str, lines: pathlib.Path) -> int:
    """Runs parts in this process. Returns `_UNUSABLE` when the device can no longer be used here."""
    import torch

    kernels = importlib.import_module("torch_device").Kernels(library)
    for name in names:
        module, function = PARTS[name]
        begin = time.perf_counter()
        try:
            result = {"result": getattr(importlib.import_module(module), function)(kernels)}
        except Exception as error:
            result = {_FAILED: f"{type(error).__name__}: {error}"[:500]}
        with lines.open("a") as file:
            print(json.dumps({"part": name, "seconds": time.perf_counter() - begin, **result}), file=file)
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:
            return _UNUSABLE
    return 0


def run_all(names: list[str], library: str, folder: str, deadline: float) -> Iterator[dict]:
    """Runs parts in other processes, and yields their results."""
    lines = pathlib.Path(folder, "lines")
    names = list(names)
    while names and time.monotonic() < deadline:
        lines.write_text("")
        command = [sys.executable, __file__, f"--lines={lines}", f"--library={library}", f"--parts={','.join(names)}"]
        how, output = _run_until(command, deadline)
        results = [json.loads(line) for line in lines.read_text().splitlines()]
        yield from results
        names = names[len(results) :]
        if names and (how != f"exit code {_UNUSABLE}" or not results):
            yield {"part": names.pop(0), _FAILED: f"{how}: {output[-500:]}"}
    for name in names:
        yield {"part": name, _FAILED: "left out: there was no time"}


def _run_until(command: list[str], deadline: float) -> tuple[str, str]:
    """Runs a command until the deadline; returns a text about its end, and its output."""
    limit = max(1.0, deadline - time.monotonic())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            return f"exit code {process.returncode}", output
        except subprocess.TimeoutExpired:
            process.kill()
            return f"stopped after {limit:.0f} s", process.communicate()[0]


# The table.


def table(results: dict[str, dict]) -> Iterator[str]:
    """Yields the lines to print."""
    found = {name: each["result"] for name, each in results.items() if "result" in each}
    if "memcpy" in found:
        yield "memcpy, GB/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in found["memcpy"].items())
    if "pcie" in found:
        for name, rates in found["pcie"]["GB/s"].items():
            yield f"PCIe, GB/s, {name:10} " + "   ".join(f"{key} {rate:.1f}" for key, rate in rates.items())
        yield f"page-locking: {found['pcie']['register ms/MB']:.2f} ms/MB"
    if "way out" in found:
        yield "way out: " + ", ".join(f"{name} {value:.2f}" for name, value in found["way out"].items())
    for name, by_queue in found.get("way back", {}).items():
        columns = [f"{key}: added {x['added ms']:.2f}, blocked {x['blocked ms']:.2f}" for key, x in by_queue.items()]
        yield f"way back, ms, {name:8} " + "   ".join(columns)
    for name, each in results.items():
        outcome = f"FAILED {' '.join(each[_FAILED].split())}" if _FAILED in each else "ok"
        detail = each["result"] if isinstance(each.get("result"), str) else ""
        yield f"{name:12} {outcome} {detail}".rstrip()


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures and checks a CUDA device with PyTorch.")
    library = os.environ.get("HOP_TF_CUDA_LIBRARY")
    parser.add_argument("--library", default=library, help="Path of libhop_tf_cuda.so. It is built if not given.")
    parser.add_argument("--json", type=pathlib.Path, help="Where to write the results.")
    parser.add_argument("--limit_seconds", type=float, default=70, help="No part runs for longer than until then.")
    parser.add_argument("--parts", default=",".join(PARTS), help="Parts to run. Default: all.")
    parser.add_argument("--lines", type=pathlib.Path, help="For processes that run parts: where their results go.")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the script with these arguments; returns its exit code."""
    arguments = _arguments(given)
    names = arguments.parts.split(",")
    if arguments.lines:
        return run_parts(names, arguments.library, arguments.lines)
    deadline = time.monotonic() + arguments.limit_seconds
    try:
        device = harness.Device()
    except RuntimeError as error:
        print(f"no device: {error}")
        return 0
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        library = arguments.library or str(harness.build(folder, device.architecture))
        for each in run_all(names, library, folder, deadline):
            results[each["part"]] = each
            if arguments.json:
                arguments.json.write_text(json.dumps({"device": device.name, "parts": results}, indent=1))
    print(f"{device.name}, copies of 102 MB")
    for line in table(results):
        print(line)
    return int(any(_FAILED in each for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
