"""The kernels as TensorFlow operations, if the native ones were not built. Same results, 10 to 100 times slower.

The caller must check the arguments. Every function works eagerly and in graphs, on any device.
"""

from __future__ import annotations

import tensorflow as tf

from hop_tf.ops.arguments import NUM_CODES

# kernels/constants.h describes these constants. Sizes are numbers of patterns.
_BIN_SIZE = 1 << 16
_NUM_BINS = (1 << 32) // _BIN_SIZE
_REFINE_FRACTION = 500
_MAX_PART_SIZE = 1 << 10
_MAX_PARTS = 1 << 15
_POINT_BUCKETS = 4
_SIGN = 1 << 31
_SMALLEST_NORMAL = 0x00800000

_LARGEST_CODE = 127.0
_SMALLEST_MAGNITUDE = 2.0**-119
_LARGEST_SCALE = float.fromhex("0x1.020406p121")  # The product with 127 is still finite.


# The quantile sketch.


def sketch_encode(values: tf.Tensor, spacing: float) -> tuple[tf.Tensor, tf.Tensor]:
    """See `hop_tf.ops.quantile_sketch_encode`."""
    floats = tf.reshape(tf.cast(values, tf.float32), [-1])
    codes, bucket_values = tf.cond(
        tf.reduce_all(tf.math.is_finite(floats)),
        lambda: _sketch_finite(floats, spacing),
        lambda: (tf.zeros(tf.shape(floats), tf.uint8), tf.fill([NUM_CODES], float("nan"))),
    )
    return tf.reshape(codes, tf.shape(values)), tf.ensure_shape(bucket_values, [NUM_CODES])


def sketch_decode(codes: tf.Tensor, bucket_values: tf.Tensor) -> tf.Tensor:
    """See `hop_tf.ops.quantile_sketch_decode`."""
    message = f"bucket_values must be a vector of {NUM_CODES} values."
    check = tf.debugging.assert_equal(tf.shape(bucket_values), [NUM_CODES], message, summarize=8)
    with tf.control_dependencies([] if check is None else [check]):
        bucket_values = tf.reshape(bucket_values, [-1])
    return tf.gather(bucket_values, tf.cast(codes, tf.int32))


def _sketch_finite(floats: tf.Tensor, spacing: float) -> tuple[tf.Tensor, tf.Tensor]:
    patterns = _patterns(floats)
    size = tf.size(floats, out_type=tf.int64)
    cells, refined, part_size = _cells(patterns, size)

    # The common bits of each cell's patterns, and the number of its patterns.
    parts = refined[:, tf.newaxis] * _BIN_SIZE + tf.range(0, _BIN_SIZE, part_size)
    cell_patterns = tf.concat([tf.range(_NUM_BINS, dtype=tf.int64) * _BIN_SIZE, tf.reshape(parts, [-1])], axis=0)
    num_cells = tf.size(cell_patterns, out_type=tf.int64)
    bin_size = tf.where(cell_patterns == 0, tf.constant(1, tf.int64), _BIN_SIZE)
    widths = tf.where(tf.range(num_cells) >= _NUM_BINS, part_size, bin_size)

    members = tf.math.unsorted_segment_sum(tf.ones_like(cells), cells, num_cells)
    low_bits = tf.math.unsorted_segment_sum(patterns - tf.gather(cell_patterns, cells), cells, num_cells)

    bins = _in_order_of_values(cell_patterns, members)
    bin_members = tf.cast(tf.gather(members, bins), tf.float64)
    bin_patterns = tf.gather(cell_patterns, bins)
    bin_codes = _assign_codes(bin_patterns, tf.gather(widths, bins), bin_members, size, spacing)
    sums = _sums(bin_patterns, bin_members, tf.cast(tf.gather(low_bits, bins), tf.float64))
    bucket_values = _bucket_values(sums, bin_members, bin_codes)

    table = tf.scatter_nd(bins[:, tf.newaxis], bin_codes, [num_cells])
    return tf.cast(tf.gather(table, cells), tf.uint8), bucket_values


def _patterns(floats: tf.Tensor) -> tf.Tensor:
    """Bit patterns as int64 from 0 to 2^32 - 1. 0 for all values that count as zero."""
    patterns = tf.cast(tf.bitcast(floats, tf.uint32), tf.int64)
    return tf.where(patterns % _SIGN < _SMALLEST_NORMAL, tf.zeros_like(patterns), patterns)


