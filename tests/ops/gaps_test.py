"""Rice codes of gaps, with and without the native kernels, also of bytes that are no codes."""

from __future__ import annotations

import math
from unittest import mock

import hypothesis
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

from hop_tf.ops import gaps, native

_IMPLEMENTATIONS = (("native", True), ("fallback", False))


def _with(is_native):
    return mock.patch.object(native, "kernels", native.kernels if is_native else lambda: None)


def _encode(indices, num_values, is_native):
    """Returns the bytes, and checks that nothing else is written."""
    out = np.full(sum(gaps.sizes(num_values, indices.size)) + 8, 0x5A, np.uint8)
    with _with(is_native):
        num_bytes = gaps.encode(indices, num_values, out[:-8])
    np.testing.assert_array_equal(out[-8:], 0x5A)
    return out[:num_bytes].copy()


def _decode(data, count, num_values, is_native):
    """Returns the indices, or None if the data are refused."""
    with _with(is_native):
        try:
            return gaps.decode(data, count, num_values).tolist()
        except ValueError:
            return None


def _chosen(num_values, share):
    return np.flatnonzero(np.random.default_rng(num_values).random(num_values) < share)


class GapsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(*_IMPLEMENTATIONS)
    def test_bits(self, is_native):
        """Gaps of 0, 1, 6, 10 and 18 values: remainders of 2 bits, and then quotients, from the lowest bit on."""
        data = _encode(np.array([0, 2, 9, 20, 39]), 40, is_native)
        self.assertAllEqual(data, [0b10_10_01_00, 0b10, 0b0_1_001_01_1, 0b1_000])

    @parameterized.product(is_native=(True, False), num_values=(0, 1, 2, 7, 8, 9, 64, 1000, 65_537, 300_001))
    def test_round_trip(self, is_native, num_values):
        for share in (0, 0.0005, 0.01, 0.1, 0.5, 0.9, 1):
            indices = _chosen(num_values, share)
            data = _encode(indices, num_values, is_native)
            self.assertAllEqual(data, _encode(indices, num_values, not is_native))
            self.assertEqual(_decode(data, indices.size, num_values, is_native), indices.tolist())

    @parameterized.parameters(0.001, 0.01, 0.1, 0.5)
    def test_length(self, share):
        indices = _chosen(1_000_000, share)
        bits = 8 * _encode(indices, 1_000_000, True).size / indices.size
        self.assertAllClose(bits, gaps.bits_per_index(share), rtol=0.01)
        entropy = -math.log2(share) - (1 - share) / share * math.log2(1 - share)
        self.assertLess(bits, 1.04 * entropy)

    @parameterized.named_parameters(*_IMPLEMENTATIONS)
    def test_far_indices(self, is_native):
        indices = np.array([3, 2**40, 2**48 - 1])
        data = _encode(indices, 2**48, is_native)
        self.assertEqual(_decode(data, 3, 2**48, is_native), indices.tolist())

    @hypothesis.settings(deadline=None, max_examples=300)
    @hypothesis.given(st.data(), st.integers(0, 500))
    def test_only_sound_data_are_taken(self, data, num_values):
        """Both implementations take the same bytes, and only those that they encode to."""
        indices = np.array(sorted(data.draw(st.sets(st.integers(0, max(0, num_values - 1)), max_size=num_values))), int)
        received = bytearray(_encode(indices, num_values, True).tobytes())
        for place, value in data.draw(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=3)):
            if received:
                received[place % len(received)] = value
        if data.draw(st.booleans()):
            del received[data.draw(st.integers(0, len(received))) :]
            received += data.draw(st.binary(max_size=4))
        count = data.draw(st.just(indices.size) | st.integers(0, num_values))
        received = np.frombuffer(bytes(received), np.uint8)
        decoded = _decode(received, count, num_values, True)
        self.assertEqual(decoded, _decode(received, count, num_values, False))
        if decoded is not None:
            self.assertLen(decoded, count)
            self.assertAllEqual(_encode(np.array(decoded, int), num_values, True), received)

    @hypothesis.settings(deadline=None)
    @hypothesis.given(st.binary(max_size=300), st.integers(-1, 2000), st.integers(0, 2**48 + 1))
    def test_random_bytes(self, received, count, num_values):
        received = np.frombuffer(received, np.uint8)
        decoded = _decode(received, count, num_values, True)
        self.assertEqual(decoded, _decode(received, count, num_values, False))

    @parameterized.named_parameters(*_IMPLEMENTATIONS)
    def test_refuses(self, is_native):
        for indices in ([5, 5], [6, 5], [-1, 5], [5, 10]):
            with self.assertRaises(ValueError):
                _encode(np.array(indices), 10, is_native)
        with self.assertRaisesRegex(ValueError, "`out` must have 2 bytes. Received: 1 bytes"):
            gaps.encode(np.array([5, 6]), 10, np.empty(1, np.uint8))
        with self.assertRaisesRegex(ValueError, "`count` must be at most `num_values`"):
            gaps.decode(np.empty(1, np.uint8), 11, 10)


if __name__ == "__main__":
    tf.test.main()
