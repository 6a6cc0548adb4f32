"""Builds the CUDA kernels and calls them on NumPy arrays, for tests and benchmarks.

Needs NumPy and nvcc, but neither TensorFlow nor the hop_tf package: it is loaded by its path. Device memory and timing
come from the driver's own library, which every machine with a device has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent
LIBRARY = "libhop_tf_cuda.so"

OK, INVALID_ARGUMENT, DEVICE_ERROR = 0, 1, 3

_NUM_CODES = 256  # As in kernels/constants.h.

# The values of HopTfType. NumPy has no bfloat16, so uint16 patterns stand for it.
TYPES = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}

_ADDRESS, _SIZE, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double

# `HopTfCuda<name>`: the types of its result and of its arguments, as in hop_tf_cuda.h.
FUNCTIONS = {
    "SketchWorkspaceBytes": (_SIZE, (_SIZE,)),
    "Int8WorkspaceBytes": (_SIZE, (_SIZE, _SIZE)),
    "SketchEncode": (_INT, (_ADDRESS, _INT, _SIZE, _DOUBLE, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS)),
    "SketchDecode": (_INT, (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS)),
    "Int8Encode": (_INT, (_ADDRESS, _INT, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS)),
    "Int8Decode": (_INT, (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS)),
    "Int8Accumulate": (_INT, (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS)),
    "Int8Reduce": (
        _INT,
        (_ADDRESS, _ADDRESS, _ADDRESS, _INT, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
    ),
    "Truncate16Encode": (_INT, (_ADDRESS, _INT, _SIZE, _INT, _ADDRESS, _ADDRESS)),
    "Truncate16Decode": (_INT, (_ADDRESS, _SIZE, _ADDRESS, _ADDRESS)),
    "Copy": (_INT, (_ADDRESS, _SIZE, _ADDRESS, _ADDRESS)),
    "LastError": (ctypes.c_char_p, ()),
    "Error": (ctypes.c_char_p, ()),
    "IsBuiltFor": (_INT, (_INT, _INT)),
    "NumDevices": (_INT, ()),
}


def find_nvcc() -> str | None:
    """The compiler's path, or None if there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(home, "bin"))


def build(folder: str | os.PathLike, architecture: str) -> pathlib.Path:
    """Compiles the library for one kind of device with nvcc. Warnings are errors.

    Args:
      folder: The folder for the library.
      architecture: The device's compute capability, such as "90".

    Returns:
      The library's path.

    Raises:
      RuntimeError: If nvcc fails. The message has its output.
    """
    path = pathlib.Path(folder, LIBRARY)
    always = f"--options-file={FOLDER / 'nvcc.options'}", "--threads=0", "-Werror=all-warnings"
    sources = [str(source) for source in sorted(FOLDER.glob("*.cu"))]
    run([find_nvcc() or "nvcc", *always, f"-arch=sm_{architecture}", "-o", str(path), *sources])
    return path


def run(command: Sequence[str]) -> None:
    """Runs a compiler. Raises RuntimeError with its output if it fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout}")


def load(path: str | os.PathLike) -> ctypes.CDLL:
    """Loads the library and declares its functions. A library of another version may lack some."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, f"HopTfCuda{name}", None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
    return library


