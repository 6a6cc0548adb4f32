"""The registered operations on the stand-in for TensorFlow. A program: it must be alone in its process."""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import numpy as np
import reference
import stand_in
from absl.testing import absltest, parameterized

_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED = 3, 8
_DEVICES = ("CPU", "GPU")
_FLOATS = (np.float32, stand_in.BFLOAT16, np.float16)
_SHAPES = ((0,), (3, 0), (), (1,), (30, 50), (1001,), (2, 3, 5, 7))
_LARGE = (3, 1_000_001) if stand_in.device() else (3, 100_001)
_NAMES = {
    "SketchEncode": "sketch_encode",
    "SketchDecode": "sketch_decode",
    "Int8Encode": "int8_encode",
    "Int8Decode": "int8_decode",
    "Int8Accumulate": "int8_accumulate",
    "Int8Reduce": "int8_reduce",
    "Truncate16Encode": "truncate16_encode",
    "Truncate16Decode": "truncate16_decode",
}


@functools.cache
def _folder():
    """Builds the libraries and returns their folder."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    start = time.perf_counter()
    stand_in.build(pathlib.Path(folder.name))
    where = stand_in.device().name if stand_in.device() else "the host's memory in the place of a device"
    print(f"GPU: {where}; built in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return pathlib.Path(folder.name)


@functools.cache
def _library():
    return stand_in.StandIn(_folder())


def _values(shape, dtype, seed=0):
    values = np.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))
    return (
        np.asarray(values.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == stand_in.BFLOAT16
        else values.astype(dtype)
    )


def _inputs(shape, dtype, block_size=512):
    """Valid inputs of every operation, and its attributes that are not the default."""
    compute = reference.Reference(_library().kernels)
    values, blocks = _values(shape, dtype), {"block_size": block_size}
    codes, scales = compute.int8_encode(_values(shape, np.float32, seed=1), **blocks)
    return {
        "SketchEncode": ([values], {}),
        "SketchDecode": ([*compute.sketch_encode(values)], {}),
        "Int8Encode": ([values], blocks),
        "Int8Decode": ([codes, scales], blocks),
        "Int8Accumulate": ([codes, scales, _values(shape, np.float32)], blocks),
        "Int8Reduce": ([codes, scales, values], blocks),
        "Truncate16Encode": ([values], {"round_to_nearest": 1}),
        "Truncate16Decode": ([_values(shape, stand_in.BFLOAT16)], {}),
    }


class _TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.library = _library()
        self.definitions, self.kernels = self.library.registered()
        self.num_live = self.library.num_live()

    def tearDown(self):
        self.assertEqual(self.library.num_live(), self.num_live)
        super().tearDown()

    def run_operation(self, device, name, inputs, attributes=None, **options):
        """Runs an operation with the defaults of its attributes."""
        attributes = self.definitions[f"HopTf{name}"].defaults() | (attributes or {})
        results = self.library.run(device, f"HopTf{name}", inputs, attributes, **options)
        self.assertEqual(results.error, "", f"{name} on the {device}")
        for index, (before, after) in enumerate(zip(inputs, results.inputs, strict=True)):
            if index not in results.forwarded:
                np.testing.assert_array_equal(before, after, f"input {index} of {name}")
        return results

    def expected(self, name, inputs, attributes):
        """The outputs, by the kernels themselves."""
        attributes = self.definitions[f"HopTf{name}"].defaults() | attributes
        return getattr(reference.Reference(self.library.kernels), _NAMES[name])(
            *inputs, **{key: value if key == "spacing" else int(value) for key, value in attributes.items()}
        )

    def check(self, device, name, inputs, attributes):
        """Runs an operation, and compares its outputs with what the kernels say."""
        results = self.run_operation(device, name, inputs, attributes)
        self.assertEqual(results.message, "", name)
        types = [output.split(": ")[1] for output in self.definitions[f"HopTf{name}"].outputs]
        self.assertEqual([output.dtype for output in results.outputs], [stand_in.DTYPES[each][1] for each in types])
        expected = self.expected(name, inputs, attributes)
        if name == "SketchEncode" and device == "GPU" and stand_in.device():
            self.assert_same_sketch(*results.outputs, *expected)
            return
        for result, wanted in zip(results.outputs, expected, strict=True):
            self.assertEqual(result.shape, wanted.shape, name)
            np.testing.assert_array_equal(result.reshape(-1).view(np.uint8), wanted.reshape(-1).view(np.uint8), name)

    def assert_same_sketch(self, codes, bucket_values, expected_codes, expected_values):
        """A device adds in another order, so a bin on the boundary of two buckets may be in either."""
        self.assertEqual(codes.shape, expected_codes.shape)
        codes, expected_codes = codes.astype(int).reshape(-1), expected_codes.astype(int).reshape(-1)
        moved = codes != expected_codes
        self.assertLessEqual(np.abs(codes - expected_codes).max(initial=0), 1)
        self.assertLessEqual(moved.sum(), 0.005 * codes.size)
        same = np.ones(bucket_values.shape, bool)
        same[codes[moved]] = same[expected_codes[moved]] = False
        last = codes.max(initial=0)
        same[last:] &= same[last]  # Behind the last bucket its mean is repeated.
        np.testing.assert_allclose(bucket_values[same], expected_values[same], rtol=1e-6, atol=1e-7)


class RegistrationTest(_TestCase):
    def test_every_operation_has_a_kernel_on_both_devices(self):
        names = {f"HopTf{name}" for name in _NAMES}
        self.assertEqual(self.library.cuda_error, "")
        self.assertEqual(set(self.definitions), names)
        self.assertEqual(self.kernels, {(device, name) for device in _DEVICES for name in names})

    def test_attributes(self):
        defaults = {name.removeprefix("HopTf"): each.defaults() for name, each in self.definitions.items()}
        blocks = {name: {"block_size": 512} for name in _NAMES if name.startswith("Int8")}
        others = {"SketchEncode": {"spacing": 0.5}, "Truncate16Encode": {"round_to_nearest": 0}}
        self.assertEqual(defaults, {"SketchDecode": {}, "Truncate16Decode": {}, **blocks, **others})

    def test_floats_are_of_three_types(self):
        for name, each in self.definitions.items():
            self.assertEqual("T: {float, bfloat16, half}" in each.attributes, "values: T" in each.inputs, name)


class FallbackTest(_TestCase):
    """Tests that the processor has the kernels even if GPUs cannot run them."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        for name in (stand_in.TENSORFLOW, stand_in.KERNELS, stand_in.OPERATIONS):
            shutil.copy(_folder() / name, self.folder)

    def registered(self, **environment):
        """The devices that get kernels in a new process, and why GPUs do not."""
        command = [sys.executable, stand_in.__file__, str(self.folder)]
        result = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, check=True)
        return tuple(json.loads(result.stdout).values())

    def test_library_that_says_if_devices_can_run_its_kernels(self):
        stand_in.build_cuda_stand_in(self.folder)
        self.assertEqual(self.registered(), (["CPU", "GPU"], ""))
        self.assertEqual(self.registered(STAND_IN_CUDA_ERROR="too old"), (["CPU"], "too old"))

    def test_library_that_does_not_load(self):
        devices, error = self.registered()
        self.assertEqual(devices, ["CPU"])
        self.assertRegex(error, f"{stand_in.CUDA}: cannot open")
        (self.folder / stand_in.CUDA).write_bytes(b"no library")
        devices, error = self.registered()
        self.assertEqual(devices, ["CPU"])
        self.assertRegex(error, f"{stand_in.CUDA}: ")

    @unittest.skipIf(stand_in.harness.find_nvcc() is None, "needs nvcc")
    def test_driver(self):
        source, target = stand_in.OPS / "cuda" / "runtime.cu", self.folder / stand_in.CUDA
        options = f"--options-file={source.with_name('nvcc.options')}", "-gencode=arch=compute_80,code=sm_80"
        options = *options, "-gencode=arch=compute_90,code=[sm_90,compute_90]"
        stand_in.harness.run([stand_in.harness.find_nvcc(), *options, str(source), "-o", str(target)])
        if stand_in.device() is None:
            devices, error = self.registered()
            self.assertEqual(devices, ["CPU"])
            self.assertRegex(error, "there is no CUDA driver|no CUDA-capable device")
        stand_in.build_old_driver(self.folder)
        devices, error = self.registered(LD_LIBRARY_PATH=str(self.folder))
        self.assertEqual(devices, ["CPU"])
        self.assertRegex(error, r"the driver supports CUDA 12\.5, and the kernels need CUDA \d+\.\d+")

        is_built_for = ctypes.CDLL(str(target)).HopTfCudaIsBuiltFor
        versions = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (9, 1), (10, 0), (12, 0)
        self.assertEqual([is_built_for(*version) for version in versions], [0, 0, 1, 1, 1, 1, 1, 1])


