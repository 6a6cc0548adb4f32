"""The functions of `hop_tf.ops` on NumPy arrays, for code outside of graphs. They release the GIL.

`hop_tf.ops` describes the functions and their arguments. Further functions are for arrays only, without a TensorFlow
operation or a CUDA kernel: `quantile_sketch_accumulate`, `truncate16_accumulate`, and those of `few_bits`.

Here values are arrays of any shape and layout (bfloat16 is `tf.bfloat16.as_numpy_dtype`), and results are arrays. `out`
takes arrays for the results, so that memory can be reused. They must be C-contiguous, of the right size and type, and
must not overlap the arguments, unless the function says so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.ops import fallback, few_bits, native
from hop_tf.ops.arguments import (
    DEFAULT_BLOCK_SIZE,
    FLOAT_TYPES,
    NUM_CODES,
    check_bits,
    check_block_size,
    check_dtype,
    check_few_bits_block_size,
    check_size,
    check_spacing,
    few_bits_sizes,
    num_blocks,
)
from hop_tf.ops.native import address

_ALL_CORES = 0
_BFLOAT16 = np.dtype(tf.bfloat16.as_numpy_dtype)
_UINT8, _INT8, _UINT16, _FLOAT32 = map(np.dtype, (np.uint8, np.int8, np.uint16, np.float32))
# The numbers of types in the C interface.
_FLOATS = {np.dtype(each.as_numpy_dtype): number for number, each in enumerate(FLOAT_TYPES)}


def quantile_sketch_encode(
    values: np.ndarray,
    spacing: float = 0.5,
    *,
    out: Sequence[np.ndarray] | None = None,
    num_threads: int = _ALL_CORES,
) -> tuple[np.ndarray, np.ndarray]:
    """See `hop_tf.ops.quantile_sketch_encode`.

    Args:
      values: As in `hop_tf.ops.quantile_sketch_encode`.
      spacing: As in `hop_tf.ops.quantile_sketch_encode`.
      out: (codes, bucket_values).
      num_threads: The largest number of threads to use. 0: as many as the process has cores.

    Returns:
      (codes, bucket_values).
    """
    spacing = check_spacing(spacing)
    values = _floats("values", values)
    codes, bucket_values = _results(out, ("codes", values.shape, np.uint8), ("bucket_values", (NUM_CODES,), np.float32))
    if native.kernels() is None:
        _copy(fallback.sketch_encode(tf.convert_to_tensor(values), spacing), (codes, bucket_values))
    else:
        native.call(
            "SketchEncode",
            *_typed_array(values), values.size, spacing, address(codes), address(bucket_values), num_threads,
        )  # fmt: skip
    return codes, bucket_values


def quantile_sketch_decode(
    codes: np.ndarray, bucket_values: np.ndarray, *, out: np.ndarray | None = None, num_threads: int = _ALL_CORES
) -> np.ndarray:
    """See `hop_tf.ops.quantile_sketch_decode`. `out` takes the values."""
    codes, bucket_values = _sketch(codes, bucket_values)
    (values,) = _results(None if out is None else [out], ("out", codes.shape, np.float32))
    if native.kernels() is None:
        _copy([fallback.sketch_decode(tf.convert_to_tensor(codes), tf.convert_to_tensor(bucket_values))], [values])
    else:
        native.call(
            "SketchDecode",
            address(codes), address(bucket_values), codes.size, address(values), num_threads,
        )  # fmt: skip
    return values


def quantile_sketch_accumulate(
    codes: np.ndarray, bucket_values: np.ndarray, accumulator: np.ndarray, *, num_threads: int = _ALL_CORES
) -> None:
    """Adds bucket_values[codes] to `accumulator`, in place. For arrays only.

    Args:
      codes: As for `quantile_sketch_decode`.
      bucket_values: As for `quantile_sketch_decode`.
      accumulator: float32, in the shape of `codes`; writable and C-contiguous.
      num_threads: As for `quantile_sketch_encode`.

    Raises:
      ValueError: If `bucket_values` has another size, or `accumulator` does not fit.
      TypeError: If an argument is of another type.

    References:
      As for `hop_tf.ops.quantile_sketch_encode`.
    """
    codes, bucket_values = _sketch(codes, bucket_values)
    (accumulator,) = _results([accumulator], ("accumulator", codes.shape, np.float32))
    if native.kernels() is None:
        accumulator += quantile_sketch_decode(codes, bucket_values)
    else:
        native.call(
            "SketchAccumulate",
            address(codes), address(bucket_values), codes.size, address(accumulator), num_threads,
        )  # fmt: skip


def int8_encode(
    values: np.ndarray,
    block_size: int | None = DEFAULT_BLOCK_SIZE,
    *,
    out: Sequence[np.ndarray] | None = None,
    num_threads: int = _ALL_CORES,
) -> tuple[np.ndarray, np.ndarray]:
    """See `hop_tf.ops.int8_encode`. `out` is (codes, scales)."""
    values = _floats("values", values)
    codes, scales = _block_results(out, values, block_size)
    if native.kernels() is None:
        _copy(fallback.int8_encode(tf.convert_to_tensor(values), block_size), (codes, scales))
    else:
        native.call(
            "Int8Encode",
            *_typed_array(values), values.size, _size(block_size, values),
            address(codes), address(scales), num_threads,
        )  # fmt: skip
    return codes, scales


def int8_decode(
    codes: np.ndarray,
    scales: np.ndarray,
    block_size: int | None = DEFAULT_BLOCK_SIZE,
    *,
    out: np.ndarray | None = None,
    num_threads: int = _ALL_CORES,
) -> np.ndarray:
    """See `hop_tf.ops.int8_decode`. `out` takes the values."""
    codes, scales = _blocks(codes, scales, block_size)
    (values,) = _results(None if out is None else [out], ("out", codes.shape, np.float32))
    if native.kernels() is None:
        _copy([fallback.int8_decode(tf.convert_to_tensor(codes), tf.convert_to_tensor(scales), block_size)], [values])
    else:
        native.call(
            "Int8Decode",
            address(codes), address(scales), codes.size, _size(block_size, codes), address(values), num_threads,
        )  # fmt: skip
    return values


def int8_accumulate(
    codes: np.ndarray,
    scales: np.ndarray,
    accumulator: np.ndarray,
    block_size: int | None = DEFAULT_BLOCK_SIZE,
    *,
    num_threads: int = _ALL_CORES,
) -> None:
    """Adds codes * scales to `accumulator`, in place. See `hop_tf.ops.int8_accumulate`."""
    codes, scales = _blocks(codes, scales, block_size)
    (accumulator,) = _results([accumulator], ("accumulator", codes.shape, np.float32))
    if native.kernels() is None:
        accumulator += int8_decode(codes, scales, block_size)
    else:
        native.call(
            "Int8Accumulate",
            address(codes), address(scales), codes.size, _size(block_size, codes), address(accumulator), num_threads,
        )  # fmt: skip


def int8_reduce(
    codes: np.ndarray,
    scales: np.ndarray,
    values: np.ndarray,
    block_size: int | None = DEFAULT_BLOCK_SIZE,
    *,
    out: Sequence[np.ndarray] | None = None,
    num_threads: int = _ALL_CORES,
) -> tuple[np.ndarray, np.ndarray]:
    """See `hop_tf.ops.int8_reduce`. `out` is (codes, scales), and may be the arguments themselves."""
    codes, scales = _blocks(codes, scales, block_size)
    values = _floats("values", values)
    if values.shape != codes.shape:
        raise ValueError(
            f"`values` must have the shape of `codes`, {codes.shape}. Received: values of shape {values.shape}."
        )
    new_codes, new_scales = _block_results(out, codes, block_size)
    if native.kernels() is None:
        arguments = [tf.convert_to_tensor(array) for array in (codes, scales, values)]
        _copy(fallback.int8_reduce(*arguments, block_size), (new_codes, new_scales))
    else:
        native.call(
            "Int8Reduce",
            address(codes), address(scales), *_typed_array(values), codes.size, _size(block_size, codes),
            address(new_codes), address(new_scales), num_threads,
        )  # fmt: skip
    return new_codes, new_scales


def truncate16_encode(
    values: np.ndarray,
    round_to_nearest: bool = False,
    *,
    out: np.ndarray | None = None,
    num_threads: int = _ALL_CORES,
) -> np.ndarray:
    """See `hop_tf.ops.truncate16_encode`. `out` takes the bfloat16 values."""
    values = _floats("values", values)
    (halves,) = _results(None if out is None else [out], ("out", values.shape, _BFLOAT16))
    if native.kernels() is None:
        _copy([fallback.truncate16_encode(tf.convert_to_tensor(values), round_to_nearest)], [halves])
    else:
        native.call(
            "Truncate16Encode",
            *_typed_array(values), values.size, int(round_to_nearest), address(halves), num_threads,
        )  # fmt: skip
    return halves


def truncate16_decode(
    halves: np.ndarray, *, out: np.ndarray | None = None, num_threads: int = _ALL_CORES
) -> np.ndarray:
    """See `hop_tf.ops.truncate16_decode`. `out` takes the float32 values."""
    halves = _typed("halves", halves, _BFLOAT16)
    (values,) = _results(None if out is None else [out], ("out", halves.shape, np.float32))
    if native.kernels() is None:
        _copy([fallback.truncate16_decode(tf.convert_to_tensor(halves))], [values])
    else:
        native.call("Truncate16Decode", address(halves), halves.size, address(values), num_threads)
    return values


def truncate16_accumulate(halves: np.ndarray, accumulator: np.ndarray, *, num_threads: int = _ALL_CORES) -> None:
    """Adds bfloat16 values to `accumulator`, in place and in float32. For arrays only.

    Args:
      halves: bfloat16 array of any shape.
      accumulator: float32, in the shape of `halves`; writable and C-contiguous.
      num_threads: As for `quantile_sketch_encode`.

    Raises:
      ValueError: If `accumulator` does not fit.
      TypeError: If an argument is of another type.

    References:
      As for `hop_tf.ops.truncate16_encode`.
    """
    halves = _typed("halves", halves, _BFLOAT16)
    (accumulator,) = _results([accumulator], ("accumulator", halves.shape, np.float32))
    if native.kernels() is None:
        accumulator += truncate16_decode(halves)
    else:
        native.call("Truncate16Accumulate", address(halves), halves.size, address(accumulator), num_threads)


def few_bits_encode(
    values: np.ndarray,
    block_size: int,
    bits: int,
    *,
    out: Sequence[np.ndarray] | None = None,
    num_threads: int = _ALL_CORES,
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes values with 4 or 2 bits, and scales for each block. For arrays only.

    `hop_tf.codecs.Bits4` and `hop_tf.codecs.Bits2` describe the encodings.

    Args:
      values: 1-D array of float32, bfloat16 or float16.
      block_size: Values per block: a multiple of 8 from 8 to 1024. The last block may be shorter.
      bits: 4 or 2.
      out: (scales, codes).
      num_threads: As for `quantile_sketch_encode`.

    Returns:
      scales: uint16[ceil(size / block_size) * 4 / bits]: patterns of bfloat16.
      codes: uint8[ceil(size * bits / 8)]. The first value's code is in the lowest bits.

    Raises:
      ValueError: If an argument is out of range, or `out` does not fit.
      TypeError: If `values` is of another type.
    """
    block_size, bits = check_few_bits_block_size(block_size), check_bits(bits)
    values = _vector("values", _floats("values", values))
    scales, codes = _few_bits_results(out, values.size, block_size, bits)
    if native.kernels() is None:
        few_bits.encode(values.astype(np.float32, copy=False), block_size, bits, scales, codes)
    else:
        native.call(
            "FewBitsEncode",
            *_typed_array(values), values.size, block_size, bits, address(scales), address(codes), num_threads,
        )  # fmt: skip
    return scales, codes


