"""The experiment `ako` of `benchmark_canary.py`: partial gradient exchange as another baseline of Figure 23.

In Ako (Watcharapichat et al., SoCC 2016) each rank applies its own step at once. In each step it sends one of P parts
of the model to all ranks: the changes that it has accumulated there in P steps. Here, as in the paper's baseline, ranks
are synchronous, and a step counts 1/n. Ranks are simulated, and nothing is timed: a step takes as long as its
computation and its messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import canary_accuracy
import delay_tasks
import gradients
import images
import keras
import numpy as np
import results
import tensorflow as tf
from absl import flags

from hop_tf.tensors.packing import Packing, TensorSpec

_LOADS = flags.DEFINE_list("loads", ["0.5", "1", "2"], "Time of communication over that of computation, in `ako`.")
_NUM_PARTS = flags.DEFINE_list("ako_parts", ["2", "4", "8"], "P of `ako`.")

_TASK = delay_tasks.TASKS["perceptron"]
_MOMENTUM = 0.9
_SKETCH_BYTES = 0.25  # Relative to float32.

_Exchange = Callable[[int, np.ndarray], np.ndarray]


def run(world_size: int, epochs: int, num_seeds: int) -> None:
    """Prints and keeps the accuracy of the mean of all ranks' weights, and the durations of steps.

    Args:
      world_size: Number of ranks.
      epochs: Number of epochs of each training.
      num_seeds: Number of trainings of each kind.
    """
    data = _TASK.load(_TASK.num_rows, None, None)
    loads = list(map(float, _LOADS.value))
    titles = ("", "sent", "accuracy", "error", *(f"step, load {load:g}" for load in loads))
    print(f"\nako: {world_size} ranks, {epochs} epochs, {num_seeds} seeds. Sent: over what float32's all-reduce sends;")
    print("load: how long that takes, over computation; steps: in times of computation")
    print("  " + "".join(f"{title:>15s}" for title in titles), flush=True)
    for label, (share, make_exchange) in _kinds(world_size).items():
        accuracies = [_train(data, make_exchange, world_size, epochs, seed) for seed in range(num_seeds)]
        error = results.standard_error(accuracies)
        row = (label, share, float(np.mean(accuracies)), error, *(1 + load * share for load in loads))
        results.note("ako: accuracy", label, accuracies)
        results.note("ako: step, with the largest load", label, row[-1])
        print(f"  {label:>15s}" + "".join(f"{cell:15.4g}" for cell in row[1:]), flush=True)


def _kinds(world_size: int) -> dict[str, tuple[float, Callable[[int], _Exchange]]]:
    """Returns for each kind its traffic relative to an all-reduce in float32, and a function from size to exchange."""
    all_reduce = canary_accuracy.AllReduce(world_size)

    def synchronous(is_sketched: bool) -> Callable[[int], _Exchange]:
        return lambda size: lambda step, changes: np.tile(all_reduce.mean(list(changes), is_sketched), (world_size, 1))

    kinds = {"BML float32": (1.0, synchronous(False)), "BSP sketch": (_SKETCH_BYTES, synchronous(True))}
    for number in map(int, _NUM_PARTS.value):
        # (n - 1) / P models. An all-reduce sends 2 (n - 1) / n of one.
        kinds[f"Ako, P = {number}"] = (world_size / 2 / number, functools.partial(_Partial, world_size, number))
    return kinds


class _Partial:
    """Computes the changes that Ako adds to each rank's weights."""

    def __init__(self, world_size: int, num_parts: int, size: int):
        self._accumulated = np.zeros((world_size, size), np.float32)
        self._bounds = np.linspace(0, size, num_parts + 1).astype(int)

    def __call__(self, step: int, changes: np.ndarray) -> np.ndarray:
        applied = changes / np.float32(len(changes))
        self._accumulated += applied
        turn = step % (len(self._bounds) - 1)
        part = slice(self._bounds[turn], self._bounds[turn + 1])
        sent = self._accumulated[:, part]
        applied[:, part] += sent.sum(axis=0) - sent
        sent[:] = 0
        return applied


def _train(
    data: delay_tasks.Data, make_exchange: Callable[[int], _Exchange], world_size: int, epochs: int, seed: int
) -> float:
    """Trains; returns the final accuracy on the test data."""
    keras.backend.clear_session()
    model = _TASK.make_model(keras, seed)
    model.compile(loss="sparse_categorical_crossentropy")
    weights = model.trainable_variables
    packing = Packing([TensorSpec(weight.path, tuple(weight.shape), tf.float32) for weight in weights])
    gradient_at = gradients.flat_gradient(model, weights, packing)
    (initial,) = packing.pack(weights)
    values = np.tile(initial.numpy(), (world_size, 1))
    velocities, exchange = np.zeros_like(values), make_exchange(values.shape[1])
    rows = delay_tasks.order(
        data,
        epochs=epochs,
        batch_size=canary_accuracy.BATCH_SIZE.value,
        world_size=world_size,
        shards=delay_tasks.IDENTICAL,
        seed=seed,
    )
    x, y = data.train
    for step, batch in enumerate(rows):
        rate = np.float32(_TASK.learning_rate * (1 + np.cos(np.pi * step / len(rows))) / 2)
        for rank, own in enumerate(np.split(batch, world_size)):
            _, gradient = gradient_at(values[rank], x[own], y[own])
            velocities[rank] = _MOMENTUM * velocities[rank] - rate * gradient
        values += exchange(step, velocities)
    for weight, value in zip(weights, packing.unpack([values.mean(axis=0)]), strict=True):
        weight.assign(value)
    return images.accuracy(model, data.test)
