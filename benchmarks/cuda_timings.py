"""Measures the kernels for CUDA: several versions of them and a copy take turns."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from cuda_data import harness

_BLOCK_SIZE = 512
_SCALE = 4 / _BLOCK_SIZE  # Bytes per value.
_REFINE_FRACTION = 500  # As in kernels/constants.h: a bin with more than this part of the values is refined.

_HEAD_START_SECONDS = 2e-3
_HEAD_START_BYTES = 1 << 28
_MOST_FILLS = 512
_SECONDS_PER_MEASUREMENT = 3e-4  # Short kernels are repeated for that long, but ...
_MOST_REPEATS = 16  # ... no more often, because a stream accepts some 1,000 launches at a time.
_PIECE = 1024  # Bytes that no kernel fills by chance with the pattern of unwritten memory.
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 20


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel with its arguments.

    Attributes:
      moved: Bytes that it reads and writes per value. Bytes that it reads in two passes count twice.
      minimum: Bytes per value if it accessed each only once.
      call: The function's name and its arguments.
      outputs: The arrays that it overwrites.
    """

    moved: float
    minimum: float
    call: tuple
    outputs: tuple[int, ...] = ()


class _Setting:
    """The arrays of one measurement, which all versions of the kernels share."""

    def __init__(self, arrays: harness.Arrays, device: harness.Device, drawn: np.ndarray, size: int):
        num_blocks = -(-size // _BLOCK_SIZE)
        self.arrays, self.size, self.drawn, self.type = arrays, size, drawn[:size], harness.TYPES[drawn.dtype]
        self.num_passes = _num_passes(self.drawn)
        self.source = _put_repeated(arrays, device, self.drawn, size)
        self.floats, self.copied = arrays.empty(size, np.float32), arrays.empty(size, np.float32)
        self.halves = arrays.empty(size, np.uint16)
        self.codes, self.bucket_values = arrays.empty(size, np.uint8), arrays.empty(256, np.float32)
        self.blocks = arrays.empty(size, np.int8), arrays.empty(num_blocks, np.float32)
        self.reduced = arrays.empty(size, np.int8), arrays.empty(num_blocks, np.float32)

    def kernels(self, kernels: harness.Kernels) -> dict[str, _Kernel]:
        """All kernels of one version. Encoders come first, because decoders read what they write."""
        size, width = self.size, self.drawn.itemsize
        values = self.source, self.type, size
        sketch, blocks, reduced = (self.codes, self.bucket_values), self.blocks, self.reduced
        sketch_memory = kernels.workspace(self.arrays, "Sketch", size)
        int8_memory = kernels.workspace(self.arrays, "Int8", size, size)
        floats = (self.floats,)
        return {
            "copy": _Kernel(8, 8, ("Copy", self.floats, 4 * size, self.copied), (self.copied,)),
            "sketch encode": _Kernel(
                self.num_passes * width + 1, width + 1, ("SketchEncode", *values, 0.5, *sketch, sketch_memory), sketch
            ),
            "sketch decode": _Kernel(5, 5, ("SketchDecode", *sketch, size, self.floats), floats),
            "int8 encode": _Kernel(
                *[width + 1 + _SCALE] * 2, ("Int8Encode", *values, _BLOCK_SIZE, *blocks, None), blocks
            ),
            "int8 decode": _Kernel(*[5 + _SCALE] * 2, ("Int8Decode", *blocks, size, _BLOCK_SIZE, self.floats), floats),
            "int8 accumulate": _Kernel(*[9 + _SCALE] * 2, ("Int8Accumulate", *blocks, size, _BLOCK_SIZE, self.floats)),
            "int8 reduce": _Kernel(
                *[width + 2 + 2 * _SCALE] * 2,
                ("Int8Reduce", *blocks, *values, _BLOCK_SIZE, *reduced, None),
                reduced,
            ),
            "int8 encode, one block": _Kernel(
                2 * width + 1, width + 1, ("Int8Encode", *values, size, *reduced, int8_memory), reduced[:1]
            ),
            "truncate16 encode": _Kernel(
                *[width + 2] * 2, ("Truncate16Encode", *values, 1, self.halves), (self.halves,)
            ),
            "truncate16 decode": _Kernel(6, 6, ("Truncate16Decode", self.halves, size, self.floats), floats),
        }


def _put_repeated(arrays: harness.Arrays, device: harness.Device, drawn: np.ndarray, size: int) -> int:
    """The address of an array that repeats `drawn`. The device makes the repetitions: it is the fastest there."""
    address = arrays.empty(size, drawn.dtype)
    device.write(address, drawn)
    filled = drawn.size
    while filled < size:
        added = min(filled, size - filled)
        device.copy(address + filled * drawn.itemsize, address, added * drawn.itemsize)
        filled += added
    return address


def _num_passes(drawn: np.ndarray) -> int:
    """The passes over these values by the sketch's encoder: one more if it refines bins of float32."""
    if drawn.itemsize == 2:
        return 2
    members = np.bincount(drawn.view(np.uint32) >> 16, minlength=1 << 16)
    return 3 if members[1:].max() > max(1, drawn.size // _REFINE_FRACTION) else 2


class _Stopwatch:
    """Measures kernels behind a head start, so that the host's calls are not in the figures."""

    def __init__(self, device: harness.Device, arrays: harness.Arrays):
        self._device, self._memory = device, arrays.empty(_HEAD_START_BYTES, np.uint8)
        self._num_fills = 1
        seconds = min(device.seconds(self._fill)[0] for _ in range(3))
        self._num_fills = min(math.ceil(_HEAD_START_SECONDS / max(seconds, 1e-9)), _MOST_FILLS // 4)
        self._most_fills = 4 * self._num_fills

    def seconds(self, enqueue: Callable, repeats: int) -> tuple[float, bool]:
        """Returns (seconds per call, is_ahead), as `harness.Device.seconds` does."""

        def enqueue_all():
            for _ in range(repeats):
                enqueue()

        seconds, is_ahead = self._device.seconds(enqueue_all, self._fill)
        return seconds / repeats, is_ahead

    def prepare(self, enqueue: Callable) -> int:
        """Returns the number of repeats that fill a measurement, and makes head starts long enough for these."""
        enqueue()  # Loads the kernel's code.
        self._device.synchronize()
        seconds, _ = self.seconds(enqueue, 1)
        repeats = int(np.clip(_SECONDS_PER_MEASUREMENT / max(seconds, 1e-9), 1, _MOST_REPEATS))
        while not self.seconds(enqueue, repeats)[1] and self._num_fills < self._most_fills:
            self._num_fills *= 2
        return repeats

    def _fill(self) -> None:
        for _ in range(self._num_fills):
            self._device.fill(self._memory, _HEAD_START_BYTES, 0)


def measure(
    drawn: np.ndarray,
    size: int,
    versions: Mapping[str, harness.Kernels],
    device: harness.Device,
    *,
    max_seconds: float,
    max_rounds: int = _MOST_ROUNDS,
    with_decoders: bool = True,
) -> tuple[list[dict], list[str]]:
    """Measures all kernels on `size` values, which repeat `drawn`.

    Args:
      drawn: Values.
      size: The number of values.
      versions: Versions of the kernels, which take turns within every round.
      device: The device.
      max_seconds: Ends the rounds, of which there are at least three.
      max_rounds: The largest number of rounds.
      with_decoders: True to look at decoded values, too, which are most of the bytes and the same for all data.

    Returns:
      (rows, faults): A row for each kernel and version, and descriptions of wrong results.
    """
    deadline = time.monotonic() + max_seconds
    main = next(iter(versions.values()))
    with main.arrays() as arrays:
        setting = _Setting(arrays, device, drawn, size)
        kernels = {version: setting.kernels(each) for version, each in versions.items()}
        stopwatch = _Stopwatch(device, arrays)
        calls = {
            (name, version): lambda call=kernels[version][name].call, each=each: each.enqueue(*call)
            for name in next(iter(kernels.values()))
            for version, each in versions.items()
            if name != "copy" or each is main
        }
        repeats = {key: stopwatch.prepare(call) for key, call in calls.items()}
        seconds = {key: [] for key in calls}
        for number in range(max_rounds):
            if number >= _FEWEST_ROUNDS and time.monotonic() > deadline:
                break
            for key in _order(calls, number):
                seconds[key].append(stopwatch.seconds(calls[key], repeats[key]))
        faults = list(_faults(setting, next(iter(kernels.values())), main, with_decoders))
    copied = 8 * size / statistics.median(each for each, _ in seconds["copy", next(iter(versions))])
    return [
        _row(name, version, kernels[version][name], size, repeats[name, version], each, copied)
        for (name, version), each in seconds.items()
    ], faults


def _order(calls: Iterable[tuple[str, str]], number: int) -> Iterator[tuple[str, str]]:
    """The order of a round. The versions of a kernel take turns in being the first, which may find caches colder."""
    for _, group in itertools.groupby(calls, key=lambda call: call[0]):
        versions = list(group)
        first = number % len(versions)
        yield from versions[first:] + versions[:first]


def _row(name, version, kernel: _Kernel, size: int, repeats: int, measured: list, copied: float) -> dict:
    seconds = [each for each, _ in measured]
    median = statistics.median(seconds)
    return {
        "kernel": name,
        "version": version,
        "milliseconds": round(median * 1e3, 6),
        "least": round(min(seconds) * 1e3, 6),
        "most": round(max(seconds) * 1e3, 6),
        "rounds": len(seconds),
        "repeats": repeats,
        "rounds_ahead": sum(is_ahead for _, is_ahead in measured),
        "bytes_per_value": kernel.moved,
        "gigabytes_per_second": round(kernel.moved * size / median / 1e9, 2),
        "share": round(kernel.moved * size / median / copied, 4),
        "share_of_minimum": round(kernel.minimum * size / median / copied, 4),
    }


def enqueue_once(drawn: np.ndarray, size: int, kernels: harness.Kernels, device: harness.Device) -> None:
    """Runs each kernel once, for profilers."""
    with kernels.arrays() as arrays:
        for kernel in _Setting(arrays, device, drawn, size).kernels(kernels).values():
            kernels.enqueue(*kernel.call)
        device.synchronize()


# Results.


def _faults(
    setting: _Setting, kernels: Mapping[str, _Kernel], version: harness.Kernels, with_decoders: bool
) -> Iterator[str]:
    """Describes what is wrong in the results for large arrays: values repeat, so results must repeat, too."""
    for name, kernel in kernels.items():
        if not with_decoders and setting.floats in (*kernel.outputs, *kernel.call[1:2]):
            continue
        for output in kernel.outputs:
            setting.arrays.poison(output)
        version.enqueue(*kernel.call)
        for output in kernel.outputs:
            yield from (f"{name}: {fault}" for fault in _array_faults(setting, output))


def _array_faults(setting: _Setting, address: int) -> Iterator[str]:
    written = setting.arrays.get(address)
    if written.size <= 256:  # Bucket values stand for all values.
        return
    period = setting.drawn.size * written.size // setting.size
    first = written[:period].view(np.uint8)
    pieces = first[: first.size // _PIECE * _PIECE].reshape(-1, _PIECE)
    if np.any(np.all(pieces == harness.Arrays.POISON, axis=1)):
        yield "a part of the result was not written"
    for begin in range(period, written.size, period):
        part = written[begin : begin + period].view(np.uint8)
        if not np.array_equal(part, first[: part.size]):
            yield f"results from {begin} on differ from earlier results for the same values"
            return
