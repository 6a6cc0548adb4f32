"""Products of a matrix with a few vectors, for factors of low rank.

The kernels compute in an order that is the same on all processors, so that ranks on different machines get equal bits.
NumPy's products start threads of their own, which slow down several ranks on one machine.

Matrices and vectors are C-contiguous float32: a matrix [m, k], and vectors as rows, [r, m] or [r, k].
"""

from __future__ import annotations

import itertools

import numpy as np

from hop_tf.ops import native
from hop_tf.ops.native import address


def times_vectors(matrix: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Returns the products of a matrix [m, k] and vectors [r, k]: [r, m]."""
    if native.kernels() is None:
        return vectors @ matrix.T
    products = np.empty((len(vectors), len(matrix)), np.float32)
    native.call("TimesVectors", address(matrix), *matrix.shape, address(vectors), len(vectors), address(products))
    return products


def vectors_times(vectors: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Returns the products of vectors [r, m] and a matrix [m, k]: [r, k]."""
    if native.kernels() is None:
        return vectors @ matrix
    products = np.empty((len(vectors), matrix.shape[1]), np.float32)
    native.call("VectorsTimes", address(vectors), len(vectors), address(matrix), *matrix.shape, address(products))
    return products


def add_product(left: np.ndarray, right: np.ndarray, matrix: np.ndarray, scale: float = 1.0) -> None:
    """Adds scale times left^T right to a matrix [m, k]; `left` is [r, m], and `right` is [r, k]."""
    if native.kernels() is None:
        matrix += np.float32(scale) * (left.T @ right)
    else:
        native.call("AddProduct", scale, address(left), address(right), len(left), *matrix.shape, address(matrix))


def orthonormalize(vectors: np.ndarray) -> None:
    """Makes vectors [r, m] orthogonal, and of length 1, in place.

    A vector in the span of the earlier ones is replaced by a vector outside of that span. If m earlier ones span the
    whole space, it becomes 0.
    """
    if native.kernels() is not None:
        native.call("Orthonormalize", address(vectors), *vectors.shape)
        return
    for number, vector in enumerate(vectors):
        size, earlier = len(vector), vectors[:number]
        axes = (np.eye(1, size, axis, dtype=np.float32)[0] for axis in range(size))
        found = (_reduced(_reduced(each, earlier), earlier) for each in itertools.chain([vector.copy()], axes))
        vector[:] = next((each for each in found if each is not None), 0)


def _reduced(vector: np.ndarray | None, earlier: np.ndarray) -> np.ndarray | None:
    """A vector of length 1 that is orthogonal to earlier ones; None if only rounding errors are left."""
    if vector is None:
        return None
    left = vector - (earlier @ vector) @ earlier
    length = np.linalg.norm(left)
    return left / length if length > 1e-6 * np.linalg.norm(vector) else None
