"""The native TensorFlow operations by themselves: shapes, types, errors, memory, threads, and what they compute."""

from __future__ import annotations

import concurrent.futures
import ctypes
import pathlib
import shutil
import subprocess
import unittest

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import ops
from hop_tf.ops import build_info, native

_FLOATS = (tf.float32, tf.bfloat16, tf.float16)
_NUM_THREADS = 8

# Multiples of 1/64 that every float type holds exactly. The largest magnitude of each block is 127/64: the int8 codes
# are the multiples, and the scales 1/64.
_MULTIPLES = np.resize(np.arange(-127, 128, 2), 1500).astype(np.int8)
_VALUES = (_MULTIPLES / 64).astype(np.float32)
_SCALES = np.full(3, 1 / 64, np.float32)


def _int8_reference(values, block_size):
    flat = np.asarray(values, np.float32).reshape(-1)
    block_size = block_size or max(flat.size, 1)
    blocks = [flat[i : i + block_size] for i in range(0, flat.size, block_size)]
    largest = [np.abs(block).max() for block in blocks]
    codes = [np.rint(block * (np.float32(127) / most)) for block, most in zip(blocks, largest, strict=True)]
    return np.concatenate(codes).reshape(np.shape(values)).astype(np.int8), np.float32(largest) / np.float32(127)


def _decoded(codes, scales, block_size):
    return codes.astype(np.float32) * np.repeat(scales, block_size)[: codes.size].reshape(codes.shape)


class TracingTest(tf.test.TestCase):
    def test_traces_without_a_warning(self):
        @tf.function
        def everything(values):
            codes, bucket_values = ops.quantile_sketch_encode(values)
            quantized = ops.int8_encode(values)
            return (
                ops.quantile_sketch_decode(codes, bucket_values),
                ops.int8_reduce(*quantized, ops.int8_accumulate(*quantized, ops.int8_decode(*quantized))),
                ops.truncate16_decode(ops.truncate16_encode(values)),
            )

        with self.assertNoLogs("tensorflow"), self.assertNoLogs("absl"):
            everything(tf.constant(_VALUES))

    def test_scales_are_a_vector_whatever_is_known_of_the_values(self):
        function = tf.function(ops.int8_encode).get_concrete_function(tf.TensorSpec([None], tf.float32))
        self.assertEqual([output.shape.rank for output in function.outputs], [1, 1])


