"""How ranks share the training data."""

from __future__ import annotations

import tensorflow as tf


def slice_global_batches(dataset: tf.data.Dataset, rank: int, world_size: int) -> tf.data.Dataset:
    """Keeps this rank's slice of every global batch.

    Rank r of N takes the rows n * r // N up to max(n * (r + 1) // N, n * r // N + 1) of a batch of n rows: contiguous
    slices that differ by at most one row. A batch with fewer rows than ranks is shared, so that no rank sees an empty
    batch and all ranks take the same number of steps.

    Args:
      dataset: Yields global batches: any structure of tensors, also sparse or ragged, with the batch as first
        dimension.
      rank: This rank.
      world_size: Number of ranks.

    Returns:
      A dataset of the same cardinality.
    """

    def slice_batch(*batch):
        batch = batch[0] if len(batch) == 1 else batch
        leaves = [leaf for leaf in tf.nest.flatten(batch) if not _is_optional(leaf)]
        if not leaves:
            return batch
        num_rows = _num_rows(leaves[0])
        start = num_rows * rank // world_size
        end = tf.maximum(num_rows * (rank + 1) // world_size, start + 1)
        return tf.nest.map_structure(lambda leaf: _rows(leaf, start, end), batch)

    sliced = dataset.map(slice_batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return sliced.prefetch(tf.data.AUTOTUNE)


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turns tf.data's autotuner off for `dataset`, unless the user's options turned it on or off.

    The autotuner's thread (TensorFlow 2.21) can miss its own cancellation and sleep on for up to a minute, and whoever
    drops the iterator waits for it: one rank's `fit` would end that much later, and an interrupt or a lost peer be
    noticed that much later. `tf.data.AUTOTUNE` then means as many parallel calls as there are cores, from the start.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _is_optional(leaf) -> bool:
    """Keras hands over absent parts of a batch (no sample weights, say) as empty optionals."""
    return isinstance(leaf, tf.experimental.Optional)


def _num_rows(leaf) -> tf.Tensor:
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    return tf.shape(leaf, out_type=tf.int64)[0]


def _rows(leaf, start: tf.Tensor, end: tf.Tensor):
    if _is_optional(leaf):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        offset = tf.concat([[start], tf.zeros_like(leaf.dense_shape[1:])], axis=0)
        size = tf.concat([[end - start], leaf.dense_shape[1:]], axis=0)
        return tf.sparse.slice(leaf, offset, size)
    return leaf[start:end]
