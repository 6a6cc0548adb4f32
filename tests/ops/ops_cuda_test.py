"""The CUDA library: that it builds and loads anywhere, and on a device, its kernels against NumPy references."""

import atexit
import ctypes
import functools
import importlib.util
import math
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import numpy as np
import pytest
from absl.testing import absltest, parameterized

_CUDA = pathlib.Path(__file__).resolve().parents[2] / "ops" / "cuda"
_SPEC = importlib.util.spec_from_file_location("hop_tf_cuda_harness", _CUDA / "harness.py")
harness = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(harness)


@functools.cache
def _device():
    """The device, or the reason why there is none."""
    try:
        return harness.Device()
    except RuntimeError as error:
        return str(error)


def _has_device():
    return isinstance(_device(), harness.Device)


@functools.cache
def _library_path():
    """The library that HOP_TF_CUDA_LIBRARY names, or a new one, built for one target: all of them take minutes."""
    if "HOP_TF_CUDA_LIBRARY" in os.environ:
        return pathlib.Path(os.environ["HOP_TF_CUDA_LIBRARY"])
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return harness.build(folder.name, _device().architecture if _has_device() else "90")


@functools.cache
def _library():
    return harness.load(_library_path())


_needs_library = unittest.skipIf(harness.find_nvcc() is None and "HOP_TF_CUDA_LIBRARY" not in os.environ, "needs nvcc")
_needs_device = unittest.skipUnless(_has_device(), f"needs a CUDA device ({_device()})")


# References.

_INFINITY, _SMALLEST_NORMAL = 0x7F800000, 0x00800000


def _patterns(values):
    """The patterns of values as float32. uint16 stands for bfloat16."""
    if values.dtype == np.uint16:
        return values.astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):  # Signaling nans.
        return values.astype(np.float32).view(np.uint32)


