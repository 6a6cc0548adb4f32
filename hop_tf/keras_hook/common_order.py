"""Gives shuffles without a seed the same order on all ranks, which take slices of a dataset's batches.

TensorFlow draws a seed for such a shuffle when the dataset is created. Each rank would have an order of its own: slices
would overlap, and rows would be left out. The seed of a dataset cannot be changed. So the shuffle, and all
transformations after it, are created again.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.data.ops import interleave_op, shuffle_op, structured_function
from tensorflow.python.data.util import nest

from hop_tf.keras_hook.pipelines import datasets_behind, functions_of

# Names of transformation classes whose arguments are attributes of the same names.
_TRANSFORMATIONS = frozenset(
    f"{name}Dataset"
    for name in (
        *("Batch", "Cache", "Concatenate", "Filter", "FlatMap", "Interleave", "Map", "Options", "PaddedBatch"),
        *("ParallelBatch", "ParallelInterleave", "ParallelMap", "Prefetch", "Repeat", "Restructured", "Shard", "Skip"),
        *("Take", "Unbatch", "Window", "Zip"),
    )
)
_ATTRIBUTES = {"dataset": "_input_dataset"}  # Attributes whose names differ from the argument's.
# Arguments without an attribute.
_GIVEN = {
    "options": lambda dataset: dataset.options(),
    "deterministic": lambda dataset: True,
    "buffer_size": lambda dataset: int(dataset._buffer_size),  # `prefetch` compares it with AUTOTUNE.
}


class CannotOrderError(ValueError):
    """A dataset is shuffled without a seed, and cannot be created again with one."""


def in_common_order(dataset: tf.data.Dataset, seed: int, *, takes_slices: bool) -> tf.data.Dataset:
    """Returns the dataset in an order that is the same on all ranks. Warns if its elements may come in any order.

    Args:
      dataset: The dataset.
      seed: Shuffles without a seed get seeds that are derived from this one.
      takes_slices: True if ranks take slices of each batch. False if they share files: only the order of the files must
        be the same then.

    Raises:
      CannotOrderError: If ranks take slices, and the dataset cannot be given a seed.
    """
    if not takes_slices:
        with contextlib.suppress(CannotOrderError):
            return with_common_order(dataset, seed)
        return dataset
    if names := without_fixed_order(dataset):
        logging.warning(
            "the order of the training data may differ between ranks, because of %s. Each rank trains on its slice of "
            "each batch, so ranks would miss some rows. Remove `deterministic=False`. With the tf.data service, give "
            "`distribute` the same `job_name` on all ranks.",
            " and ".join(sorted(set(names))),
        )
    return with_common_order(dataset, seed)


def with_common_order(dataset: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """Returns the dataset with seeds for all shuffles that have none. These seeds are derived from `seed`.

    Raises:
      CannotOrderError: If an unknown transformation follows such a shuffle, or a function contains such a shuffle.
    """
    for each in datasets_behind(dataset):
        if _shuffles_within(each):
            raise _cannot_order(f"`Dataset.shuffle` without a seed within the function of {_name(each)}")
    return _Reseeding(seed).again(dataset)


class _Reseeding:
    """Creates datasets again with seeds, each dataset once.

    Args:
      seed: The seed from which all others are derived.
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._made: dict[int, tf.data.Dataset] = {}

    def again(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset with seeds: the dataset itself if nothing in it is shuffled without a seed."""
        if id(dataset) not in self._made:
            self._made[id(dataset)] = self._make(dataset)
        return self._made[id(dataset)]

    def _make(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        inputs = dataset._inputs()
        changed = [self.again(each) for each in inputs] != inputs
        if isinstance(dataset, shuffle_op._ShuffleDataset) and (changed or not any(_seeds_of(dataset))):
            seeds = _seeds_of(dataset)
            seed = hash(seeds) % 2**31 if any(seeds) else self._random.getrandbits(31)
            reshuffles = dataset._reshuffle_each_iteration
            return self.again(inputs[0]).shuffle(dataset._buffer_size, seed, reshuffles)
        return self._with_inputs(dataset) if changed else dataset

    def _with_inputs(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        make = type(dataset)
        if _name(dataset) not in _TRANSFORMATIONS:
            raise _cannot_order(f"`Dataset.shuffle` without a seed, behind it {_name(dataset)}")
        names = [name for name in inspect.signature(make).parameters if _has(dataset, name)]
        made = make(**{name: self._argument(dataset, name) for name in names})
        if made.element_spec != dataset.element_spec:
            raise _cannot_order(f"`Dataset.shuffle` without a seed, behind it {_name(dataset)}")
        return made

    def _argument(self, dataset: tf.data.Dataset, name: str) -> Any:
        if name in _GIVEN:
            return _GIVEN[name](dataset)
        return nest.map_structure(self._value, getattr(dataset, _attribute(name)))

    def _value(self, value: Any) -> Any:
        if isinstance(value, tf.data.Dataset):
            return self.again(value)
        if isinstance(value, structured_function.StructuredFunctionWrapper):
            return value._func
        return value


def _has(dataset: tf.data.Dataset, name: str) -> bool:
    return name in _GIVEN or hasattr(dataset, _attribute(name))


def _attribute(name: str) -> str:
    return _ATTRIBUTES.get(name, f"_{name}")


def _seeds_of(shuffle: tf.data.Dataset) -> tuple[int, int]:
    """The two seeds of a shuffled dataset; zeros if it has none."""
    return int(shuffle._seed), int(shuffle._seed2)


def order_of(dataset: tf.data.Dataset) -> str:
    """The seeds of all shuffles in a dataset, as a string. Ranks with different seeds have different orders."""
    shuffles = [each for each in datasets_behind(dataset) if isinstance(each, shuffle_op._ShuffleDataset)]
    return str([_seeds_of(each) for each in shuffles])


def _way_of(dataset: tf.data.Dataset) -> str | None:
    """A transformation's `deterministic` setting: "true", "false" or "default"; None if it has no such setting."""
    if isinstance(dataset, data_service_ops._DataServiceDatasetV2):
        return "false"
    default = "default" if isinstance(dataset, interleave_op._ParallelInterleaveDataset) else None
    return getattr(dataset, "_deterministic", default)


def without_fixed_order(dataset: tf.data.Dataset) -> list[str]:
    """Names the transformations whose elements may come in a different order on each rank."""
    any_order = dataset.options().deterministic is False
    ways = {"false", "default"} if any_order else {"false"}
    return [_name(each) for each in datasets_behind(dataset) if _way_of(each) in ways]


def _shuffles_within(dataset: tf.data.Dataset) -> bool:
    """True if the function of a transformation, such as `interleave`, shuffles without a seed.

    Such a shuffle has two seed operands that are constants of 0. With a seed or a global seed (even 0), TensorFlow
    computes the second operand, so the operands are not both a constant 0.
    """
    return any(
        node.op.startswith("ShuffleDataset") and all(_constant(nodes, name) == 0 for name in node.input[2:4])
        for nodes in functions_of(dataset)
        for node in nodes
    )


def _constant(nodes: Any, name: str) -> int | None:
    """The value of an operand; None if it is computed."""
    name = name.partition(":")[0]
    node = next((each for each in nodes if each.name == name and each.op == "Const"), None)
    return None if node is None else tf.make_ndarray(node.attr["value"].tensor).item()


def _name(dataset: tf.data.Dataset) -> str:
    return type(dataset).__name__.strip("_")


def _cannot_order(received: str) -> CannotOrderError:
    return CannotOrderError(
        "the order of a dataset must be the same on all ranks, because each rank trains on its slice of every batch. "
        "If the orders differ, ranks miss some rows. Give `Dataset.shuffle` the same seed on all ranks: "
        f"`dataset.shuffle(buffer_size, seed=0)`. Received: {received}."
    )