@parameterized.product(device=_DEVICES, dtype=_FLOATS)
class ResultsTest(_TestCase):
    def test_shapes(self, device, dtype):
        for shape in (*_SHAPES, _LARGE):
            for name, (inputs, attributes) in _inputs(shape, dtype).items():
                with self.subTest(f"{name} of {shape}"):
                    self.check(device, name, inputs, attributes)

    def test_block_size(self, device, dtype):
        for block_size in (0, 1, 7, 1000, 1024, 5000, 2**31 - 1):
            for name, (inputs, attributes) in _inputs((20_001,), dtype, block_size).items():
                if "block_size" in attributes:
                    with self.subTest(f"{name} in blocks of {block_size}"):
                        self.check(device, name, inputs, attributes)

    def test_spacing_and_rounding(self, device, dtype):
        values = _values((5001,), dtype)
        for spacing in (1.0, 0.25):
            self.check(device, "SketchEncode", [values], {"spacing": spacing})
        for round_to_nearest in (0, 1):
            self.check(device, "Truncate16Encode", [values], {"round_to_nearest": round_to_nearest})


@parameterized.parameters(*_DEVICES)
class MemoryTest(_TestCase):
    def test_the_sum_takes_the_memory_of_an_accumulator_that_nothing_else_needs(self, device):
        inputs, attributes = _inputs((100, 31), np.float32)["Int8Accumulate"]
        (expected,) = self.expected("Int8Accumulate", inputs, attributes)
        for shared, forwarded in (((), 2), ((2,), -1)):
            results = self.run_operation(device, "Int8Accumulate", inputs, attributes, shared=shared)
            self.assertEqual(results.forwarded, [forwarded])
            np.testing.assert_array_equal(results.outputs[0], expected)

    def test_gives_back_what_it_has_when_there_is_no_more(self, device):
        for name, (inputs, attributes) in _inputs((1000,), np.float32).items():
            codes = []
            while not codes or codes[-1]:
                options = {"num_allocations": len(codes), "shared": range(len(inputs))}
                results = self.run_operation(device, name, inputs, attributes, **options)
                codes.append(results.code)
                self.assertEqual(results.message, "out of memory" if results.code else "")
                self.assertEqual(self.library.num_live(), self.num_live)
            num_scratch = device == "GPU" and name in ("SketchEncode", "Int8Encode", "Int8Reduce")
            num_arrays = len(self.definitions[f"HopTf{name}"].outputs) + num_scratch
            self.assertEqual(codes, [_RESOURCE_EXHAUSTED] * num_arrays + [0], name)

    def test_several_threads(self, device):
        def run(seed):
            values = _values((200_003,), np.float32, seed)
            for _ in range(5):
                self.check(device, "SketchEncode", [values], {})
                self.check(device, "Int8Encode", [values], {})

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            list(threads.map(run, range(4)))


