"""What the operations compute, by the kernels for processors, which have tests of their own."""

from __future__ import annotations

import ctypes

import numpy as np

_NUM_CODES = 256
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}  # HopTfType.
_ALL_CORES = 0

_ADDRESS, _SIZE, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_FUNCTIONS = {
    "SketchEncode": (_ADDRESS, _INT, _SIZE, _DOUBLE, _ADDRESS, _ADDRESS, _INT),
    "SketchDecode": (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _INT),
    "Int8Encode": (_ADDRESS, _INT, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _INT),
    "Int8Decode": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _INT),
    "Int8Accumulate": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _INT),
    "Int8Reduce": (_ADDRESS, _ADDRESS, _ADDRESS, _INT, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _INT),
    "Truncate16Encode": (_ADDRESS, _INT, _SIZE, _INT, _ADDRESS, _INT),
    "Truncate16Decode": (_ADDRESS, _SIZE, _ADDRESS, _INT),
}


class Reference:
    """One method for each operation, with the operation's inputs and attributes."""

    def __init__(self, kernels: ctypes.CDLL):
        self._kernels = kernels

    def _call(self, name, *arguments):
        function = getattr(self._kernels, f"HopTf{name}")
        function.argtypes = _FUNCTIONS[name]
        arguments = [each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments]
        if function(*arguments, _ALL_CORES):
            raise ValueError(f"HopTf{name} refused its arguments.")

    def sketch_encode(self, values, spacing):
        codes, bucket_values = np.empty(values.shape, np.uint8), np.empty(_NUM_CODES, np.float32)
        self._call("SketchEncode", values, _TYPES[values.dtype], values.size, spacing, codes, bucket_values)
        return codes, bucket_values

    def sketch_decode(self, codes, bucket_values):
        values = np.empty(codes.shape, np.float32)
        self._call("SketchDecode", codes, bucket_values, codes.size, values)
        return (values,)

    def int8_encode(self, values, block_size):
        size = block_size or max(values.size, 1)
        codes, scales = np.empty(values.shape, np.int8), np.empty(-(-values.size // size), np.float32)
        self._call("Int8Encode", values, _TYPES[values.dtype], values.size, size, codes, scales)
        return codes, scales

    def int8_decode(self, codes, scales, block_size):
        values = np.empty(codes.shape, np.float32)
        self._call("Int8Decode", codes, scales, codes.size, block_size or max(codes.size, 1), values)
        return (values,)

    def int8_accumulate(self, codes, scales, accumulator, block_size):
        total = accumulator.copy()
        self._call("Int8Accumulate", codes, scales, codes.size, block_size or max(codes.size, 1), total)
        return (total,)

    def int8_reduce(self, codes, scales, values, block_size):
        out_codes, out_scales = np.empty_like(codes), np.empty_like(scales)
        size = codes.size, block_size or max(codes.size, 1)
        self._call("Int8Reduce", codes, scales, values, _TYPES[values.dtype], *size, out_codes, out_scales)
        return out_codes, out_scales

    def truncate16_encode(self, values, round_to_nearest):
        halves = np.empty(values.shape, np.uint16)
        self._call("Truncate16Encode", values, _TYPES[values.dtype], values.size, round_to_nearest, halves)
        return (halves,)

    def truncate16_decode(self, halves):
        values = np.empty(halves.shape, np.float32)
        self._call("Truncate16Decode", halves, halves.size, values)
        return (values,)