def _cells(patterns: tf.Tensor, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The cell of each value (a bin, or a part of a refined bin), the refined bins, and the patterns per part."""
    bins = patterns // _BIN_SIZE
    members = tf.math.unsorted_segment_sum(tf.ones_like(bins), bins, _NUM_BINS)
    is_refined = (members > tf.maximum(size // _REFINE_FRACTION, 1)) & (tf.range(_NUM_BINS) > 0)
    refined = tf.where(is_refined)[:, 0]
    sizes = 2 ** tf.range(_MAX_PART_SIZE.bit_length(), dtype=tf.int64)
    is_enough = tf.size(refined, out_type=tf.int64) * (_BIN_SIZE // sizes) <= _MAX_PARTS
    part_size = tf.reduce_min(sizes[is_enough])
    place = tf.gather(tf.cumsum(tf.cast(is_refined, tf.int64)) - 1, bins)
    part_cells = _NUM_BINS + (place * _BIN_SIZE + patterns % _BIN_SIZE) // part_size
    return tf.where(tf.gather(is_refined, bins), part_cells, bins), refined, part_size


def _in_order_of_values(cell_patterns: tf.Tensor, members: tf.Tensor) -> tf.Tensor:
    """The cells with members, from the lowest value to the highest."""
    occupied = tf.where(members > 0)[:, 0]
    patterns = tf.gather(cell_patterns, occupied)
    return tf.gather(occupied, tf.argsort(tf.where(patterns >= _SIGN, _SIGN - patterns, patterns)))


def _exponents(patterns: tf.Tensor) -> tf.Tensor:
    return tf.cast(patterns // (1 << 23) % 256, tf.float64)


def _assign_codes(patterns, widths, members, size, spacing: float) -> tf.Tensor:
    """The code of each bin. Bins are in order of their values.

    Runs on the processor, because cumulative sums on a GPU need not be monotonic.
    """
    with tf.device("/cpu:0"):
        return _assign_codes_on_cpu(patterns, widths, members, size, spacing)


def _assign_codes_on_cpu(patterns, widths, members, size, spacing: float) -> tf.Tensor:
    num_bins = tf.size(patterns)
    shares = members**spacing * (2.0 ** (_exponents(patterns) - 150.0) * tf.cast(widths, tf.float64)) ** (1.0 - spacing)
    is_point = (widths < _BIN_SIZE) & (members * NUM_CODES > _POINT_BUCKETS * tf.cast(size, tf.float64))
    shares = tf.where(is_point, tf.zeros_like(shares), shares)
    num_buckets = NUM_CODES - 2 * tf.reduce_sum(tf.cast(is_point, tf.int32))
    middle = (tf.cumsum(shares, exclusive=True) + shares / 2.0) / tf.reduce_sum(shares)
    buckets = tf.cast(middle * tf.cast(num_buckets, tf.float64), tf.int32)
    buckets = tf.where(is_point, num_buckets + tf.range(num_bins), tf.minimum(buckets, num_buckets - 1))
    begins = tf.concat([[False], buckets[1:] != buckets[:-1]], axis=0)[:num_bins]
    codes = tf.cumsum(tf.cast(begins, tf.int32))
    return tf.where(num_bins <= NUM_CODES, tf.range(num_bins), codes)


def _sums(patterns: tf.Tensor, members: tf.Tensor, low_bits: tf.Tensor) -> tf.Tensor:
    """The sum of each bin's members, in float64."""
    smallest = tf.cast(tf.bitcast(tf.cast(patterns % _SIGN, tf.uint32), tf.float32), tf.float64)
    magnitudes = members * smallest + low_bits * 2.0 ** (_exponents(patterns) - 150.0)
    return tf.where(patterns >= _SIGN, -magnitudes, magnitudes)


def _bucket_values(sums, members, codes) -> tf.Tensor:
    """The mean of each bucket's members. Codes after the last bucket have the last bucket's value."""
    means = tf.math.unsorted_segment_sum(sums, codes, NUM_CODES) / tf.maximum(
        tf.math.unsorted_segment_sum(members, codes, NUM_CODES), 1.0
    )
    last = tf.maximum(tf.reduce_max(tf.concat([[0], codes], axis=0)), 0)
    return tf.cast(tf.gather(means, tf.minimum(tf.range(NUM_CODES), last)), tf.float32)


# 8-bit blocks.


def int8_encode(values: tf.Tensor, block_size: int | None) -> tuple[tf.Tensor, tf.Tensor]:
    """See `hop_tf.ops.int8_encode`."""
    floats = tf.cast(values, tf.float32)
    blocks = _blocks(floats, block_size)
    largest = tf.reduce_max(tf.abs(blocks), axis=1)
    is_finite = tf.reduce_all(tf.math.is_finite(blocks), axis=1)
    is_zero = largest < _SMALLEST_MAGNITUDE
    scales = tf.where(is_zero, 0.0, tf.minimum(largest / _LARGEST_CODE, _LARGEST_SCALE))
    inverses = tf.where(is_zero | ~is_finite, 0.0, _LARGEST_CODE / largest)
    codes = tf.round(tf.where(is_finite[:, tf.newaxis], blocks, 0.0) * inverses[:, tf.newaxis])
    codes = tf.reshape(tf.reshape(codes, [-1])[: tf.size(values)], tf.shape(values))
    return tf.cast(codes, tf.int8), tf.where(is_finite, scales, float("nan"))


def int8_decode(codes: tf.Tensor, scales: tf.Tensor, block_size: int | None) -> tf.Tensor:
    """See `hop_tf.ops.int8_decode`."""
    num_blocks = -(-tf.size(codes) // (block_size or tf.maximum(tf.size(codes), 1)))
    message = "scales must be a vector with one value per block of codes."
    check = tf.debugging.assert_equal(tf.shape(scales), [num_blocks], message, summarize=8)
    with tf.control_dependencies([] if check is None else [check]):
        scales = tf.reshape(scales, [-1])
    floats = _blocks(tf.cast(codes, tf.float32), block_size) * scales[:, tf.newaxis]
    return tf.reshape(tf.reshape(floats, [-1])[: tf.size(codes)], tf.shape(codes))


def int8_accumulate(codes, scales, accumulator, block_size: int | None) -> tf.Tensor:
    """See `hop_tf.ops.int8_accumulate`."""
    return _add("accumulator", accumulator, int8_decode(codes, scales, block_size))


def int8_reduce(codes, scales, values, block_size: int | None) -> tuple[tf.Tensor, tf.Tensor]:
    """See `hop_tf.ops.int8_reduce`."""
    total = _add("values", tf.cast(values, tf.float32), int8_decode(codes, scales, block_size))
    return int8_encode(total, block_size)


def _add(name: str, values: tf.Tensor, decoded: tf.Tensor) -> tf.Tensor:
    shapes = tf.shape(values), tf.shape(decoded)
    is_same = tf.cond(
        tf.size(shapes[0]) == tf.size(shapes[1]), lambda: tf.reduce_all(tf.equal(*shapes)), lambda: tf.constant(False)
    )
    check = tf.debugging.Assert(is_same, [f"{name} must have the shape of codes. Received shapes:", *shapes])
    with tf.control_dependencies([] if check is None else [check]):
        return values + decoded


def _blocks(values: tf.Tensor, block_size: int | None) -> tf.Tensor:
    """Reshapes values to [number of blocks, block size]. The last block is padded with zeros."""
    size = tf.size(values)
    # Without the minimum, a large block size would take much memory for few values.
    block_size = tf.minimum(block_size or size, tf.maximum(size, 1))
    block_size = tf.maximum(block_size, 1)
    return tf.reshape(tf.pad(tf.reshape(values, [-1]), [[0, -size % block_size]]), [-1, block_size])


# The upper 16 bits.


def truncate16_encode(values: tf.Tensor, round_to_nearest: bool) -> tf.Tensor:
    """See `hop_tf.ops.truncate16_encode`."""
    floats = tf.cast(values, tf.float32)
    patterns = tf.bitcast(floats, tf.uint32)
    if round_to_nearest:
        rounded = patterns + 0x7FFF + (tf.bitwise.right_shift(patterns, tf.constant(16, tf.uint32)) & 1)
    else:
        rounded = patterns
    patterns = tf.where(tf.math.is_nan(floats), patterns | 0x00400000, rounded)
    halves = tf.cast(tf.bitwise.right_shift(patterns, tf.constant(16, tf.uint32)), tf.uint16)
    return tf.bitcast(halves, tf.bfloat16)


def truncate16_decode(halves: tf.Tensor) -> tf.Tensor:
    """See `hop_tf.ops.truncate16_decode`."""
    return tf.cast(halves, tf.float32)
