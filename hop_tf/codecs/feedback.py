"""`ErrorFeedback`: keeps the loss of a codec for the next vector."""

from __future__ import annotations

import numpy as np

from hop_tf.codecs.base import Codec, take_float32
from hop_tf.tensors.buffers import BufferPool


class ErrorFeedback:
    """Encodes the pieces of a vector, and adds the loss of each piece to the same piece of the next vector.

    With residual e: v = values + e; the codec sends encode(v); e = v - decode(encode(v)). So the sum of all sent values
    differs from the sum of all values by the last residual only. A piece with a value that is not finite leaves its
    residual unchanged.

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
        """Encodes a piece that is certain to be sent: calls `try_encode`, keeps the loss, and returns the data."""
        data, lost = self.try_encode(values, where, pool)
        self.keep(lost, where)
        return data

    def try_encode(
        self, values: np.ndarray, where: slice, pool: BufferPool, scale: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encodes the piece `where` of a vector, which may turn out not to be sent. Does not keep the loss.

        Args:
          values: The piece.
          where: The piece's slice of the vector.
          pool: Provides the result's memory.
          scale: Factor on the piece and its residual before encoding. The loss is divided by the factor again, so that
            the same residual fits a sum, its mean, and one of its terms. Default 1.

        Returns:
          The result of `Codec.encode`, and the loss. Pass the loss to `keep` if the data was sent.
        """
        corrected = take_float32(values, pool)
        np.add(values, self._residual[where], out=corrected, dtype=corrected.dtype)
        if scale != 1:
            corrected *= scale
        data = self._codec.encode(corrected, pool)
        decoded = pool.take(corrected.nbytes).view(np.float32)
        self._codec.decode(data, decoded)
        np.subtract(corrected, decoded, out=decoded)
        if scale != 1:
            decoded /= scale
        return data, decoded

    def take(self) -> np.ndarray:
        """Removes and returns the residual."""
        residual, self._residual = self._residual, np.zeros_like(self._residual)
        return residual

    def keep(self, lost: np.ndarray, where: slice) -> None:
        """Keeps the loss of the piece `where` for the next vector."""
        if np.isfinite(lost).all():
            self._residual[where] = lost
