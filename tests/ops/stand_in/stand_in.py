"""Builds the stand-in for TensorFlow and runs the registered operations on NumPy arrays.

As a program, prints what the libraries of a folder register: the devices that have kernels, and why GPUs have none.

Needs NumPy and a C++ compiler, and neither TensorFlow nor the hop_tf package. A process can load one stand-in only, and
none if TensorFlow is loaded.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent
OPS = FOLDER.parents[2] / "ops"

_SPEC = importlib.util.spec_from_file_location("hop_tf_cuda_harness", OPS / "cuda" / "harness.py")
harness = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(harness)

TENSORFLOW, OPERATIONS = "libtensorflow_framework.so.2", "hop_tf_ops.so"
KERNELS, CUDA = "libhop_tf_kernels.so", "libhop_tf_cuda.so"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))

# As in setup.py.
_OPTIONS = (
    *("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"),
    *("-Wall", "-Wextra", "-Werror"),
)

# TF_DataType. NumPy has no bfloat16: its patterns are uint16, which no operation takes.
BFLOAT16 = np.dtype(np.uint16)
DTYPES = {
    "float": (1, np.dtype(np.float32)),
    "uint8": (4, np.dtype(np.uint8)),
    "int8": (6, np.dtype(np.int8)),
    "bfloat16": (14, BFLOAT16),
    "half": (19, np.dtype(np.float16)),
}
_TYPES = {dtype: type_ for type_, dtype in DTYPES.values()}
_OF_TYPES = dict(DTYPES.values())


@functools.cache
def device() -> harness.Device | None:
    """The CUDA device, if there is one."""
    try:
        return harness.Device()
    except RuntimeError:
        return None


def build(folder: pathlib.Path) -> None:
    """Puts all libraries into `folder`. The kernels for GPUs are stand-ins, too, unless there is a device."""
    _in_parallel(
        lambda: _build_tensorflow(folder),
        lambda: _build_or_copy(KERNELS, "kernels", "-O3", folder),
        lambda: _build_cuda(folder) if device() else None,
    )
    _in_parallel(
        lambda: _build_or_copy(OPERATIONS, "tensorflow", "-O1", folder, *_links(folder), f"-l:{TENSORFLOW}"),
        lambda: None if device() else build_cuda_stand_in(folder),
    )


def build_cuda_stand_in(folder: pathlib.Path) -> None:
    """Puts a libhop_tf_cuda.so into `folder` that works on host memory, by the kernels that are there."""
    _compile(*_OPTIONS, "-O1", FOLDER / "cuda.cc", *_links(folder), "-o", folder / CUDA)


def build_old_driver(folder: pathlib.Path) -> None:
    """Puts a libcuda.so.1 for CUDA 12.5 into `folder`."""
    _compile("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", FOLDER / "old_driver.cc", "-o", folder / "libcuda.so.1")


def _links(folder: pathlib.Path) -> tuple[str, ...]:
    return f"-L{folder}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-lhop_tf_kernels"


def _in_parallel(*builds: Callable[[], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor() as threads:
        for result in [threads.submit(build) for build in builds]:
            result.result()


def _build_tensorflow(folder: pathlib.Path) -> None:
    source, target = str(FOLDER / "tensorflow.cc"), str(folder / TENSORFLOW)
    if device() is None:
        options = [option for option in _OPTIONS if option != "-fvisibility=hidden"]
        _compile(*options, "-O1", f"-Wl,-soname,{TENSORFLOW}", source, "-o", target)
    else:
        options = "-std=c++17", "-O1", "-shared", "-cudart=static", "-Xcompiler=-fPIC", f"-Xlinker=-soname={TENSORFLOW}"
        harness.run([harness.find_nvcc() or "nvcc", *options, "-DHOP_TF_WITH_CUDA", source, "-o", target])


def _build_cuda(folder: pathlib.Path) -> None:
    given = os.environ.get("HOP_TF_CUDA_LIBRARY")
    if given:
        shutil.copy(given, folder / CUDA)
    else:
        harness.build(folder, device().architecture)


def _build_or_copy(name: str, sources: str, optimize: str, folder: pathlib.Path, *links: str) -> None:
    """Copies a library from the source tree, unless it is missing or a source is newer."""
    built = OPS / name
    newest = max(path.stat().st_mtime for path in OPS.glob("*/*") if path.suffix in (".cc", ".h"))
    if built.exists() and built.stat().st_mtime > newest:
        shutil.copy(built, folder / name)
    else:
        paths = [str(path) for path in sorted((OPS / sources).glob("*.cc"))]
        _compile(*_OPTIONS, optimize, *paths, *links, "-o", str(folder / name))


def _compile(*arguments: object) -> None:
    harness.run([*COMPILER, *map(str, arguments)])


@dataclasses.dataclass
class Definition:
    """An operation as it is registered."""

    attributes: list[str] = dataclasses.field(default_factory=list)
    inputs: list[str] = dataclasses.field(default_factory=list)
    outputs: list[str] = dataclasses.field(default_factory=list)

    def defaults(self) -> dict[str, float]:
        """The values of attributes that are not types."""
        words = [attribute.replace(":", "").split() for attribute in self.attributes]
        return {
            name: float({"false": 0, "true": 1}.get(last, last)) for name, kind, *_, last in words if kind != "{float,"
        }


@dataclasses.dataclass
class Results:
    """One run of an operation."""

    code: int
    message: str
    outputs: list[np.ndarray]
    inputs: list[np.ndarray]  # The inputs after the call.
    forwarded: list[int]  # For each output, the input in whose memory it lies, or -1.
    error: str  # Of the device, and of writes beside arrays.


class StandIn:
    """The stand-in for TensorFlow with the operations of `folder`.

    Args:
      folder: The folder in which `build` has put the libraries.
    """

    def __init__(self, folder: pathlib.Path):
        self.kernels = folder / KERNELS
        self._library = ctypes.CDLL(str(folder / TENSORFLOW))
        self._declare()
        self.cuda_error = self._load_cuda(folder / CUDA)
        ctypes.CDLL(str(folder / OPERATIONS))  # Registers them.

    def _load_cuda(self, path: pathlib.Path) -> str:
        """Loads the CUDA library as `ops/native.py` does; returns its error, or an empty text."""
        try:
            find_error = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL).HopTfCudaError
        except OSError as error:
            return str(error)
        find_error.restype = ctypes.c_char_p
        return find_error().decode()

    def _declare(self) -> None:
        address, text, integer, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int64
        functions = {
            "TF_NewStatus": (address, ()),
            "TF_DeleteStatus": (None, (address,)),
            "TF_GetCode": (integer, (address,)),
            "TF_Message": (text, (address,)),
            "TF_TensorType": (integer, (address,)),
            "TF_NumDims": (integer, (address,)),
            "TF_Dim": (size, (address, integer)),
            "StandInNumLive": (size, ()),
            "StandInRegistered": (text, ()),
            "StandInNewShapes": (address, ()),
            "StandInDeleteShapes": (None, (address,)),
            "StandInAddShape": (None, (address, integer, address)),
            "StandInInferShapes": (None, (address, text, address)),
            "StandInRank": (integer, (address, integer)),
            "StandInDim": (size, (address, integer, integer)),
            "StandInNewCall": (address, (text, text, integer)),
            "StandInSetAttribute": (None, (address, text, ctypes.c_double)),
            "StandInAddInput": (None, (address, integer, integer, address, address, integer)),
            "StandInCompute": (address, (address,)),
            "StandInNumOutputs": (integer, (address,)),
            "StandInOutput": (address, (address, integer)),
            "StandInInput": (address, (address, integer)),
            "StandInForwarded": (integer, (address, integer)),
            "StandInRead": (None, (address, address, address)),
            "StandInEndCall": (text, (address,)),
        }
        for name, (result, arguments) in functions.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def num_live(self) -> int:
        """Returns the number of buffers, tensors, statuses and shapes that were not released."""
        return self._library.StandInNumLive()

    def registered(self) -> tuple[dict[str, Definition], set[tuple[str, str]]]:
        """The operations by name; and the kernels as (device, operation)."""
        definitions, kernels = {}, set()
        for line in self._library.StandInRegistered().decode().splitlines():
            kind, text = line.split(" ", 1)
            if kind == "operation":
                definitions[text] = definition = Definition()
            elif kind == "kernel":
                kernels.add(tuple(text.split()))
            else:
                getattr(definition, f"{kind}s").append(text)
        return definitions, kernels

    def infer_shapes(self, operation: str, shapes: Sequence[Sequence[int] | None]) -> list[list[int] | None] | str:
        """The static shapes of two outputs for those of the inputs, or the error. None and -1 are unknown."""
        context, status = self._library.StandInNewShapes(), self._library.TF_NewStatus()
        for shape in shapes:
            self._library.StandInAddShape(context, -1 if shape is None else len(shape), _dims(shape or ()))
        self._library.StandInInferShapes(context, operation.encode(), status)
        result = self._library.TF_Message(status).decode() or [self._inferred(context, index) for index in range(2)]
        self._library.TF_DeleteStatus(status)
        self._library.StandInDeleteShapes(context)
        return result

    def _inferred(self, context: int, output: int) -> list[int] | None:
        rank = self._library.StandInRank(context, output)
        return None if rank < 0 else [self._library.StandInDim(context, output, index) for index in range(rank)]

    def run(
        self,
        device: str,
        operation: str,
        inputs: Sequence[np.ndarray],
        attributes: dict[str, float],
        *,
        shared: Sequence[int] = (),
        num_allocations: int = -1,
    ) -> Results:
        """Runs an operation.

        Args:
          device: "CPU" or "GPU".
          operation: Its name.
          inputs: One array for each input.
          attributes: All that the operation has.
          shared: The inputs that other operations need, too.
          num_allocations: Number of outputs and scratch arrays for which there is memory; -1: all.
        """
        call = self._library.StandInNewCall(device.encode(), operation.encode(), num_allocations)
        if call is None:
            raise KeyError(f"{operation} is not registered for the {device}.")
        for name, value in attributes.items():
            self._library.StandInSetAttribute(call, name.encode(), value)
        inputs = [np.array(array, order="C") for array in inputs]
        for index, array in enumerate(inputs):
            data = array.ctypes.data, index in shared
            self._library.StandInAddInput(call, _TYPES[array.dtype], array.ndim, _dims(array.shape), *data)
        status = self._library.StandInCompute(call)
        results = Results(self._library.TF_GetCode(status), self._library.TF_Message(status).decode(), [], [], [], "")
        for index in range(self._library.StandInNumOutputs(call) if results.code == 0 else 0):
            results.outputs.append(self._read(call, self._library.StandInOutput(call, index)))
            results.forwarded.append(self._library.StandInForwarded(call, index))
        results.inputs = [self._read(call, self._library.StandInInput(call, index)) for index in range(len(inputs))]
        results.error = self._library.StandInEndCall(call).decode()
        return results

    def _read(self, call: int, tensor: int) -> np.ndarray:
        shape = [self._library.TF_Dim(tensor, index) for index in range(self._library.TF_NumDims(tensor))]
        array = np.empty(shape, _OF_TYPES[self._library.TF_TensorType(tensor)])
        self._library.StandInRead(call, tensor, array.ctypes.data)
        return array


def _dims(shape: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * max(len(shape), 1))(*shape)


if __name__ == "__main__":
    library = StandIn(pathlib.Path(sys.argv[1]))
    devices = sorted({device for device, _ in library.registered()[1]})
    print(json.dumps({"devices": devices, "error": library.cuda_error}))
