"""Compares every kernel for CUDA with the kernel for processors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import cuda_data
import numpy as np
from cuda_data import Processor, harness

_BLOCK_SIZES = 512, 333, 5000
SIZES = {
    "none": (),
    "quick": (1, 3, 513, 1025, 16385),
    "full": (1, 2, 3, 511, 513, 1025, 16385, 1_000_003, 5_000_000),
}


def differences(
    kernels: harness.Kernels, processor: Processor, sizes: Sequence[int], data: Sequence[str]
) -> Iterator[str]:
    """Describes each case in which the two kernels differ, for values of every type."""
    for size in sizes:
        for name in data:
            floats = cuda_data.draw(cuda_data.TO_CHECK[name], size)
            with np.errstate(over="ignore", invalid="ignore"):
                cases = floats, floats.astype(np.float16), processor.truncate16_encode(floats, False)
            for values in cases:
                for difference in _differences(values, kernels, processor):
                    yield f"{name}, {size} {values.dtype}: {difference}"


def _differences(values, kernels, processor) -> Iterator[str]:
    for name, arguments in _calls(values, processor):
        try:
            actual = getattr(kernels, name)(*arguments)
        except RuntimeError as error:  # Of the device, or because the kernel wrote too far.
            yield f"{name}: {error}"
            continue
        expected = getattr(processor, name)(*arguments)
        pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
        if not all(np.array_equal(a, e, equal_nan=a.dtype == np.float32) for a, e in pairs):
            yield name
    yield from sketch_differences(values, kernels, processor)


def _calls(values: np.ndarray, processor: Processor) -> Iterator[tuple[str, tuple]]:
    """Each kernel's name and arguments, except those of the sketch's encoder."""
    gaussian = cuda_data.draw(cuda_data.TO_CHECK["gaussian"], values.size)
    for block_size in (*_BLOCK_SIZES, values.size):
        others = processor.int8_encode(gaussian, block_size)
        yield "int8_encode", (values, block_size)
        yield "int8_decode", (*others, block_size)
        yield "int8_accumulate", (*others, np.linspace(-1, 1, values.size, dtype=np.float32), block_size)
        yield "int8_reduce", (*others, values, block_size)
    for round_to_nearest in (False, True):
        yield "truncate16_encode", (values, round_to_nearest)
    yield "truncate16_decode", (processor.truncate16_encode(values, False),)
    yield "sketch_decode", processor.sketch_encode(np.nan_to_num(values))


def sketch_differences(values: np.ndarray, kernels: harness.Kernels, processor: Processor) -> Iterator[str]:
    """Describes by what two sketches differ more than they may."""
    try:
        codes, bucket_values = kernels.sketch_encode(values)
    except RuntimeError as error:
        yield f"sketch_encode: {error}"
        return
    expected_codes, expected_values = processor.sketch_encode(values)
    moved = codes != expected_codes
    if np.any(np.maximum(codes, expected_codes) - np.minimum(codes, expected_codes) > 1):
        yield "sketch_encode, codes"
    # A bucket that a value has moved to or from has another mean. Behind the last one, its mean is repeated.
    same = np.ones(bucket_values.size, bool)
    same[codes[moved]] = same[expected_codes[moved]] = False
    same[codes.max() :] &= same[codes.max()]
    if not np.allclose(bucket_values[same], expected_values[same], rtol=1e-6, atol=1e-30, equal_nan=True):
        yield "sketch_encode, bucket values"