def few_bits_decode(
    scales: np.ndarray,
    codes: np.ndarray,
    size: int,
    block_size: int,
    bits: int,
    *,
    out: np.ndarray | None = None,
    num_threads: int = _ALL_CORES,
) -> np.ndarray:
    """Decodes the results of `few_bits_encode`. For arrays only.

    Args:
      scales: As for `few_bits_encode`.
      codes: As for `few_bits_encode`.
      size: Number of values.
      block_size: As for `few_bits_encode`.
      bits: As for `few_bits_encode`.
      out: Takes the values.
      num_threads: As for `quantile_sketch_encode`.

    Returns:
      float32[size].

    Raises:
      ValueError: If an argument is out of range or does not fit.
      TypeError: If an argument is of another type.
    """
    scales, codes = _few_bits(scales, codes, size, block_size, bits)
    (values,) = _results(None if out is None else [out], ("out", (size,), np.float32))
    if native.kernels() is None:
        few_bits.decode(scales, codes, block_size, bits, values)
    else:
        native.call(
            "FewBitsDecode",
            address(scales), address(codes), size, block_size, bits, address(values), num_threads,
        )  # fmt: skip
    return values


def few_bits_accumulate(
    scales: np.ndarray,
    codes: np.ndarray,
    accumulator: np.ndarray,
    block_size: int,
    bits: int,
    *,
    num_threads: int = _ALL_CORES,
) -> None:
    """Adds the result of `few_bits_decode` to `accumulator`, in place. For arrays only.

    Args:
      scales: As for `few_bits_encode`.
      codes: As for `few_bits_encode`.
      accumulator: 1-D, float32; writable and C-contiguous.
      block_size: As for `few_bits_encode`.
      bits: As for `few_bits_encode`.
      num_threads: As for `quantile_sketch_encode`.

    Raises:
      ValueError: If an argument is out of range or does not fit.
      TypeError: If an argument is of another type.
    """
    size = np.size(accumulator)
    scales, codes = _few_bits(scales, codes, size, block_size, bits)
    (accumulator,) = _results([accumulator], ("accumulator", (size,), np.float32))
    if native.kernels() is None:
        accumulator += few_bits_decode(scales, codes, size, block_size, bits)
    else:
        native.call(
            "FewBitsAccumulate",
            address(scales), address(codes), size, block_size, bits, address(accumulator), num_threads,
        )  # fmt: skip


