"""The public functions on tensors: native operations if they were built, otherwise TensorFlow's own."""

from __future__ import annotations

import tensorflow as tf

from hop_tf.ops import fallback, native
from hop_tf.ops.arguments import (
    DEFAULT_BLOCK_SIZE,
    FLOAT_TYPES,
    NUM_CODES,
    check_block_size,
    check_dtype,
    check_size,
    check_spacing,
    num_blocks,
)


def quantile_sketch_encode(values, spacing: float = 0.5) -> tuple[tf.Tensor, tf.Tensor]:
    """Sorts values into 256 buckets and keeps, for each bucket, the mean of its members.

    Buckets have equal weights, count^spacing * width^(1 - spacing), with the width of the bucket's range. With
    `spacing` 1 all buckets hold equally many values (quantiles). As `spacing` approaches 0, buckets become equally
    wide. 1/3 gives the smallest mean squared error.

    Values are distinguished by the upper 16 bits of float32 (one part in 128 to 256). If more than 1/500 of all values
    have the same upper bits, up to 16 more bits distinguish them. Values that are not distinguished share a bucket. So
    a bucket of continuous data begins at most 1/1000 of all values away from its exact place. A value that would fill
    more than four buckets gets a bucket of its own and stays exact. An example is zero in a sparse gradient. Every
    value is exact if at most 256 values are distinguished. Values with a magnitude below 2^-126 count as zero.

    Args:
      values: Tensor of any shape of float32, bfloat16 or float16; at most 2^31 - 1 values. If a value is not finite,
        all decode to nan, so that a check of the decoded values finds it.
      spacing: Above 0, at most 1.

    Returns:
      codes: uint8 bucket numbers, in the shape of `values`. A larger value never has a smaller number.
      bucket_values: float32[256], ascending. The value of the last bucket in use is repeated up to the end.

    Raises:
      ValueError: If an argument is out of range.
      TypeError: If `values` is of another type.

    References:
      Zhou et al. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in Multi-Interface
      Networks. IEEE TPDS 2021. (There `spacing` is 1 and a bucket's value the middle of its range.)
      Panter, Dite. Quantization distortion in pulse-count modulation with nonuniform spacing of levels. Proc. IRE 1951.
    """
    spacing = check_spacing(spacing)
    values = _floats("values", values)
    operations = native.operations()
    if operations is None:
        return fallback.sketch_encode(values, spacing)
    codes, bucket_values = operations.hop_tf_sketch_encode(values=values, spacing=spacing)
    return codes, tf.ensure_shape(bucket_values, [NUM_CODES])


def quantile_sketch_decode(codes, bucket_values) -> tf.Tensor:
    """Returns bucket_values[codes].

    Args:
      codes: uint8 tensor of any shape.
      bucket_values: float32[256].

    Returns:
      float32 tensor in the shape of `codes`.

    Raises:
      TypeError: If an argument is of another type.
      tf.errors.InvalidArgumentError: If `bucket_values` has another size.

    References:
      Zhou et al. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in Multi-Interface
      Networks. IEEE TPDS 2021.
    """
    codes = _typed("codes", codes, tf.uint8)
    bucket_values = _typed("bucket_values", bucket_values, tf.float32)
    operations = native.operations()
    if operations is None:
        return fallback.sketch_decode(codes, bucket_values)
    return operations.hop_tf_sketch_decode(codes=codes, bucket_values=bucket_values)


def int8_encode(values, block_size: int | None = DEFAULT_BLOCK_SIZE) -> tuple[tf.Tensor, tf.Tensor]:
    """Rounds the values of each block to multiples of 1/127 of the block's largest magnitude.

    The error is at most half such a step, plus a few units in float32's last place. A block in which all magnitudes are
    below 2^-119 decodes to zeros. A block with a value that is not finite decodes to nan.

    Args:
      values: Tensor of any shape of float32, bfloat16 or float16; at most 2^31 - 1 values. Blocks are consecutive
        values in row-major order.
      block_size: Values per block, at least 1; None for one block. The last block may be shorter.

    Returns:
      codes: int8, in the shape of `values`; from -127 to 127.
      scales: float32[ceil(size / block_size)]: the step of each block.

    Raises:
      ValueError: If `block_size` is out of range, or there are too many values.
      TypeError: If `values` is of another type.

    References:
      Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
      (There block_size is None.)
    """
    block_size = check_block_size(block_size)
    values = _floats("values", values)
    operations = native.operations()
    if operations is None:
        codes, scales = fallback.int8_encode(values, block_size)
    else:
        codes, scales = operations.hop_tf_int8_encode(values=values, block_size=block_size or 0)
    return codes, _with_num_blocks(scales, values, block_size)


def int8_decode(codes, scales, block_size: int | None = DEFAULT_BLOCK_SIZE) -> tf.Tensor:
    """Returns codes * scales, each code with the scale of its block.

    Args:
      codes: int8 tensor of any shape.
      scales: float32[ceil(size / block_size)].
      block_size: As in `int8_encode`.

    Returns:
      float32 tensor in the shape of `codes`.

    Raises:
      ValueError: If `block_size` is out of range.
      TypeError: If an argument is of another type.
      tf.errors.InvalidArgumentError: If `scales` has another size.

    References:
      Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
    """
    block_size = check_block_size(block_size)
    codes, scales = _typed("codes", codes, tf.int8), _typed("scales", scales, tf.float32)
    operations = native.operations()
    if operations is None:
        return fallback.int8_decode(codes, scales, block_size)
    return operations.hop_tf_int8_decode(codes=codes, scales=scales, block_size=block_size or 0)


