"""The kernels against NumPy references written from their definitions: native operations, arrays, and the fallback."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import pathlib
import re
import shutil
import tempfile
import types
import unittest
from unittest import mock

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hop_tf import ops
from hop_tf.ops import fallback, few_bits, native

_BFLOAT16 = tf.bfloat16.as_numpy_dtype

# Every function in each of its implementations takes and returns NumPy arrays here.
_NAMES = [name for name in ops.__all__ if "encode" in name or "decode" in name or name.startswith("int8")]


def _on_tensors(name):
    def call(*args, **kwargs):
        results = getattr(ops, name)(*args, **kwargs)
        return (
            tuple(np.asarray(r.numpy()) for r in results) if isinstance(results, tuple) else np.asarray(results.numpy())
        )

    return call


def _on_arrays(name):
    function = getattr(ops.arrays, name)
    if not name.endswith("accumulate"):
        return function
    position = list(inspect.signature(function).parameters).index("accumulator")

    def accumulate(*args, **kwargs):
        args = [*args]
        args[position] = np.array(args[position])
        function(*args, **kwargs)
        return args[position]

    return accumulate


def _without_native(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        with (
            mock.patch.object(native, "operations", lambda: None),
            mock.patch.object(native, "kernels", lambda: None),
        ):
            return function(*args, **kwargs)

    return call


class _Implementation:
    """The functions of one implementation, as attributes."""

    def __init__(self, name, make):
        self.name = name
        for each in _NAMES:
            setattr(self, each, make(each))


_FALLBACK = _Implementation("fallback", lambda name: _without_native(_on_tensors(name)))
_IMPLEMENTATIONS = [
    ("tensors", _Implementation("tensors", _on_tensors)),
    ("arrays", _Implementation("arrays", _on_arrays)),
    ("fallback", _FALLBACK),
    ("fallback_arrays", _Implementation("fallback arrays", lambda name: _without_native(_on_arrays(name)))),
]


# References.


def _bins_reference(values):
    """The lower edge, width and members of each cell that the sketch tells apart, in the order of the values."""
    values = np.asarray(values, np.float64).reshape(-1)
    values = np.where(np.abs(values) < 2.0**-126, 0.0, values)

    def cell(x, bits):
        """Index of x among steps of 2^-bits of its power of two, as (sign * exponent-and-step)."""
        mantissa, exponent = np.frexp(np.abs(x))
        step = np.floor((2 * mantissa - 1) * 2**bits)
        index = (exponent.astype(np.int64) + 200) * 2**bits + step.astype(np.int64)
        width = np.ldexp(1.0, exponent - 1 - bits)
        return np.where(x == 0, 0, np.sign(x).astype(np.int64) * index), np.where(x == 0, 2.0**-149, width)

    coarse, coarse_width = cell(values, 7)
    _, inverse, counts = np.unique(coarse, return_inverse=True, return_counts=True)
    refined = (counts[inverse] > max(1, values.size // 500)) & (values != 0)
    num_refined = np.unique(coarse[refined]).size
    part_bits = max(bits for bits in range(17) if num_refined * 2**bits <= 2**15)
    fine, fine_width = cell(values, 7 + part_bits)
    # Cells of both kinds are told apart by where they begin.
    key = np.where(refined, fine, coarse * 2**part_bits + np.where(coarse < 0, 1 - 2**part_bits, 0))
    width = np.where(refined, fine_width, coarse_width)
    exact = refined | (values == 0)
    _, first, inverse, counts = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(values[first], kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    return place[inverse], counts[order], width[first][order], exact[first][order]


def _sketch_reference(values, spacing):
    """Codes and bucket values by the definition, from sorted cells."""
    values, spacing = np.asarray(values), float(np.float32(spacing))
    flat = values.astype(np.float64).reshape(-1)
    if not np.all(np.isfinite(flat)):
        return np.zeros(values.shape, np.uint8), np.full(256, np.nan, np.float32)
    if not flat.size:
        return np.zeros(values.shape, np.uint8), np.zeros(256, np.float32)
    cells, counts, widths, exact = _bins_reference(flat)
    if counts.size <= 256:
        code_of_cell = np.arange(counts.size)
    else:
        is_point = exact & (counts * 256 > 4 * flat.size)
        shares = np.where(is_point, 0.0, counts.astype(np.float64) ** spacing * widths ** (1 - spacing))
        num_buckets = 256 - 2 * is_point.sum()
        before = np.cumsum(shares) - shares
        buckets = np.minimum(((before + shares / 2) / shares.sum() * num_buckets).astype(int), num_buckets - 1)
        buckets = np.where(is_point, num_buckets + np.arange(counts.size), buckets)
        code_of_cell = np.cumsum(np.concatenate([[0], buckets[1:] != buckets[:-1]]))
    codes = code_of_cell[cells]
    flat = np.where(np.abs(flat) < 2.0**-126, 0.0, flat)
    means = [flat[codes == code].mean() for code in range(code_of_cell[-1] + 1)]
    bucket_values = np.array(means + [means[-1]] * (256 - len(means)), np.float32)
    return codes.astype(np.uint8).reshape(values.shape), bucket_values


def _int8_reference(values, block_size):
    flat = np.asarray(values, np.float32).reshape(-1)
    block_size = block_size or max(flat.size, 1)
    codes, scales = np.zeros(flat.size, np.int8), np.zeros(-(-flat.size // block_size), np.float32)
    for block in range(scales.size):
        part = slice(block * block_size, (block + 1) * block_size)
        largest = np.abs(flat[part]).max()
        if not np.all(np.isfinite(flat[part])):
            scales[block] = np.nan
        elif largest >= 2.0**-119:
            # The largest step of which 127 are still finite.
            scales[block] = min(largest / np.float32(127), np.float32(float.fromhex("0x1.020406p121")))
            codes[part] = np.rint(flat[part] * (np.float32(127) / largest))
    return codes.reshape(np.shape(values)), scales


def _int8_decoded(codes, scales, block_size):
    block_size = block_size or max(codes.size, 1)
    return codes.astype(np.float32) * np.repeat(scales, block_size)[: codes.size].reshape(codes.shape)


# Data.


def _sparse(rng, size):
    return np.where(rng.random(size) < 0.9, 0.0, rng.standard_t(2, size)).astype(np.float32)


_DATA = {
    "gaussian": lambda rng, size: rng.standard_normal(size, np.float32),
    "laplace": lambda rng, size: rng.laplace(size=size).astype(np.float32),
    "sparse": _sparse,
    "uniform": lambda rng, size: rng.random(size, np.float32),
    "narrow": lambda rng, size: (1 + 1e-3 * rng.standard_normal(size)).astype(np.float32),
    "wide": lambda rng, size: np.exp(10 * rng.standard_normal(size)).astype(np.float32),
}
_NAN, _INF = float("nan"), float("inf")
_EDGE_CASES = {
    "empty": np.zeros([0], np.float32),
    "empty_matrix": np.zeros([3, 0], np.float32),
    "scalar": np.float32(-2.5),
    "one": np.array([3.25], np.float32),
    "all_equal": np.full(1000, -0.7, np.float32),
    "zeros": np.zeros(1000, np.float32),
    "negative_zeros": np.full(700, -0.0, np.float32),
    "denormals": np.array([1e-40, -1e-40, 0.0, 1.0, -1e-38], np.float32),
    "tiny": np.array([1e-37, -2e-37, 3e-37], np.float32),
    "huge": np.array([3.4e38, -3.4e38, 1.0, 3.3e38], np.float32),
    "two_close": np.array([1.0, 1.001, 5.0], np.float32),
    "infinity": np.array([1.0, _INF, 2.0], np.float32),
    "negative_infinity": np.array([1.0, -_INF, 2.0], np.float32),
    "nan": np.array([1.0, _NAN, 2.0], np.float32),
    "fewer_than_codes": np.linspace(-1, 1, 201, dtype=np.float32),
    "ties": np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5], np.float32),
    "image": np.arange(2 * 3 * 5 * 7, dtype=np.float32).reshape(2, 3, 5, 7) - 100,
    "transposed": (np.arange(600, dtype=np.float32).reshape(20, 30).T - 250) ** 3,
    "strided": np.linspace(-3, 5, 3000, dtype=np.float32)[::3],
    "reversed": np.geomspace(1e-6, 1e6, 999, dtype=np.float32)[::-1],
    "misaligned": np.frombuffer(b"x" + np.linspace(-1, 2, 777, dtype=np.float32).tobytes(), np.float32, 777, 1),
}


def _every_case():
    rng = np.random.default_rng(0)
    yield from ((f"_{name}", values) for name, values in _EDGE_CASES.items())
    yield from ((f"_{name}", make(rng, 20_001)) for name, make in _DATA.items())


def _for_implementations(*cases):
    cases = cases or ((),)
    return parameterized.named_parameters(
        (f"{name}{case[0] if case else ''}", implementation, *case[1:])
        for case in cases
        for name, implementation in _IMPLEMENTATIONS
    )


class _OpsTestCase(tf.test.TestCase, parameterized.TestCase):
    def assert_same_codes(self, codes, expected):
        """Equal, or at most 1 apart where rounding put a cell on the other side of a boundary."""
        self.assertEqual(codes.dtype, expected.dtype)
        self.assertEqual(codes.shape, expected.shape)
        difference = np.abs(codes.astype(int) - expected.astype(int))
        self.assertLessEqual(difference.max(initial=0), 1)
        self.assertLessEqual(np.mean(difference > 0) if difference.size else 0, 1e-3)


class QuantileSketchTest(_OpsTestCase):
    @_for_implementations(*_every_case())
    @pytest.mark.slow(after=47)
    def test_equals_the_reference(self, implementation, values):
        for spacing in (0.5, 1.0, 1 / 3):
            codes, bucket_values = implementation.quantile_sketch_encode(values, spacing)
            expected_codes, expected_values = _sketch_reference(values, spacing)
            self.assert_same_codes(codes, expected_codes)
            self.assertAllClose(bucket_values, expected_values, rtol=1e-6, atol=1e-44)
            decoded = implementation.quantile_sketch_decode(codes, bucket_values)
            self.assertEqual(decoded.dtype, np.float32)
            self.assertAllEqual(decoded, bucket_values[codes])

    @_for_implementations(("_bfloat16", _BFLOAT16), ("_float16", np.float16))
    def test_narrow_types_count_as_their_float32(self, implementation, dtype):
        values = np.random.default_rng(0).standard_normal(30_000).astype(dtype)
        values[:5] = [0.0, -0.0, 6e-8, -6e-8, 1e4]
        results = implementation.quantile_sketch_encode(values)
        for result, expected in zip(
            results, implementation.quantile_sketch_encode(values.astype("float32")), strict=True
        ):
            self.assertAllEqual(result, expected)

    @_for_implementations()
    def test_few_values_are_exact(self, implementation):
        rng = np.random.default_rng(0)
        values = rng.choice(rng.standard_normal(256).astype(np.float32), [100, 70])
        codes, bucket_values = implementation.quantile_sketch_encode(values)
        self.assertAllEqual(bucket_values[codes], values)

    @_for_implementations()
    def test_frequent_values_are_exact(self, implementation):
        values = _sparse(np.random.default_rng(0), 50_000)
        values[:3000] = 0.7
        codes, bucket_values = implementation.quantile_sketch_encode(values)
        for frequent in (0.0, np.float32(0.7)):
            self.assertAllEqual(bucket_values[codes[values == frequent]], values[values == frequent])

    @parameterized.named_parameters((name, name) for name in _DATA)
    def test_quantiles_have_their_rank(self, name):
        values = _DATA[name](np.random.default_rng(1), 300_000)
        codes, _ = ops.arrays.quantile_sketch_encode(values, spacing=1.0)
        ends = np.cumsum(np.bincount(codes.reshape(-1), minlength=256)) / values.size
        if name == "sparse":  # The zeros' bucket is as large as it must be; those around it divide the rest.
            zeros = codes[values == 0][0]
            counts = np.delete(np.bincount(codes, minlength=256), zeros)
            rest = np.sum(values != 0)
            self.assertLessEqual(counts.max() / rest, 1 / 253 + 2e-3)
        else:
            self.assertLess(np.abs(ends - np.arange(1, 257) / 256).max(), 1e-3)

    @parameterized.parameters(
        ("gaussian", 1.0, 0.0285), ("gaussian", 0.5, 0.0079), ("gaussian", 1 / 3, 0.0067),
        ("laplace", 1.0, 0.068), ("laplace", 0.5, 0.0126), ("laplace", 1 / 3, 0.009),
    )  # fmt: skip
    def test_accuracy(self, name, spacing, most):
        """Relative root mean square error; by high-resolution theory 0.0064 is the least for Gaussian data."""
        values = _DATA[name](np.random.default_rng(0), 1_000_000)
        decoded = ops.arrays.quantile_sketch_decode(*ops.arrays.quantile_sketch_encode(values, spacing=spacing))
        self.assertLess(_relative_error(decoded, values), most)

    def test_heavy_tails_need_wide_buckets(self):
        values = _sparse(np.random.default_rng(0), 1_000_000)
        errors = {}
        for spacing in (1.0, 0.5, 1 / 3):
            decoded = ops.arrays.quantile_sketch_decode(*ops.arrays.quantile_sketch_encode(values, spacing=spacing))
            errors[spacing] = _relative_error(decoded, values)
        whole = ops.arrays.int8_decode(*ops.arrays.int8_encode(values, None), None)
        self.assertLess(errors[1 / 3], errors[0.5])
        self.assertLess(errors[0.5], errors[1.0])
        self.assertLess(errors[1 / 3], _relative_error(whole, values))

    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        hnp.arrays(np.float32, st.integers(0, 99), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
        st.integers(1, 900),
        st.integers(0, 2**32 - 1),
        st.floats(0.01, 1.0),
    )
    def test_properties(self, drawn, num_random, seed, spacing):
        """Fewer than 1000 values: those in one bin are told apart, and stay what they are when encoded again."""
        random = np.random.default_rng(seed).integers(1 << 32, size=num_random, dtype=np.uint32).view(np.float32)
        values = np.concatenate([drawn, np.where(np.isfinite(random), random, np.float32(0))])
        codes, bucket_values = ops.arrays.quantile_sketch_encode(values, spacing)
        rising = codes[np.argsort(values)].astype(int)
        self.assertTrue(np.all(np.diff(rising) >= 0))  # monotone
        self.assertTrue(np.all(np.diff(bucket_values) >= 0))
        for code in np.unique(rising):  # a bucket's value is its mean
            members = values[codes == code].astype(np.float64)
            members[np.abs(members) < 2.0**-126] = 0.0
            np.testing.assert_allclose(bucket_values[code], np.float32(members.mean()), rtol=1e-6, atol=1e-45)
        again, values_again = ops.arrays.quantile_sketch_encode(bucket_values[codes], spacing)
        np.testing.assert_allclose(values_again[again], bucket_values[codes], rtol=2e-5, atol=2.0**-126)

    @unittest.skipUnless(ops.native_available(), "needs the native kernels")
    @parameterized.product(data=list(_DATA), spacing=[1.0, 1 / 3])
    def test_native_and_fallback_agree(self, data, spacing):
        values = _DATA[data](np.random.default_rng(2), 200_000)
        codes, bucket_values = ops.arrays.quantile_sketch_encode(values, spacing)
        expected_codes, expected_values = _FALLBACK.quantile_sketch_encode(values, spacing)
        self.assert_same_codes(codes, expected_codes)
        self.assertAllClose(bucket_values, expected_values, rtol=1e-6, atol=0)

    @_for_implementations(("_one", (1,)), ("_too_few", (128,)), ("_too_many", (512,)), ("_matrix", (16, 16)))
    def test_refuses_other_tables(self, implementation, shape):
        with self.assertRaisesRegex((ValueError, tf.errors.InvalidArgumentError), "bucket_values"):
            implementation.quantile_sketch_decode(np.zeros(3, np.uint8), np.zeros(shape, np.float32))

    @_for_implementations()
    def test_takes_numpy_scalars(self, implementation):
        values = np.arange(10, dtype=np.float32)
        codes, bucket_values = implementation.quantile_sketch_encode(values, np.float32(0.5))
        self.assertAllEqual(np.asarray(bucket_values)[codes], values)
        implementation.int8_encode(values, np.int64(512))

    @_for_implementations(
        ("_none", 0.0), ("_zero_as_float32", 1e-46), ("_wide", 1.5), ("_nan", _NAN), ("_text", "0.5"), ("_bool", True)
    )
    def test_refuses_spacings_out_of_range(self, implementation, spacing):
        with self.assertRaisesRegex(ValueError, "`spacing` must be .* Received: "):
            implementation.quantile_sketch_encode(np.ones(3, np.float32), spacing)


class ByteOrderTest(_OpsTestCase):
    def test_arrays_of_the_other_byte_order(self):
        values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
        other = values.astype(values.dtype.newbyteorder())
        for name in ("quantile_sketch_encode", "int8_encode"):
            encode = getattr(ops.arrays, name)
            for result, expected in zip(encode(other), encode(values), strict=True):
                self.assertAllEqual(result, expected)
        codes, scales = ops.arrays.int8_encode(values)
        decoded = ops.arrays.int8_decode(codes, scales.astype(scales.dtype.newbyteorder()))
        self.assertAllEqual(decoded, ops.arrays.int8_decode(codes, scales))


class Int8Test(_OpsTestCase):
    @_for_implementations(*_every_case())
    @pytest.mark.slow(after=47)
    def test_equals_the_reference(self, implementation, values):
        for block_size in (512, 100, 3000, None):
            codes, scales = implementation.int8_encode(values, block_size)
            expected_codes, expected_scales = _int8_reference(values, block_size)
            self.assertAllEqual(codes, expected_codes)
            self.assertEqual(codes.dtype, np.int8)
            self.assertAllEqual(scales, expected_scales)
            decoded = implementation.int8_decode(codes, scales, block_size)
            self.assertAllEqual(decoded, _int8_decoded(codes, scales, block_size))
            self.assertEqual(decoded.dtype, np.float32)

    @_for_implementations(*((f"_{name}", values) for name, values in _EDGE_CASES.items()))
    @pytest.mark.slow(after=45)
    def test_accumulates_and_reduces_decoded_values(self, implementation, values):
        values = np.ascontiguousarray(values) if np.ndim(values) else values
        rng = np.random.default_rng(3)
        other = rng.standard_normal(np.shape(values)).astype(np.float32)
        for block_size in (512, 10, None):
            codes, scales = _int8_reference(other, block_size)
            expected = values + _int8_decoded(codes, scales, block_size)
            self.assertAllEqual(implementation.int8_accumulate(codes, scales, values, block_size), expected)
            results = implementation.int8_reduce(codes, scales, values, block_size)
            for result, reference in zip(results, _int8_reference(expected, block_size), strict=True):
                self.assertAllEqual(result, reference)

    @_for_implementations(("_bfloat16", _BFLOAT16), ("_float16", np.float16))
    def test_narrow_types_count_as_their_float32(self, implementation, dtype):
        values = np.random.default_rng(0).standard_normal(3001).astype(dtype)
        values[:5] = [0.0, -0.0, 6e-8, -6e-8, 1e4]
        wide = values.astype(np.float32)
        codes, scales = implementation.int8_encode(values)
        for result, expected in zip((codes, scales), _int8_reference(wide, 512), strict=True):
            self.assertAllEqual(result, expected)
        results = implementation.int8_reduce(codes, scales, values)
        expected = _int8_reference(wide + _int8_decoded(codes, scales, 512), 512)
        for result, reference in zip(results, expected, strict=True):
            self.assertAllEqual(result, reference)

    def test_reduces_in_place(self):
        values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
        codes, scales = ops.arrays.int8_encode(values)
        expected = ops.arrays.int8_reduce(codes, scales, values)
        ops.arrays.int8_reduce(codes, scales, values, out=(codes, scales))
        self.assertAllEqual(codes, expected[0])
        self.assertAllEqual(scales, expected[1])

    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        hnp.arrays(np.float32, st.integers(0, 3000), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
        st.integers(1, 4000),
    )
    def test_error_is_at_most_half_a_step(self, values, block_size):
        codes, scales = ops.arrays.int8_encode(values, block_size)
        decoded = ops.arrays.int8_decode(codes, scales, block_size)
        steps = np.repeat(scales.astype(np.float64), block_size)[: values.size]
        slack = 127 * 2.0**-23 * steps  # A code is chosen, and multiplied, in float32.
        error = np.abs(decoded.astype(np.float64) - values)
        self.assertTrue(np.all(error <= steps / 2 + slack + 2.0**-119))

    @_for_implementations(("_zero", 0), ("_negative", -1), ("_float", 512.0), ("_bool", True))
    def test_refuses_block_sizes_out_of_range(self, implementation, block_size):
        with self.assertRaisesRegex(ValueError, "`block_size` must be None or an integer from 1 .* Received: "):
            implementation.int8_encode(np.ones(3, np.float32), block_size)

    @_for_implementations(("_one", 1), ("_too_few", 2), ("_too_many", 4))
    def test_refuses_a_wrong_number_of_scales(self, implementation, num_scales):
        codes, scales = np.ones(1500, np.int8), np.ones(num_scales, np.float32)
        for call in (
            lambda: implementation.int8_decode(codes, scales),
            lambda: implementation.int8_accumulate(codes, scales, np.ones(1500, np.float32)),
            lambda: implementation.int8_reduce(codes, scales, np.ones(1500, np.float32)),
        ):
            with self.assertRaisesRegex((ValueError, tf.errors.InvalidArgumentError), "scales"):
                call()

    @_for_implementations(("_more", (2, 8)), ("_one", (1,)), ("_none", ()))
    def test_refuses_other_shapes(self, implementation, shape):
        codes, scales, others = np.ones(8, np.int8), np.ones(1, np.float32), np.ones(shape, np.float32)
        with self.assertRaisesRegex((ValueError, tf.errors.InvalidArgumentError), "accumulator"):
            implementation.int8_accumulate(codes, scales, others)
        with self.assertRaisesRegex((ValueError, tf.errors.InvalidArgumentError), "values"):
            implementation.int8_reduce(codes, scales, others)

    @_for_implementations()
    def test_the_largest_values_stay_finite(self, implementation):
        values = np.array([1, -1, 0.5], np.float32) * np.finfo(np.float32).max
        decoded = implementation.int8_decode(*implementation.int8_encode(values))
        self.assertAllClose(decoded, values, rtol=1 / 127, atol=0)

    @_for_implementations()
    def test_a_large_block_takes_no_more_memory(self, implementation):
        """Of 2^31 - 1 values; a block is as long as what it holds."""
        codes, scales = implementation.int8_encode(np.array([1, -2], np.float32), 2**31 - 1)
        self.assertAllEqual(codes, [64, -127])
        decoded = implementation.int8_decode(codes, scales, 2**31 - 1)
        self.assertAllEqual(decoded, np.array([64, -127], np.float32) * scales)

    @hypothesis.settings(deadline=None)
    @hypothesis.given(st.integers(1, 2000), st.integers(1, 600), st.integers(0, 2**32 - 1))
    def test_sums(self, size, block_size, seed):
        """Of an accumulation: exact to float32's rounding. Of a reduction: within half a step of its blocks."""
        rng = np.random.default_rng(seed)
        first, second = rng.standard_t(3, (2, size)).astype(np.float32)
        codes, scales = ops.arrays.int8_encode(first, block_size)
        decoded = codes.astype(np.float64) * np.repeat(scales, block_size)[:size]
        total = second + decoded
        accumulated = second.copy()
        ops.arrays.int8_accumulate(codes, scales, accumulated, block_size)
        np.testing.assert_allclose(accumulated, total, rtol=1e-6, atol=1e-6)
        new_codes, new_scales = ops.arrays.int8_reduce(codes, scales, second, block_size)
        steps = np.repeat(new_scales, block_size)[:size]
        np.testing.assert_array_less(np.abs(new_codes * steps - total), 0.5 * steps + 1e-5 * np.abs(total) + 1e-6)


