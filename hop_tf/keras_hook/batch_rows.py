"""Checks that all parts of a batch have the same number of rows: ranks and devices share a batch by its rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, prefetch_op
from tensorflow.python.util import nest

_RULE = (
    "all parts of a batch must have the same number of rows, because ranks and devices share a batch by its rows. If "
    "parts differ on purpose, as the nodes and edges of a graph do, let each rank make its own batches, and use one "
    "device per rank: `fit(strategy.distribute_datasets_from_function(make_dataset))`. Received"
)
_NAMES_OF_PARTS = ("x", "y", "sample_weight")


def check_rows(structure: Any) -> bool:
    """Raises ValueError if static shapes show a scalar among the parts of a batch, or different numbers of rows.

    Args:
      structure: A batch, or the `element_spec` of a dataset of batches. Absent parts (None or optionals) do not count.

    Returns:
      True if the numbers of rows are known to be equal. Otherwise each batch has to be checked.
    """
    rows = [(name, _static_rows(leaf)) for name, leaf in _named_parts(structure)]
    known = {number for _, number in rows if number is not None}
    if len(known) > 1 or "no" in known:
        received = ", ".join(f"{name} with {number} rows" for name, number in rows if number is not None)
        raise ValueError(f"{_RULE}: {received}.")
    return len(rows) < 2 or all(number is not None for _, number in rows)


def require_equal_rows(batch: Any) -> None:
    """Emits an assertion that all parts of a batch have the same number of rows, unless static shapes show it."""
    if check_rows(batch):
        return
    names, parts = zip(*_named_parts(batch), strict=True)
    rows = tf.stack([num_rows(part) for part in parts])
    message = f"{_RULE}, in the order of {', '.join(names)}, these numbers of rows:"
    tf.debugging.Assert(tf.reduce_all(tf.equal(rows, rows[0])), [message, rows], summarize=len(names))


# Datasets that check their own batches.
_checked: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()


def note_equal_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset, and records that its function checks each batch by `require_equal_rows`."""
    _checked.add(dataset)
    return dataset


def with_equal_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset that fails at a batch whose parts have different numbers of rows.

    Batches are checked before they are prefetched, so that no step waits for the check.
    """
    if check_rows(dataset.element_spec) or dataset in _checked:
        return dataset
    if isinstance(dataset, prefetch_op._PrefetchDataset):
        return _checked_before(dataset, lambda checked: checked.prefetch(int(dataset._buffer_size)))
    if isinstance(dataset, dataset_ops._OptionsDataset):
        return _checked_before(dataset, lambda checked: checked.with_options(dataset.options()))

    def check(_: tf.Tensor, batch: Any) -> Any:
        require_equal_rows(batch)
        return batch

    return note_equal_rows(dataset.enumerate().map(tf.autograph.experimental.do_not_convert(check)))


def _checked_before(dataset: tf.data.Dataset, again: Callable[[tf.data.Dataset], tf.data.Dataset]) -> tf.data.Dataset:
    """Checks batches before a dataset's last transformation, which `again` repeats, unless they were checked."""
    (before,) = dataset._inputs()
    checked = with_equal_rows(before)
    return dataset if checked is before else again(checked)


def is_optional(leaf: Any) -> bool:
    """True for an absent part of a batch. Keras passes an empty optional for missing sample weights, for instance."""
    return isinstance(leaf, tf.experimental.Optional | tf.OptionalSpec)


def has_rows(leaf: Any) -> bool:
    """True for a part of a batch that is present."""
    return not (leaf is None or is_optional(leaf) or type(leaf).__name__ == "NoneTensorSpec")


def num_rows(leaf: Any) -> tf.Tensor:
    """Emits the ops that compute the number of rows of a part of a batch: an int64 scalar."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    return tf.shape(leaf, out_type=tf.int64)[0]


def _static_rows(leaf: Any) -> int | str | None:
    """The number of rows, None if it is not known, "no" for a scalar."""
    shape = tf.TensorShape(getattr(leaf, "shape", None))
    if shape.rank == 0:
        return "no"
    return None if shape.rank is None else shape[0]


def _named_parts(structure: Any) -> list[tuple[str, Any]]:
    """Each present part of a batch with its name, such as x['edges']."""
    leaves = nest.flatten_with_tuple_paths(structure)
    is_tuple = isinstance(structure, tuple | list) and len(structure) <= len(_NAMES_OF_PARTS)
    names = _NAMES_OF_PARTS if is_tuple else ()
    return [(_name(path, names), leaf) for path, leaf in leaves if has_rows(leaf)]


def _name(path: tuple, names: tuple[str, ...]) -> str:
    first, rest = (names[path[0]], path[1:]) if names and path else ("the batch" if not path else "", path)
    return first + "".join(f"[{key!r}]" for key in rest)
