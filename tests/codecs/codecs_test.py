"""One contract that every codec keeps, and what each one promises by itself."""

import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from hop_tf import codecs
from hop_tf.tensors.buffers import BufferPool

_BFLOAT16 = tf.bfloat16.as_numpy_dtype
_CODECS = (
    codecs.Identity(),
    codecs.Truncate16(),
    codecs.Truncate16(round_to_nearest=True),
    codecs.Int8(),
    codecs.Int8(block_size=64),
    codecs.Int8(block_size=None),
    codecs.QuantileSketch(),
    codecs.QuantileSketch(spacing=1.0),
    codecs.Bits4(),
    codecs.Bits4(block_size=32),
    codecs.Bits2(),
    codecs.Sparse(),
    codecs.Sparse(values="sketch"),
    codecs.TopK(),
    codecs.TopK(ratio=0.3, warmup_steps=4),
    codecs.TopK(ratio=0.2, values="truncate16"),
    codecs.TopK(ratio=0.2, values=codecs.Int8(block_size=64)),
    codecs.TopK(ratio=0.2, values="bits4"),
    codecs.TopK(ratio=0.01, values="bits2"),
)
_SPARSE = tuple(codec for codec in _CODECS if isinstance(codec, codecs.Sparse))


def _gradients(size=5000, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def _share_lost(codec):
    """Of the sum of squares, at most. The largest k of n values hold at least k / n of it."""
    return (0.25 if codec.name == "bits2" else 0.05) + (1 - codec.ratio if isinstance(codec, codecs.TopK) else 0)


def _top_k(values, count):
    """Indices of the `count` largest magnitudes, the first of equal ones, in NumPy; not those of zeros."""
    order = np.argsort(-np.abs(values.astype(np.float64)), kind="stable")[:count]
    return np.sort(order[values[order] != 0])


def _decode_sparse(data, num_values):
    """Returns the values in data of `Sparse(values="truncate16")`, read as documented; None if the data are invalid."""
    length, count, num_bytes = (int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(3))
    start = math.ceil((24 + num_bytes) / 64) * 64
    if length != num_values or count > length or len(data) != start + 2 * count or any(data[24 + num_bytes : start]):
        return None
    shift = max(0, int(math.log2(0.96 * length / count))) if count else 0
    num_remainders = math.ceil(count * shift / 8)
    if num_bytes < num_remainders or len(data) < 24:
        return None

    def bits(part):
        return "".join(f"{byte:08b}"[::-1] for byte in part)

    remainders, quotients = bits(data[24 : 24 + num_remainders]), bits(data[24 + num_remainders : 24 + num_bytes])
    zeros, ones = quotients.rstrip("0").split("1"), quotients.count("1")
    used = len(quotients.rstrip("0"))
    if ones != count or num_bytes != num_remainders + math.ceil(used / 8) or "1" in remainders[count * shift :]:
        return None
    indices, index = [], -1
    for i in range(count):
        remainder = remainders[i * shift : (i + 1) * shift]
        index += 1 + (len(zeros[i]) << shift) + int("0" + remainder[::-1], 2)
        indices.append(index)
    if index >= num_values:
        return None
    values = np.zeros(num_values, np.float32)
    halves = [int.from_bytes(data[start + 2 * i :][:2], "little") for i in range(count)]
    values[indices] = (np.array(halves, np.uint32) << 16).view(np.float32)
    return values


class CodecsTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.pool = BufferPool()

    def encode(self, codec, values):
        before = values.copy()
        data = codec.encode(values, self.pool)
        self.assertEqual((data.dtype, data.ndim), (np.uint8, 1))
        self.assertAllEqual(values, before)
        return self.received(data)

    def received(self, data):
        """As it comes from a transport."""
        buffer = self.pool.take(data.nbytes)
        buffer[:] = data
        buffer.flags.writeable = False
        return buffer

    def decode(self, codec, data, size):
        values = np.full(size, np.nan, np.float32)
        codec.decode(data, values)
        return values

    def round_trip(self, codec, values):
        return self.decode(codec, self.encode(codec, values), values.size)

    # The contract.

    @parameterized.parameters(*_CODECS)
    def test_is_plain_data(self, codec):
        self.assertEqual(codec, dataclasses.replace(codec))
        self.assertEqual(hash(codec), hash(dataclasses.replace(codec)))
        self.assertEqual(eval(repr(codec), vars(codecs)), codec)
        self.assertEqual(pickle.loads(pickle.dumps(codec)), codec)
        self.assertIsInstance(codecs.get(codec.name), type(codec))

    @parameterized.parameters(*_CODECS)
    def test_any_length(self, codec):
        for size in (0, 1, 2, 63, 64, 65, 511, 513, 5000):
            values = _gradients(size)
            error = self.round_trip(codec, values) - values
            self.assertLessEqual(np.sum(error**2), _share_lost(codec) * np.sum(values**2))

    @parameterized.parameters(*_CODECS)
    def test_length_of_data(self, codec):
        size = 1 << 18
        self.assertAllClose(self.encode(codec, _gradients(size)).nbytes / size, codec.bytes_per_value, rtol=0.02)

    @parameterized.parameters(*_CODECS)
    def test_is_deterministic(self, codec):
        values = _gradients()
        self.assertAllEqual(self.encode(codec, values), self.encode(codec, values.copy()))

    @parameterized.parameters(*_CODECS)
    def test_zeros_stay_zeros(self, codec):
        self.assertAllEqual(self.round_trip(codec, np.zeros(1000, np.float32)), np.zeros(1000))

    @parameterized.parameters(*_CODECS)
    def test_scales(self, codec):
        """Twice the values decode to twice as much: a gradient's size does not matter."""
        values = _gradients()
        self.assertAllClose(self.round_trip(codec, 2 * values), 2 * self.round_trip(codec, values), rtol=1e-6)

    @parameterized.parameters(*_CODECS)
    def test_accumulate(self, codec):
        data, others = self.encode(codec, _gradients()), _gradients(seed=1)
        total = others.copy()
        codec.accumulate(data, total)
        self.assertAllClose(total, others + self.decode(codec, data, 5000), rtol=1e-6, atol=1e-6)

    @parameterized.product(codec=_CODECS, dtype=[np.float32, _BFLOAT16], factor=[1.0, 1 / 3])
    def test_total(self, codec, dtype, factor):
        """A vector and two decoded ones: longer than a block, and not a multiple of one."""
        size = 70_001
        own, *others = (np.random.default_rng(seed).normal(size=size).astype(dtype) for seed in range(3))
        parts = [self.encode(codec, each) for each in others]
        total = codec.total(parts, own, factor, self.pool)
        self.assertEqual(total.dtype, np.float32)
        decoded = [self.decode(codec, part, size) for part in parts]
        expected = (own.astype(np.float64) + decoded[0] + decoded[1]) * factor
        self.assertAllClose(total, expected, rtol=1e-5, atol=1e-6)

    @parameterized.product(codec=_CODECS, num_parts=[2, 3])
    def test_decode_sum(self, codec, num_parts):
        size, factor = 70_001, 1 / 3
        vectors = [np.random.default_rng(seed).normal(size=size).astype(np.float32) for seed in range(num_parts)]
        parts = [self.encode(codec, each) for each in vectors]
        mean = np.full(size, np.nan, np.float32)
        codec.decode_sum(parts, factor, mean)
        expected = sum(self.decode(codec, part, size).astype(np.float64) for part in parts) * factor
        self.assertAllClose(mean, expected, rtol=1e-5, atol=1e-6)

    @parameterized.parameters(*_CODECS)
    def test_reduce(self, codec):
        """Decodes, adds in float32, and encodes; codes themselves are never added."""
        data, others = self.encode(codec, _gradients()), _gradients(seed=1)
        reduced = self.decode(codec, self.received(codec.reduce(data, others, self.pool)), 5000)
        total = others + self.decode(codec, data, 5000)
        expected = self.round_trip(codec, total)
        # A value at the border of two codes may fall to either side.
        near = np.isclose(reduced, expected, rtol=1e-5, atol=1e-6)
        self.assertGreater(np.mean(near), 0.999)
        self.assertAllClose(reduced, expected, atol=2 * np.max(np.abs(expected - total)) + 1e-6)

    @parameterized.parameters(*_CODECS)
    def test_other_floats(self, codec):
        for dtype in (np.float16, _BFLOAT16):
            values = _gradients().astype(dtype)
            self.assertAllEqual(self.encode(codec, values), self.encode(codec, values.astype(np.float32)))

    @parameterized.parameters(*_CODECS)
    def test_what_is_not_finite_is_seen(self, codec):
        for bad in (np.inf, -np.inf, np.nan):
            values = _gradients()
            values[1234] = bad
            self.assertFalse(np.isfinite(self.round_trip(codec, values)).all())

    @parameterized.parameters(*_CODECS)
    def test_refuses_data_of_another_length(self, codec):
        data = self.encode(codec, _gradients())
        for size in (4999, 5001):
            for use in (codec.decode, codec.accumulate):
                with self.assertRaisesRegex(ValueError, f"`data` must .* Received: {data.nbytes} bytes"):
                    use(data, np.empty(size, np.float32))

    @parameterized.parameters(*_CODECS)
    def test_refuses_data_that_are_cut_off(self, codec):
        data = self.encode(codec, _gradients(300))
        for num_bytes in range(data.nbytes):
            with self.assertRaisesRegex(ValueError, "`data` must "):
                codec.decode(self.received(data[:num_bytes]), np.empty(300, np.float32))

    @parameterized.parameters(*_CODECS)
    def test_steps(self, codec):
        """Settings that change with time end as those that were given."""
        self.assertEqual(codec.at_step(0), dataclasses.replace(codec.at_step(0)))
        last = codec.at_step(1000)
        self.assertEqual(last.bytes_per_value, codec.bytes_per_value)
        self.assertEqual(last.at_step(0), last)

    # Each by itself.

    def test_identity(self):
        values = _gradients()
        self.assertAllEqual(self.round_trip(codecs.Identity(), values), values)
        self.assertTrue(np.shares_memory(codecs.Identity().encode(values, self.pool), values))
        doubles = values.astype(np.float64)
        out = np.empty(5000)
        codec = codecs.Identity(dtype=np.float64)
        codec.decode(codec.encode(doubles, self.pool), out)
        self.assertAllEqual(out, doubles)

    @parameterized.parameters("float16", "bfloat16")
    def test_identity_of_16_bits_loses_something(self, dtype):
        codec = codecs.Identity(dtype=dtype)
        self.assertTrue(np.any(self.round_trip(codec, _gradients()) != _gradients()))
        self.assertTrue(codec.is_lossy)
        self.assertTrue(codec.with_error_feedback(True).error_feedback)
        self.assertTrue(codecs.TopK(values=codec, error_feedback=True).selected().error_feedback)
        self.assertFalse(codecs.Identity(dtype="float64").is_lossy)

    @parameterized.parameters((False, 2.0**-7), (True, 2.0**-8))
    def test_truncate16(self, round_to_nearest, bound):
        values = _gradients()
        decoded = self.round_trip(codecs.Truncate16(round_to_nearest=round_to_nearest), values)
        self.assertLessEqual(np.max(np.abs(decoded - values) / np.abs(values)), bound)
        bits = values.view(np.uint32)
        if not round_to_nearest:
            self.assertAllEqual(decoded.view(np.uint32), bits & 0xFFFF0000)

    @parameterized.parameters(64, 512, None)
    def test_int8(self, block_size):
        """At most half a step of 1/127 of the block's largest magnitude."""
        values = _gradients(5120)
        decoded = self.round_trip(codecs.Int8(block_size=block_size), values)
        blocks = np.abs(values.reshape(-1, block_size or values.size))
        bounds = np.repeat(blocks.max(1) / 254, blocks.shape[1])
        self.assertTrue(np.all(np.abs(decoded - values) <= bounds * (1 + 1e-5)))

    @parameterized.parameters((4, 0.10, 0.1), (2, 0.36, 0.25))
    def test_few_bits(self, bits, most, of_selected):
        """Relative root mean squares: of normally distributed values, and of the largest 1 % of them."""
        codec, values = codecs.get(f"bits{bits}"), _gradients(1 << 18)
        for each, bound in ((values, most), (values[_top_k(values, 2622)], of_selected)):
            error = self.round_trip(codec, each) - each
            self.assertLess(np.sqrt(np.mean(error**2) / np.mean(each**2)), bound)
        self.assertAllClose(codec.bytes_per_value, {4: 0.53125, 2: 0.28125}[bits])
        self.assertEqual(codec.granularity, codec.block_size)

    def test_bits2_keeps_the_sum_of_magnitudes(self):
        values = _gradients(1 << 16)
        sums = [np.abs(each.astype(np.float64)).sum() for each in (values, self.round_trip(codecs.Bits2(), values))]
        self.assertAllClose(*sums, rtol=1e-3)

    def test_sketch(self):
        values = _gradients(1 << 18)
        error = self.round_trip(codecs.QuantileSketch(), values) - values
        self.assertLess(np.sqrt(np.mean(error**2)), 0.009)

    @parameterized.parameters(codecs.QuantileSketch(), codecs.QuantileSketch(spacing=1.0))
    def test_encodes_in_the_graph(self, codec):
        """To the same bytes; and what is cut out of them decodes to that part of the values, times the factor."""
        values, where = _gradients(1600), slice(112, 999)
        data = tf.function(codec.emit_encode)(tf.constant(values)).numpy()
        self.assertAllEqual(data, codec.encode(values, self.pool))
        part = self.received(codec.part(self.received(data), where, 1 / 3, self.pool))
        expected = self.decode(codec, self.received(data), values.size)[where] / 3
        self.assertAllClose(self.decode(codec, part, expected.size), expected, rtol=1e-6)

    @parameterized.product(
        codec=(
            codecs.Int8(),
            codecs.Int8(block_size=48),
            codecs.Truncate16(),
            codecs.Truncate16(round_to_nearest=True),
        ),
        dtype=(np.float32, np.float16, _BFLOAT16),
    )
    def test_divisible(self, codec, dtype):
        """The graph encodes to the same bytes, and decodes to the same values. Parts are encoded as they are alone."""
        values, size = _gradients(5000).astype(dtype), 5000
        data = tf.function(codec.emit_encode)(tf.constant(values)).numpy()
        self.assertAllEqual(data, codec.encode(values, self.pool))
        self.assertEqual(data.size, codec.num_bytes(size))
        self.assertAllEqual(self.decode(codec, self.received(np.zeros_like(data)), size), np.zeros(size))
        decoded = tf.function(lambda data: codec.emit_decode(data, size))(tf.constant(data)).numpy()
        self.assertAllEqual(decoded, self.decode(codec, self.received(data), size))
        others = [codec.encode(_gradients(size, seed).astype(dtype), self.pool) for seed in (1, 2)]
        parts = [self.received(each) for each in (data, *others)]
        expected = np.empty(size, np.float32)
        codec.decode_sum(parts, 1 / 3, expected)
        mean = tf.function(lambda *parts: codec.emit_decode_sum(parts, 1 / 3, size))(*map(tf.constant, parts))
        self.assertAllEqual(mean, expected)
        joined = np.zeros_like(data)
        for begin, end in itertools.pairwise((0, 3, 7, math.ceil(size / codec.granularity))):
            where = slice(begin * codec.granularity, min(end * codec.granularity, size))
            part = codec.cut(self.received(data), size, where, self.pool)
            self.assertAllEqual(part, codec.encode(values[where], self.pool))
            codec.paste(self.received(part), joined, size, where)
            with self.assertRaisesRegex(ValueError, "must have the"):
                codec.paste(part[1:], joined, size, where)
        self.assertAllEqual(joined, data)

    def test_others_do_not_encode_in_the_graph(self):
        for codec in (codecs.Identity(), codecs.Bits4(), codecs.TopK(ratio=0.1)):
            self.assertFalse(codec.encodes_in_graph or codec.is_divisible)
            with self.assertRaisesRegex(NotImplementedError, "does not encode in the graph"):
                codec.emit_encode(tf.zeros([16]))

    @parameterized.product(codec=_SPARSE, share=(0.0, 0.001, 0.3, 1.0))
    def test_sparse_sends_what_is_not_zero(self, codec, share):
        """Several blocks, some without any value."""
        values = _gradients(200_000)
        values[np.random.default_rng(1).random(values.size) >= share] = 0
        values[65536:131072] = 0
        if isinstance(codec, codecs.TopK):
            expected = _top_k(values, math.ceil(codec.ratio * values.size))
        else:
            (expected,) = np.nonzero(values)
        data = self.encode(codec, values)
        indices, sent = codec.entries(data, values.size)
        self.assertAllEqual(indices, expected)
        self.assertAllEqual(codec.select(values), expected)
        self.assertAllEqual(sent, self.round_trip(codec.values, values[expected]))
        decoded = np.zeros_like(values)
        decoded[expected] = sent
        self.assertAllEqual(self.decode(codec, data, values.size), decoded)

    def test_sparse_leaves_zeros_alone(self):
        """Only the accumulator's values at the sent places change: nan stays elsewhere."""
        values = np.zeros(1000, np.float32)
        values[[0, 7, 999]] = 1, 2, 3
        total = np.full(1000, np.nan, np.float32)
        total[[0, 7, 999]] = 10
        codecs.Sparse().accumulate(self.encode(codecs.Sparse(), values), total)
        self.assertAllEqual(total[[0, 7, 999]], [11, 12, 13])
        self.assertEqual(np.count_nonzero(np.isnan(total)), 997)

    def test_sparse_of_doubles(self):
        values = np.random.default_rng(0).normal(size=1000)
        codec = codecs.TopK(ratio=0.1, values=codecs.Identity(dtype="float64"))
        out = np.empty(1000)
        codec.decode(self.encode(codec, values), out)
        expected = np.zeros(1000)
        indices = _top_k(values, 100)
        expected[indices] = values[indices]
        self.assertAllEqual(out, expected)

    @parameterized.product(
        dtype=(np.float32, np.float64, np.float16, _BFLOAT16),
        values=(
            lambda random: random.normal(size=50_000),
            lambda random: random.standard_cauchy(size=50_000),
            lambda random: np.where(random.random(50_000) < 0.003, random.normal(size=50_000), 0),
            # Samples mislead: one value in 61 is large, or is all that is not zero.
            lambda random: np.where(np.arange(50_000) % 61, random.random(50_000), 10),
            lambda random: np.where(np.arange(50_000) % 61, 0, random.random(50_000)),
            lambda random: np.where(np.arange(50_000) % 61, random.random(50_000), 0),
            lambda random: np.ones(50_000),
            lambda random: random.integers(-3, 4, 50_000),
        ),
    )
    def test_top_k_selects_the_largest(self, dtype, values):
        with np.errstate(over="ignore"):
            values = values(np.random.default_rng(0)).astype(dtype)
        for ratio in (1e-9, 0.001, 0.01, 0.1, 0.7, 1.0):
            expected = _top_k(values, math.ceil(ratio * values.size))
            self.assertAllEqual(codecs.TopK(ratio=ratio).select(values), expected)

    def test_top_k_takes_nan_for_the_largest(self):
        values = _gradients()
        values[17] = -np.nan
        values[18:20] = np.inf, -np.inf
        self.assertAllEqual(codecs.TopK(ratio=1 / 5000).select(values), [17])
        self.assertAllEqual(codecs.TopK(ratio=2 / 5000).select(values), [17, 18])
        self.assertAllEqual(codecs.TopK(ratio=3 / 5000).select(values), [17, 18, 19])

    def test_warm_up(self):
        """From 25 % to 0.0977 % in equal ratios: 1 / 4 each, as the paper's steps are."""
        codec = codecs.TopK(ratio=4.0**-5, warmup_steps=4, values="int8", error_feedback=True)
        ratios = [codec.ratio_at(step) for step in range(7)]
        self.assertAllClose(ratios, [4.0**-n for n in (1, 2, 3, 4, 5, 5, 5)], rtol=1e-12)
        for step, ratio in enumerate(ratios):
            self.assertEqual(codec.at_step(step), dataclasses.replace(codec, ratio=ratio, warmup_steps=0))
            selected = codecs.Sparse(ratio=ratio, values="int8", error_feedback=True)
            self.assertEqual(codec.selected().at_step(step), selected, "the shares agree")

    def test_dense(self):
        """The dense codec keeps the error feedback, if its values are lossy."""
        self.assertEqual(codecs.TopK(error_feedback=True).dense, codecs.Identity())
        self.assertEqual(codecs.TopK(values="int8", error_feedback=True).dense, codecs.Int8(error_feedback=True))
        self.assertEqual(codecs.TopK(values="int8").selected().dense, codecs.Int8())
        self.assertEqual(codecs.TopK(values="bits2").selected().dense, codecs.Bits4())

    @parameterized.parameters(
        (0, np.uint64, 70_001, "header announces 70001 values"),
        (8, np.uint64, 2**63, "indices are malformed"),
        (8, np.uint64, 2, "indices are malformed"),
        (16, np.uint64, 2**64 - 1, "indices are cut off"),
        (16, np.uint64, 8, "indices are malformed"),
        (16, np.uint64, 6, "padding is not zero"),
        (29, np.uint8, 1 << 2, "indices are malformed"),  # Behind the remainders.
        (30, np.uint8, 0b11 | 1 << 6 | 1 << 5, "indices are malformed"),
        (30, np.uint8, 0b11 | 1 << 7, "indices are malformed"),  # Beyond the vector.
        (63, np.uint8, 1, "padding is not zero"),
    )
    def test_sparse_tells_what_is_malformed(self, where, dtype, value, problem):
        """The indices take 3 times 14 bits, and quotients 0, 0 and 4."""
        values = np.zeros(70_000, np.float32)
        values[[2, 5, 69_999]] = 1
        data = self.encode(codecs.Sparse(), values).copy()
        self.assertAllEqual(data[16:24].view(np.uint64), [7])
        self.assertAllEqual(data[30:31], [0b11 | 1 << 6])
        data[where : where + np.dtype(dtype).itemsize].view(dtype)[0] = value
        with self.assertRaisesRegex(
            ValueError, rf"`data` must be 70000 values in the format of Sparse\(.* 76 bytes, whose {problem}"
        ):
            codecs.Sparse().decode(self.received(data), np.empty(70_000, np.float32))

    @parameterized.parameters(0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
    def test_bits_of_an_index(self, ratio):
        """At most 4 % above the entropy of independent places, with one bit at least."""
        bits = 8 * (codecs.Sparse(ratio=ratio).bytes_per_value / ratio - 4)
        entropy = -math.log2(ratio) - (1 - ratio) / ratio * math.log2(1 - ratio) if ratio < 1 else 1
        self.assertBetween(bits, entropy * (1 - 1e-9), 1.04 * entropy)

    @settings(deadline=None, max_examples=300)
    @given(data=st.data())
    @pytest.mark.slow
    def test_sparse_refuses_what_cannot_be(self, data):
        """Bytes of a vector's data are changed, left out and added: they are taken if, and only if, they are sound."""
        num_values = data.draw(st.sampled_from((0, 1, 40, 65536, 65540, 131073)))
        values = np.zeros(num_values, np.float32)
        if num_values:
            indices = st.integers(0, min(4, num_values - 1)) | st.integers(0, num_values - 1)
            values[data.draw(st.lists(indices, max_size=6))] = 1.5
        received = bytearray(self.encode(codecs.Sparse(values="truncate16"), values).tobytes())
        # Near the beginning, where the header, the counts and the indices are; to small numbers, and to any.
        places = st.integers(0, 48) | st.integers(0, len(received) - 1)
        changes = st.tuples(places, st.integers(0, 4) | st.integers(0, 255))
        for place, value in data.draw(st.lists(changes, max_size=4)):
            received[place % len(received)] = value
        if data.draw(st.booleans()):
            del received[data.draw(st.integers(0, len(received))) :]
            received += data.draw(st.binary(max_size=8))
        self.check_that_only_sound_data_are_taken(bytes(received), num_values)

    @settings(deadline=None)
    @given(received=st.binary(max_size=300), num_values=st.integers(0, 70_000))
    def test_sparse_refuses_random_bytes(self, received, num_values):
        self.check_that_only_sound_data_are_taken(received, num_values)

    def check_that_only_sound_data_are_taken(self, received, num_values):
        codec, out = codecs.Sparse(values="truncate16"), np.empty(num_values, np.float32)
        array = self.received(np.frombuffer(received, np.uint8))
        expected = _decode_sparse(received, num_values)
        if expected is not None:
            codec.decode(array, out)
            self.assertAllEqual(out.view(np.uint32), expected.view(np.uint32))
        else:
            with self.assertRaisesRegex(ValueError, "`data` must "):
                codec.decode(array, out)

    # Error feedback.

    @parameterized.parameters(
        "truncate16", "int8", "sketch", "bits4", "bits2", "top_k", codecs.Identity(dtype="float16")
    )
    def test_error_feedback(self, codec):
        """With e <- (values + e) - decode(encode(values + e)), written out."""
        codec = codecs.get(codec)
        feedback = codecs.ErrorFeedback(codec, 5000)
        residual = np.zeros(5000, np.float32)
        for step in range(5):
            values = _gradients(seed=step)
            for where in (slice(0, 2048), slice(2048, 5000)):
                corrected = values[where] + residual[where]
                data = self.received(feedback.encode(values[where], where, self.pool))
                self.assertAllEqual(data, codec.encode(corrected, self.pool))
                residual[where] = corrected - self.decode(codec, data, corrected.size)

    def test_error_feedback_of_a_mean_fits_its_terms(self):
        """Error feedback keeps the error of the sum: four times the error of a mean over four."""
        codec, where = codecs.Truncate16(), slice(0, 5000)
        feedback, values = codecs.ErrorFeedback(codec, 5000), _gradients()
        data, lost = feedback.try_encode(values, where, self.pool, scale=0.25)
        mean = self.decode(codec, data, 5000)
        self.assertAllEqual(mean, self.decode(codec, codec.encode(values / 4, self.pool), 5000))
        self.assertAllEqual(lost, values - 4 * mean)
        feedback.keep(lost, where)
        self.assertAllEqual(
            feedback.encode(values, where, self.pool), codec.encode(values + (values - 4 * mean), self.pool)
        )

    def test_error_feedback_forgets_nothing_over_a_bad_step(self):
        codec = codecs.Int8()
        feedback, twin = (codecs.ErrorFeedback(codec, 5000) for _ in range(2))
        where = slice(0, 5000)
        for each in (feedback, twin):
            each.encode(_gradients(), where, self.pool)
        bad = _gradients()
        bad[7] = np.inf
        self.assertFalse(np.isfinite(self.decode(codec, feedback.encode(bad, where, self.pool), 5000)).all())
        after = [each.encode(_gradients(seed=1), where, self.pool) for each in (feedback, twin)]
        self.assertAllEqual(*after)

    # Arguments.

    def test_get(self):
        self.assertEqual(codecs.get(None), codecs.Identity())
        self.assertEqual(codecs.get("int8"), codecs.Int8(block_size=512))
        self.assertEqual(
            codecs.get("top_k"), codecs.TopK(ratio=0.01, values=None, warmup_steps=0, error_feedback=False)
        )
        codec = codecs.Int8(block_size=None, error_feedback=True)
        self.assertIs(codecs.get(codec), codec)
        with self.assertRaisesRegex(ValueError, "must be one of .*'int8'.* Received: codec='int5'"):
            codecs.get("int5")
        with self.assertRaisesRegex(TypeError, "must be a hop_tf.codecs.Codec.* Received: codec=8"):
            codecs.get(8)

    @parameterized.parameters(
        (codecs.Int8, {"block_size": 0}, "block_size"),
        (codecs.Bits4, {"block_size": 100}, "block_size"),
        (codecs.Bits2, {"block_size": None}, "block_size"),
        (codecs.QuantileSketch, {"spacing": 0.0}, "spacing"),
        (codecs.Identity, {"error_feedback": True}, "error_feedback"),
        (codecs.Int8, {"error_feedback": "no"}, "error_feedback"),
        (codecs.TopK, {"error_feedback": 1}, "error_feedback"),
        (codecs.Truncate16, {"error_feedback": None}, "error_feedback"),
        (codecs.Truncate16, {"round_to_nearest": "no"}, "round_to_nearest"),
        (codecs.Identity, {"dtype": "int32"}, "dtype"),
        (codecs.TopK, {"ratio": 0.0}, "ratio"),
        (codecs.TopK, {"ratio": 1.5}, "ratio"),
        (codecs.TopK, {"ratio": float("nan")}, "ratio"),
        (codecs.TopK, {"ratio": "1%"}, "ratio"),
        (codecs.TopK, {"warmup_steps": -1}, "warmup_steps"),
        (codecs.TopK, {"values": "int5"}, "values"),
        (codecs.TopK, {"values": "top_k"}, "values"),
        (codecs.TopK, {"values": codecs.Int8(error_feedback=True)}, "values"),
        (codecs.Sparse, {"error_feedback": True}, "error_feedback"),
    )
    def test_refuses(self, codec, arguments, name):
        with self.assertRaisesRegex(ValueError, f"`{name}` must be"):
            codec(**arguments)


if __name__ == "__main__":
    tf.test.main()