class Truncate16Test(_OpsTestCase):
    @_for_implementations(*_every_case())
    def test_equals_the_reference(self, implementation, values):
        truncated = implementation.truncate16_encode(values)
        self.assertEqual(truncated.dtype, _BFLOAT16)
        patterns = np.atleast_1d(np.array(values, np.float32)).view(np.uint32)
        expected = (patterns & 0xFFFF0000).view(np.float32).reshape(np.shape(values))
        self.assertAllEqual(implementation.truncate16_decode(truncated), np.where(np.isnan(values), _NAN, expected))
        rounded = implementation.truncate16_encode(values, round_to_nearest=True)
        self.assertAllEqual(rounded.astype(np.float32), np.asarray(values).astype(_BFLOAT16).astype(np.float32))

    @_for_implementations()
    def test_every_kind_of_nan_stays_one(self, implementation):
        patterns = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
        for round_to_nearest in (False, True):
            halves = implementation.truncate16_encode(patterns.view(np.float32), round_to_nearest)
            self.assertTrue(np.all(np.isnan(implementation.truncate16_decode(halves))))

    @_for_implementations()
    def test_narrow_types(self, implementation):
        values = np.random.default_rng(0).standard_normal(3001).astype(np.float32)
        halves = values.astype(_BFLOAT16)
        self.assertAllEqual(implementation.truncate16_encode(halves), halves)
        small = values.astype(np.float16)
        expected = implementation.truncate16_encode(small.astype(np.float32))
        self.assertAllEqual(implementation.truncate16_encode(small), expected)