def _cells(patterns):
    """Returns the sketch's cells: for each value its cell; for each cell its pattern, width and number of members."""
    bins = patterns >> 16
    members = np.bincount(bins, minlength=1 << 16)
    refined = members > max(1, patterns.size // 500)
    refined[0] = False
    shift = min(7, math.ceil(math.log2(max(1, refined.sum()))))
    of_value = np.where(refined[bins], shift, 16)
    cell_patterns = patterns >> of_value << of_value
    order = np.where(cell_patterns >> 31, ~cell_patterns, cell_patterns | 0x80000000)  # Rises with the values.
    _, first, inverse, counts = np.unique(order, return_index=True, return_inverse=True, return_counts=True)
    shifts = np.where(cell_patterns[first] == 0, 0, of_value[first])
    return inverse, cell_patterns[first], shifts, counts


def _buckets(cell_patterns, shifts, counts, spacing):
    """The code of each cell."""
    if counts.size <= 256:
        return np.arange(counts.size)
    is_point = (shifts < 16) & (counts * 256 > 4 * counts.sum())
    exponents = ((cell_patterns & 0x7FFFFFFF) >> 23).astype(np.int64) - 150 + shifts
    shares = np.where(is_point, 0.0, counts**spacing * 2.0 ** ((1 - spacing) * exponents))
    num_buckets = 256 - 2 * is_point.sum()
    middles = np.cumsum(shares) - shares / 2
    buckets = np.minimum((middles / shares.sum() * num_buckets).astype(int), num_buckets - 1)
    buckets = np.where(is_point, num_buckets + np.arange(counts.size), buckets)
    return np.cumsum(np.concatenate([[0], buckets[1:] != buckets[:-1]]))


def _sketch(values, spacing):
    """The codes, or None where values are not finite."""
    patterns = _patterns(values)
    if np.any(patterns & 0x7FFFFFFF >= _INFINITY):
        return None
    patterns = np.where(patterns & 0x7FFFFFFF < _SMALLEST_NORMAL, 0, patterns)
    cell_of_value, *cells = _cells(patterns)
    return _buckets(*cells, spacing)[cell_of_value]


def _means(values, codes):
    """The mean of each code's members; behind the last code its mean again. And how large members are on average."""
    floats = _patterns(values).view(np.float32).astype(np.float64)
    floats[np.abs(floats) < 2.0**-126] = 0
    counts = np.bincount(codes, minlength=256)
    sums = np.bincount(codes, floats, 256), np.bincount(codes, np.abs(floats), 256)
    last = np.minimum(np.arange(256), codes.max())
    return tuple((each / np.maximum(counts, 1))[last] for each in sums)


def _int8(floats, block_size):
    codes, scales = np.zeros(floats.size, np.int8), np.zeros(-(-floats.size // block_size), np.float32)
    for block in range(scales.size):
        part = slice(block * block_size, (block + 1) * block_size)
        largest = np.abs(floats[part]).max()
        if not np.isfinite(largest):
            scales[block] = np.nan
        elif largest >= 2.0**-119:
            # The largest step of which 127 are still finite.
            scales[block] = min(largest / np.float32(127), np.float32(float.fromhex("0x1.020406p121")))
            codes[part] = np.rint(floats[part] * (np.float32(127) / largest))
    return codes, scales


def _dequantized(codes, scales, block_size):
    with np.errstate(invalid="ignore"):
        return codes.astype(np.float32) * np.repeat(scales, block_size)[: codes.size]


def _truncated(values, round_to_nearest):
    patterns = _patterns(values)
    is_nan = patterns & 0x7FFFFFFF > _INFINITY
    rounded = patterns + (0x7FFF + (patterns >> 16 & 1) if round_to_nearest else 0)
    return (np.where(is_nan, patterns | 0x00400000, rounded) >> 16).astype(np.uint16)


# Values.


def _half_equal(rng, size):
    return np.where(rng.random(size) < 0.5, 0.25, rng.standard_normal(size)).astype(np.float32)


def _repeated(rng, size):
    """Some thousand values that repeat, and one that lies far below the others."""
    steps = np.round(3000 * rng.standard_normal(size)) / 1000
    return np.where(rng.random(size) < 0.5, 1.1e-30, steps).astype(np.float32)


def _in_many_bins(rng, size):
    """In some 400 bins, each of which is refined."""
    bins = rng.integers(400, size=size)
    return np.ldexp(1 + (bins % 128 + rng.random(size)) / 128, bins // 128).astype(np.float32)


def _patterns_of_any_kind(rng, size):
    return rng.integers(1 << 32, size=size, dtype=np.uint32).view(np.float32)


def _finite(rng, size):
    values = _patterns_of_any_kind(rng, size)
    return np.where(np.isfinite(values), values, np.float32(1))


def _with(value):
    def values(rng, size):
        result = rng.standard_normal(size, np.float32)
        result[size // 2] = value
        return result

    return values


_DISTRIBUTIONS = {
    "gaussian": lambda rng, size: rng.standard_normal(size, np.float32),
    "laplace": lambda rng, size: rng.laplace(size=size).astype(np.float32),
    "sparse": lambda rng, size: np.where(rng.random(size) < 0.9, 0, rng.standard_t(2, size)).astype(np.float32),
    "all_equal": lambda rng, size: np.full(size, -0.37, np.float32),
    "all_zero": lambda rng, size: np.zeros(size, np.float32),
    "half_equal": _half_equal,
    "narrow": lambda rng, size: (1 + 0.01 * rng.random(size)).astype(np.float32),
    "few": lambda rng, size: rng.choice(np.array([-3, -0.1, 0, 1, 7, 7.25], np.float32), size),
    "clipped": lambda rng, size: np.clip(rng.standard_normal(size), -0.5, 0.5).astype(np.float32),
    "repeated": _repeated,
    "many_bins": _in_many_bins,
    "denormals": lambda rng, size: rng.integers(1 << 25, size=size, dtype=np.uint32).view(np.float32),
    "signed_zeros": lambda rng, size: np.where(rng.random(size) < 0.5, 0.0, -0.0).astype(np.float32),
    "all_magnitudes": _finite,
    "patterns": _patterns_of_any_kind,
    "infinity": _with(-np.inf),
    "nan": _with(np.nan),
}
# Around the sizes of packs, warps, tiles and blocks; and enough to keep a device busy.
_SIZES = (1, 2, 3, 5, 31, 257, 511, 512, 513, 1025, 16385, 100_003, 3_000_001)
_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


def _values(distribution, size, dtype=np.float32, seed=0):
    floats = _DISTRIBUTIONS[distribution](np.random.default_rng([seed, size]), size)
    with np.errstate(over="ignore", invalid="ignore"):
        return _truncated(floats, False) if dtype == np.uint16 else floats.astype(dtype)


_CASES = [
    {"testcase_name": f"_{distribution}_{name}", "distribution": distribution, "dtype": dtype}
    for distribution in _DISTRIBUTIONS
    for name, dtype in _TYPES.items()
]


class _Memory:
    """This machine's memory, with the methods of `harness.Device` that arrays use."""

    def __init__(self):
        self.blocks = {}

    def allocate(self, num_bytes):
        block = ctypes.create_string_buffer(num_bytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address):
        del self.blocks[address]

    def write(self, address, array):
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def read(self, address, array):
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def fill(self, address, num_bytes, byte):
        ctypes.memset(address, byte, num_bytes)

    def synchronize(self):
        pass


class ArraysTest(parameterized.TestCase):
    """Notices kernels that write too far or too little; on this machine's memory, to be tried without a device."""

    def setUp(self):
        super().setUp()
        self.memory = _Memory()
        self.kernels = harness.Kernels(None, self.memory)

    @parameterized.parameters(0, 1, 3)
    def test_holds_arrays(self, offset):
        values = np.arange(5, dtype=np.float32)
        with self.kernels.arrays(offset) as arrays:
            address, empty = arrays.put(values), arrays.put(values[:0])
            self.memory.write(arrays.scratch(7), np.zeros(7, np.uint8))
            np.testing.assert_array_equal(arrays.get(address), values)
            self.assertEqual(arrays.get(empty).size, 0)
        self.assertEmpty(self.memory.blocks)

    @parameterized.product(make=("put", "empty", "scratch"), offset=(0, 3), distance=(0, 63))
    def test_notices_what_is_written_behind_the_end(self, make, offset, distance):
        sizes = {"put": (np.zeros(7, np.uint8),), "empty": (7, np.uint8), "scratch": (7,)}
        with (
            self.assertRaisesRegex(RuntimeError, "wrote behind an array of 7 uint8"),
            self.kernels.arrays(offset) as arrays,
        ):
            address = getattr(arrays, make)(*sizes[make])
            arrays.scratch(100)
            self.memory.write(address + 7 + distance, np.zeros(1, np.uint8))
        self.assertEmpty(self.memory.blocks)

    @parameterized.product(make=("put", "empty", "scratch"), offset=(0, 3), distance=(1, 64))
    def test_notices_what_is_written_before_the_beginning(self, make, offset, distance):
        sizes = {"put": (np.zeros(7, np.uint8),), "empty": (7, np.uint8), "scratch": (7,)}
        with (
            self.assertRaisesRegex(RuntimeError, "wrote before an array of 7 uint8"),
            self.kernels.arrays(offset) as arrays,
        ):
            arrays.scratch(100)
            address = getattr(arrays, make)(*sizes[make])
            self.memory.write(address - distance, np.zeros(1, np.uint8))

    @parameterized.parameters(0, 3)
    def test_new_arrays_hold_nothing_of_earlier_ones(self, offset):
        with self.kernels.arrays(offset) as arrays:
            address = arrays.empty(1000, np.uint8)
            self.assertLen(set(arrays.get(address)), 1)
            self.memory.write(address, np.arange(1000, dtype=np.uint16).view(np.uint8)[:1000])
            arrays.poison(address)
            self.assertLen(set(arrays.get(address)), 1)


@_needs_library
@pytest.mark.slow
class LibraryTest(absltest.TestCase):
    @pytest.mark.stress
    def test_exports_the_functions_of_the_header_only(self):
        declared = set(re.findall(r"\b(HopTfCuda\w+)\(", (_CUDA / "hop_tf_cuda.h").read_text()))
        symbols = subprocess.run(
            ["nm", "-D", "--defined-only", str(_library_path())], check=True, capture_output=True, text=True
        )
        self.assertEqual({line.split()[-1] for line in symbols.stdout.splitlines()}, declared)
        self.assertEqual({f"HopTfCuda{name}" for name in harness.FUNCTIONS}, declared)

    def test_needs_no_library_of_cuda(self):
        needed = subprocess.run(["ldd", str(_library_path())], check=True, capture_output=True, text=True).stdout
        self.assertNotRegex(needed, r"libcuda|libcudart|not found")

    def test_refuses_arguments(self):
        library, too_many = _library(), 1 << 31
        calls = {
            "SketchEncode": [(None, 3, 1, 0.5), (None, 0, -1, 0.5), (None, 0, too_many, 0.5)]
            + [(None, 0, 1, spacing) for spacing in (0.0, -1.0, 1.1, math.nan)],
            "SketchDecode": [(None, None, -1), (None, None, too_many)],
            "Int8Encode": [(None, 0, 1, 0), (None, 3, 1, 512), (None, 0, too_many, 512)],
            "Int8Decode": [(None, None, 1, 0), (None, None, -1, 512)],
            "Int8Accumulate": [(None, None, 1, -1), (None, None, too_many, 512)],
            "Int8Reduce": [(None, None, None, 3, 1, 512), (None, None, None, 0, 1, 0)],
            "Truncate16Encode": [(None, 3, 1, 0), (None, 0, -1, 0)],
            "Truncate16Decode": [(None, -1)],
            "Copy": [(None, -1)],
        }
        for name, bad in calls.items():
            for arguments in bad:
                missing = len(harness.FUNCTIONS[name][1]) - len(arguments)
                status = getattr(library, f"HopTfCuda{name}")(*arguments, *[None] * missing)
                self.assertEqual(status, harness.INVALID_ARGUMENT, f"{name}{arguments}")
                self.assertEqual(library.HopTfCudaLastError(), b"an argument is out of range")

    def test_nothing_to_do_needs_no_device(self):
        library = _library()
        self.assertEqual(library.HopTfCudaSketchDecode(None, None, 0, None, None), harness.OK)
        self.assertEqual(library.HopTfCudaInt8Encode(None, 0, 0, 512, None, None, None, None), harness.OK)
        self.assertEqual(library.HopTfCudaInt8Decode(None, None, 0, 512, None, None), harness.OK)
        self.assertEqual(library.HopTfCudaTruncate16Encode(None, 0, 0, 1, None, None), harness.OK)
        self.assertEqual(library.HopTfCudaCopy(None, 0, None, None), harness.OK)

    def test_workspace_and_devices(self):
        library = _library()
        self.assertEqual(library.HopTfCudaNumDevices() > 0, _has_device())
        self.assertEqual(library.HopTfCudaSketchWorkspaceBytes(0), 0)
        self.assertLess(library.HopTfCudaSketchWorkspaceBytes(2**31 - 1), 8 << 20)
        self.assertEqual(library.HopTfCudaInt8WorkspaceBytes(2**31 - 1, 512), 0)
        self.assertEqual(library.HopTfCudaInt8WorkspaceBytes(2**31 - 1, 2**31 - 1), 4)
        self.assertEqual(library.HopTfCudaInt8WorkspaceBytes(1000, 2**40), 0)
        self.assertEqual(library.HopTfCudaInt8WorkspaceBytes(5000, 2048), 12)

    @unittest.skipIf(_has_device(), "there is a CUDA device")
    def test_fails_politely_without_a_device(self):
        library = _library()
        memory = np.zeros(library.HopTfCudaSketchWorkspaceBytes(1), np.uint8)
        address = memory.ctypes.data
        calls = {
            "SketchEncode": (address, 0, 1, 0.5, address, address, address, None),
            "SketchDecode": (address, address, 1, address, None),
            "Int8Encode": (address, 0, 1, 512, address, address, address, None),
            "Int8Decode": (address, address, 1, 512, address, None),
            "Int8Accumulate": (address, address, 1, 512, address, None),
            "Int8Reduce": (address, address, address, 0, 1, 512, address, address, address, None),
            "Truncate16Encode": (address, 0, 1, 1, address, None),
            "Truncate16Decode": (address, 1, address, None),
            "Copy": (address, 1, address, None),
        }
        for name, arguments in calls.items():
            self.assertEqual(getattr(library, f"HopTfCuda{name}")(*arguments), harness.DEVICE_ERROR, name)
            self.assertRegex(library.HopTfCudaLastError().decode(), "(?i)cuda|driver|device")


@_needs_library
@_needs_device
class KernelsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.kernels = harness.Kernels(_library(), _device())

    def _check_sketch(self, values, spacing=0.5, offset=0):
        codes, bucket_values = self.kernels.sketch_encode(values, spacing, offset=offset)
        expected = _sketch(values, spacing)
        if expected is None:
            self.assertFalse(codes.any())
            self.assertTrue(np.isnan(bucket_values).all())
            return
        # Sums are rounded in another order: a cell on the boundary of two buckets may fall to either.
        self.assertLessEqual(np.abs(codes.astype(int) - expected).max(), 1)
        self.assertLess(np.mean(codes != expected), 0.005 if values.size > 1000 else 0.3)
        means, magnitudes = _means(values, codes)
        np.testing.assert_array_less(np.abs(bucket_values - means), 1e-6 * magnitudes + 1e-45)

    @parameterized.named_parameters(_CASES)
    def test_sketch_encode(self, distribution, dtype):
        for size in _SIZES:
            for offset in (0, 1, 2):
                with self.subTest(size=size, offset=offset):
                    self._check_sketch(_values(distribution, size, dtype), offset=offset)

    @parameterized.parameters(1.0, 0.5, 1 / 3, 0.2)
    def test_sketch_encode_with_spacing(self, spacing):
        for distribution in ("gaussian", "sparse", "half_equal", "narrow", "many_bins", "all_magnitudes"):
            with self.subTest(distribution):
                self._check_sketch(_values(distribution, 50_000), spacing)

    def test_sketch_of_nothing(self):
        codes, bucket_values = self.kernels.sketch_encode(np.zeros(0, np.float32))
        self.assertEqual(codes.size, 0)
        np.testing.assert_array_equal(bucket_values, np.zeros(256))

    def test_sketch_is_the_same_in_every_run(self):
        for distribution in ("gaussian", "narrow", "many_bins"):
            values = _values(distribution, 3_000_001)
            first = self.kernels.sketch_encode(values)
            for _ in range(5):
                for a, b in zip(first, self.kernels.sketch_encode(values), strict=True):
                    np.testing.assert_array_equal(a, b)

    @parameterized.parameters(0, 1, 3)
    def test_sketch_decode(self, offset):
        rng = np.random.default_rng(0)
        bucket_values = rng.standard_normal(256, np.float32)
        for size in (0, *_SIZES):
            codes = rng.integers(256, size=size, dtype=np.uint8)
            values = self.kernels.sketch_decode(codes, bucket_values, offset=offset)
            np.testing.assert_array_equal(values, bucket_values[codes])

    # 1024 is the longest block that a warp keeps, 16384 a chunk of longer ones.
    @parameterized.named_parameters(_CASES)
    def test_int8(self, distribution, dtype):
        for size, block_size in (
            *((size, 512) for size in _SIZES),
            *((size, size) for size in _SIZES),
            *((100_003, block_size) for block_size in (32, 100, 301, 1023, 1024, 1025, 4096, 16384, 16388, 33001)),
            (1000, 1),
            (1000, 2**40),
        ):
            for offset in (0, 1):
                with self.subTest(size=size, block_size=block_size, offset=offset):
                    self._check_int8(_values(distribution, size, dtype), block_size, offset)

    def _check_int8(self, values, block_size, offset):
        floats = _patterns(values).view(np.float32)
        effective = min(block_size, values.size)
        expected = _int8(floats, effective)
        encoded = self.kernels.int8_encode(values, block_size, offset=offset)
        self._assert_equal(encoded, expected)
        decoded = _dequantized(*expected, effective)
        self._assert_equal([self.kernels.int8_decode(*expected, block_size, offset=offset)], [decoded])

        others = np.random.default_rng(0).standard_normal(values.size, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = others + decoded
        self._assert_equal([self.kernels.int8_accumulate(*expected, others, block_size, offset=offset)], [sums])

        others = _int8(others, effective)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = _int8(floats + _dequantized(*others, effective), effective)
        for in_place in (False, True):
            reduced = self.kernels.int8_reduce(*others, values, block_size, in_place=in_place, offset=offset)
            self._assert_equal(reduced, sums)

    def _assert_equal(self, actual, expected):
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, b)
            if a.dtype == np.float32:
                np.testing.assert_array_equal(np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)]))

    @parameterized.named_parameters(_CASES)
    def test_truncate16(self, distribution, dtype):
        for size in (0, *_SIZES):
            for offset in (0, 1):
                with self.subTest(size=size, offset=offset):
                    values = _values(distribution, size, dtype) if size else np.zeros(0, dtype)
                    for rounded in (False, True):
                        halves = self.kernels.truncate16_encode(values, rounded, offset=offset)
                        np.testing.assert_array_equal(halves, _truncated(values, rounded))
                    decoded = self.kernels.truncate16_decode(halves, offset=offset).view(np.uint32)
                    np.testing.assert_array_equal(decoded, halves.astype(np.uint32) << 16)

    def test_copy(self):
        for size in (0, 1, 5, 100_003):
            array = np.random.default_rng(0).standard_normal(size, np.float32)
            np.testing.assert_array_equal(self.kernels.copy(array, offset=1), array)


if __name__ == "__main__":
    absltest.main()
