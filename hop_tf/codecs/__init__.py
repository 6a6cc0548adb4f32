"""Codecs: compress vectors that ranks send to each other.

A codec turns a vector of float32 into bytes and back. It has no state, so that the same bytes decode to the same values
on every rank. `ErrorFeedback` can keep the loss (encoding error) of a lossy codec, and add it to the next vector.

    Codec                      Bytes per value   Error
    Identity()                 4                 none
    Truncate16()               2                 below 2^-7 of each value (2^-8 with `round_to_nearest`)
    Int8(block_size=512)       1.008             at most 1/254 of the largest magnitude in each block
    QuantileSketch()           1 [1]             relative root mean square 0.8 % on normally distributed values
    Bits4(block_size=64)       0.53              relative root mean square 9 % on gradients
    Bits2(block_size=128)      0.28              for the values of TopK: their deviation from two magnitudes per block
    Sparse()                   5 per nonzero     none. (The index takes 1 of the 5 bytes if one value in 100 is sent.)
    TopK(ratio=0.01)           0.05 [2]          all but the largest 1 % of the values
    TopK(values="bits2")       0.013 [2]         and the deviation of these
    LowRank(rank=4)            0.03 [3]          all of a kernel but its largest 4 singular values

[1] plus 1 KiB for every chunk that all-reduce cuts a vector into.
[2] In an all-reduce of n ranks, each rank sends this n - 1 times. It sends the output of other codecs 2 (n - 1) / n
times.
[3] of a kernel of 1,024 x 1,024. `LowRank` does not encode vectors: see there.
"""

from hop_tf.codecs.base import Codec, get, register
from hop_tf.codecs.dense import Identity, Int8, QuantileSketch, Truncate16
from hop_tf.codecs.feedback import ErrorFeedback
from hop_tf.codecs.few_bits import Bits2, Bits4
from hop_tf.codecs.low_rank import LowRank, get_for_means
from hop_tf.codecs.sparse import Sparse, TopK

__all__ = [
    "Bits2",
    "Bits4",
    "Codec",
    "ErrorFeedback",
    "Identity",
    "Int8",
    "LowRank",
    "QuantileSketch",
    "Sparse",
    "TopK",
    "Truncate16",
    "get",
    "get_for_means",
]

for _member in (Identity, Truncate16, Int8, QuantileSketch, Bits4, Bits2, Sparse, TopK):
    register(_member)
