"""The order in which `fit` shuffles training data: the same on all ranks, so that their slices do not overlap."""

from __future__ import annotations

import contextlib
import functools
import queue
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.utils import module_utils
from tensorflow.python.eager import context


def draw_seed(session: int) -> int:
    """Returns a seed for a session, derived from the user's `tf.random.set_seed`. Without that, the seed is random.

    Args:
      session: Number of the session. Each session has a seed of its own.
    """
    chosen = context.global_seed()
    return secrets.randbits(62) if chosen is None else random.Random(f"{chosen} {session}").getrandbits(62)


@contextlib.contextmanager
def shuffled_alike(given: dict[str, Any], seed: int | None) -> Iterator[None]:
    """Surrounds Keras's `fit`, which then shuffles arrays and PyDatasets in an order that `seed` determines.

    Args:
      given: The arguments of `fit` by name. If `x` is a PyDataset of known length, it is replaced.
      seed: The seed, or None to let Keras shuffle as usual.
    """
    if seed is None or not given.get("shuffle", True):
        yield
        return
    if isinstance(given.get("x"), keras.utils.PyDataset) and given["x"].num_batches is not None:
        given["x"] = Shuffled(given["x"], seed)
        given["shuffle"] = False
    _wrap_keras()
    _of_this_thread.seed = seed
    try:
        yield
    finally:
        _of_this_thread.seed = None


class Shuffled(keras.utils.PyDataset):
    """The batches of a PyDataset in an order that a seed determines, and that differs from epoch to epoch.

    Args:
      dataset: The PyDataset, of known length.
      seed: The seed.
    """

    def __init__(self, dataset: keras.utils.PyDataset, seed: int):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._random = random.Random(seed)
        self.draw_order()

    def draw_order(self) -> None:
        """Draws the order of another epoch."""
        self._order = list(range(self._dataset.num_batches))
        self._random.shuffle(self._order)

    @property
    def num_batches(self) -> int:
        return self._dataset.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._order[index]]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()  # This may change its length.
        if self.workers > 1 or (self.workers and self.use_multiprocessing):
            self.draw_order()  # The workers are idle now, and start again before the next iterator is created.


class _OfThread(threading.local):
    """The seed of the dataset that Keras makes next in this thread."""

    seed: int | None = None


_of_this_thread = _OfThread()
_replaces = threading.Lock()


@functools.cache
def _wrap_keras() -> None:
    """Wraps Keras's creation of datasets and iterators, once. Only the training data of a `fit` changes."""
    ArrayDataAdapter.get_tf_dataset = _wrapped_get_tf_dataset(ArrayDataAdapter.get_tf_dataset)
    TFEpochIterator._get_iterator = _wrapped_get_iterator(TFEpochIterator._get_iterator)
    TFEpochIterator.reset = _wrapped_reset(TFEpochIterator.reset)


def _wrapped_get_tf_dataset(method: Callable) -> Callable:
    @functools.wraps(method)
    def get_tf_dataset(self):
        seed, _of_this_thread.seed = _of_this_thread.seed, None
        if seed is None:
            return method(self)
        # The adapter lives as long as the dataset. A seed of tf.random.shuffle would give all epochs the same order.
        self.num_iterators = tf.Variable(0, dtype=tf.int64, trainable=False)

        def shuffle(indices: tf.Tensor) -> tf.Tensor:
            # If Keras shuffles within each batch, the first index of a batch, if any, gives the batch its own order.
            key = tf.stack([seed ^ tf.reduce_sum(indices[:1]), self.num_iterators.read_value()])
            return tf.random.experimental.stateless_shuffle(indices, key)

        with _replaces:  # The method uses `module_utils.tensorflow`.
            tensorflow = module_utils.tensorflow
            module_utils.tensorflow = _With(tensorflow, random=_With(tf.random, shuffle=shuffle))
            try:
                return method(self)
            finally:
                module_utils.tensorflow = tensorflow

    return get_tf_dataset


def _wrapped_get_iterator(method: Callable) -> Callable:
    """Counts iterators, to give each its own order. Elements do not count: tf.data reads some that Keras never uses."""

    @functools.wraps(method)
    def get_iterator(self):
        adapter = self.data_adapter
        if hasattr(adapter, "num_iterators"):
            adapter.num_iterators.assign_add(1)
        elif _is_shuffled(adapter) and adapter.enqueuer is None:
            adapter.py_dataset.draw_order()
        return method(self)

    return get_iterator


def _wrapped_reset(method: Callable) -> Callable:
    """Drops batches that workers have loaded before a reset.

    Keras takes a batch to build the model, and begins anew. Under any strategy (Keras 3.15), the batches that workers
    had loaded would come first, and then all batches again.
    """

    @functools.wraps(method)
    def reset(self):
        method(self)
        if _is_shuffled(self.data_adapter) and self.data_adapter.enqueuer is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self.data_adapter.enqueuer.ready_queue.get_nowait()

    return reset


def _is_shuffled(adapter: Any) -> bool:
    return isinstance(getattr(adapter, "py_dataset", None), Shuffled)


class _With:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **replaced: Any):
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
