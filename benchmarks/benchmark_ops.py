"""Measures the kernels on a processor, and compares them with peers.

    python benchmarks/benchmark_ops.py
    python benchmarks/benchmark_ops.py --sizes=1000000 --rounds=15

Nothing else should run on the machine. All candidates take turns within every round, so that a busy moment meets all
of them; medians over the rounds are shown. With a share of 1 a kernel reads and writes its
bytes as fast as one thread copies memory (`numpy.copyto` of float32, measured in the same rounds). At 0.67 it takes 1.5
times as long as a copy of those bytes. The native kernels run on one thread, and once more on all cores.

`numpy.quantile` and an Apache DataSketches KLL sketch are the alternatives to a sketch: they find 255 quantiles and
encode nothing. Above 10 million values they take minutes, so they run at most twice and do not warm up.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import results
import tensorflow as tf
from absl import app, flags

from hop_tf import ops
from hop_tf.ops import arrays

try:
    import datasketches
except ImportError:
    datasketches = None

_SIZES = flags.DEFINE_list("sizes", ["1000000", "10000000", "100000000"], "Numbers of values.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds; medians over them are shown.", lower_bound=1)

_BLOCK_SIZE = 512
_FEW_BITS = {4: 64, 2: 128}  # Bits, and values per block.
_MANY_VALUES = 10_000_000  # With more than these, peers take part in a few rounds only.
_FEW_ROUNDS = 2


# A function, and the bytes that it reads and writes per value, or 0 if a share of the copy bandwidth has no meaning.
Call = tuple[Callable[[], object], float]


def _native(values: np.ndarray, num_threads: int) -> dict[str, Call]:
    size, suffix = values.size, f"{num_threads} thread" if num_threads == 1 else "all cores"
    codes, bucket_values = np.empty(size, np.uint8), np.empty(256, np.float32)
    floats, halves = np.empty(size, np.float32), np.empty(size, tf.bfloat16.as_numpy_dtype)
    quantized = arrays.int8_encode(values, _BLOCK_SIZE)
    target = tuple(np.empty_like(array) for array in quantized)
    threads = {"num_threads": num_threads}
    arrays.quantile_sketch_encode(values, out=(codes, bucket_values))
    calls = {
        "sketch encode": (lambda: arrays.quantile_sketch_encode(values, out=(codes, bucket_values), **threads), 9),
        "sketch decode": (lambda: arrays.quantile_sketch_decode(codes, bucket_values, out=floats, **threads), 5),
        "sketch accumulate": (lambda: arrays.quantile_sketch_accumulate(codes, bucket_values, floats, **threads), 9),
        "int8 encode": (lambda: arrays.int8_encode(values, _BLOCK_SIZE, out=target, **threads), 5),
        "int8 decode": (lambda: arrays.int8_decode(*quantized, _BLOCK_SIZE, out=floats, **threads), 5),
        "int8 accumulate": (lambda: arrays.int8_accumulate(*quantized, floats, _BLOCK_SIZE, **threads), 9),
        "int8 reduce": (lambda: arrays.int8_reduce(*quantized, values, _BLOCK_SIZE, out=target, **threads), 6),
        "truncate16 encode": (lambda: arrays.truncate16_encode(values, out=halves, **threads), 6),
        "truncate16 decode": (lambda: arrays.truncate16_decode(halves, out=floats, **threads), 6),
        "truncate16 accumulate": (lambda: arrays.truncate16_accumulate(halves, floats, **threads), 10),
    }
    for bits, block_size in _FEW_BITS.items():
        calls |= _few_bits(values, floats, bits, block_size, threads)
    return {f"{name}, {suffix}": call for name, call in calls.items()}


def _few_bits(
    values: np.ndarray, floats: np.ndarray, bits: int, block_size: int, threads: dict[str, int]
) -> dict[str, Call]:
    shape = {"block_size": block_size, "bits": bits, **threads}
    encoded = arrays.few_bits_encode(values, **shape)
    target = tuple(np.empty_like(array) for array in encoded)
    size = bits / 8
    return {
        f"bits{bits} encode": (lambda: arrays.few_bits_encode(values, out=target, **shape), 4 + size),
        f"bits{bits} decode": (lambda: arrays.few_bits_decode(*encoded, values.size, out=floats, **shape), 4 + size),
        f"bits{bits} accumulate": (lambda: arrays.few_bits_accumulate(*encoded, floats, **shape), 8 + size),
        f"bits{bits} reduce": (lambda: arrays.few_bits_reduce(*encoded, values, out=target, **shape), 4 + 2 * size),
    }


def _peers(values: np.ndarray) -> dict[str, Call]:
    quantiles = np.arange(1, 256) / 256
    calls = {"numpy.quantile": (lambda: np.quantile(values, quantiles), 0)}
    if datasketches is not None:
        calls["DataSketches KLL"] = lambda: _kll(values, quantiles), 0
    return calls


def _kll(values: np.ndarray, quantiles: np.ndarray) -> object:
    sketch = datasketches.kll_floats_sketch(512)
    sketch.update(values)
    return sketch.get_quantiles(quantiles)


def _measure(size: int) -> None:
    """Times all candidates in turns. The first round warms up those that take part in all."""
    values = np.random.default_rng(0).standard_normal(size, np.float32)
    target, peers = np.empty_like(values), _peers(values)
    calls = {"copy": (lambda: np.copyto(target, values), 8), **_native(values, 1), **_native(values, 0), **peers}
    seconds = {name: [] for name in calls}
    for round_index, (name, (run, _)) in itertools.product(range(_ROUNDS.value + 1), calls.items()):
        is_slow = name in peers and size > _MANY_VALUES
        if not is_slow or round_index < min(_FEW_ROUNDS, _ROUNDS.value):
            start = time.perf_counter()
            run()
            taken = time.perf_counter() - start
            if round_index or is_slow:
                seconds[name].append(taken)
    bandwidth = 8 / np.median(seconds["copy"])
    for name, (_, touched) in calls.items():
        taken = np.median(seconds[name])
        share = {"share": touched / taken / bandwidth} if touched else {}
        results.show(f"{size} gaussian {name}", {"ns per value": taken / size * 1e9, **share})


def main(argv: list[str]) -> None:
    """Measures, prints and keeps."""
    del argv
    print(ops.build_info(), flush=True)
    for size in map(int, _SIZES.value):
        _measure(size)


if __name__ == "__main__":
    app.run(main)
