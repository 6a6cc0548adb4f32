"""Packing tensors into buckets and back."""

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hop_tf.errors import ProtocolError
from hop_tf.tensors.packing import Packing, TensorSpec

_DTYPES = (tf.float32, tf.float16, tf.bfloat16, tf.float64)
_tensors = st.lists(
    st.tuples(st.lists(st.integers(0, 7), max_size=3), st.sampled_from(_DTYPES)), min_size=1, max_size=8
)


def _packing_of(shapes_and_dtypes):
    return Packing([TensorSpec(f"v{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(shapes_and_dtypes)])


class PackingTest(tf.test.TestCase):
    @settings(max_examples=50, deadline=None)
    @given(shapes_and_dtypes=_tensors, seed=st.integers(0, 1000))
    def test_unpack_undoes_pack(self, shapes_and_dtypes, seed):
        rng = np.random.default_rng(seed)
        tensors = [tf.cast(rng.normal(size=shape), dtype) for shape, dtype in shapes_and_dtypes]
        packing = _packing_of(shapes_and_dtypes)
        buckets = packing.pack(tensors)
        self.assertEqual([bucket.dtype for bucket in buckets], list(packing.dtypes))
        self.assertEqual([int(tf.size(bucket)) for bucket in buckets], list(packing.sizes))
        for tensor, unpacked in zip(tensors, packing.unpack(buckets), strict=True):
            self.assertEqual(tensor.shape, unpacked.shape)
            self.assertAllEqual(tensor, unpacked)

    def test_tensors_start_at_64_bytes(self):
        packing = _packing_of([([3], tf.float32), ([17], tf.float32), ([1], tf.float32), ([5], tf.float64)])
        self.assertEqual(packing.sizes, (16 + 32 + 16, 8))
        self.assertEqual(packing.num_bytes, 4 * 64 + 64)

    def test_places_in_buckets_of_zeros(self):
        packing = _packing_of([([3], tf.float32), ([2, 2], tf.float32), ([5], tf.float64)])
        buckets = packing.zeros()
        self.assertEqual([(bucket.dtype, bucket.size) for bucket in buckets], [(np.float32, 32), (np.float64, 8)])
        bucket, where = packing.place(1)
        buckets[bucket][where] = 1
        _, matrix, _ = packing.unpack([tf.constant(each) for each in buckets])
        self.assertAllEqual(matrix, np.ones((2, 2)))
        self.assertEqual(buckets[0].sum(), 4)

    def test_a_part_of_a_part_has_all_buckets(self):
        """Those too of which the part has no tensor."""
        packing = _packing_of([([3], tf.float32), ([5], tf.float64), ([2], tf.float32)])
        part = packing.part([1, 2]).part([0])
        self.assertEqual((part.dtypes, part.exact, part.sizes), (packing.dtypes, packing.exact, (0, 8)))
        self.assertEqual(part.place(0), (1, slice(0, 5)))
        self.assertEqual(packing.part([0, 2]).part([1]).sizes, (16, 0))

    def test_unpacking_shares_memory(self):
        packing = _packing_of([([96], tf.float32), ([7, 3], tf.float32), ([8, 2], tf.float32)])
        (bucket,) = packing.pack([tf.ones([96]), tf.ones([7, 3]), tf.ones([8, 2])])
        start = np.asarray(bucket).ctypes.data
        first, _, last = packing.unpack([bucket])
        self.assertEqual(np.asarray(first).ctypes.data, start)
        self.assertEqual(np.asarray(last).ctypes.data, start + 4 * (96 + 32))

    def test_view_sees_the_buckets_behind_each_other(self):
        packing = _packing_of([([3], tf.float32), ([2], tf.bfloat16), ([4], tf.float32)])
        buckets = [np.asarray(b) for b in packing.pack([tf.range(3.0), tf.ones([2], tf.bfloat16), tf.range(4.0)])]
        payload = np.concatenate([bucket.view(np.uint8) for bucket in buckets])
        for expected, view in zip(buckets, packing.view(payload), strict=True):
            self.assertEqual(expected.dtype, view.dtype)
            self.assertAllEqual(expected, view)
            self.assertTrue(np.shares_memory(view, payload))

    def test_view_refuses_another_size(self):
        with self.assertRaisesRegex(ProtocolError, "expected 64 bytes. Received: 63 bytes"):
            _packing_of([([3], tf.float32)]).view(np.zeros(63, np.uint8))


if __name__ == "__main__":
    tf.test.main()
