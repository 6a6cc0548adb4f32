"""Tools of `gpu_with_torch.py`: the CUDA kernels on tensors, memory, and a busy device."""

from __future__ import annotations

import math
import mmap
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from cuda_data import harness

BLOCK_SIZE = 512
ROUNDS = 5
QUEUE_SECONDS = 0.02  # Time for which the device is busy before a measurement or check.
_PORTABLE = 1  # cudaHostRegisterPortable: all contexts see the memory as page-locked.

_registered: list[torch.Tensor] = []  # Memory must not be unmapped while it is page-locked.


class Kernels:
    """The kernels, on tensors and PyTorch's current stream."""

    def __init__(self, path: str):
        self._library = harness.load(path)

    def status(self, name: str, *arguments) -> int:
        """Returns the result of `HopTfCuda<name>` for these arguments and the stream."""
        addresses = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        return getattr(self._library, f"HopTfCuda{name}")(*addresses, torch.cuda.current_stream().cuda_stream)

    def enqueue(self, name: str, *arguments) -> None:
        """Calls `HopTfCuda<name>`; raises a RuntimeError if it refuses."""
        status = self.status(name, *arguments)
        if status != harness.OK:
            raise RuntimeError(f"HopTfCuda{name} returned {status}: {self._library.HopTfCudaLastError().decode()}")

    def scratch(self, kind: str, *sizes: int):
        """New memory for `SketchEncode` or `Int8Encode`."""
        return new(getattr(self._library, f"HopTfCuda{kind}WorkspaceBytes")(*sizes), torch.uint8)


def new(size: int, dtype=None):
    """A vector on the device; float32 unless told otherwise."""
    return torch.empty(size, dtype=dtype or torch.float32, device="cuda")


def new_pinned(size: int, dtype=None):
    """A vector of ones in page-locked memory of the host; float32 unless told otherwise."""
    return torch.empty(size, dtype=dtype or torch.float32, pin_memory=True).fill_(1)


def new_registered(num_bytes: int):
    """Bytes in mapped memory that is then page-locked, for as long as the process lives; and how long that took."""
    memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)).fill_(1)
    _registered.append(memory)
    begin = time.perf_counter()
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, _PORTABLE)
    if int(error):
        raise RuntimeError(f"cudaHostRegister failed: {error}")
    return memory, time.perf_counter() - begin


class Load:
    """Products of matrices, to keep the device busy."""

    def __init__(self, size: int = 8192):
        self._factor = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        self._product = torch.empty_like(self._factor)
        self._seconds = 0.0
        for number in (3, 10):  # The first ones load code and raise clocks.
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self._multiply(number)
            torch.cuda.synchronize()
            self._seconds = (time.perf_counter() - begin) / number

    def enqueue(self, seconds: float):
        """Keeps the current stream busy for about so long; returns an event at the end."""
        self._multiply(math.ceil(seconds / self._seconds))
        return torch.cuda.current_stream().record_event()

    def _multiply(self, number: int) -> None:
        for _ in range(number):
            torch.mm(self._factor, self._factor, out=self._product)


def median(measure: Callable[[], float], rounds: int = ROUNDS) -> float:
    """The median of some measurements, after one that does not count."""
    measure()
    return statistics.median(measure() for _ in range(rounds))


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
