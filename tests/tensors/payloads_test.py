import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.errors import ProtocolError
from hop_tf.tensors import payloads
from hop_tf.tensors.buffers import BufferPool


class PayloadsTest(tf.test.TestCase, parameterized.TestCase):
    def test_parts_come_back_aligned(self):
        parts = [
            np.arange(n, dtype=dtype) for n, dtype in ((3, np.float64), (0, np.int8), (65, np.uint8), (7, np.int16))
        ]
        pool = BufferPool()
        joined = payloads.join(parts)
        payload = pool.take(sum(array.nbytes for array in joined))
        np.concatenate(joined, out=payload)
        for part, found in zip(parts, payloads.split(payload), strict=True):
            self.assertEqual(found.ctypes.data % 64, 0)
            self.assertAllEqual(found.view(part.dtype), part)

    @parameterized.parameters(0, 3, 8, 40, 63, 64, 100)
    def test_refuses_what_is_cut_off(self, length):
        payload = np.concatenate(payloads.join([np.arange(100, dtype=np.uint8)]))
        with self.assertRaises(ProtocolError):
            payloads.split(payload[:length])

    def test_views_have_the_length_that_is_expected(self):
        part = np.arange(6, dtype=np.float32).view(np.uint8)
        self.assertAllEqual(payloads.view(part, np.float32, (2, 3)), [[0, 1, 2], [3, 4, 5]])
        with self.assertRaisesRegex(ProtocolError, "expected 20 bytes. Received: 24 bytes"):
            payloads.view(part, np.float32, (5,))


if __name__ == "__main__":
    tf.test.main()
