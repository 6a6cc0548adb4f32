"""The first batch of `fit`, `evaluate` or `predict`: Keras builds the model from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from hop_tf.keras_hook.data import count_rows, divide


def build_from_first(
    build: Callable[[Any], None] | None,
    batches: Iterator,
    model: keras.Model,
    context: tf.distribute.InputContext,
    num_devices: int,
    own_rows: Callable[[Any], Any],
) -> None:
    """Builds a model from the part of the first batch that a device gets.

    Args:
      build: Builds the model from a batch; None if the model has nothing to build.
      batches: Keras's iterator over an epoch.
      model: The model.
      context: This rank's index, and the number of ranks.
      num_devices: Number of devices of this rank.
      own_rows: Takes the rows of this rank from a batch, as a training step does.

    Raises:
      ValueError: If there is no batch, or the model was made for batches of another number of rows.
    """
    try:
        batch = own_rows(next(next(iter(batches))[-1]))
    except StopIteration:
        raise no_batch(context) from None
    if build is None:
        return
    part = batch if num_devices == 1 else divide(batch, num_devices)[0][0]
    expected, rows = _fixed_batch_size(model), count_rows(part)
    fits = expected in (None, rows)
    explanation = "" if fits else _explain(expected, rows, context.num_input_pipelines, num_devices)
    if not fits and any(getattr(layer, "stateful", False) for layer in model._flatten_layers()):
        raise ValueError(explanation)
    try:
        build(part)
    except ValueError as error:
        if fits:
            raise
        raise ValueError(explanation) from error


def no_batch(context: tf.distribute.InputContext) -> ValueError:
    """Returns the error of a rank that has no data."""
    return ValueError(
        f"rank {context.input_pipeline_id} of {context.num_input_pipelines} has no data: every rank must have at least "
        "one batch. Under AutoShardPolicy.FILE, ranks share the files: give at least as many files as ranks, or take "
        "AutoShardPolicy.DATA, under which ranks share each batch. In "
        "`strategy.distribute_datasets_from_function(make_dataset)`, `make_dataset` must return a batch or more on "
        "every rank. Received: data without a batch."
    )


def _fixed_batch_size(model: keras.Model) -> int | None:
    """The number of rows that the model was made for, as by `keras.Input(batch_shape=...)`; None for any number."""
    sizes = {each.shape[0] for each in getattr(model, "inputs", None) or () if each.shape} - {None}
    return sizes.pop() if len(sizes) == 1 else None


def _explain(expected: int, rows: int, num_ranks: int, num_devices: int) -> str:
    num_parts = num_ranks * num_devices
    return (
        f"the model expects batches of {expected} rows, by `keras.Input(batch_shape=({expected}, ...))`, and gets "
        f"{rows} rows. `fit` shares each batch among ranks and their devices, {num_parts} in all; validation, "
        "`evaluate` and `predict` take whole batches on every rank. So write `model.fit(..., "
        f"batch_size={expected * num_parts}, validation_batch_size={expected * num_devices})` and `model.evaluate(..., "
        f"batch_size={expected * num_devices})`. To train on batches of another size, make the model for its part of "
        f"them: `keras.Input(batch_shape=(batch_size // {num_parts}, ...))`. Leave `batch_shares` out: they make parts "
        f"of different sizes. Received: {rows} rows, batch_shape=({expected}, ...)."
    )