class _OperationsTestCase(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.operations = native.operations()
        if self.operations is None:
            self.skipTest("hop_tf_ops.so was not built")

    def assert_fails(self, message, call):
        """`call` fails with `message`, eagerly and in a graph."""
        for execute in (call, tf.function(call, autograph=False)):
            with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
                execute()


class ResultsTest(_OperationsTestCase):
    @parameterized.parameters(*_FLOATS)
    def test_sketch(self, dtype):
        different, codes = np.unique(np.resize(_VALUES, [12]), return_inverse=True)
        values = different[codes].reshape(3, 4)
        results = self.operations.hop_tf_sketch_encode(values=tf.cast(values, dtype), spacing=1.0)
        self.assertEqual([result.dtype for result in results], [tf.uint8, tf.float32])
        self.assertAllEqual(results.codes, codes.reshape(3, 4))
        self.assertAllEqual(results.bucket_values, np.pad(different, (0, 256 - different.size), "edge"))
        self.assertAllEqual(self.operations.hop_tf_sketch_decode(*results), values)

    def test_sketch_defaults(self):
        codes, bucket_values = self.operations.hop_tf_sketch_encode(values=_VALUES)
        self.assertEqual(bucket_values.shape, [256])
        self.assertAllEqual(codes, np.unique(_VALUES, return_inverse=True)[1])

    @parameterized.product(dtype=_FLOATS, block_size=(512, 7, 0))
    def test_int8(self, dtype, block_size):
        values = tf.reshape(tf.cast(np.random.default_rng(0).normal(size=1500), dtype), [30, 50])
        expected = _int8_reference(tf.cast(values, tf.float32).numpy(), block_size)
        codes, scales = self.operations.hop_tf_int8_encode(values=values, block_size=block_size)
        self.assertEqual([codes.dtype, scales.dtype], [tf.int8, tf.float32])
        self.assertAllEqual(codes, expected[0])
        self.assertAllEqual(scales, expected[1])

        decoded = self.operations.hop_tf_int8_decode(codes=codes, scales=scales, block_size=block_size)
        self.assertAllEqual(decoded, _decoded(*expected, block_size or 1500))
        wide = tf.cast(values, tf.float32)
        arguments = {"codes": codes, "scales": scales, "block_size": block_size}
        total = self.operations.hop_tf_int8_accumulate(accumulator=wide, **arguments)
        self.assertAllEqual(total, wide + decoded)
        sums = self.operations.hop_tf_int8_reduce(values=values, **arguments)
        for result, reference in zip(sums, _int8_reference(total.numpy(), block_size), strict=True):
            self.assertAllEqual(result, reference)

    @parameterized.parameters(*_FLOATS)
    def test_int8_defaults(self, dtype):
        codes, scales = self.operations.hop_tf_int8_encode(values=tf.cast(_VALUES, dtype))
        self.assertAllEqual(codes, _MULTIPLES)
        self.assertAllEqual(scales, _SCALES)

    @parameterized.parameters(*_FLOATS)
    def test_truncate16(self, dtype):
        values = tf.cast(tf.linspace(-3.0, 5.0, 1001), dtype)
        patterns = tf.cast(values, tf.float32).numpy().view(np.uint32)
        halves = self.operations.hop_tf_truncate16_encode(values=values)
        self.assertEqual(halves.dtype, tf.bfloat16)
        truncated = self.operations.hop_tf_truncate16_decode(halves=halves)
        self.assertAllEqual(truncated, (patterns & 0xFFFF0000).view(np.float32))
        rounded = self.operations.hop_tf_truncate16_encode(values=values, round_to_nearest=True)
        self.assertAllEqual(tf.cast(rounded, tf.float32), tf.cast(tf.cast(values, tf.bfloat16), tf.float32))

    @parameterized.parameters(([0],), ([3, 0],), ([],))
    def test_empty_and_scalar(self, shape):
        values = tf.ones(shape)
        codes, scales = self.operations.hop_tf_int8_encode(values=values, block_size=0)
        self.assertEqual(scales.shape, [values.shape.num_elements()])
        total = self.operations.hop_tf_int8_accumulate(codes=codes, scales=scales, accumulator=values, block_size=0)
        self.assertAllEqual(total, 2 * values)
        sketch = self.operations.hop_tf_sketch_encode(values=values)
        self.assertAllEqual(self.operations.hop_tf_sketch_decode(*sketch), values)
        halves = self.operations.hop_tf_truncate16_encode(values=values)
        self.assertAllEqual(self.operations.hop_tf_truncate16_decode(halves=halves), values)

    def test_several_threads(self):
        """Each call is large enough for threads of its own."""
        inputs = [np.random.default_rng(i).normal(size=1_200_000).astype(np.float32) for i in range(_NUM_THREADS)]

        @tf.function(input_signature=[tf.TensorSpec([None])])
        def exchange(values):
            codes, scales = self.operations.hop_tf_int8_encode(values=values)
            sums = self.operations.hop_tf_int8_reduce(codes=codes, scales=scales, values=values)
            return self.operations.hop_tf_sketch_encode(values=self.operations.hop_tf_int8_decode(*sums))

        expected = [exchange(values) for values in inputs]
        with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as threads:
            for results, references in zip(threads.map(exchange, inputs), expected, strict=True):
                self.assertAllEqual(results[0], references[0])
                self.assertAllEqual(results[1], references[1])


class MemoryTest(_OperationsTestCase):
    """The accumulator's memory takes the sum, but only if no other operation needs it."""

    def _accumulate(self, accumulator):
        return self.operations.hop_tf_int8_accumulate(codes=_MULTIPLES, scales=_SCALES, accumulator=accumulator)

    def test_inputs_keep_their_values(self):
        accumulator, variable = tf.ones([1500]), tf.Variable(tf.ones([1500]))
        self.assertAllEqual(self._accumulate(accumulator), 1 + _VALUES)
        self.assertAllEqual(accumulator, tf.ones([1500]))

        @tf.function
        def twice(values):
            shared = values * 3
            return self._accumulate(shared), self._accumulate(shared), self._accumulate(variable), shared

        first, second, of_variable, shared = twice(accumulator)
        self.assertAllEqual(first, 3 + _VALUES)
        self.assertAllEqual(second, 3 + _VALUES)
        self.assertAllEqual(of_variable, 1 + _VALUES)
        self.assertAllEqual(shared, 3 * accumulator)
        self.assertAllEqual(variable, accumulator)

    def test_memory_of_an_intermediate_result_is_reused(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            values = tf.compat.v1.placeholder(tf.float32, [1500])
            total = tf.identity(self._accumulate(tf.multiply(values, 3.0, name="intermediate")), name="total")
            metadata = tf.compat.v1.RunMetadata()
            options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
            result = session.run(total, {values: np.ones(1500)}, options, metadata)
        self.assertAllEqual(result, 3 + _VALUES)
        nodes = [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
        memory = {
            node.node_name: node.output[0].tensor_description.allocation_description.ptr
            for node in nodes
            if node.node_name in ("intermediate", "HopTfInt8Accumulate")
        }
        self.assertLen(memory, 2)
        self.assertLen(set(memory.values()), 1)


class ShapesTest(_OperationsTestCase):
    def _shapes(self, shape):
        """Static shapes of the outputs for values of static shape `shape`, by the name of the operation."""
        shapes = {}

        @tf.function(input_signature=[tf.TensorSpec(shape, tf.float32), tf.TensorSpec([3], tf.float32)])
        def trace(values, scales):
            codes = self.operations.hop_tf_int8_encode(values=values).codes
            half = self.operations.hop_tf_truncate16_encode(values=values)
            results = {
                "sketch_encode": self.operations.hop_tf_sketch_encode(values=values),
                "sketch_decode": self.operations.hop_tf_sketch_decode(tf.cast(codes, tf.uint8), tf.zeros([256])),
                "int8_encode": self.operations.hop_tf_int8_encode(values=values),
                "int8_decode": self.operations.hop_tf_int8_decode(codes=codes, scales=scales),
                "int8_accumulate": self.operations.hop_tf_int8_accumulate(codes, scales, values),
                "int8_reduce": self.operations.hop_tf_int8_reduce(codes=codes, scales=scales, values=values),
                "truncate16_encode": half,
                "truncate16_decode": self.operations.hop_tf_truncate16_decode(halves=half),
            }
            shapes.update({name: [tensor.shape for tensor in tf.nest.flatten(of)] for name, of in results.items()})
            return results

        trace.get_concrete_function()
        return shapes

    @parameterized.parameters(([30, 50],), ([None, 50],), (None,))
    def test_the_first_output_has_the_shape_of_the_first_input(self, shape):
        shapes = self._shapes(shape)
        self.assertLen(shapes, 8)
        for name, (first, *_) in shapes.items():
            self.assertEqual(first.rank, tf.TensorShape(shape).rank, name)
            if shape is not None:
                self.assertEqual(first.as_list(), shape, name)
        self.assertEqual(shapes["int8_reduce"][1], [3])

    def test_scales_are_a_vector(self):
        with self.assertRaisesRegex(ValueError, "must be rank 1 but is rank 2"):
            tf.function(self.operations.hop_tf_int8_decode).get_concrete_function(
                codes=tf.TensorSpec([8], tf.int8), scales=tf.TensorSpec([2, 4], tf.float32)
            )


class ErrorsTest(_OperationsTestCase):
    @parameterized.parameters(
        ({"spacing": 0.0}, "`spacing` must be above 0 and at most 1. Received: spacing=0.0"),
        ({"spacing": 1.5}, "`spacing` must be above 0 and at most 1. Received: spacing=1.5"),
        ({"spacing": float("nan")}, "`spacing` must be above 0 and at most 1. Received: spacing="),
    )
    def test_sketch_encode(self, attributes, message):
        self.assert_fails(message, lambda: self.operations.hop_tf_sketch_encode(values=_VALUES, **attributes))

    @parameterized.parameters(0, 1, 128, 512)
    def test_sketch_decode(self, size):
        message = rf"`bucket_values` must have 256 values. Received: shape \[{size}\]."
        codes, bucket_values = np.zeros(5, np.uint8), np.zeros(size, np.float32)
        self.assert_fails(message, lambda: self.operations.hop_tf_sketch_decode(codes, bucket_values))

    @parameterized.parameters(-1, 2**31, 2**63 - 1)
    def test_block_size(self, block_size):
        message = f"`block_size` must be from 0 to 2.31 - 1. Received: block_size={block_size}."
        attributes = {"block_size": block_size}
        self.assert_fails(message, lambda: self.operations.hop_tf_int8_encode(values=_VALUES, **attributes))
        self.assert_fails(message, lambda: self.operations.hop_tf_int8_decode(_MULTIPLES, _SCALES, **attributes))

    def test_number_of_scales(self):
        message = r"`scales` must have 3 values for 1500 codes in blocks of 512. Received: shape \[2\]."
        arguments = {"codes": _MULTIPLES, "scales": _SCALES[:2]}
        self.assert_fails(message, lambda: self.operations.hop_tf_int8_decode(**arguments))
        self.assert_fails(message, lambda: self.operations.hop_tf_int8_accumulate(accumulator=_VALUES, **arguments))
        self.assert_fails(message, lambda: self.operations.hop_tf_int8_reduce(values=_VALUES, **arguments))

    def test_shapes_differ(self):
        message = r"` must have the shape of `codes`, \[1500\]. Received: shape \[30, 50\]."
        codes, values = {"codes": _MULTIPLES, "scales": _SCALES}, _VALUES.reshape(30, 50)
        accumulate, reduce = self.operations.hop_tf_int8_accumulate, self.operations.hop_tf_int8_reduce
        self.assert_fails(f"`accumulator{message}", lambda: accumulate(accumulator=values, **codes))
        self.assert_fails(f"`values{message}", lambda: reduce(values=values, **codes))

    def test_types(self):
        with self.assertRaisesRegex((TypeError, tf.errors.InvalidArgumentError), "float64|double"):
            self.operations.hop_tf_int8_encode(values=tf.zeros([3], tf.float64))


class GpuStreamTest(tf.test.TestCase):
    """The C API does not give the stream: gpu_stream.h relies on TensorFlow's C++ classes."""

    def test_tensorflow_has_the_method(self):
        library = pathlib.Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"
        ctypes.CDLL(str(library))._ZNK10tensorflow15OpKernelContext12eigen_deviceIN5Eigen9GpuDeviceEEERKT_v  # noqa: B018

    @unittest.skipIf(shutil.which("nvcc") is None, "needs nvcc")
    @pytest.mark.slow
    def test_layout(self):
        program = pathlib.Path(self.get_temp_dir()) / "layout"
        source = pathlib.Path(__file__).with_name("gpu_stream_layout.cc")
        folders = f"-I{tf.sysconfig.get_include()}", f"-I{source.parents[2]}"
        subprocess.run(["nvcc", "-std=c++17", *folders, str(source), "-o", str(program)], check=True, timeout=300)
        self.assertEqual(subprocess.run([program], check=False).returncode, 0)


class GpuTest(_OperationsTestCase):
    def setUp(self):
        super().setUp()
        if not build_info()["cuda"] or not tf.config.list_physical_devices("GPU"):
            raise unittest.SkipTest("needs the CUDA kernels, and a TensorFlow that has a GPU")

    @parameterized.product(dtype=_FLOATS, block_size=(512, 0))
    def test_equals_the_processor(self, dtype, block_size):
        values = tf.cast(np.random.default_rng(0).normal(size=[300, 1001]), dtype)

        def every_operation():
            sketch = self.operations.hop_tf_sketch_encode(values=values)
            encoded = self.operations.hop_tf_int8_encode(values=values, block_size=block_size)
            wide = self.operations.hop_tf_int8_decode(*encoded, block_size=block_size)
            return [
                *sketch,
                self.operations.hop_tf_sketch_decode(*sketch),
                *encoded,
                wide,
                self.operations.hop_tf_int8_accumulate(*encoded, accumulator=wide * 2, block_size=block_size),
                *self.operations.hop_tf_int8_reduce(*encoded, values=values, block_size=block_size),
                self.operations.hop_tf_truncate16_decode(self.operations.hop_tf_truncate16_encode(values=values)),
            ]

        with tf.device("GPU:0"):
            results = tf.function(every_operation)()
        with tf.device("CPU:0"):
            expected = every_operation()
        self.assert_same_sketch(*results[:2], *expected[:2])
        self.assertAllEqual(results[2], tf.gather(results[1], tf.cast(results[0], tf.int32)))
        for result, reference in zip(results[3:], expected[3:], strict=True):
            self.assertAllEqual(result, reference)

    def assert_same_sketch(self, codes, bucket_values, expected_codes, expected_values):
        """A cell on the boundary of two buckets may fall to either; both then have other means."""
        codes, expected_codes = codes.numpy().astype(int), expected_codes.numpy().astype(int)
        moved = codes != expected_codes
        self.assertLessEqual(np.abs(codes - expected_codes).max(), 1)
        self.assertLess(np.mean(moved), 0.005)
        same = np.ones(bucket_values.shape[0], bool)
        same[codes[moved]] = same[expected_codes[moved]] = False
        same[codes.max() :] &= same[codes.max()]  # Behind the last bucket, its mean is repeated.
        self.assertAllClose(bucket_values[same], expected_values[same], rtol=1e-6, atol=0)


if __name__ == "__main__":
    tf.test.main()
