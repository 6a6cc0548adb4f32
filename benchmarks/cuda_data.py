"""Data for the kernels' checks and timings: distributions of values, and the kernels for processors.

Needs NumPy only, as `ops/cuda/harness.py` does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pathlib
from collections.abc import Callable

import numpy as np

OPS = pathlib.Path(__file__).resolve().parent.parent / "ops"
_SPEC = importlib.util.spec_from_file_location("hop_tf_cuda_harness", OPS / "cuda" / "harness.py")
harness = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(harness)

MOST_DRAWN = 1 << 24  # Larger arrays repeat these values, because drawing takes longer than all measurements.


def truncated(values: np.ndarray) -> np.ndarray:
    """The patterns of finite float32 values as bfloat16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _in_many_bins(rng, size):
    """In some 400 bins, each of which the sketch refines."""
    bins = rng.integers(400, size=size)
    return np.ldexp(1 + (bins % 128 + rng.random(size)) / 128, bins // 128).astype(np.float32)


def _narrow(rng, size):
    return (1 + 0.01 * rng.random(size)).astype(np.float32)


def _half_equal(rng, size):
    return np.where(rng.random(size) < 0.5, np.float32(0.25), rng.standard_normal(size, np.float32))


def _some_equal(rng, size):
    """In few bins. One value shows in a sample, another does not, but small counters of a block cannot hold it."""
    values, drawn = _narrow(rng, size), rng.random(size)
    values[drawn < 0.1] = 1.0059
    values[drawn < 0.06] = 1.0031
    return values


def _tiny(rng, size):
    """Far below the normal numbers of float16, which then has some 30 steps for them."""
    return rng.standard_normal(size, np.float32) * np.float32(1e-6)


def _patterns(rng, size):
    return rng.integers(1 << 32, size=size, dtype=np.uint32)


# Each is a function of a generator and a size.
_FLOATS = {
    "gaussian": lambda rng, size: rng.standard_normal(size, np.float32),
    "laplace": lambda rng, size: rng.laplace(size=size).astype(np.float32),
    # Nine of ten values are 0, the others have Student's distribution with two degrees of freedom.
    "sparse": lambda rng, size: np.where(rng.random(size) < 0.9, 0.0, rng.standard_t(2, size)).astype(np.float32),
    "half_equal": _half_equal,
    "some_equal": _some_equal,
    "narrow": _narrow,
    "many_bins": _in_many_bins,
    "tiny": _tiny,
}
TO_CHECK = _FLOATS | {
    "all_equal": lambda rng, size: np.full(size, -0.37, np.float32),
    "patterns": lambda rng, size: _patterns(rng, size).view(np.float32),
    "finite_patterns": lambda rng, size: (_patterns(rng, size) & 0xBFFFFFFF).view(np.float32),
}
TO_MEASURE = {name: function for name, function in _FLOATS.items() if name != "tiny"} | {
    "fp16": lambda rng, size: _tiny(rng, size).astype(np.float16),
    "fp16_in_fp32": lambda rng, size: _tiny(rng, size).astype(np.float16).astype(np.float32),
    "bf16": lambda rng, size: truncated(rng.standard_normal(size, np.float32)),
}


def draw(distribution: Callable, size: int) -> np.ndarray:
    """Draws at most MOST_DRAWN values."""
    return distribution(np.random.default_rng(0), min(size, MOST_DRAWN))


class Processor:
    """The kernels for processors, with the methods of `harness.Kernels`.

    Args:
      path: Their library.
    """

    def __init__(self, path: str | os.PathLike):
        self._library = ctypes.CDLL(str(path))

    @classmethod
    def build(cls, folder: str | os.PathLike) -> Processor:
        """Compiles their library into a folder."""
        path = pathlib.Path(folder, "libhop_tf_kernels.so")
        options = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
        harness.run(["g++", *options, "-o", str(path), *map(str, sorted((OPS / "kernels").glob("*.cc")))])
        return cls(path)

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
