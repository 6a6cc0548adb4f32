"""Shares the training data among ranks."""

from __future__ import annotations

import contextlib
import enum
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.distribute import input_ops

from hop_tf.keras_hook.batch_rows import check_rows, has_rows, note_equal_rows, num_rows, require_equal_rows
from hop_tf.keras_hook.common_order import in_common_order, order_of
from hop_tf.keras_hook.pipelines import reads_generator, reads_service, reads_workers, without_prefetch
from hop_tf.keras_hook.roster import Roster
from hop_tf.keras_hook.shares import BatchShares, equal_slice

# The seed of shuffles in a custom loop: ranks have not agreed on a seed yet when a dataset is distributed.
_SEED_OF_LOOPS = 0


class _Sharding(enum.Enum):
    """The ways in which ranks share a dataset."""

    NONE = enum.auto()
    BY_SLICES = enum.auto()
    OF_GENERATOR = enum.auto()  # By slices, too.
    BY_POLICY = enum.auto()


class DataSharding:
    """Takes this rank's part of the datasets that Keras, or the user, has distributed.

    The first dataset of a `fit` is the training data, which ranks share. Every rank takes all of the data for
    validation and prediction.

    Args:
      rank: This rank.
      world_size: Number of ranks.
      note_first: Called with a digest of the first batch of the training data, in each epoch.
      shares: The part of each batch that each rank takes. Default: equal parts.
      seed: Returns the seed for shuffles in the running `fit`.
      roster: The ranks that share the batches of `fit`. Default: all ranks share them.
      slices_in_step: True if `fit` gets whole batches, and a step takes this rank's rows by `own_rows`. A change of the
        roster then takes effect in the same step on all ranks. If False, batches that were read ahead keep their slices
        when the roster changes. Default False.

    Attributes:
      num_batches: Number of batches in an epoch of the training data that ranks share in the running `fit`; 0 if not
        known.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        note_first: Callable[[int], None],
        shares: BatchShares | None = None,
        seed: Callable[[], int] = lambda: _SEED_OF_LOOPS,
        roster: Roster | None = None,
        *,
        slices_in_step: bool = False,
    ):
        self.num_batches = 0
        self._awaits_first = False
        self._counts_next = False
        self._rank = rank
        self._world_size = world_size
        self._note_first = note_first
        self._shares = shares
        self._seed = seed
        self._roster = roster
        self._slices_in_step = slices_in_step
        self._of_next = _Sharding.NONE
        self._whole: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()
        self._inside_keras = 0

    def begin_fit(self, x: object) -> None:
        """Called when a `fit` on `x` begins."""
        self._awaits_first = True
        if isinstance(x, tf.data.Dataset):
            self._of_next = _Sharding.NONE if x in self._whole else _Sharding.BY_POLICY
        elif isinstance(x, types.GeneratorType):
            self._of_next = _Sharding.OF_GENERATOR
        else:  # Keras makes a dataset of `x`, and sets a policy that the user has not chosen.
            self._of_next = _Sharding.BY_SLICES

    def end_fit(self) -> None:
        """Called when the `fit` has ended, even if it has never distributed its data."""
        self._of_next = _Sharding.NONE
        self.num_batches = 0
        if self._roster is not None:
            self._roster.use(False)

    def count_batches(self, number: int | None) -> bool:
        """Called when Keras has counted the batches of the dataset that it has distributed last.

        Returns:
          True if that is the first dataset of the running `fit`.
        """
        is_first, self._awaits_first = self._awaits_first, False
        if self._counts_next:
            self._counts_next = False
            self.num_batches = number or 0
        return is_first

    @property
    def is_inside_keras(self) -> bool:
        """True if `fit`, `evaluate` or `predict` runs."""
        return self._inside_keras > 0

    @contextlib.contextmanager
    def keras_call(self) -> Iterator[None]:
        """Surrounds Keras's own calls. Within them, ranks share only the training data of `fit`."""
        self._inside_keras += 1
        try:
            yield
        finally:
            self._inside_keras -= 1

    def take_whole(self, dataset: tf.data.Dataset) -> None:
        """Makes `fit` use this dataset as it is: the dataset is this rank's part already."""
        self._whole.add(dataset)

    def part_of(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """This rank's part of a distributed dataset; all of it if Keras distributes data other than training data."""
        sharding = self._of_next if self._inside_keras else _Sharding.BY_POLICY
        self._of_next = _Sharding.NONE
        if self._world_size == 1:
            return dataset
        part = without_autotuning(self._share(dataset, sharding))
        if not self._inside_keras:  # The user's own call.
            self.take_whole(part)
        return part

    def _share(self, dataset: tf.data.Dataset, sharding: _Sharding) -> tf.data.Dataset:
        if sharding is _Sharding.NONE:
            return dataset
        policy = dataset.options().experimental_distribute.auto_shard_policy
        # Under DATA every rank reads all data and keeps its share, as with slices. TensorFlow's own sharding would
        # give empty batches to some ranks.
        by_slices = (tf.data.experimental.AutoShardPolicy.AUTO, tf.data.experimental.AutoShardPolicy.DATA)
        if sharding is _Sharding.BY_POLICY and policy is not tf.data.experimental.AutoShardPolicy.OFF:
            seed = self._seed() if self._inside_keras else _SEED_OF_LOOPS
            dataset = in_common_order(dataset, seed, takes_slices=policy in by_slices)
        if sharding is _Sharding.BY_POLICY and policy not in by_slices:
            if self._inside_keras and policy is tf.data.experimental.AutoShardPolicy.OFF:
                _check_endless(dataset)
            return shard_by_policy(dataset, self._rank, self._world_size, self._shares)
        if sharding is _Sharding.OF_GENERATOR:  # Keras's prefetched batches would be lost with the iterator.
            dataset = without_prefetch(dataset)
        self._counts_next = self._inside_keras > 0
        note_first = self._note_first if self._inside_keras else None
        roster = self._roster if self._inside_keras else None
        if roster is not None:
            roster.use(True)
        return slice_global_batches(
            dataset,
            self._rank,
            self._world_size,
            note_first,
            self._shares,
            roster,
            takes_all=roster is not None and self._slices_in_step,
        )

    def own_rows(self, batch: Any) -> Any:
        """Emits the ops that take this rank's rows of a training step's input, unless `part_of` has taken them.

        Args:
          batch: Any structure of tensors. Other leaves are left as they are.
        """
        if self._roster is None or not self._slices_in_step:
            return batch
        leaf = next((leaf for leaf in tf.nest.flatten(batch) if _is_sliceable(leaf)), None)
        if leaf is None:
            return batch
        with tf.device("/cpu:0"):
            return _part(batch, *self._roster.slice_in_step(num_rows(leaf)), is_sliced=_is_sliceable)


def _check_endless(dataset: tf.data.Dataset) -> None:
    """Raises ValueError if a dataset is finite under OFF: Keras counts undivided batches, and would skip some parts."""
    num_batches = int(dataset.cardinality())
    if num_batches >= 0:
        raise ValueError(
            "under AutoShardPolicy.OFF, every rank reads the whole dataset in smaller batches. There are more of these "
            "batches than Keras has counted. Repeat the dataset (`Dataset.repeat()`) and give `steps_per_epoch`. "
            f"Received: a dataset of {num_batches} batches."
        )


def slice_global_batches(
    dataset: tf.data.Dataset,
    rank: int,
    world_size: int,
    note_first: Callable[[int], None] | None = None,
    shares: BatchShares | None = None,
    roster: Roster | None = None,
    *,
    takes_all: bool = False,
) -> tf.data.Dataset:
    """Keeps this rank's slice of every global batch.

    Rank r of N takes the rows n * r // N up to max(n * (r + 1) // N, n * r // N + 1) of a batch of n rows. These slices
    are contiguous, and their sizes differ by at most one row. If a batch has fewer rows than ranks, some ranks take the
    same row. So no rank sees an empty batch, and all ranks take the same number of steps. With `shares`, slices are in
    proportion to the shares.

    Args:
      dataset: Yields global batches: any structure of tensors, also sparse or ragged, with the batch as first
        dimension.
      rank: This rank.
      world_size: Number of ranks.
      note_first: Called with a digest of the first global batch of each epoch, on a thread of TensorFlow.
      shares: The part of each batch that each rank takes. Default: equal parts.
      roster: The ranks that share a batch when it is sliced, with their shares. Default: all ranks, with `shares`.
      takes_all: True to keep whole batches here. The rank takes its rows of them later. Default False.

    Returns:
      A dataset of the same cardinality.
    """

    def slice_of(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if takes_all:  # A slice of all rows, so that a part that cannot be sliced raises an error.
            return tf.constant(0, tf.int64), rows
        if roster is not None:
            return roster.slice_of(rows)
        return equal_slice(rows, rank, world_size) if shares is None else shares.slice_of(rows)

    # AutoGraph's conversion takes seconds, at every start and every restart of a rank.
    @tf.autograph.experimental.do_not_convert
    def slice_batch(index, batch):
        leaves = [leaf for leaf in tf.nest.flatten(batch) if has_rows(leaf)]
        if not leaves:
            return batch
        require_equal_rows(batch)
        if note_first is not None:
            tf.cond(tf.equal(index, 0), lambda: _note_digest(batch, note_first, order), lambda: None)
        start, end = slice_of(num_rows(leaves[0]))
        return _part(batch, start, end)

    check_rows(dataset.element_spec)
    order = order_of(dataset)

    def slices(**arguments: object) -> tf.data.Dataset:
        return note_equal_rows(dataset.enumerate().map(slice_batch, **arguments))

    # With automatic shares, a batch is sliced right before its step, so that shares change in the same step on all
    # ranks. A generator cannot be rewound: batches read ahead are lost with the iterator, and each rank would lose
    # different ones.
    are_late = shares is not None and shares.is_automatic and not takes_all
    if are_late or reads_generator(dataset):
        return slices().with_options(_without_prefetching())
    if reads_workers(dataset):
        return slices()
    return slices(num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def _note_digest(batch: Any, note: Callable[[int], None], order: str) -> None:
    """Emits the op that calls `note` with a digest of `order` and the batch's targets.

    Without targets, the whole batch counts. The order is included because targets may be the same in another order.
    Inputs are left out because each rank may augment them at random.
    """
    has_targets = isinstance(batch, (tuple, list)) and len(batch) in (2, 3)
    leaves = tf.nest.flatten(batch[1] if has_targets else batch, expand_composites=True)
    parts = [
        tf.io.serialize_tensor(leaf) for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.variant
    ]
    digest = tf.strings.to_hash_bucket_fast(tf.strings.join([*parts, order]), 2**62)
    tf.numpy_function(tf.autograph.experimental.do_not_convert(lambda value: note(int(value))), [digest], [])


def _without_prefetching() -> tf.data.Options:
    """Options that keep TensorFlow from reading batches ahead."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return options


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turns tf.data's autotuner off for `dataset`, unless the user's options turned it on or off.

    The autotuner's thread (TensorFlow 2.21) can miss its own cancellation and sleep on for up to a minute. Deleting the
    iterator waits for this thread. The end of one rank's `fit`, an interrupt or the loss of a peer could be delayed by
    up to a minute. Without the autotuner, `tf.data.AUTOTUNE` means as many parallel calls as there are cores, from the
    start.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _is_sliceable(leaf) -> bool:
    """True if a step may slice `leaf`. A rank's own data may have leaves without rows, which stay as they are."""
    is_tensor = isinstance(leaf, (tf.Tensor, tf.SparseTensor, tf.RaggedTensor))
    return is_tensor and leaf.shape.rank != 0


def _rows(leaf, start: tf.Tensor, end: tf.Tensor):
    if isinstance(leaf, tf.SparseTensor):
        offset = tf.concat([[start], tf.zeros_like(leaf.dense_shape[1:])], axis=0)
        size = tf.concat([[end - start], leaf.dense_shape[1:]], axis=0)
        return tf.sparse.slice(leaf, offset, size)
    return leaf[start:end]


def shard_by_policy(
    dataset: tf.data.Dataset, rank: int, world_size: int, shares: BatchShares | None = None
) -> tf.data.Dataset:
    """Takes a rank's part of a dataset by its `AutoShardPolicy`, as `MultiWorkerMirroredStrategy` does."""
    check_rows(dataset.element_spec)
    batch_size = int(distribute.compute_batch_size(dataset))
    if batch_size < 0 and reads_service(dataset):  # The service hides the batch size.
        return _divided_batches(dataset, world_size, shares)
    if batch_size < 0:
        raise ValueError(
            "A dataset with an AutoShardPolicy must be batched with `Dataset.batch`, so that its global batch can be "
            f"divided. Received: element_spec={dataset.element_spec}."
        )
    if shares is None:
        batch_sizes = distribute.batch_sizes_for_worker(batch_size, world_size, 1, rank)
    else:
        batch_sizes = _shared_batch_size(dataset, batch_size, shares)
    return input_ops.auto_shard_dataset(dataset.rebatch(batch_sizes), world_size, rank, world_size)


def _divided_batches(dataset: tf.data.Dataset, number: int, shares: BatchShares | None) -> tf.data.Dataset:
    """Divides each batch into `number` parts. In a tf.data service job that ranks share, each goes to one rank."""
    if shares is not None:
        raise ValueError(
            "`batch_shares` must be None with a job of the tf.data service that ranks share: the service decides which "
            f"rank reads a batch. Received: batch_shares={shares}."
        )

    @tf.autograph.experimental.do_not_convert
    def parts(_: tf.Tensor, batch: Any) -> tf.data.Dataset:
        require_equal_rows(batch)
        rows = count_rows(batch)
        part = tf.autograph.experimental.do_not_convert(lambda index: _part(batch, *equal_slice(rows, index, number)))
        return tf.data.Dataset.range(number).map(part)

    return dataset.enumerate().flat_map(parts)


def _shared_batch_size(dataset: tf.data.Dataset, batch_size: int, shares: BatchShares) -> tf.Tensor:
    """This rank's part of the batch size, if each rank reads all of the data."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if shares.is_automatic or policy is not tf.data.experimental.AutoShardPolicy.OFF:
        raise ValueError(
            "`batch_shares` must be None with this AutoShardPolicy: ranks take files, which are divided equally, or "
            "batches of one size. With AUTO or DATA, hop_tf divides each batch by the shares; with OFF, a list of "
            f"shares works. Received: {policy}, batch_shares={shares}."
        )
    start, end = shares.slice_of(tf.constant(batch_size, tf.int64))
    return end - start


def divide(batch: Any, number: int) -> tuple[list, list]:
    """Divides a batch into contiguous parts whose sizes differ by at most one row. Each part has at least one row.

    If a batch has fewer rows than parts, some rows belong to two parts. One of these parts then has the share 0.

    Args:
      batch: Any structure of tensors (also sparse or ragged), arrays, and leaves without rows: None, or an optional.
      number: Number of parts.

    Returns:
      The parts, and the share of the rows of each part.
    """
    check_rows(batch)
    rows = count_rows(batch)
    if rows is None:
        return [batch] * number, [1 / number] * number
    bounds = [rows * index // number for index in range(number + 1)]
    most = max if isinstance(rows, int) else tf.maximum
    pairs = list(itertools.pairwise(bounds))
    parts = [_part(batch, start, most(end, start + 1)) for start, end in pairs]
    return parts, [(end - start) / rows for start, end in pairs]


def count_rows(batch: Any) -> int | tf.Tensor | None:
    """The number of rows of a batch for `divide`: an int if known, otherwise a tensor; None if no leaf has rows."""
    leaf = next((leaf for leaf in tf.nest.flatten(batch) if has_rows(leaf)), None)
    if leaf is None or leaf.shape[0] is not None:
        return None if leaf is None else int(leaf.shape[0])
    return num_rows(leaf)


def without_rows(batch: Any) -> Any:
    """The same structure of tensors, without any row."""
    return _part(batch, 0, 0)


def _part(batch: Any, start: int | tf.Tensor, end: int | tf.Tensor, is_sliced: Callable[[Any], bool] = has_rows) -> Any:
    return tf.nest.map_structure(lambda leaf: _rows(leaf, start, end) if is_sliced(leaf) else leaf, batch)