def few_bits_reduce(
    scales: np.ndarray,
    codes: np.ndarray,
    values: np.ndarray,
    block_size: int,
    bits: int,
    *,
    out: Sequence[np.ndarray] | None = None,
    num_threads: int = _ALL_CORES,
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes the sum, in float32, of `values` and the result of `few_bits_decode`. For arrays only.

    Args:
      scales: As for `few_bits_encode`.
      codes: As for `few_bits_encode`.
      values: As for `few_bits_encode`.
      block_size: As for `few_bits_encode`.
      bits: As for `few_bits_encode`.
      out: (scales, codes). May be the arguments themselves.
      num_threads: As for `quantile_sketch_encode`.

    Returns:
      (scales, codes), as for `few_bits_encode`.

    Raises:
      ValueError: If an argument is out of range or does not fit.
      TypeError: If an argument is of another type.
    """
    values = _vector("values", _floats("values", values))
    scales, codes = _few_bits(scales, codes, values.size, block_size, bits)
    new_scales, new_codes = _few_bits_results(out, values.size, block_size, bits)
    if native.kernels() is None:
        total = values + few_bits_decode(scales, codes, values.size, block_size, bits)
        few_bits.encode(total, block_size, bits, new_scales, new_codes)
    else:
        native.call(
            "FewBitsReduce",
            address(scales), address(codes), *_typed_array(values), values.size, block_size, bits,
            address(new_scales), address(new_codes), num_threads,
        )  # fmt: skip
    return new_scales, new_codes


# Arguments.


def _floats(name: str, values) -> np.ndarray:
    return _checked(name, values, _FLOATS)


def _typed(name: str, array, dtype: np.dtype) -> np.ndarray:
    return _checked(name, array, (dtype,))


def _checked(name: str, array, dtypes: Collection[np.dtype]) -> np.ndarray:
    """Returns an array for the kernels: contiguous, in this machine's byte order, with a checked type and size."""
    array = np.asarray(array, order="C")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype not in dtypes:
        check_dtype(name, tf.as_dtype(array.dtype), list(map(tf.as_dtype, dtypes)))
    check_size(name, array.size)
    return array


def _sketch(codes, bucket_values) -> tuple[np.ndarray, np.ndarray]:
    codes, bucket_values = _typed("codes", codes, _UINT8), _typed("bucket_values", bucket_values, _FLOAT32)
    if bucket_values.shape != (NUM_CODES,):
        raise ValueError(
            f"`bucket_values` must be a vector of {NUM_CODES} values. "
            f"Received: bucket_values of shape {bucket_values.shape}."
        )
    return codes, bucket_values


def _blocks(codes, scales, block_size: int | None) -> tuple[np.ndarray, np.ndarray]:
    block_size = check_block_size(block_size)
    codes, scales = _typed("codes", codes, _INT8), _typed("scales", scales, _FLOAT32)
    expected = num_blocks(codes.size, block_size)
    if scales.shape != (expected,):
        raise ValueError(
            f"`scales` must be a vector of {expected} values for {codes.size} codes in blocks of {block_size}. "
            f"Received: scales of shape {scales.shape}."
        )
    return codes, scales


def _vector(name: str, values: np.ndarray) -> np.ndarray:
    if values.ndim != 1:
        raise ValueError(f"`{name}` must be a vector. Received: {name} of shape {values.shape}.")
    return values


def _few_bits(scales, codes, size: int, block_size: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    block_size, bits = check_few_bits_block_size(block_size), check_bits(bits)
    scales, codes = _typed("scales", scales, _UINT16), _typed("codes", codes, _UINT8)
    for name, array, expected in zip(
        ("scales", "codes"), (scales, codes), few_bits_sizes(size, block_size, bits), strict=True
    ):
        if array.shape != (expected,):
            raise ValueError(
                f"`{name}` must be a vector of {expected} for {size} values in blocks of {block_size}. "
                f"Received: {name} of shape {array.shape}."
            )
    return scales, codes


def _size(block_size: int | None, values: np.ndarray) -> int:
    return block_size or max(values.size, 1)


# Results.


def _results(out: Sequence[np.ndarray] | None, *specs: tuple[str, tuple[int, ...], type]) -> list[np.ndarray]:
    """The arrays in `out`, each checked against its (name, shape, dtype), or new arrays if `out` is None."""
    if out is None:
        return [np.empty(shape, dtype) for _, shape, dtype in specs]
    if len(out) != len(specs):
        names = ", ".join(name for name, _, _ in specs)
        raise ValueError(f"`out` must be ({names}). Received: {len(out)} arrays.")
    for array, (name, shape, dtype) in zip(out, specs, strict=True):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"`{name}` must be a NumPy array. Received: {array!r}.")
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError(
                f"`{name}` must be a writable, C-contiguous array of type {np.dtype(dtype)} and shape {shape}. "
                f"Received: type {array.dtype}, shape {array.shape}, strides {array.strides}."
            )
    return list(out)


def _block_results(out: Sequence[np.ndarray] | None, values: np.ndarray, block_size: int | None) -> list[np.ndarray]:
    block_size = check_block_size(block_size)
    return _results(
        out, ("codes", values.shape, np.int8), ("scales", (num_blocks(values.size, block_size),), np.float32)
    )


def _few_bits_results(out: Sequence[np.ndarray] | None, size: int, block_size: int, bits: int) -> list[np.ndarray]:
    num_scales, num_bytes = few_bits_sizes(size, block_size, bits)
    return _results(out, ("scales", (num_scales,), np.uint16), ("codes", (num_bytes,), np.uint8))


def _copy(tensors: Sequence[tf.Tensor], arrays: Sequence[np.ndarray]) -> None:
    for tensor, array in zip(tensors, arrays, strict=True):
        np.copyto(array, tensor.numpy())


def _typed_array(values: np.ndarray) -> tuple[int, int]:
    """The C interface's (values, type)."""
    return address(values), _FLOATS[values.dtype]
