"""`ErrorFeedback`: keeps what a codec loses for the next vector."""

from __future__ import annotations

import numpy as np

from hop_tf.buffers import BufferPool
from hop_tf.codecs.base import Codec, float32_copy


class ErrorFeedback:
    """Encodes the pieces of a vector, and adds what is lost to the same piece of the next vector.

    With residual e: v = values + e; what is sent is encode(v); e = v - decode(encode(v)). So the sum of all that was
    sent differs from the sum of all values by the last residual only. A piece with a value that is not finite is sent
    as it is, and its residual stays.

    Args:
      codec: The codec.
      num_values: Length of the vector.

    References:
      Seide et al. 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
      DNNs. Interspeech 2014. Karimireddy et al. Error Feedback Fixes SignSGD and other Gradient Compression Schemes.
      ICML 2019.
    """

    def __init__(self, codec: Codec, num_values: int):
        self._codec = codec
        self._residual = np.zeros(num_values, np.float32)

    def encode(self, values: np.ndarray, where: slice, pool: BufferPool) -> np.ndarray:
        """Encodes the piece `where` of a vector.

        Args:
          values: The piece.
          where: Where it lies in the vector.
          pool: Where the result's memory comes from.

        Returns:
          As `Codec.encode`.
        """
        residual = self._residual[where]
        corrected = float32_copy(values, pool)
        corrected += residual
        data = self._codec.encode(corrected, pool)
        decoded = pool.take(corrected.nbytes).view(np.float32)
        self._codec.decode(data, decoded)
        np.subtract(corrected, decoded, out=decoded)
        if np.isfinite(decoded).all():
            residual[:] = decoded
        return data