def int8_accumulate(codes, scales, accumulator, block_size: int | None = DEFAULT_BLOCK_SIZE) -> tf.Tensor:
    """Returns accumulator + codes * scales, computed in float32.

    Args:
      codes: int8 tensor of any shape.
      scales: float32[ceil(size / block_size)].
      accumulator: float32 tensor in the shape of `codes`. The result reuses its memory if no other operation needs it.
      block_size: As in `int8_encode`.

    Returns:
      float32 tensor in the shape of `codes`.

    Raises:
      ValueError: If `block_size` is out of range.
      TypeError: If an argument is of another type.
      tf.errors.InvalidArgumentError: If shapes do not fit.

    References:
      Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
    """
    block_size = check_block_size(block_size)
    codes, scales = _typed("codes", codes, tf.int8), _typed("scales", scales, tf.float32)
    accumulator = _typed("accumulator", accumulator, tf.float32)
    operations = native.operations()
    if operations is None:
        return fallback.int8_accumulate(codes, scales, accumulator, block_size)
    return operations.hop_tf_int8_accumulate(
        codes=codes, scales=scales, accumulator=accumulator, block_size=block_size or 0
    )


def int8_reduce(codes, scales, values, block_size: int | None = DEFAULT_BLOCK_SIZE) -> tuple[tf.Tensor, tf.Tensor]:
    """Encodes values + codes * scales anew: one hop of a ring all-reduce.

    The sum is computed in float32. Codes themselves are never added. Values are read from memory once if blocks have up
    to 1024 values, and otherwise twice.

    Args:
      codes: int8 tensor of any shape.
      scales: float32[ceil(size / block_size)].
      values: Tensor in the shape of `codes` of float32, bfloat16 or float16.
      block_size: As in `int8_encode`.

    Returns:
      codes, scales: As for `int8_encode`.

    Raises:
      ValueError: If `block_size` is out of range.
      TypeError: If an argument is of another type.
      tf.errors.InvalidArgumentError: If shapes do not fit.

    References:
      Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
    """
    block_size = check_block_size(block_size)
    codes, scales = _typed("codes", codes, tf.int8), _typed("scales", scales, tf.float32)
    values = _floats("values", values)
    operations = native.operations()
    if operations is None:
        new_codes, new_scales = fallback.int8_reduce(codes, scales, values, block_size)
    else:
        new_codes, new_scales = operations.hop_tf_int8_reduce(
            codes=codes, scales=scales, values=values, block_size=block_size or 0
        )
    return new_codes, _with_num_blocks(new_scales, codes, block_size)


def truncate16_encode(values, round_to_nearest: bool = False) -> tf.Tensor:
    """Keeps the upper 16 bits of each value as float32: a bfloat16.

    Args:
      values: Tensor of any shape of float32, bfloat16 or float16.
      round_to_nearest: Round to the nearest bfloat16, ties to even, instead of towards zero. Halves the largest error
        (2^-8 instead of 2^-7 of the value) and has no bias.

    Returns:
      bfloat16 tensor in the shape of `values`. Infinities and nan stay as they are. Rounding turns values that are
      nearer to 2^128 than to the largest bfloat16 into infinity.

    Raises:
      ValueError: If there are too many values.
      TypeError: If `values` is of another type.

    References:
      Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
    """
    values = _floats("values", values)
    operations = native.operations()
    if operations is None:
        return fallback.truncate16_encode(values, round_to_nearest)
    return operations.hop_tf_truncate16_encode(values=values, round_to_nearest=round_to_nearest)


def truncate16_decode(halves) -> tf.Tensor:
    """Returns bfloat16 values as float32, exactly.

    Args:
      halves: bfloat16 tensor of any shape.

    Returns:
      float32 tensor in the shape of `halves`.

    Raises:
      TypeError: If `halves` is of another type.

    References:
      Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
    """
    halves = _typed("halves", halves, tf.bfloat16)
    operations = native.operations()
    if operations is None:
        return fallback.truncate16_decode(halves)
    return operations.hop_tf_truncate16_decode(halves=halves)


def _floats(name: str, values) -> tf.Tensor:
    values = tf.convert_to_tensor(values)
    check_dtype(name, values.dtype, FLOAT_TYPES)
    if values.shape.is_fully_defined():
        check_size(name, values.shape.num_elements())
    return values


def _typed(name: str, values, dtype: tf.DType) -> tf.Tensor:
    values = tf.convert_to_tensor(values)
    check_dtype(name, values.dtype, [dtype])
    return values


def _with_num_blocks(scales: tf.Tensor, values: tf.Tensor, block_size: int | None) -> tf.Tensor:
    """Sets the static shape of the scales, which TensorFlow's interface for operations in C cannot express."""
    if values.shape.is_fully_defined():
        scales.set_shape([num_blocks(values.shape.num_elements(), block_size)])
    else:
        scales.set_shape([None])
    return scales
