"""The experiment `scales` of `benchmark_canary.py`: the cost of sketches if the scales of gradients differ.

A sketch has 256 values for all encoded gradients. The tensors of a colayer share one: a tensor whose gradients are 100
times smaller than others' gets few of these values. An optimizer such as Adam still makes steps of the same size of it.
Training is synchronous, in simulated ranks (`canary_accuracy.AllReduce`), on the tasks of `benchmark_delay.py`.
"""

from __future__ import annotations

import canary_accuracy
import delay_tasks
import gradients
import images
import keras
import numpy as np
import results
import tensorflow as tf
from absl import flags

from hop_tf.strategies.canary import colayers
from hop_tf.tensors.packing import Packing, TensorSpec

_TASKS = flags.DEFINE_list("tasks", ["transformer"], "Of `scales`: those of benchmark_delay.py.")
_OPTIMIZERS = flags.DEFINE_multi_enum("optimizer", ["adam"], ["adam", "sgd"], "Of `scales`.")

_NUM_COLAYERS = 10
_ADAM_RATE = 0.001
_STEPS_PER_LOOK = 20
_SKETCHED = ("nothing", "colayers", "tensors")  # The units that have their own sketch.
_TITLES = ("task", "optimizer", "sketch for", "scales", "error", "decile", "accuracy")


def run(world_size: int, epochs: int, num_seeds: int, folder: str | None) -> None:
    """Prints a row for each kind of training, and writes it. All but accuracies are of seed 0.

    Args:
      world_size: Number of ranks.
      epochs: Number of epochs of each training.
      num_seeds: Number of trainings of each kind.
      folder: Folder for the results, or None to write nothing.
    """
    print(f"\nscales: {world_size} ranks, {epochs} epochs, {num_seeds} seeds. Scales: the largest ratio of the root")
    print("mean squares of two tensors of a colayer; errors of tensors' gradients, relative: median, ninth decile")
    print("  " + "".join(f"{title:>13s}" for title in _TITLES), flush=True)
    with results.table(folder, "canary_scales", _TITLES) as add:
        for name in _TASKS.value:
            task = delay_tasks.TASKS[name]
            data = task.load(task.num_rows, task.test_rows, canary_accuracy.CIFAR10.value)
            for optimizer in _OPTIMIZERS.value:
                for sketched in _SKETCHED:
                    trained = [_train(task, data, optimizer, sketched, world_size, epochs, s) for s in range(num_seeds)]
                    row = (name, optimizer, sketched, *trained[0][1:], np.mean([accuracy for accuracy, *_ in trained]))
                    add(row)
                    print(
                        "  " + "".join(f"{each if isinstance(each, str) else f'{each:.4g}':>13s}" for each in row),
                        flush=True,
                    )


def _train(
    task: delay_tasks.Task,
    data: delay_tasks.Data,
    optimizer_name: str,
    sketched: str,
    world_size: int,
    epochs: int,
    seed: int,
) -> tuple[float, ...]:
    """Trains; returns the accuracy, and the values of `_TITLES` for gradients."""
    keras.backend.clear_session()
    model = task.make_model(keras, seed)
    model.compile(loss="sparse_categorical_crossentropy")
    trained = model.trainable_variables
    specs = [TensorSpec(weight.path, tuple(weight.shape), tf.float32) for weight in trained]
    members = colayers.bundle(specs, _NUM_COLAYERS)
    order = [index for colayer in members for index in colayer]
    packing, weights = Packing([specs[index] for index in order]), [trained[index] for index in order]
    tensors = [packing.place(index)[1] for index in range(len(order))]
    of_colayers = [tensors[start:end] for start, end in _spans(members)]
    parts = {
        "nothing": [],
        "tensors": tensors,
        "colayers": [slice(each[0].start, each[-1].stop) for each in of_colayers],
    }[sketched]
    rows = delay_tasks.order(
        data,
        epochs=epochs,
        batch_size=canary_accuracy.BATCH_SIZE.value,
        world_size=world_size,
        shards=delay_tasks.IDENTICAL,
        seed=seed,
    )
    adam = optimizer_name == "adam"
    schedule = keras.optimizers.schedules.CosineDecay(_ADAM_RATE if adam else task.learning_rate, len(rows))
    optimizer = keras.optimizers.Adam(schedule) if adam else keras.optimizers.SGD(schedule, 0.9)
    optimizer.build(weights)
    gradient_at = gradients.flat_gradient(model, weights, packing)
    apply = tf.function(lambda mean: optimizer.apply(packing.unpack([mean]), weights))
    all_reduce, ratios, errors = canary_accuracy.AllReduce(world_size), [], []
    x, y = data.train
    for step, batch in enumerate(rows):
        (values,) = packing.pack(weights)
        of_ranks = [gradient_at(values, x[own], y[own])[1] for own in np.split(batch, world_size)]
        exact = np.mean(of_ranks, axis=0)
        mean = exact.copy()
        for part in parts:
            mean[part] = all_reduce.mean([gradient[part] for gradient in of_ranks], is_sketched=True)
        if step % _STEPS_PER_LOOK == 0:
            sizes = [[_size(exact[tensor]) for tensor in each] for each in of_colayers]
            ratios.append(max(max(each) / min(each) for each in sizes))
            errors.append([_size(mean[each] - exact[each]) / _size(exact[each]) for each in tensors])
        apply(tf.constant(mean))
    of_tensors = np.median(errors, axis=0)
    return images.accuracy(model, data.test), np.median(ratios), np.median(of_tensors), np.quantile(of_tensors, 0.9)


def _spans(members: list[list[int]]) -> list[tuple[int, int]]:
    ends = np.cumsum([len(colayer) for colayer in members]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _size(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) + 1e-30
