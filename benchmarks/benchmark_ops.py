"""Measures the kernels on a processor, and compares them with peers.

    python benchmarks/benchmark_ops.py
    python benchmarks/benchmark_ops.py --sizes=1000000 --data=sparse --rounds=15

Nothing else should run on the machine. All candidates take turns within every round, so that a busy moment meets all
of them; medians over the rounds are shown. With a share of 1 a kernel reads and writes its
bytes as fast as one thread copies memory (`numpy.copyto` of float32, measured in the same rounds). At 0.67 it takes 1.5
times as long as a copy of those bytes. The native kernels run on one thread, and once more on all cores.

Peers do not compute exactly the same, but are the alternatives: `numpy.quantile` and an Apache DataSketches KLL sketch
find 255 quantiles and encode nothing; `tf.sort` is the cost of quantiles by sorting; "int8 encode, NumPy" is the same
encoding in vectorized NumPy; "fallback" is this package without native kernels. Above 10 million values some peers take
minutes, so peers run at most twice and do not warm up. With 100 million the fallback needs some 10 GB of memory.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable

import numpy as np
import results
import tensorflow as tf
from absl import app, flags

from hop_tf import ops
from hop_tf.ops import arrays, fallback, gaps

try:
    import datasketches
except ImportError:
    datasketches = None

_SIZES = flags.DEFINE_list("sizes", ["1000000", "10000000", "100000000"], "Numbers of values.")
_DATA = flags.DEFINE_list("data", ["gaussian", "laplace", "sparse"], "Distributions.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds; medians over them are shown.", lower_bound=1)

_BLOCK_SIZE = 512
_INDEX_RATIO = 0.01  # Share of the values that have an index.
_FEW_BITS = {4: 64, 2: 128}  # Bits, and values per block.
_MANY_VALUES = 10_000_000  # With more than these, peers take part in a few rounds only.
_FEW_ROUNDS = 2

_DISTRIBUTIONS = {
    "gaussian": lambda rng, size: rng.standard_normal(size, np.float32),
    "laplace": lambda rng, size: rng.laplace(size=size).astype(np.float32),
    # Nine of ten values are 0, the others have Student's distribution with two degrees of freedom.
    "sparse": lambda rng, size: np.where(rng.random(size) < 0.9, 0.0, rng.standard_t(2, size)).astype(np.float32),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A function to time.

    Args:
      name: Name in the table.
      run: The function.
      bytes_touched: Bytes read and written per value, or 0 if a share of the copy bandwidth would be meaningless.
      most_rounds: Number of rounds for the candidate, without a warm-up; None: all rounds, after a warm-up.
    """

    name: str
    run: Callable[[], object]
    bytes_touched: float = 0.0
    most_rounds: int | None = None


def _native(values: np.ndarray, num_threads: int) -> list[Candidate]:
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
    return [Candidate(f"{name}, {suffix}", run, touched) for name, (run, touched) in calls.items()]


def _few_bits(
    values: np.ndarray, floats: np.ndarray, bits: int, block_size: int, threads: dict[str, int]
) -> dict[str, tuple[Callable[[], object], float]]:
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


def _indices(size: int) -> list[Candidate]:
    """Rice codes of the indices of some values, on one thread; nanoseconds are per value, with an index or without."""
    indices = np.flatnonzero(np.random.default_rng(0).random(size, np.float32) < _INDEX_RATIO)
    target = np.empty(sum(gaps.sizes(size, indices.size)), np.uint8)
    encoded = target[: gaps.encode(indices, size, target)].copy()
    return [
        Candidate("indices encode", lambda: gaps.encode(indices, size, target)),
        Candidate("indices decode", lambda: gaps.decode(encoded, indices.size, size)),
    ]


def _peers(values: np.ndarray) -> list[Candidate]:
    tensor = tf.constant(values)
    quantiles = np.arange(1, 256) / 256
    calls = {
        "sketch encode, fallback": lambda: fallback.sketch_encode(tensor, 0.5)[0].numpy(),
        "numpy.quantile": lambda: np.quantile(values, quantiles),
        "tf.sort": lambda: tf.sort(tensor).numpy(),
        "int8 encode, fallback": lambda: fallback.int8_encode(tensor, _BLOCK_SIZE)[0].numpy(),
        "int8 encode, NumPy": lambda: _numpy_int8(values),
    }
    if datasketches is not None:
        calls["DataSketches KLL"] = lambda: _kll(values, quantiles)
    most_rounds = _FEW_ROUNDS if values.size > _MANY_VALUES else None
    return [Candidate(name, run, most_rounds=most_rounds) for name, run in calls.items()]


def _numpy_int8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = values[: values.size // _BLOCK_SIZE * _BLOCK_SIZE].reshape(-1, _BLOCK_SIZE)
    scales = np.abs(blocks).max(axis=1) / np.float32(127)
    return np.rint(blocks / np.maximum(scales, np.float32(1e-30))[:, np.newaxis]).astype(np.int8), scales


def _kll(values: np.ndarray, quantiles: np.ndarray) -> object:
    sketch = datasketches.kll_floats_sketch(512)
    sketch.update(values)
    return sketch.get_quantiles(quantiles)


def _measure(candidates: list[Candidate], num_rounds: int) -> dict[str, float]:
    """Returns the median seconds of each candidate. The first round warms up those that take part in all."""
    seconds = {candidate.name: [] for candidate in candidates}
    for round_index in range(num_rounds + 1):
        for candidate in candidates:
            if candidate.most_rounds is not None and round_index >= min(candidate.most_rounds, num_rounds):
                continue
            start = time.perf_counter()
            candidate.run()
            if round_index or candidate.most_rounds is not None:
                seconds[candidate.name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _rows(data: str, size: int, num_rounds: int) -> list[dict[str, object]]:
    values = _DISTRIBUTIONS[data](np.random.default_rng(0), size)
    target = np.empty_like(values)
    copy = Candidate("copy", lambda: np.copyto(target, values), 8)
    candidates = [copy, *_native(values, 1), *_native(values, 0), *_indices(size), *_peers(values)]
    seconds = _measure(candidates, num_rounds)
    bandwidth = copy.bytes_touched / seconds["copy"]
    rows = []
    for candidate in candidates:
        share = candidate.bytes_touched / seconds[candidate.name] / bandwidth
        rows.append(
            {
                "values": size,
                "data": data,
                "kernel": candidate.name,
                "ns per value": round(seconds[candidate.name] / size * 1e9, 3),
                "share of copy": round(share, 2) if candidate.bytes_touched else "",
            }
        )
    return rows


def main(argv: list[str]) -> None:
    """Measures, prints and writes."""
    del argv
    print(ops.build_info(), flush=True)
    for size in _SIZES.value:
        for data in _DATA.value:
            for row in _rows(data, int(size), _ROUNDS.value):
                results.note("ns per value", f"{size} {data} {row['kernel']}", row["ns per value"])
                print("{values:>11,} {data:<9} {kernel:<32} {ns per value:>9.3f} {share of copy:>6}".format(**row))
            gc.collect()


if __name__ == "__main__":
    app.run(main)
