"""Kernels for compressed exchange: quantile sketch, 8-bit blocks, few bits, 16-bit truncation, indices.

The functions here take and return tensors, eagerly and in graphs. `hop_tf.ops.arrays` has the same functions for NumPy
arrays, and those for blocks of 4 and 2 bits. `hop_tf.ops.gaps` encodes indices, `hop_tf.ops.selection` finds values of
large magnitude.
"""

from hop_tf.ops import arrays
from hop_tf.ops.encodings import (
    int8_accumulate,
    int8_decode,
    int8_encode,
    int8_reduce,
    quantile_sketch_decode,
    quantile_sketch_encode,
    truncate16_decode,
    truncate16_encode,
)
from hop_tf.ops.native import build_info, native_available

__all__ = [
    "arrays",
    "build_info",
    "int8_accumulate",
    "int8_decode",
    "int8_encode",
    "int8_reduce",
    "native_available",
    "quantile_sketch_decode",
    "quantile_sketch_encode",
    "truncate16_decode",
    "truncate16_encode",
]
