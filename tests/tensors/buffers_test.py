import gc
import threading
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.page_lock import Block


class BufferPoolTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.pool = BufferPool()

    def test_gives_writable_aligned_bytes(self):
        for num_bytes in (0, 1, 63, 64, 4095, 4096, 4097, 100_000, 3_000_001):
            array = self.pool.take(num_bytes)
            self.assertEqual(array.dtype, np.uint8)
            self.assertEqual(array.shape, (num_bytes,))
            self.assertTrue(array.flags.writeable)
            self.assertEqual(array.ctypes.data % 64, 0)
            array[:] = 1

    def test_refuses_a_negative_size(self):
        with self.assertRaisesRegex(ValueError, r"`num_bytes` must be at least 0\. Received: num_bytes=-1\."):
            self.pool.take(-1)

    def test_uses_memory_again(self):
        address = self.pool.take(10_000).ctypes.data
        self.assertEqual(self.pool.take(10_000).ctypes.data, address)
        self.assertEqual(self.pool.take(9_999).ctypes.data, address)

    def test_arrays_in_use_share_nothing(self):
        arrays = [self.pool.take(10_000) for _ in range(5)]
        for index, array in enumerate(arrays):
            array[:] = index
        for index, array in enumerate(arrays):
            self.assertAllEqual(array, np.full(10_000, index))

    def test_every_view_keeps_the_memory(self):
        views = {
            "slice": lambda array: array[100:200],
            "slice of a slice": lambda array: array[100:200][3:4],
            "dtype": lambda array: array.view(np.float32),
            "dtype of a slice": lambda array: array[:400].view(np.float32).reshape(10, 10)[1:],
            "read-only": lambda array: np.broadcast_to(array, (2, *array.shape)),
            "transposed": lambda array: array.reshape(100, -1).T,
            "memoryview": lambda array: memoryview(array)[10:],
            "from buffer": lambda array: np.frombuffer(memoryview(array), np.int32),
            "ctypes": lambda array: np.ctypeslib.as_ctypes(array),
        }
        for name, make_view in views.items():
            with self.subTest(name):
                array = self.pool.take(100_000)
                live = self.pool.live_bytes
                view = make_view(array)
                del array
                self.assertEqual(self.pool.live_bytes, live)
                del view
                self.assertEqual(self.pool.live_bytes, 0)

    @pytest.mark.slow
    def test_a_tensor_that_shares_the_memory_keeps_it(self):
        queue = tf.queue.FIFOQueue(1, [tf.float32])
        array = self.pool.take(4_000_000).view(np.float32)
        array[:] = np.arange(1_000_000)
        address = array.ctypes.data
        tf.raw_ops.QueueEnqueueV2(handle=queue.queue_ref, components=[array])
        del array
        gc.collect()
        self.assertNotEqual(self.pool.take(4_000_000).ctypes.data, address)
        tensor = queue.dequeue()
        shared = np.asarray(tensor)
        self.assertEqual(shared.ctypes.data, address)
        del tensor
        gc.collect()
        others = [self.pool.take(4_000_000) for _ in range(3)]
        for other in others:
            other[:] = 0
        self.assertAllEqual(shared, np.arange(1_000_000, dtype=np.float32))

    def test_memory_returns_from_a_tensor(self):
        queue = tf.queue.FIFOQueue(1, [tf.float32])
        num_bytes = 1_000_000
        for _ in range(20):
            array = self.pool.take(num_bytes).view(np.float32)
            array[:] = 1.0
            tf.raw_ops.QueueEnqueueV2(handle=queue.queue_ref, components=[array])
            del array
            self.assertAllClose(tf.reduce_sum(queue.dequeue()), num_bytes / 4)
        # TensorFlow lets go of NumPy's memory a little later, at one of its next calls.
        self.assertLess(self.pool.live_bytes + self.pool.free_bytes, 5 * num_bytes)

    def test_keeps_little_more_than_was_in_use(self):
        arrays = [self.pool.take(100_000) for _ in range(10)]
        peak = self.pool.live_bytes
        arrays.clear()
        self.assertEqual(self.pool.free_bytes, peak)
        for size in (10_000, 20_000, 300_000, 500_000):
            del arrays[:]
            arrays.append(self.pool.take(size))
            self.assertLessEqual(self.pool.live_bytes + self.pool.free_bytes, 1.25 * peak)

    def test_sizes_that_take_turns_need_no_new_memory(self):
        def use(*sizes):
            arrays = [self.pool.take(size) for size in sizes]
            del arrays[:]

        for _ in range(2):
            use(*(8 * [100_000]))
            use(*(6 * [100_000]), 200_000)
        with mock.patch.object(Block, "new", side_effect=AssertionError("new memory")):
            for _ in range(3):
                use(*(8 * [100_000]))
                use(*(6 * [100_000]), 200_000)

    def test_wastes_little(self):
        for num_bytes in (40_000, 1_000_000, 1_000_001, 2**20, 2**20 + 1, 104_857_600):
            array = self.pool.take(num_bytes)
            self.assertLessEqual(self.pool.live_bytes, 1.13 * num_bytes)
            self.assertGreaterEqual(self.pool.live_bytes, num_bytes)
            del array

    def test_many_threads(self):
        errors = []

        def work(seed):
            generator = np.random.default_rng(seed)
            kept = []
            for step in range(500):
                array = self.pool.take(int(generator.integers(1, 50_000)))
                array[:] = (seed + step) % 256
                kept.append((array, (seed + step) % 256))
                if len(kept) > 5:
                    array, value = kept.pop(int(generator.integers(len(kept))))
                    if not (array == value).all():
                        errors.append(value)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEmpty(errors)
        gc.collect()
        self.assertEqual(self.pool.live_bytes, 0)


if __name__ == "__main__":
    tf.test.main()