@parameterized.parameters(*_DEVICES)
class ErrorsTest(_TestCase):
    def assert_fails(self, message, device, name, inputs, attributes=None):
        results = self.run_operation(device, name, inputs, attributes)
        self.assertEqual(results.code, _INVALID_ARGUMENT)
        self.assertRegex(results.message, message)

    def test_spacing(self, device):
        for spacing in (0.0, 1.5, -1.0, float("nan")):
            message = f"`spacing` must be above 0 and at most 1. Received: spacing={spacing}"
            self.assert_fails(message, device, "SketchEncode", [_values((5,), np.float32)], {"spacing": spacing})

    def test_bucket_values(self, device):
        for shape in ((0,), (255,), (2, 128)):
            inputs = np.zeros(5, np.uint8), np.zeros(shape, np.float32)
            self.assert_fails("`bucket_values` must have 256 values. Received: shape", device, "SketchDecode", inputs)

    def test_block_size(self, device):
        for name, (inputs, attributes) in _inputs((1500,), np.float32).items():
            for block_size in (-1, 2**31) if attributes.keys() == {"block_size"} else ():
                message = f"`block_size` must be from 0 to 2.31 - 1. Received: block_size={block_size}."
                self.assert_fails(message, device, name, inputs, {"block_size": block_size})

    def test_scales(self, device):
        message = r"`scales` must have 3 values for 1500 codes in blocks of 512. Received: shape \[2\]."
        for name in ("Int8Decode", "Int8Accumulate", "Int8Reduce"):
            codes, scales, *rest = _inputs((1500,), np.float32)[name][0]
            self.assert_fails(message, device, name, [codes, scales[:2], *rest])

    def test_shape(self, device):
        for name, argument in (("Int8Accumulate", "accumulator"), ("Int8Reduce", "values")):
            *inputs, values = _inputs((1500,), np.float32)[name][0]
            message = rf"`{argument}` must have the shape of `codes`, \[1500\]. Received: shape \[30, 50\]."
            self.assert_fails(message, device, name, [*inputs, values.reshape(30, 50)])


class ShapesTest(_TestCase):
    @parameterized.parameters(([30, 50],), ([-1, 50],), ([],), (None,))
    def test_the_first_output_has_the_shape_of_the_first_input(self, shape):
        for name, definition in self.definitions.items():
            others = [[3], shape][: len(definition.inputs) - 1]
            second = [3] if name == "HopTfInt8Reduce" else None
            self.assertEqual(self.library.infer_shapes(name, [shape, *others]), [shape, second], name)

    def test_the_second_input_is_a_vector(self):
        for name, definition in self.definitions.items():
            if len(definition.inputs) > 1:
                shapes = [[8], [2, 4], [8]][: len(definition.inputs)]
                self.assertEqual(self.library.infer_shapes(name, shapes), "Shape must be rank 1 but is rank 2", name)
        self.assertEqual(self.library.infer_shapes("HopTfInt8Reduce", [[8], None, [8]]), [[8], None])


if __name__ == "__main__":
    absltest.main()
