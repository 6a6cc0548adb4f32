"""Builds the CUDA kernels for the device of this machine, checks them, and measures what they cost. Prints a table.

    python benchmarks/benchmark_cuda.py
    python benchmarks/benchmark_cuda.py --num_values=1000000 --rounds=100

Needs a CUDA device, nvcc and g++, and of Python's packages only NumPy and absl-py. Nothing else should run on the
device.

The check compares every kernel with the one for processors, which is built from `ops/kernels`: 8-bit blocks and 16-bit
truncation must be equal to the last bit, sketch codes may differ by one where a bin lies on the boundary of two
buckets. The exit code is 1 if anything differs.

All kernels take turns within every round, between two events on one stream; medians over the rounds are shown. "GB/s"
counts the bytes that a kernel reads and writes, those twice that it reads twice. "share" compares that with a copy
within the device's memory (bytes read and written), measured in the same rounds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
from absl import app, flags

_OPS = pathlib.Path(__file__).resolve().parent.parent / "ops"
_SPEC = importlib.util.spec_from_file_location("hop_tf_cuda_harness", _OPS / "cuda" / "harness.py")
harness = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(harness)

_NUM_VALUES = flags.DEFINE_integer("num_values", 1 << 28, "Values to measure with; 2^28 are 1 GiB.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Rounds; medians over them are shown.", lower_bound=1)
_DATA = flags.DEFINE_list("data", ["gaussian", "laplace", "sparse"], "Distributions.")
_FOLDER = flags.DEFINE_string("folder", None, "Where to build; a temporary folder if not given.")

_BLOCK_SIZE = 512

_DISTRIBUTIONS = {
    "gaussian": lambda rng, size: rng.standard_normal(size, np.float32),
    "laplace": lambda rng, size: rng.laplace(size=size).astype(np.float32),
    # Nine of ten values are 0, the others have Student's distribution with two degrees of freedom.
    "sparse": lambda rng, size: np.where(rng.random(size) < 0.9, 0.0, rng.standard_t(2, size)).astype(np.float32),
}
_ODD_DISTRIBUTIONS = {
    "all equal": lambda rng, size: np.full(size, -0.37, np.float32),
    "narrow": lambda rng, size: (1 + 0.01 * rng.random(size)).astype(np.float32),
    "patterns": lambda rng, size: rng.integers(1 << 32, size=size, dtype=np.uint32).view(np.float32),
    "finite patterns": lambda rng, size: (rng.integers(1 << 32, size=size, dtype=np.uint32) & 0xBFFFFFFF).view(
        np.float32
    ),
}
_SIZES_TO_CHECK = (1, 2, 3, 511, 513, 1025, 16385, 1_000_003, 10_000_000)
_MOST_DRAWN = 1 << 24  # More values repeat these: drawing them takes longer than all measurements.


def _draw(distribution: Callable, size: int) -> np.ndarray:
    values = distribution(np.random.default_rng(0), min(size, _MOST_DRAWN))
    return np.resize(values, size)


class _Processor:
    """The kernels for processors, with the methods of `harness.Kernels`."""

    def __init__(self, folder: str):
        path = pathlib.Path(folder, "libhop_tf_kernels.so")
        options = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
        harness.run(["g++", *options, "-o", str(path), *map(str, sorted((_OPS / "kernels").glob("*.cc")))])
        self._library = ctypes.CDLL(str(path))

    def _call(self, name, *arguments):
        converted = [_to_ctypes(each) for each in arguments]
        status = getattr(self._library, f"HopTf{name}")(*converted, ctypes.c_int(0))  # All cores.
        if status != harness.OK:
            raise RuntimeError(f"HopTf{name} returned {status}.")

    def sketch_encode(self, values, spacing=0.5):
        codes, buckets = np.empty(values.size, np.uint8), np.empty(256, np.float32)
        self._call("SketchEncode", *_typed(values), ctypes.c_double(spacing), codes, buckets)
        return codes, buckets

    def sketch_decode(self, codes, bucket_values):
        values = np.empty(codes.size, np.float32)
        self._call("SketchDecode", codes, bucket_values, codes.size, values)
        return values

    def int8_encode(self, values, block_size):
        codes, scales = np.empty(values.size, np.int8), np.empty(-(-values.size // block_size), np.float32)
        self._call("Int8Encode", *_typed(values), block_size, codes, scales)
        return codes, scales

    def int8_decode(self, codes, scales, block_size):
        values = np.empty(codes.size, np.float32)
        self._call("Int8Decode", codes, scales, codes.size, block_size, values)
        return values

    def int8_accumulate(self, codes, scales, accumulator, block_size):
        sums = accumulator.copy()
        self._call("Int8Accumulate", codes, scales, codes.size, block_size, sums)
        return sums

    def int8_reduce(self, codes, scales, values, block_size):
        out = np.empty_like(codes), np.empty_like(scales)
        self._call("Int8Reduce", codes, scales, *_typed(values), block_size, *out)
        return out

    def truncate16_encode(self, values, round_to_nearest):
        halves = np.empty(values.size, np.uint16)
        self._call("Truncate16Encode", *_typed(values), ctypes.c_int(round_to_nearest), halves)
        return halves

    def truncate16_decode(self, halves):
        values = np.empty(halves.size, np.float32)
        self._call("Truncate16Decode", halves, halves.size, values)
        return values


def _to_ctypes(argument):
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument


def _typed(values):
    return values, ctypes.c_int(harness.TYPES[values.dtype]), values.size


# Checks.


def _calls(values: np.ndarray, processor: _Processor) -> Iterator[tuple[str, tuple]]:
    """Each kernel's name and arguments but the sketch's encoding."""
    for block_size in (_BLOCK_SIZE, 333, 5000, values.size):
        others = processor.int8_encode(_draw(_DISTRIBUTIONS["gaussian"], values.size), block_size)
        yield "int8_encode", (values, block_size)
        yield "int8_decode", (*others, block_size)
        yield "int8_accumulate", (*others, np.linspace(-1, 1, values.size, dtype=np.float32), block_size)
        yield "int8_reduce", (*others, values, block_size)
    for round_to_nearest in (False, True):
        yield "truncate16_encode", (values, round_to_nearest)
    yield "truncate16_decode", (processor.truncate16_encode(values, False),)
    yield "sketch_decode", processor.sketch_encode(np.nan_to_num(values))


def _differences(values: np.ndarray, kernels, processor: _Processor) -> Iterator[str]:
    """What differs from the kernels for processors."""
    for name, arguments in _calls(values, processor):
        actual, expected = getattr(kernels, name)(*arguments), getattr(processor, name)(*arguments)
        pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
        if not all(np.array_equal(a, e, equal_nan=a.dtype == np.float32) for a, e in pairs):
            yield name
    yield from _sketch_differences(values, kernels, processor)


def _sketch_differences(values: np.ndarray, kernels, processor: _Processor) -> Iterator[str]:
    codes, bucket_values = kernels.sketch_encode(values)
    expected_codes, expected_values = processor.sketch_encode(values)
    moved = codes != expected_codes
    if np.any(np.maximum(codes, expected_codes) - np.minimum(codes, expected_codes) > 1):
        yield "sketch_encode, codes"
    elif moved.any():
        print(f"    {np.count_nonzero(moved)} of {codes.size} sketch codes differ by one")
    # A bucket that a value has moved to or from has another mean. Behind the last one, its mean is repeated.
    same = np.ones(bucket_values.size, bool)
    same[codes[moved]] = same[expected_codes[moved]] = False
    same[codes.max() :] &= same[codes.max()]
    if not np.allclose(bucket_values[same], expected_values[same], rtol=1e-6, atol=1e-30, equal_nan=True):
        yield "sketch_encode, bucket values"


def _check(kernels, processor: _Processor) -> bool:
    print("checks")
    failed = False
    for name, distribution in (_DISTRIBUTIONS | _ODD_DISTRIBUTIONS).items():
        for size in _SIZES_TO_CHECK:
            floats = _draw(distribution, size)
            with np.errstate(over="ignore", invalid="ignore"):
                cases = floats, floats.astype(np.float16), processor.truncate16_encode(floats, False)
            for values in cases:
                for difference in _differences(values, kernels, processor):
                    failed = True
                    print(f"    {name}, {size} {values.dtype}: {difference} DIFFERS")
    print("    failed" if failed else "    passed")
    return not failed


# Measurements.


def _candidates(values: np.ndarray, arrays, kernels) -> dict[str, tuple[float, Callable[[], None]]]:
    """For each kernel the bytes that it touches per value, and what enqueues it."""
    size, block_size = values.size, _BLOCK_SIZE
    source, floats = arrays.put(values), arrays.empty(size, np.float32)
    codes, bucket_values = arrays.empty(size, np.uint8), arrays.empty(256, np.float32)
    quantized, scales = arrays.empty(size, np.int8), arrays.empty(-(-size // block_size), np.float32)
    out_quantized, out_scales = arrays.empty(size, np.int8), arrays.empty(-(-size // block_size), np.float32)
    halves = arrays.empty(size, np.uint16)
    sketch_workspace = kernels.workspace(arrays, "Sketch", size)
    workspace = kernels.workspace(arrays, "Int8", size, size)
    blocks = quantized, scales
    calls = {
        "copy": (8, "Copy", source, 4 * size, floats),
        "sketch encode": (9, "SketchEncode", source, 0, size, 0.5, codes, bucket_values, sketch_workspace),
        "sketch decode": (5, "SketchDecode", codes, bucket_values, size, floats),
        "int8 encode": (5, "Int8Encode", source, 0, size, block_size, *blocks, None),
        "int8 decode": (5, "Int8Decode", *blocks, size, block_size, floats),
        "int8 accumulate": (9, "Int8Accumulate", *blocks, size, block_size, floats),
        "int8 reduce": (6, "Int8Reduce", *blocks, source, 0, size, block_size, out_quantized, out_scales, None),
        "int8 encode, one block": (9, "Int8Encode", source, 0, size, size, out_quantized, out_scales, workspace),
        "truncate16 encode": (6, "Truncate16Encode", source, 0, size, 1, halves),
        "truncate16 decode": (6, "Truncate16Decode", halves, size, floats),
    }
    return {name: (num_bytes, lambda call=call: kernels.enqueue(*call)) for name, (num_bytes, *call) in calls.items()}


def _measure(values: np.ndarray, device, kernels) -> None:
    with kernels.arrays() as arrays:
        candidates = _candidates(values, arrays, kernels)
        seconds = {name: [] for name in candidates}
        for _ in range(_ROUNDS.value + 2):  # The first two load code and raise clocks.
            for name, (_, enqueue) in candidates.items():
                seconds[name].append(device.seconds(enqueue))
    medians = {name: statistics.median(each[2:]) for name, each in seconds.items()}
    rates = {name: num_bytes * values.size / medians[name] / 1e9 for name, (num_bytes, _) in candidates.items()}
    for name, rate in rates.items():
        print(f"    {name:24}{medians[name] * 1e3:10.3f} ms{rate:10.0f} GB/s{rate / rates['copy']:8.2f}")


def _run(folder: str) -> int:
    try:
        device = harness.Device()
    except RuntimeError as error:
        print(f"This measures a CUDA device, and cannot: {error}.")
        return 1
    print(f"{device.name}, compute capability {device.architecture}")
    kernels = harness.Kernels(harness.load(harness.build(folder, device.architecture)), device)
    processor = _Processor(folder)
    passed = _check(kernels, processor)
    for name in _DATA.value:
        print(f"{name}, {_NUM_VALUES.value} values")
        values = _draw(_DISTRIBUTIONS[name], _NUM_VALUES.value)
        _measure(values, device, kernels)
        for difference in _sketch_differences(values, kernels, processor):
            passed = False
            print(f"    {difference} DIFFER")
    return 0 if passed else 1


def main(_) -> int:
    if _FOLDER.value is not None:
        return _run(_FOLDER.value)
    with tempfile.TemporaryDirectory() as folder:
        return _run(folder)


if __name__ == "__main__":
    app.run(main)
