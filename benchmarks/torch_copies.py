"""Copies between the host and a GPU: parts of `gpu_with_torch.py`, whose text explains them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch_device import (
    BLOCK_SIZE,
    QUEUE_SECONDS,
    ROUNDS,
    Kernels,
    Load,
    median,
    new,
    new_pinned,
    new_registered,
    seconds_of,
)

NUM_VALUES = 25_600_000  # float32; 102 MB.


def measure_memcpy(_: Kernels) -> dict:
    source, target = np.ones(NUM_VALUES, np.float32), np.ones(NUM_VALUES, np.float32)
    pinned = new_pinned(NUM_VALUES).numpy()
    seconds = {
        "host": median(lambda: seconds_of(lambda: np.copyto(target, source))),
        "into pinned": median(lambda: seconds_of(lambda: np.copyto(pinned, source))),
        "into new pages": median(lambda: seconds_of(source.copy)),
    }
    return {name: source.nbytes / each / 1e9 for name, each in seconds.items()}


def measure_pcie(_: Kernels) -> dict:
    """GB/s by memory, direction and what the device does meanwhile; and the cost of page-locking."""
    load, stream, on_device = Load(), torch.cuda.Stream(), new(NUM_VALUES).fill_(1)
    num_bytes = 4 * NUM_VALUES
    registered, registration_seconds = new_registered(num_bytes)
    memories = {
        "pageable": torch.empty(NUM_VALUES).fill_(1),
        "pinned": new_pinned(NUM_VALUES),
        "registered": registered.view(torch.float32),
    }
    results = {"register ms/MB": registration_seconds * 1e3 / (num_bytes / 1e6), "GB/s": {}, "load had ended": []}
    for name, memory in memories.items():
        rates = results["GB/s"][name] = {}
        for direction, target, source in (("up", on_device, memory), ("down", memory, on_device)):
            for load_seconds, suffix in ((0, ""), (0.05, " beside")):

                def measure(target=target, source=source, load_seconds=load_seconds, what=f"{name} {direction}"):
                    torch.cuda.synchronize()
                    busy = load.enqueue(load_seconds) if load_seconds else None
                    seconds = seconds_of(lambda: _copy(stream, target, source))
                    if busy is not None and busy.query():
                        results["load had ended"].append(what)
                    torch.cuda.synchronize()
                    return seconds

                rates[direction + suffix] = num_bytes / median(measure, 3) / 1e9
    return results


def _copy(stream, target, source) -> None:
    """Copies on a stream, and waits for that."""
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    stream.synchronize()


def measure_way_out(kernels: Kernels) -> dict:
    """int8 encoding of all values, and the copy of codes and scales to pinned memory, in ms."""
    num_scales = -(-NUM_VALUES // BLOCK_SIZE)
    values, codes, scales = torch.randn(NUM_VALUES, device="cuda"), new(NUM_VALUES, torch.int8), new(num_scales)
    out_codes, out_scales = new_pinned(NUM_VALUES, torch.int8), new_pinned(num_scales)

    def encode():
        kernels.enqueue("Int8Encode", values, 0, NUM_VALUES, BLOCK_SIZE, codes, scales, None)

    def copy():
        out_codes.copy_(codes, non_blocking=True)
        out_scales.copy_(scales, non_blocking=True)

    def both():
        encode()
        copy()

    def until_done(call):
        torch.cuda.synchronize()
        return seconds_of(lambda: (call(), torch.cuda.synchronize()))

    calls = {"encode": encode, "copy": copy, "encode and copy": both}
    return {f"{name} ms": 1e3 * median(lambda call=call: until_done(call)) for name, call in calls.items()}


class WayBack:
    """A mean comes from a communication thread to the compute stream. Methods return how long they block the thread."""

    def __init__(self, kernels: Kernels):
        self._kernels = kernels
        self.compute, self._up, self._down = (torch.cuda.Stream() for _ in range(3))
        self._pageable, self._pinned = torch.empty(NUM_VALUES).fill_(1), new_pinned(NUM_VALUES)
        self._registered = new_registered(4 * NUM_VALUES)[0].view(torch.float32)
        self._mean, self._weights = new(NUM_VALUES).fill_(1), new(NUM_VALUES).fill_(1)
        self._codes, self._scales = new(NUM_VALUES, torch.int8), new(-(-NUM_VALUES // BLOCK_SIZE))
        self._host_codes = new_registered(self._codes.numel())[0].view(torch.int8)
        self._host_scales = new_registered(4 * self._scales.numel())[0].view(torch.float32)

    def today(self) -> float:
        begin = time.perf_counter()
        self._up.wait_stream(self.compute)
        _copy(self._up, self._mean, self._pageable)
        torch.cuda.synchronize()
        returned = torch.empty(NUM_VALUES)  # New pages.
        _copy(self._down, returned, self._mean)
        blocked = time.perf_counter() - begin
        self._stage(returned)
        return blocked

    def staged(self) -> float:
        self._stage(self._pageable)
        return 0.0

    def registered(self) -> float:
        self._bring([(self._mean, self._registered)])
        return 0.0

    def encoded(self, *, waits: bool = True) -> float:
        self._bring([(self._codes, self._host_codes), (self._scales, self._host_scales)], waits=waits)
        with torch.cuda.stream(self.compute):
            arguments = self._codes, self._scales, NUM_VALUES, BLOCK_SIZE, self._mean
            self._kernels.enqueue("Int8Decode", *arguments)
        return 0.0

    def use(self) -> None:
        """The step uses the mean."""
        with torch.cuda.stream(self.compute):
            self._weights.add_(self._mean, alpha=-1e-3)
        self.compute.synchronize()

    def _stage(self, source) -> None:
        np.copyto(self._pinned.numpy(), source.numpy())
        self._bring([(self._mean, self._pinned)])

    def _bring(self, pairs: list, *, waits: bool = True) -> None:
        """Copies to the device before the compute stream goes on. As in TensorFlow, the copy waits for its kernels."""
        if waits:
            self._up.wait_stream(self.compute)
        with torch.cuda.stream(self._up):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self.compute.wait_stream(self._up)


def measure_way_back(kernels: Kernels) -> dict:
    """For each way, behind no kernels and behind some: milliseconds that the step loses, and that the thread stands."""
    load, way = Load(), WayBack(kernels)
    ways = {
        "nothing": lambda: 0.0,
        "today": way.today,
        "A": way.staged,
        "B": way.registered,
        "C": way.encoded,
        "D": lambda: way.encoded(waits=False),
    }
    results = {name: {} for name in ways}
    for queue_seconds in (0.0, QUEUE_SECONDS):
        for name, bring in ways.items():
            rounds = [_bring_back(load, way, bring, queue_seconds) for _ in range(ROUNDS + 1)][1:]
            total, blocked = (1e3 * statistics.median(each) for each in zip(*rounds, strict=True))
            key = f"behind {1e3 * queue_seconds:g} ms"
            nothing = results["nothing"].get(key, {"total ms": total})["total ms"]
            results[name][key] = {"total ms": total, "added ms": total - nothing, "blocked ms": blocked}
    return results


def _bring_back(load: Load, way: WayBack, bring: Callable[[], float], queue_seconds: float) -> tuple[float, float]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if queue_seconds:
        with torch.cuda.stream(way.compute):
            load.enqueue(queue_seconds)
    blocked = bring()
    way.use()
    return time.perf_counter() - begin, blocked