def _misaligned(array):
    """A writable, contiguous copy at an odd address."""
    copy = np.frombuffer(bytearray(array.nbytes + 1), np.uint8)[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


# How an array of any shape may lie in memory.
_LAYOUTS = {
    "plain": np.ascontiguousarray,
    "misaligned": _misaligned,
    "strided": lambda array: np.repeat(array, 2, axis=0)[::2],
    "reversed": lambda array: np.ascontiguousarray(array[::-1])[::-1],
    "transposed": lambda array: np.ascontiguousarray(array.T).T,
}

# For results of 8 float32 values: too few, of another type, not contiguous, not writable.
_UNFIT = (
    np.empty(7, np.float32),
    np.empty(8, np.float64),
    np.empty(16, np.float32)[::2],
    np.broadcast_to(np.float32(0), 8),
)


@parameterized.named_parameters(("native", lambda call: call), ("fallback", _without_native))
class AccumulateTest(_OpsTestCase):
    """Tests of the functions that add decoded values to an array in place, except `int8_accumulate`."""

    def _check(self, add, decoded):
        """`add` adds `decoded` to an accumulator, wherever that lies."""
        others = np.random.default_rng(0).standard_normal(decoded.shape, np.float32)
        for accumulator in (others.copy(), _misaligned(others)):
            self.assertIsNone(add(accumulator))
            np.testing.assert_array_equal(accumulator, others + decoded)

    def test_sketch(self, within):
        accumulate = within(ops.arrays.quantile_sketch_accumulate)
        rng = np.random.default_rng(1)
        for shape in ((0,), (3, 0), (1,), (1023,), (1025,), (2000,), (30, 20)):
            for layout in _LAYOUTS:
                bucket_values = _LAYOUTS[layout](rng.standard_normal(256, np.float32))
                codes = _LAYOUTS[layout](rng.integers(256, size=shape, dtype=np.uint8))
                with self.subTest(shape=shape, layout=layout):
                    self._check(functools.partial(accumulate, codes, bucket_values), bucket_values[codes])

    def test_truncate16(self, within):
        accumulate = within(ops.arrays.truncate16_accumulate)
        for shape in ((0,), (3, 0), (1,), (1023,), (1025,), (2000,), (30, 20)):
            values = np.random.default_rng(1).standard_normal(shape).astype(_BFLOAT16)
            for layout in _LAYOUTS:
                with self.subTest(shape=shape, layout=layout):
                    halves = _LAYOUTS[layout](values)
                    self._check(functools.partial(accumulate, halves), values.astype(np.float32))

    def test_scalars(self, within):
        total = np.array(1.5, np.float32)
        within(ops.arrays.quantile_sketch_accumulate)(np.uint8(2), np.arange(256, dtype=np.float32), total)
        within(ops.arrays.truncate16_accumulate)(_BFLOAT16(-0.25), total)
        self.assertEqual(total, 3.25)

    def test_what_is_not_finite(self, within):
        halves = np.array([_INF, -_INF, _NAN, _INF, 1e-40, -0.0], _BFLOAT16)
        total = np.array([1, 1, 1, -_INF, 0, -0.0], np.float32)
        with np.errstate(invalid="ignore"):
            within(ops.arrays.truncate16_accumulate)(halves, total)
        self.assertAllEqual(total, [_INF, -_INF, _NAN, _NAN, np.float32(halves[4]), 0])
        self.assertTrue(np.signbit(total[5]))
        bucket_values, total = np.full(256, _NAN, np.float32), np.ones(3, np.float32)
        bucket_values[:2] = [-_INF, 3]
        within(ops.arrays.quantile_sketch_accumulate)(np.array([0, 1, 2], np.uint8), bucket_values, total)
        self.assertAllEqual(total, [-_INF, 4, _NAN])

    def test_refuses_accumulators_that_do_not_fit(self, within):
        calls = (
            functools.partial(
                within(ops.arrays.quantile_sketch_accumulate), np.ones(8, np.uint8), np.ones(256, np.float32)
            ),
            functools.partial(within(ops.arrays.truncate16_accumulate), np.ones(8, _BFLOAT16)),
        )
        for call, accumulator in itertools.product(calls, _UNFIT):
            with self.assertRaisesRegex(ValueError, "`accumulator` must be a writable, C-contiguous array"):
                call(accumulator)
        for call in calls:
            with self.assertRaisesRegex(TypeError, "`accumulator` must be a NumPy array"):
                call([0.0] * 8)

    def test_refuses_other_types_and_tables(self, within):
        total = np.zeros(3, np.float32)
        sketch, truncate16 = within(ops.arrays.quantile_sketch_accumulate), within(ops.arrays.truncate16_accumulate)
        with self.assertRaisesRegex(TypeError, "`codes` must be of type uint8"):
            sketch(np.zeros(3, np.int8), np.zeros(256, np.float32), total)
        with self.assertRaisesRegex(ValueError, "`bucket_values` must be a vector of 256 values"):
            sketch(np.zeros(3, np.uint8), np.zeros(3, np.float32), total)
        with self.assertRaisesRegex(TypeError, "`halves` must be of type bfloat16"):
            truncate16(np.zeros(3, np.float16), total)


class ArraysTest(_OpsTestCase):
    @parameterized.parameters(*_DATA)
    @pytest.mark.stress(after=2)
    def test_results_do_not_depend_on_the_number_of_threads(self, name):
        values = _DATA[name](np.random.default_rng(4), 3_000_001)
        sketch = ops.arrays.quantile_sketch_encode(values, num_threads=1)
        codes, scales = ops.arrays.int8_encode(values, num_threads=1)
        halves = ops.arrays.truncate16_encode(values, num_threads=1)
        calls = [
            ("quantile_sketch_encode", values),
            ("quantile_sketch_decode", *sketch),
            ("quantile_sketch_accumulate", *sketch, values),
            *(("int8_encode", values, block_size) for block_size in (512, None)),
            *(("int8_decode", codes, *each) for each in ((scales, 512), (scales[:1], None))),
            *(("int8_accumulate", codes, *each) for each in ((scales, values, 512), (scales[:1], values, None))),
            *(("int8_reduce", codes, *each) for each in ((scales, values, 512), (scales[:1], values, None))),
            ("truncate16_encode", values),
            ("truncate16_decode", halves),
            ("truncate16_accumulate", halves, values),
        ]
        self.assertContainsSubset(_NAMES, {function for function, *_ in calls})
        for function, *arguments in calls:
            call = functools.partial(_on_arrays(function), *arguments)
            expected = tf.nest.flatten(call(num_threads=1))
            for num_threads in (2, 5):
                for result, reference in zip(tf.nest.flatten(call(num_threads=num_threads)), expected, strict=True):
                    np.testing.assert_array_equal(result, reference, err_msg=function)

    def test_out_takes_the_results(self):
        values = np.arange(2000, dtype=np.float32)
        out = np.empty(2000, np.int8), np.empty(4, np.float32)
        codes, scales = ops.arrays.int8_encode(values, out=out)
        self.assertIs(codes, out[0])
        self.assertIs(scales, out[1])
        self.assertAllEqual(codes, _int8_reference(values, 512)[0])

    @parameterized.parameters((out,) for out in _UNFIT)
    def test_refuses_an_out_that_does_not_fit(self, out):
        with self.assertRaisesRegex(ValueError, "`out` must be a writable, C-contiguous array"):
            ops.arrays.int8_decode(np.zeros(8, np.int8), np.ones(1, np.float32), out=out)

    @_for_implementations(("_int32", np.int32), ("_float64", np.float64))
    def test_refuses_other_types(self, implementation, dtype):
        for name in ("quantile_sketch_encode", "int8_encode", "truncate16_encode"):
            with self.assertRaisesRegex(TypeError, "`values` must be of type float32, bfloat16, float16. Received"):
                getattr(implementation, name)(np.ones(3, dtype))


class GraphTest(_OpsTestCase):
    @parameterized.parameters("native", "fallback")
    @pytest.mark.slow(after=1)
    def test_works_with_unknown_shapes(self, which):
        @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
        def exchange(values):
            codes, scales = ops.int8_encode(values, 100)
            codes, scales = ops.int8_reduce(codes, scales, values, 100)
            total = ops.int8_accumulate(codes, scales, values, 100)
            sketch = ops.quantile_sketch_decode(*ops.quantile_sketch_encode(total))
            return ops.truncate16_decode(ops.truncate16_encode(sketch)), ops.int8_decode(codes, scales, 100)

        if which == "fallback":
            exchange = _without_native(exchange)
        values = np.random.default_rng(0).standard_normal([50, 33]).astype(np.float32)
        for shape in ([50, 33], [1650], [0]):
            three_times, twice = exchange(values.reshape(-1)[: np.prod(shape)].reshape(shape))
            self.assertEqual(three_times.shape, shape)
            if np.prod(shape):
                self.assertLess(_relative_error(twice, 2 * values.reshape(shape)), 0.02)
                self.assertLess(_relative_error(three_times, 3 * values.reshape(shape)), 0.02)

    def test_static_shapes_are_known(self):
        @tf.function(input_signature=[tf.TensorSpec([1000, 3], tf.float32)])
        def shapes(values):
            codes, bucket_values = ops.quantile_sketch_encode(values)
            blocks, scales = ops.int8_encode(values, 512)
            tensors = (codes, bucket_values, ops.quantile_sketch_decode(codes, bucket_values), blocks, scales)
            self.assertEqual([t.shape for t in tensors], [[1000, 3], [256], [1000, 3], [1000, 3], [6]])
            self.assertEqual(ops.truncate16_encode(values).shape, [1000, 3])
            return tensors

        shapes.get_concrete_function()


class ConstantsTest(tf.test.TestCase):
    def test_the_fallback_has_those_of_the_kernels(self):
        header = pathlib.Path(__file__).resolve().parents[2] / "ops" / "kernels" / "constants.h"
        literals = re.findall(r"constexpr \w+ (\w+) = ([\w.]+?)[uf]?;", header.read_text())
        numbers = {name: (float.fromhex if "x" in text else float)(text) for name, text in literals}
        expected = {
            "kMagnitudeMask": fallback._SIGN - 1,
            "kInfinity": np.float32(_INF).view(np.uint32),
            "kSmallestNormal": fallback._SMALLEST_NORMAL,
            "kNumCodes": fallback.NUM_CODES,
            "kBinShift": math.log2(fallback._BIN_SIZE),
            "kRefineFraction": fallback._REFINE_FRACTION,
            "kMaxParts": fallback._MAX_PARTS,
            "kMaxPartShift": math.log2(fallback._MAX_PART_SIZE),
            "kPointBuckets": fallback._POINT_BUCKETS,
            "kLargestCode": fallback._LARGEST_CODE,
            "kSmallestMagnitude": np.float32(fallback._SMALLEST_MAGNITUDE).view(np.uint32),
            "kLargestScale": fallback._LARGEST_SCALE,
            "kRounder": 1.5 * 2**23,
            "kLargestHalf": few_bits.LARGEST_HALF,
            "kNanHalf": few_bits.NAN_HALF,
            "kNumLevels": len(few_bits.LEVELS),
            "kLevelsPerScale": few_bits.LEVELS_PER_SCALE,
            "kMagnitudeUnits": few_bits.MAGNITUDE_UNITS,
        }
        self.assertEqual(numbers, expected)


def _cuda_library(error):
    """Loads a libhop_tf_cuda.so that says this of the devices."""
    return lambda path, mode: types.SimpleNamespace(HopTfCudaError=lambda: error)


class BuildTest(tf.test.TestCase):
    @unittest.skipIf(os.environ.get("HOP_TF_REQUIRE_NATIVE") != "1", "HOP_TF_REQUIRE_NATIVE=1 is not set")
    def test_native_is_there(self):
        self.assertTrue(ops.native_available())

    def test_info(self):
        info = ops.build_info()
        self.assertEqual(info["native"], ops.native_available())
        self.assertCountEqual(info, ["native", "compiler", "num_cores", "cuda", "cuda_error"])
        self.assertEqual(info["cuda"], not info["cuda_error"])

    @unittest.skipUnless(ops.native_available(), "needs the native kernels")
    def test_info_tells_why_operations_do_not_run_on_gpus(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        library = folder / "libhop_tf_cuda.so"
        self.enter_context(mock.patch.object(native, "_FOLDER", folder))
        self.assertEqual(ops.build_info()["cuda_error"], "libhop_tf_cuda.so was not built")
        library.write_bytes(b"no library")
        info = ops.build_info()
        self.assertFalse(info["cuda"])
        self.assertRegex(info["cuda_error"], "libhop_tf_cuda.so: ")
        library.unlink()
        shutil.copy(pathlib.Path(native.__file__).with_name("libhop_tf_kernels.so"), library)
        self.assertIn("undefined symbol: HopTfCudaError", ops.build_info()["cuda_error"])
        for error in (b"there is no CUDA driver", b""):
            with mock.patch.object(native.ctypes, "CDLL", _cuda_library(error)):
                info = ops.build_info()
            self.assertEqual((info["cuda"], info["cuda_error"]), (not error, error.decode()))
        with mock.patch.object(native, "kernels", lambda: None):
            self.assertEqual(ops.build_info()["cuda_error"], "there are no native kernels at all")

    @unittest.skipUnless(ops.native_available(), "needs the native kernels")
    def test_operations_stay_on_the_processor_if_gpus_cannot_run_them(self):
        """And a warning says why, if there are GPUs."""
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.enter_context(mock.patch.object(native, "_FOLDER", folder))
        load = self.enter_context(mock.patch.object(tf, "load_op_library"))
        for name in ("hop_tf_ops.so", "libhop_tf_cuda.so"):
            (folder / name).write_bytes(b"no library")
        for gpus in ([], ["GPU:0"]):
            with (
                mock.patch.object(tf.config, "list_physical_devices", lambda kind, gpus=gpus: gpus),
                mock.patch.object(native.logging, "warning") as warn,
            ):
                self.assertIs(native.operations.__wrapped__(), load.return_value)
            self.assertEqual(warn.call_count, len(gpus))
        self.assertRegex(warn.call_args.args[0] % warn.call_args.args[1:], "run on the processor.*libhop_tf_cuda.so: ")

    def test_a_missing_library_is_told_with_what_to_do(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.enter_context(mock.patch.object(native, "_FOLDER", folder / "ops"))
        warn = self.enter_context(mock.patch.object(native.logging, "log_first_n"))
        for files, expected in (((), "was built without"), (("setup.py",), f"comes from the source tree {folder}, ")):
            for name in files:
                (folder / name).touch()
            self.assertIsNone(native.kernels.__wrapped__())
            self.assertIn(f"hop_tf {expected}", warn.call_args.args[-1])


def _relative_error(decoded, values):
    values = np.asarray(values, np.float64)
    return np.sqrt(np.mean((np.asarray(decoded, np.float64) - values) ** 2) / np.mean(values**2))


if __name__ == "__main__":
    tf.test.main()
