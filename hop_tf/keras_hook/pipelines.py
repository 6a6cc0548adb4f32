"""The datasets behind a `tf.data.Dataset`, and the operations in their functions."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.data.ops import prefetch_op

_PYTHON_GENERATOR = "GeneratorDataset"


def datasets_behind(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all datasets that it is made from, the last transformation first."""
    yield dataset
    for each in dataset._inputs():
        yield from datasets_behind(each)


def functions_of(dataset: tf.data.Dataset) -> list[list]:
    """The operations (`NodeDef`s) of each function of a transformation, such as the one given to `map`."""
    graphs = [wrapper.function.graph.as_graph_def() for wrapper in dataset._functions()]
    nested = [list(function.node_def) for graph in graphs for function in graph.library.function]
    return [*(list(graph.node) for graph in graphs), *nested]


def _operations(dataset: tf.data.Dataset) -> set[str]:
    return {node.op for nodes in functions_of(dataset) for node in nodes}


def reads_generator(dataset: tf.data.Dataset) -> bool:
    """True if data come from a Python generator (`Dataset.from_generator`), which may be impossible to rewind."""
    return any(_PYTHON_GENERATOR in _operations(each) for each in datasets_behind(dataset))


def without_prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without its `prefetch`, if that is its last transformation."""
    return dataset._inputs()[0] if isinstance(dataset, prefetch_op._PrefetchDataset) else dataset


def reads_service(dataset: tf.data.Dataset) -> bool:
    """True if data come from the tf.data service."""
    return any(isinstance(each, data_service_ops._DataServiceDatasetV2) for each in datasets_behind(dataset))


def reads_workers(dataset: tf.data.Dataset) -> bool:
    """True if Keras made the dataset from a PyDataset with workers.

    Such a dataset prefetches by itself. Batches read before an epoch begins belong to the workers' previous epoch.
    """
    options = dataset.options()
    return options.autotune.enabled is False and options.threading.private_threadpool_size == 1
