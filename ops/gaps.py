"""Increasing indices as Rice codes of their gaps: about 8.1 bits per index if one value in 100 has an index.

`HopTfGapsEncode` describes the encoding. Without the native kernels, NumPy computes the same.

References:
  Golomb. Run-Length Encodings. IEEE Transactions on Information Theory 1966. Rice. Some Practical Universal Noiseless
  Coding Techniques. JPL 1979. Sattler et al. Robust and Communication-Efficient Federated Learning from Non-IID Data.
  IEEE TNNLS 2020, arXiv 1903.02891: the same codes for the places of gradients.
"""

from __future__ import annotations

import math

import numpy as np

from hop_tf.ops import native

_MOST_VALUES = 1 << 48


def bits_per_index(ratio: float) -> float:
    """The expected bits per index, if each value has an index with probability `ratio`, above 0 and at most 1."""
    shift = _shift(1, ratio)
    if ratio == 1:
        return 1.0
    # Geometrically distributed gaps: a quotient is at least k with probability (1 - ratio)^(k 2^shift).
    return shift + 1 / -math.expm1(math.log1p(-ratio) * 2.0**shift)


def sizes(num_values: int, count: int) -> tuple[int, int]:
    """The bytes of the remainders of `count` indices below `num_values`, and the largest size of the quotients."""
    shift = _shift(num_values, count)
    return -(-count * shift // 8), -(-(count + ((num_values - count) >> shift)) // 8) if count else 0


def encode(indices: np.ndarray, num_values: int, out: np.ndarray) -> int:
    """Encodes strictly increasing indices.

    Args:
      indices: 1-D int64 array, C-contiguous; each at least 0 and below `num_values`.
      num_values: At most 2^48.
      out: Takes the remainders and, behind them, the quotients. 1-D uint8 array, no shorter than the sum of `sizes`.

    Returns:
      The number of bytes written.

    Raises:
      ValueError: If an argument is out of range.
    """
    num_remainders, most = sizes(num_values, indices.size)
    if out.nbytes < num_remainders + most or num_values > _MOST_VALUES:
        raise ValueError(f"`out` must have {num_remainders + most} bytes. Received: {out.nbytes} bytes.")
    shift, quotients = _shift(num_values, indices.size), out[num_remainders:]
    if native.kernels() is None:
        return num_remainders + _encode(indices, num_values, shift, out[:num_remainders], quotients)
    num_bytes = np.zeros(1, np.int64)
    native.call(
        "GapsEncode",
        native.address(indices), indices.size, num_values, shift, native.address(out), native.address(quotients),
        native.address(num_bytes),
    )  # fmt: skip
    return num_remainders + int(num_bytes[0])


def decode(data: np.ndarray, count: int, num_values: int) -> np.ndarray:
    """Decodes the result of `encode`.

    Args:
      data: 1-D uint8 array, C-contiguous.
      count: Number of indices.
      num_values: As for `encode`.

    Returns:
      int64[count].

    Raises:
      ValueError: If `data` is no encoding of that many indices.
    """
    if not 0 <= count <= num_values <= _MOST_VALUES:
        raise ValueError(f"`count` must be at most `num_values`. Received: count={count}, num_values={num_values}.")
    num_remainders, most = sizes(num_values, count)
    num_quotients = data.nbytes - num_remainders
    if not 0 <= num_quotients <= most:
        raise ValueError(f"`data` must have at most {num_remainders + most} bytes. Received: {data.nbytes} bytes.")
    remainders, quotients, shift = data[:num_remainders], data[num_remainders:], _shift(num_values, count)
    if native.kernels() is None:
        return _decode(remainders, quotients, count, num_values, shift)
    indices = np.empty(count, np.int64)
    native.call(
        "GapsDecode",
        native.address(remainders), native.address(quotients), num_quotients, count, num_values, shift,
        native.address(indices),
    )  # fmt: skip
    return indices


def _shift(num_values: float, count: float) -> int:
    """The bits of a remainder: the integer part of log2(0.96 num_values / count), and 0 at least.

    For long, geometrically distributed gaps, the factor with the shortest codes is 2 ln((1 + sqrt(5)) / 2), or 0.962.
    """
    return max(0, int(24 * num_values // (25 * count)).bit_length() - 1) if count else 0


# Without the kernels.


def _encode(indices: np.ndarray, num_values: int, shift: int, remainders: np.ndarray, quotients: np.ndarray) -> int:
    gaps = np.diff(indices, prepend=-1) - 1
    if indices.size and (gaps.min() < 0 or indices[-1] >= num_values):
        raise ValueError("`indices` must increase strictly, from at least 0 to below `num_values`.")
    bits = (gaps[:, np.newaxis] >> np.arange(shift)) & 1
    remainders[:] = np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")
    ends = np.cumsum((gaps >> shift) + 1) - 1
    bits = np.zeros(ends[-1] + 1 if indices.size else 0, np.uint8)
    bits[ends] = 1
    packed = np.packbits(bits, bitorder="little")
    quotients[: packed.nbytes] = packed
    return packed.nbytes


def _decode(remainders: np.ndarray, quotients: np.ndarray, count: int, num_values: int, shift: int) -> np.ndarray:
    ends = np.flatnonzero(np.unpackbits(quotients, bitorder="little"))
    bits = np.unpackbits(remainders, bitorder="little")
    is_sound = ends.size == count and not bits[count * shift :].any() and (not quotients.size or quotients[-1])
    if is_sound and count:
        high = np.diff(ends, prepend=-1) - 1
        is_sound = high.max() <= num_values >> shift  # Otherwise the sums could overflow.
    if is_sound:
        low = bits[: count * shift].reshape(count, shift) @ (1 << np.arange(shift, dtype=np.int64))
        indices = np.cumsum((high << shift) + low + 1) - 1 if count else np.empty(0, np.int64)
        is_sound = not count or indices[-1] < num_values
    if not is_sound:
        raise ValueError(f"`data` does not encode {count} indices below {num_values}.")
    return indices
