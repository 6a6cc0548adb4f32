"""One contract that every codec keeps, and what each one promises by itself."""

import dataclasses

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.buffers import BufferPool

_BFLOAT16 = tf.bfloat16.as_numpy_dtype
_CODECS = (
    codecs.Identity(),
    codecs.Truncate16(),
    codecs.Truncate16(round_to_nearest=True),
    codecs.Int8(),
    codecs.Int8(block_size=64),
    codecs.Int8(block_size=None),
    codecs.QuantileSketch(),
    codecs.QuantileSketch(num_bits=4, spacing=1.0),
)


def _gradients(size=5000, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


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
        self.assertIsInstance(codecs.get(codec.name), type(codec))

    @parameterized.parameters(*_CODECS)
    def test_any_length(self, codec):
        for size in (0, 1, 2, 63, 64, 65, 511, 513, 5000):
            values = _gradients(size)
            error = self.round_trip(codec, values) - values
            self.assertLessEqual(np.sum(error**2), 0.05 * np.sum(values**2))

    @parameterized.parameters(*_CODECS)
    def test_length_of_data(self, codec):
        size = 1 << 16
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
            with self.assertRaisesRegex(ValueError, rf"`data` must have the \d+ bytes .* Received: {data.nbytes}"):
                codec.decode(data, np.empty(size, np.float32))

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

    def test_sketch(self):
        values = _gradients(1 << 18)
        error = self.round_trip(codecs.QuantileSketch(), values) - values
        self.assertLess(np.sqrt(np.mean(error**2)), 0.009)

    # Error feedback.

    @parameterized.parameters("truncate16", "int8", "sketch")
    def test_error_feedback(self, name):
        """With e <- (values + e) - decode(encode(values + e)), written out."""
        codec = codecs.get(name)
        feedback = codecs.ErrorFeedback(codec, 5000)
        residual = np.zeros(5000, np.float32)
        for step in range(5):
            values = _gradients(seed=step)
            for where in (slice(0, 2048), slice(2048, 5000)):
                corrected = values[where] + residual[where]
                data = self.received(feedback.encode(values[where], where, self.pool))
                self.assertAllEqual(data, codec.encode(corrected, self.pool))
                residual[where] = corrected - self.decode(codec, data, corrected.size)

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
        codec = codecs.Int8(block_size=None, error_feedback=True)
        self.assertIs(codecs.get(codec), codec)
        with self.assertRaisesRegex(ValueError, "must be one of .*'int8'.* Received: codec='int4'"):
            codecs.get("int4")
        with self.assertRaisesRegex(TypeError, "must be a hop_tf.codecs.Codec.* Received: codec=8"):
            codecs.get(8)

    @parameterized.parameters(
        (codecs.Int8, {"block_size": 0}, "block_size"),
        (codecs.QuantileSketch, {"num_bits": 9}, "num_bits"),
        (codecs.QuantileSketch, {"spacing": 0.0}, "spacing"),
        (codecs.Identity, {"error_feedback": True}, "error_feedback"),
        (codecs.Identity, {"dtype": "int32"}, "dtype"),
    )
    def test_refuses(self, codec, arguments, name):
        with self.assertRaisesRegex(ValueError, f"`{name}` must be"):
            codec(**arguments)


if __name__ == "__main__":
    tf.test.main()