class Device:
    """The first device: memory, and a stream of its own.

    Raises:
      RuntimeError: If there is no driver or no device.
    """

    _COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
    _NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: work on other streams does not wait for it.
    _NOT_READY = 600  # CUDA_ERROR_NOT_READY

    def __init__(self):
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError("there is no CUDA driver") from error
        self._call("cuInit", ctypes.c_uint(0))
        self._device, context, self.stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(self.stream), ctypes.c_uint(self._NON_BLOCKING))

    @property
    def name(self) -> str:
        """The driver's name of the device."""
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, ctypes.c_int(len(name)), self._device)
        return name.value.decode()

    @property
    def architecture(self) -> str:
        """The device's compute capability, as `build` takes it."""
        digits = [ctypes.c_int(), ctypes.c_int()]
        for digit, attribute in zip(digits, self._COMPUTE_CAPABILITY, strict=True):
            self._call("cuDeviceGetAttribute", ctypes.byref(digit), ctypes.c_int(attribute), self._device)
        return "".join(str(digit.value) for digit in digits)

    def allocate(self, num_bytes: int) -> int:
        """Allocates memory, and returns its address, which is aligned to 256 bytes."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(num_bytes, 1)))
        return address.value

    def free(self, address: int) -> None:
        """Frees memory."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address: int, array: np.ndarray) -> None:
        """Copies an array to the device after all earlier work, and waits for the copy."""
        self.synchronize()  # The copy itself does not wait for the stream.
        array = np.ascontiguousarray(array)
        if array.nbytes:
            source = ctypes.c_void_p(array.ctypes.data)
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(array.nbytes))
        self.synchronize()

    def read(self, address: int, array: np.ndarray) -> None:
        """Fills a contiguous array from the device's memory, after all earlier work."""
        self.synchronize()
        if array.nbytes:
            target = ctypes.c_void_p(array.ctypes.data)
            self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueues a copy within the device's memory."""
        addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(num_bytes), self.stream)

    def fill(self, address: int, num_bytes: int, byte: int) -> None:
        """Enqueues that all bytes from an address become `byte`."""
        size = ctypes.c_size_t(num_bytes)
        self._call("cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(byte), size, self.stream)

    def synchronize(self) -> None:
        """Waits until the device has done all work."""
        self._call("cuCtxSynchronize")

    def seconds(self, enqueue: Callable, head_start: Callable | None = None) -> tuple[float, bool]:
        """Measures the time that the device takes for the work that `enqueue` puts on the stream.

        Args:
          enqueue: Puts the work on the stream.
          head_start: Puts other work on the stream before the measurement begins. If that work takes longer than the
            calls of `enqueue`, the device never waits for the host during the measurement.

        Returns:
          (seconds, is_ahead): `is_ahead` is true if all work was enqueued before the device began with it.
        """
        with self._events() as (begin, end):
            if head_start is not None:
                head_start()
            self._call("cuEventRecord", begin, self.stream)
            enqueue()
            self._call("cuEventRecord", end, self.stream)
            is_ahead = self._driver.cuEventQuery(begin) == self._NOT_READY
            self._call("cuEventSynchronize", end)
            milliseconds = ctypes.c_float()
            self._call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
            return milliseconds.value / 1e3, is_ahead

    @contextlib.contextmanager
    def _events(self) -> Iterator[tuple[ctypes.c_void_p, ctypes.c_void_p]]:
        events = ctypes.c_void_p(), ctypes.c_void_p()
        for event in events:
            self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        try:
            yield events
        finally:
            for event in events:
                self._call("cuEventDestroy_v2", event)

    def _call(self, name: str, *arguments) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            message = ctypes.c_char_p()
            self._driver.cuGetErrorString(error, ctypes.byref(message))
            raise RuntimeError(f"{name} failed: {(message.value or b'unknown error').decode()} ({error})")


class Arrays:
    """Arrays on a device, each `offset` elements behind an aligned address."""

    _GUARD = np.full(64, 0xA5, np.uint8)  # The bytes before and behind each array, which no kernel may change.
    _FRONT = 256  # Bytes for the guard before the array; a multiple of the alignment.
    POISON = 0x5B  # Fills new arrays, so that elements are wrong if a kernel does not write them.

    def __init__(self, device: Device, offset: int = 0):
        self._device, self._offset = device, offset
        self._starts: list[int] = []
        self._shapes: dict[int, tuple[int, np.dtype]] = {}

    def empty(self, size: int, dtype: np.typing.DTypeLike) -> int:
        """Allocates an array of `size` elements, filled with `POISON`, and returns its address."""
        dtype = np.dtype(dtype)
        address = self._allocate(self._offset * dtype.itemsize, size, dtype)
        self.poison(address)
        return address

    def poison(self, address: int) -> None:
        """Fills the array at an address as `empty` does."""
        size, dtype = self._shapes[address]
        if size:
            self._device.fill(address, size * dtype.itemsize, self.POISON)

    def put(self, array: np.ndarray) -> int:
        """Copies `array` to the device, and returns the copy's address."""
        address = self.empty(array.size, array.dtype)
        self._device.write(address, array)
        return address

    def scratch(self, num_bytes: int) -> int:
        """Allocates memory that is aligned with any offset, with undefined contents. Returns its address."""
        address = self._allocate(0, num_bytes, np.dtype(np.uint8))
        self.poison(address)
        return address

    def get(self, address: int) -> np.ndarray:
        """The array at an address."""
        array = np.empty(*self._shapes[address])
        self._device.read(address, array)
        return array

    def check(self) -> None:
        """Raises RuntimeError if a kernel wrote next to any array, including scratch memory."""
        guard = np.empty_like(self._GUARD)
        for address, (size, dtype) in self._shapes.items():
            for side, guarded in self._guards(address, size, dtype).items():
                self._device.read(guarded, guard)
                if not np.array_equal(guard, self._GUARD):
                    raise RuntimeError(f"a kernel wrote {side} an array of {size} {dtype}.")

    def free(self) -> None:
        """Frees the memory."""
        self._device.synchronize()
        for start in self._starts:
            self._device.free(start)
        self._starts.clear()
        self._shapes.clear()

    def _allocate(self, gap: int, size: int, dtype: np.dtype) -> int:
        """Allocates an array `gap` bytes behind an aligned address, between two guards. Returns its address."""
        start = self._device.allocate(self._FRONT + gap + size * dtype.itemsize + self._GUARD.size)
        self._starts.append(start)
        address = start + self._FRONT + gap
        for guarded in self._guards(address, size, dtype).values():
            self._device.write(guarded, self._GUARD)
        self._shapes[address] = size, dtype
        return address

    def _guards(self, address: int, size: int, dtype: np.dtype) -> dict[str, int]:
        """The addresses of an array's guards."""
        return {"before": address - self._GUARD.size, "behind": address + size * dtype.itemsize}


class Kernels:
    """The kernels, on NumPy arrays. Arrays lie `offset` elements behind aligned addresses."""

    def __init__(self, library: ctypes.CDLL, device: Device):
        self._library, self._device = library, device

    @contextlib.contextmanager
    def arrays(self, offset: int = 0) -> Iterator[Arrays]:
        """Yields arrays on the device. The end of the block checks and frees them."""
        arrays = Arrays(self._device, offset)
        try:
            yield arrays
            arrays.check()
        finally:
            arrays.free()

    def enqueue(self, name: str, *arguments) -> None:
        """Calls `HopTfCuda<name>` with these arguments and the device's stream.

        Raises:
          RuntimeError: If the function returns an error.
        """
        status = getattr(self._library, f"HopTfCuda{name}")(*arguments, self._device.stream)
        if status != OK:
            raise RuntimeError(f"HopTfCuda{name}: {self._library.HopTfCudaLastError().decode()} ({status})")

    def workspace(self, arrays: Arrays, name: str, *sizes: int) -> int:
        """Allocates the workspace of `HopTfCuda<name>WorkspaceBytes(*sizes)` bytes, and returns its address."""
        return arrays.scratch(getattr(self._library, f"HopTfCuda{name}WorkspaceBytes")(*sizes))

    def sketch_encode(self, values: np.ndarray, spacing: float = 0.5, *, offset: int = 0):
        """Returns (codes, bucket_values)."""
        with self.arrays(offset) as arrays:
            codes, buckets = arrays.empty(values.size, np.uint8), arrays.empty(_NUM_CODES, np.float32)
            source, workspace = arrays.put(values), self.workspace(arrays, "Sketch", values.size)
            arguments = source, TYPES[values.dtype], values.size, spacing, codes, buckets, workspace
            self.enqueue("SketchEncode", *arguments)
            return arrays.get(codes), arrays.get(buckets)

    def sketch_decode(self, codes: np.ndarray, bucket_values: np.ndarray, *, offset: int = 0):
        """Returns the values."""
        with self.arrays(offset) as arrays:
            values = arrays.empty(codes.size, np.float32)
            sources = arrays.put(codes), arrays.put(bucket_values)
            self.enqueue("SketchDecode", *sources, codes.size, values)
            return arrays.get(values)

    def int8_encode(self, values: np.ndarray, block_size: int, *, offset: int = 0):
        """Returns (codes, scales)."""
        with self.arrays(offset) as arrays:
            codes = arrays.empty(values.size, np.int8)
            scales = arrays.empty(-(-values.size // block_size), np.float32)
            source, workspace = arrays.put(values), self.workspace(arrays, "Int8", values.size, block_size)
            arguments = source, TYPES[values.dtype], values.size, block_size, codes, scales, workspace
            self.enqueue("Int8Encode", *arguments)
            return arrays.get(codes), arrays.get(scales)

    def int8_decode(self, codes: np.ndarray, scales: np.ndarray, block_size: int, *, offset: int = 0):
        """Returns the values."""
        with self.arrays(offset) as arrays:
            values = arrays.empty(codes.size, np.float32)
            self.enqueue("Int8Decode", arrays.put(codes), arrays.put(scales), codes.size, block_size, values)
            return arrays.get(values)

    def int8_accumulate(self, codes, scales, accumulator: np.ndarray, block_size: int, *, offset: int = 0):
        """Returns the sums."""
        with self.arrays(offset) as arrays:
            sums = arrays.put(accumulator)
            self.enqueue("Int8Accumulate", arrays.put(codes), arrays.put(scales), codes.size, block_size, sums)
            return arrays.get(sums)

    def int8_reduce(self, codes, scales, values: np.ndarray, block_size: int, *, in_place=False, offset: int = 0):
        """Returns (codes, scales) of the sums, which with `in_place` overwrite the arguments' copies."""
        with self.arrays(offset) as arrays:
            sources = arrays.put(codes), arrays.put(scales)
            targets = (
                sources if in_place else (arrays.empty(codes.size, np.int8), arrays.empty(scales.size, np.float32))
            )
            source, workspace = arrays.put(values), self.workspace(arrays, "Int8", values.size, block_size)
            arguments = source, TYPES[values.dtype], values.size, block_size, *targets, workspace
            self.enqueue("Int8Reduce", *sources, *arguments)
            return tuple(arrays.get(target) for target in targets)

    def truncate16_encode(self, values: np.ndarray, round_to_nearest: bool, *, offset: int = 0):
        """Returns the halves."""
        with self.arrays(offset) as arrays:
            halves = arrays.empty(values.size, np.uint16)
            source = arrays.put(values)
            self.enqueue("Truncate16Encode", source, TYPES[values.dtype], values.size, round_to_nearest, halves)
            return arrays.get(halves)

    def truncate16_decode(self, halves: np.ndarray, *, offset: int = 0):
        """Returns the values."""
        with self.arrays(offset) as arrays:
            values = arrays.empty(halves.size, np.float32)
            self.enqueue("Truncate16Decode", arrays.put(halves), halves.size, values)
            return arrays.get(values)

    def copy(self, array: np.ndarray, *, offset: int = 0):
        """Returns a copy."""
        with self.arrays(offset) as arrays:
            target = arrays.empty(array.size, array.dtype)
            self.enqueue("Copy", arrays.put(array), array.nbytes, target)
            return arrays.get(target)
