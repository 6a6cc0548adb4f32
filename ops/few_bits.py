"""Blocks of few bits in NumPy, for machines without the native kernels. `HopTfFewBitsEncode` describes the encoding.

The results are those of the kernels, to the bit.
"""

from __future__ import annotations

import numpy as np

# kernels/constants.h has the same constants. The levels are in 1/64 of the scale.
LEVELS = (-55, -42, -31, -22, -15, -8, -3, 0, 3, 8, 13, 20, 29, 38, 51, 64)
LEVELS_PER_SCALE = 64
MAGNITUDE_UNITS = 32768
LARGEST_HALF = 0x7F7F
NAN_HALF = 0x7FC0

_INFINITY, _MAGNITUDE_MASK = 0x7F800000, 0x7FFFFFFF
_SMALLEST_MAGNITUDE = 0x04000000  # 2^-119.
_CODES = np.searchsorted(np.add(LEVELS[1:], LEVELS[:-1]) / 2, np.arange(-LEVELS_PER_SCALE, LEVELS_PER_SCALE + 1))


def encode(values: np.ndarray, block_size: int, bits: int, scales: np.ndarray, codes: np.ndarray) -> None:
    """Encodes `values`, a vector of float32, into `scales` and `codes`."""
    size = values.size
    blocks = np.pad(values, (0, -size % block_size)).reshape(-1, block_size)
    encode_blocks = _encode4 if bits == 4 else _encode2
    counts = np.minimum(block_size, size - np.arange(len(blocks)) * block_size)
    block_scales, block_codes = encode_blocks(blocks, counts)
    scales[:] = block_scales.reshape(-1)
    codes[:] = _packed(block_codes.reshape(-1)[:size], bits)


def decode(scales: np.ndarray, codes: np.ndarray, block_size: int, bits: int, values: np.ndarray) -> None:
    """Decodes into `values`, a vector of float32."""
    unpacked = _unpacked(codes, bits)[: values.size]
    blocks = np.arange(values.size) // block_size
    if bits == 4:
        levels = np.array(LEVELS, np.float32) / np.float32(LEVELS_PER_SCALE)
        np.multiply(levels[unpacked], _widened(scales)[blocks], out=values)
    else:
        magnitudes = _widened(scales).view(np.uint32).reshape(-1, 2)[blocks, unpacked & 1]
        values.view(np.uint32)[:] = magnitudes ^ (unpacked.astype(np.uint32) >> 1 << 31)


def _encode4(blocks: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    del counts  # Zeros after the last value change no scale.
    patterns = blocks.view(np.uint32)
    largest = (patterns & _MAGNITUDE_MASK).max(axis=1)
    is_coded = (largest >= _SMALLEST_MAGNITUDE) & (largest < _INFINITY)
    # As integers, patterns of positive values lie above those of negative ones.
    is_negative = patterns.view(np.int32).max(axis=1) != largest.view(np.int32)
    scales = np.where(is_coded, _rounded(largest) | is_negative.astype(np.uint16) << 15, 0).astype(np.uint16)
    inverses = np.float32(LEVELS_PER_SCALE) / np.where(is_coded, _widened(scales), np.float32(1))
    multiples = np.rint(np.where(is_coded[:, np.newaxis], blocks, np.float32(0)) * inverses[:, np.newaxis])
    scales[largest >= _INFINITY] = NAN_HALF
    return scales, _CODES[multiples.astype(np.intp) + LEVELS_PER_SCALE].astype(np.uint8)


def _encode2(blocks: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    magnitudes = np.abs(blocks)
    patterns = magnitudes.view(np.uint32).max(axis=1)
    is_coded = (patterns >= _SMALLEST_MAGNITUDE) & (patterns < _INFINITY)
    largest = np.where(is_coded, patterns.view(np.float32), np.float32(1))
    inverses = np.float32(MAGNITUDE_UNITS // 256) / largest
    magnitudes[~is_coded] = 0
    multiples = np.rint(magnitudes * inverses[:, np.newaxis] * np.float32(256)).astype(np.int64)
    mean = multiples.sum(axis=1) // counts
    _, *parts = _split(multiples, counts, mean)
    is_upper, *parts = _split(multiples, counts, _middle(*parts, mean))
    units = largest.astype(np.float64) / MAGNITUDE_UNITS
    scales = np.stack([_mean_scale(*part, units) for part in parts], axis=1)
    codes = is_upper | (blocks < 0).astype(np.uint8) << 1
    codes[~is_coded] = 0
    scales[patterns >= _INFINITY] = NAN_HALF
    return scales, codes


_Part = tuple[np.ndarray, np.ndarray]  # Of each block: the sum of some magnitudes, and their number.


def _split(multiples: np.ndarray, counts: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, _Part, _Part]:
    """Splits each block's magnitudes at a bound. Returns a mask of those above, the lower part and the upper part."""
    is_upper = multiples > bounds[:, np.newaxis]
    upper, num_upper = np.where(is_upper, multiples, 0).sum(axis=1), is_upper.sum(axis=1)
    return is_upper, (multiples.sum(axis=1) - upper, counts - num_upper), (upper, num_upper)


def _middle(lower: _Part, upper: _Part, mean: np.ndarray) -> np.ndarray:
    """The integer part of the middle between the means of both parts; `mean` if one is empty."""
    divisor = 2 * lower[1] * upper[1]
    return np.where(divisor > 0, (lower[0] * upper[1] + upper[0] * lower[1]) // np.maximum(divisor, 1), mean)


def _mean_scale(sums: np.ndarray, numbers: np.ndarray, units: np.ndarray) -> np.ndarray:
    means = sums / np.maximum(numbers, 1) * units
    return np.where(means < 2.0**-119, 0, _rounded(means.astype(np.float32).view(np.uint32))).astype(np.uint16)


def _rounded(magnitudes: np.ndarray) -> np.ndarray:
    """Rounds patterns of magnitudes to the nearest finite bfloat16, ties to even."""
    halves = (magnitudes.astype(np.uint64) + 0x7FFF + ((magnitudes >> 16) & 1)) >> 16
    return np.minimum(halves, LARGEST_HALF).astype(np.uint16)


def _widened(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    per_byte = 8 // bits
    rows = np.pad(codes, (0, -codes.size % per_byte)).reshape(-1, per_byte)
    return np.bitwise_or.reduce(rows << np.arange(0, 8, bits, dtype=np.uint8), axis=1)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    return ((packed[:, np.newaxis] >> np.arange(0, 8, bits, dtype=np.uint8)) & ((1 << bits) - 1)).reshape(-1)
