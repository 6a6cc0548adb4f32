"""Finds the native libraries that are built with the package: kernels for processors, and TensorFlow operations."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

import numpy as np
import tensorflow as tf
from absl import logging

_FOLDER = pathlib.Path(__file__).parent
_KERNELS = "libhop_tf_kernels.so"
_OPERATIONS = "hop_tf_ops.so"
_CUDA = "libhop_tf_cuda.so"

_OK, _OUT_OF_MEMORY = 0, 2

# `HopTf<name>`: the types of its arguments, as in kernels/hop_tf_kernels.h.
_ADDRESS, _SIZE, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_FUNCTIONS = {
    "SketchEncode": (_ADDRESS, _INT, _SIZE, _DOUBLE, _ADDRESS, _ADDRESS, _INT),
    "SketchDecode": (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _INT),
    "SketchAccumulate": (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _INT),
    "Int8Encode": (_ADDRESS, _INT, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _INT),
    "Int8Decode": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _INT),
    "Int8Accumulate": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _INT),
    "Int8Reduce": (_ADDRESS, _ADDRESS, _ADDRESS, _INT, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _INT),
    "FewBitsEncode": (_ADDRESS, _INT, _SIZE, _SIZE, _INT, _ADDRESS, _ADDRESS, _INT),
    "FewBitsDecode": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _INT, _ADDRESS, _INT),
    "FewBitsAccumulate": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _INT, _ADDRESS, _INT),
    "FewBitsReduce": (_ADDRESS, _ADDRESS, _ADDRESS, _INT, _SIZE, _SIZE, _INT, _ADDRESS, _ADDRESS, _INT),
    "Truncate16Encode": (_ADDRESS, _INT, _SIZE, _INT, _ADDRESS, _INT),
    "Truncate16Decode": (_ADDRESS, _SIZE, _ADDRESS, _INT),
    "Truncate16Accumulate": (_ADDRESS, _SIZE, _ADDRESS, _INT),
    "GapsEncode": (_ADDRESS, _SIZE, _SIZE, _INT, _ADDRESS, _ADDRESS, _ADDRESS),
    "GapsDecode": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _INT, _ADDRESS),
    "SelectLarge": (_ADDRESS, _INT, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS),
    "TimesVectors": (_ADDRESS, _SIZE, _SIZE, _ADDRESS, _SIZE, _ADDRESS),
    "VectorsTimes": (_ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _ADDRESS),
    "AddProduct": (_DOUBLE, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS),
    "Orthonormalize": (_ADDRESS, _SIZE, _SIZE),
    "BlockHash": (_ADDRESS, _SIZE, _ADDRESS, _ADDRESS),
    "ExchangeFrames": (_ADDRESS, _SIZE, _INT, _INT),
}


def native_available() -> bool:
    """True if the native kernels are in use. Otherwise TensorFlow's own operations compute the same, more slowly.

    The kernels are missing if the package was built without a C++ compiler. `HOP_TF_DISABLE_NATIVE=1` in the
    environment disables them.
    """
    return kernels() is not None and operations() is not None


def build_info() -> dict[str, object]:
    """Describes the build of the native kernels, for bug reports.

    This function asks the driver for the GPUs, so set `CUDA_VISIBLE_DEVICES` first.

    Returns:
      `native`: see `native_available`; `compiler`: the compiler, and the instruction set in use; `num_cores`: the
      number of threads for large arrays; `cuda`: True if the operations run on GPUs; `cuda_error`: the reason why they
      do not, or "".
    """
    library, cuda_error = kernels(), _cuda_error()
    return {
        "native": native_available(),
        "compiler": library.HopTfBuildInfo().decode() if library else "",
        "num_cores": library.HopTfNumCores() if library else 0,
        "cuda": not cuda_error,
        "cuda_error": cuda_error,
    }


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library of kernels, or None if there is none."""
    return _load(ctypes.CDLL)


@functools.cache
def quick_kernels() -> ctypes.PyDLL | None:
    """The library of kernels for short calls, which keep the GIL. None if there is none."""
    return _load(ctypes.PyDLL)


def _load(kind: type[ctypes.CDLL]) -> ctypes.CDLL | None:
    path = _find(_KERNELS)
    if path is None:
        return None
    library = kind(str(path))
    library.HopTfBuildInfo.restype = ctypes.c_char_p
    for name, argument_types in _FUNCTIONS.items():
        getattr(library, f"HopTf{name}").argtypes = argument_types
    return library


@functools.cache
def operations():
    """The module of TensorFlow operations (`hop_tf_int8_encode`, ...), or None if there is none."""
    path = _find(_OPERATIONS)
    if path is None:
        return None
    cuda_error = _cuda_error()
    if cuda_error and tf.config.list_physical_devices("GPU"):
        logging.warning("hop_tf's operations run on the processor, because GPUs cannot run them: %s.", cuda_error)
    return tf.load_op_library(str(path))


def _cuda_error() -> str:
    """Loads the kernels for GPUs. Returns the reason why the operations do not run on GPUs, or "" if they do."""
    if kernels() is None:
        return "there are no native kernels at all"
    path = _FOLDER / _CUDA
    if not path.exists():
        return f"{_CUDA} was not built"
    try:
        # RTLD_GLOBAL, so that the operations find the kernels. The operations register them if HopTfCudaError returns
        # "".
        find_error = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL).HopTfCudaError
    except (OSError, AttributeError) as error:
        return str(error)
    find_error.restype = ctypes.c_char_p
    return find_error().decode()


def address(array: np.ndarray) -> int:
    """The address of an array's memory. Faster than `ctypes.data`, which makes several calls and objects."""
    return array.__array_interface__["data"][0]


def call(name: str, *arguments) -> None:
    """Calls the kernel `HopTf<name>`, without the GIL.

    Raises:
      ValueError: If an argument is out of range.
      MemoryError: If there is not enough memory.
    """
    status = getattr(kernels(), f"HopTf{name}")(*arguments)
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"not enough memory for HopTf{name}.")
    if status != _OK:
        raise ValueError(f"HopTf{name} refused its arguments with status {status}. Received: {arguments}.")


def _find(name: str) -> pathlib.Path | None:
    if os.environ.get("HOP_TF_DISABLE_NATIVE") == "1":
        return None
    path = _FOLDER / name
    if path.exists():
        return path
    # Logged once, even from several threads: if one library is missing, so are the others that need it.
    logging.log_first_n(logging.WARNING, "%s", 1, _what_is_missing(name))
    return None


def _what_is_missing(name: str) -> str:
    slow = "its kernels run as TensorFlow operations, 10 to 100 times slower"
    root = _FOLDER.parent
    if (root / "setup.py").exists():  # For instance if a program is started in the source tree of an installed hop_tf.
        return (
            f"hop_tf comes from the source tree {root}, where {name} is not built: {slow}. Build it there, by "
            "`pip install --editable .`, or start the program in another directory: then it takes the installed hop_tf."
        )
    return (
        f"hop_tf was built without {name}: {slow}. Install it again where there is a C++ compiler "
        "(HOP_TF_REQUIRE_NATIVE=1 shows why the build leaves it out)."
    )
