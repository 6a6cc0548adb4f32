"""Blocks of few bits against references written from their definition, with and without the native kernels."""

from __future__ import annotations

import fractions
import functools
import itertools
import pathlib
import re
from unittest import mock

import hypothesis
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hop_tf import ops
from hop_tf.ops import few_bits, native

_BFLOAT16 = tf.bfloat16.as_numpy_dtype
_NAN, _INF = float("nan"), float("inf")
_TINY = 2.0**-119
_LEVELS = [-55, -42, -31, -22, -15, -8, -3, 0, 3, 8, 13, 20, 29, 38, 51, 64]
_LARGEST_HALF = float.fromhex("0x1.fep127")


def _without_native(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        with mock.patch.object(native, "kernels", lambda: None):
            return function(*args, **kwargs)

    return call


_IMPLEMENTATIONS = (("native", lambda call: call), ("fallback", _without_native))


# References: a block at a time, in exact arithmetic if the definition does not say otherwise.


def _half(value):
    """The nearest bfloat16, as a float; never infinite."""
    return float(np.clip(np.float32(value).astype(_BFLOAT16).astype(np.float64), -_LARGEST_HALF, _LARGEST_HALF))


def _block4(block):
    """Returns the scales and the decoded values."""
    largest = max(block, key=lambda value: (abs(value), value))
    if not np.all(np.isfinite(block)):
        return [_NAN], [_NAN] * len(block)
    if abs(largest) < _TINY:
        return [0.0], [0.0] * len(block)
    scale = _half(largest)
    inverse = np.float32(64) / np.float32(scale)
    integers = [int(np.rint(value * inverse)) for value in block]
    nearest = [min(_LEVELS, key=lambda level, i=i: abs(level - i)) for i in integers]
    return [scale], [level * scale / 64 for level in nearest]


def _block2(block):
    magnitudes = np.abs(block)
    if not np.all(np.isfinite(block)):
        return [_NAN, _NAN], [_NAN] * len(block)
    if magnitudes.max() < _TINY:
        return [0.0, 0.0], [0.0] * len(block)
    inverse = np.float32(128) / magnitudes.max()
    units = [int(np.rint(magnitude * inverse * np.float32(256))) for magnitude in magnitudes]

    def mean(part):
        return fractions.Fraction(sum(part), len(part)) if part else None

    border = mean(units)
    for _ in range(2):
        parts = [u for u in units if u <= border], [u for u in units if u > border]
        used = border
        if all(parts):
            border = sum(map(mean, parts)) / 2
    unit = float(magnitudes.max()) / 32768
    means = [sum(part) / len(part) * unit if part else 0.0 for part in parts]
    scales = [_half(value) if value >= _TINY else 0.0 for value in means]
    return scales, [(-1 if value < 0 else 1) * scales[u > used] for value, u in zip(block, units, strict=True)]


def _reference(values, block_size, bits):
    """Returns the scales and the decoded values, as float32."""
    scales, decoded = [], []
    for begin in range(0, values.size, block_size):
        block = values[begin : begin + block_size]
        of_block, in_block = (_block4 if bits == 4 else _block2)(block)
        scales += of_block
        decoded += in_block
    return np.array(scales, np.float32), np.array(decoded, np.float32)


def _widened(scales):
    return (scales.astype(np.uint32) << 16).view(np.float32)


def _misaligned(array):
    """A writable copy at an odd address."""
    copy = np.frombuffer(bytearray(array.nbytes + 1), np.uint8)[1:].view(array.dtype)
    copy[...] = array
    return copy


def _data():
    random = np.random.default_rng(0)
    yield "empty", np.zeros(0)
    for size in (1, 2, 3, 7, 8, 9, 63, 64, 65, 129, 1000, 2051):
        yield f"normal {size}", random.standard_normal(size)
    yield "cauchy", random.standard_cauchy(1500)
    yield "sparse", np.where(random.random(900) < 0.9, 0, random.standard_normal(900))
    yield "wide", np.exp(10 * random.standard_normal(700)) * random.choice([-1, 1], 700)
    yield "integers", random.integers(-3, 4, 800)
    yield "ties", np.array([64.0, *(np.arange(-128, 129) / 2)])
    yield "both signs", np.array([3.0, -3.0, 1, 2, -1, -2] * 30)
    yield "negative", -random.random(300)
    yield "zeros", np.zeros(300)
    yield "negative zeros", np.full(300, -0.0)
    yield "equal", np.full(300, -0.7)
    yield "tiny", np.array([1e-40, -1e-40, 1e-37, -1e-38, 0])
    yield "tiny beside larger", np.array([1e-37, *[2e-36] * 5, 1e-39] * 20)
    yield "huge", np.array([3.4e38, -3.4e38, 1.0, 3.3e38, -3.402e38] * 40)
    for bad in (_NAN, _INF, -_INF):
        values = random.standard_normal(300)
        values[70] = bad
        yield f"with {bad}", values


_CASES = [
    (f"{name}, {kind}, {bits} bits", implementation, values.astype(np.float32), bits)
    for (name, values), (kind, implementation), bits in itertools.product(_data(), _IMPLEMENTATIONS, (4, 2))
]


class FewBitsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(*_CASES)
    def test_equals_the_reference(self, within, values, bits):
        for block_size in (8, 64, 128, 1024):
            scales, codes = within(ops.arrays.few_bits_encode)(values, block_size, bits)
            expected_scales, expected = _reference(values, block_size, bits)
            self.assertAllEqual(_widened(scales), expected_scales)
            decoded = within(ops.arrays.few_bits_decode)(scales, codes, values.size, block_size, bits)
            self.assertAllEqual(decoded, expected)
            others = np.random.default_rng(1).standard_normal(values.size, np.float32)
            total = others.copy()
            within(ops.arrays.few_bits_accumulate)(scales, codes, total, block_size, bits)
            self.assertAllEqual(total, others + expected)
            for result, reference in zip(
                within(ops.arrays.few_bits_reduce)(scales, codes, others, block_size, bits),
                within(ops.arrays.few_bits_encode)(others + expected, block_size, bits),
                strict=True,
            ):
                self.assertAllEqual(result, reference)

    @parameterized.named_parameters(*_IMPLEMENTATIONS)
    def test_layout(self, within):
        """The bytes, as documented: the first value's code in the lowest bits, and zeros behind the last code."""
        scales, codes = within(ops.arrays.few_bits_encode)(np.array([-2, 1, 0, 2 * 55 / 64, -0.1], np.float32), 8, 4)
        self.assertAllEqual(scales, [0xC000])  # -2.
        self.assertAllEqual(codes, [15 | 2 << 4, 7 | 0 << 4, 8])
        scales, codes = within(ops.arrays.few_bits_encode)(np.array([1, -1, 8, -8, -1], np.float32), 8, 2)
        self.assertAllEqual(scales, [0x3F80, 0x4100])  # 1 and 8.
        self.assertAllEqual(codes, [0 | 2 << 2 | 1 << 4 | 3 << 6, 2])

    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
        st.sampled_from((8, 64, 104)),
        st.sampled_from((4, 2)),
    )
    def test_error(self, values, block_size, bits):
        """4 bits: at most 15 % of the largest magnitude. 2 bits: at most the magnitudes' standard deviation."""
        scales, codes = ops.arrays.few_bits_encode(values, block_size, bits)
        decoded = ops.arrays.few_bits_decode(scales, codes, values.size, block_size, bits)
        for begin in range(0, values.size, block_size):
            block = values[begin : begin + block_size].astype(np.float64)
            error = decoded[begin : begin + block_size] - block
            largest = np.abs(block).max()
            if bits == 4:
                self.assertLessEqual(np.abs(error).max(), 0.15 * largest + _TINY)
            else:
                # Beside rounding: of the means to 8 bits, and of magnitudes to 1/32768 of the largest.
                rounding = np.sqrt(np.mean(block**2)) / 256 + largest / 32768 + _TINY
                self.assertLessEqual(np.sqrt(np.mean(error**2)), np.std(np.abs(block)) + rounding)

    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        hnp.arrays(np.uint32, st.integers(0, 300)), st.sampled_from((8, 64, 1024)), st.sampled_from((4, 2))
    )
    def test_native_and_fallback_agree(self, patterns, block_size, bits):
        values = patterns.view(np.float32)
        with np.errstate(all="ignore"):
            results = ops.arrays.few_bits_encode(values, block_size, bits)
            others = _without_native(ops.arrays.few_bits_encode)(values, block_size, bits)
        for result, other in zip(results, others, strict=True):
            np.testing.assert_array_equal(result, other)

    @hypothesis.settings(deadline=None)
    @hypothesis.given(st.data(), st.integers(0, 300), st.sampled_from((8, 64)), st.sampled_from((4, 2)))
    def test_any_data_decode(self, data, size, block_size, bits):
        """Whatever comes: to the same values with and without the kernels."""
        num_scales, num_bytes = -(-size // block_size) * (4 // bits), -(-size * bits // 8)
        scales = data.draw(hnp.arrays(np.uint16, num_scales))
        codes = data.draw(hnp.arrays(np.uint8, num_bytes))
        with np.errstate(all="ignore"):
            decoded = ops.arrays.few_bits_decode(scales, codes, size, block_size, bits)
            other = _without_native(ops.arrays.few_bits_decode)(scales, codes, size, block_size, bits)
        np.testing.assert_array_equal(decoded, other)

    @parameterized.product(dtype=(_BFLOAT16, np.float16), bits=(4, 2), within=[each for _, each in _IMPLEMENTATIONS])
    def test_narrow_types_count_as_their_float32(self, dtype, bits, within):
        values = np.random.default_rng(0).standard_normal(3001).astype(dtype)
        values[:5] = [0.0, -0.0, 6e-8, -6e-8, 1e4]
        results = within(ops.arrays.few_bits_encode)(values, 64, bits)
        wide = within(ops.arrays.few_bits_encode)(values.astype(np.float32), 64, bits)
        sums = within(ops.arrays.few_bits_reduce)(*results, values, 64, bits)
        wide_sums = within(ops.arrays.few_bits_reduce)(*results, values.astype(np.float32), 64, bits)
        for result, expected in zip((*results, *sums), (*wide, *wide_sums), strict=True):
            self.assertAllEqual(result, expected)

    @parameterized.product(bits=(4, 2), block_size=(8, 64, 104, 1024))
    def test_results_depend_neither_on_threads_nor_on_alignment(self, bits, block_size):
        values = np.random.default_rng(4).standard_normal(1_000_003, np.float32)
        encode = functools.partial(ops.arrays.few_bits_encode, block_size=block_size, bits=bits)
        encoded = encode(values, num_threads=1)
        decode = functools.partial(ops.arrays.few_bits_decode, size=values.size, block_size=block_size, bits=bits)
        decoded, shape = decode(*encoded, num_threads=1), {"block_size": block_size, "bits": bits}
        reduced = ops.arrays.few_bits_reduce(*encoded, values, **shape, num_threads=1)
        moved = [_misaligned(each) for each in encoded]
        for num_threads in (2, 5):
            for result, expected in zip(encode(_misaligned(values), num_threads=num_threads), encoded, strict=True):
                np.testing.assert_array_equal(result, expected)
            np.testing.assert_array_equal(decode(*moved, num_threads=num_threads), decoded)
            total = _misaligned(values)
            ops.arrays.few_bits_accumulate(*moved, total, **shape, num_threads=num_threads)
            np.testing.assert_array_equal(total, values + decoded)
            results = ops.arrays.few_bits_reduce(*moved, _misaligned(values), **shape, num_threads=num_threads)
            for result, expected in zip(results, reduced, strict=True):
                np.testing.assert_array_equal(result, expected)
        ops.arrays.few_bits_reduce(*moved, values, **shape, out=moved)  # In place.
        for result, expected in zip(moved, reduced, strict=True):
            np.testing.assert_array_equal(result, expected)

    @parameterized.named_parameters(*_IMPLEMENTATIONS)
    def test_refuses(self, within):
        encode, decode = within(ops.arrays.few_bits_encode), within(ops.arrays.few_bits_decode)
        values = np.ones(20, np.float32)
        for block_size in (0, 4, 12, 1032, -8, 64.0, True, None):
            with self.assertRaisesRegex(ValueError, "`block_size` must be a multiple of 8 from 8 to 1024. Received"):
                encode(values, block_size, 4)
        for bits in (0, 1, 3, 8, "4", True):
            with self.assertRaisesRegex(ValueError, "`bits` must be 2 or 4. Received"):
                encode(values, 8, bits)
        with self.assertRaisesRegex(ValueError, "`values` must be a vector"):
            encode(values.reshape(4, 5), 8, 4)
        for dtype in (np.int32, np.float64):
            with self.assertRaisesRegex(TypeError, "`values` must be of type float32, bfloat16, float16. Received"):
                encode(values.astype(dtype), 8, 4)
        scales, codes = encode(values, 8, 4)
        with self.assertRaisesRegex(ValueError, "`scales` must be a vector of 3 for 20 values in blocks of 8"):
            decode(scales[1:], codes, 20, 8, 4)
        with self.assertRaisesRegex(ValueError, "`codes` must be a vector of 10 for 20 values in blocks of 8"):
            decode(scales, np.append(codes, codes), 20, 8, 4)
        with self.assertRaisesRegex(ValueError, "`out` must be a writable, C-contiguous array"):
            decode(scales, codes, 20, 8, 4, out=np.empty(21, np.float32))
        with self.assertRaisesRegex(ValueError, "`accumulator` must be a writable, C-contiguous array"):
            within(ops.arrays.few_bits_accumulate)(scales, codes, np.empty(20), 8, 4)

    def test_the_fallback_has_the_constants_of_the_kernels(self):
        header = (pathlib.Path(__file__).resolve().parents[2] / "ops" / "kernels" / "constants.h").read_text()
        levels, bounds = (
            re.search(rf"{name}\[[^=]*= {{([^}}]*)}}", header).group(1).split(",")
            for name in ("kLevels", "kLevelBounds")
        )
        self.assertAllEqual([64 * eval(level.strip().replace("f", "")) for level in levels], _LEVELS)
        self.assertAllEqual(few_bits.LEVELS, _LEVELS)
        middles = np.add(_LEVELS[1:], _LEVELS[:-1])
        self.assertTrue(np.all(middles % 2), "no integer lies in the middle of two levels")
        self.assertAllEqual(list(map(int, bounds)), middles // 2)


if __name__ == "__main__":
    tf.test.main()
