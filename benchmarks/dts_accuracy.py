"""The experiment `accuracy` of `benchmark_dts.py`: what delays and intervals do to what is learned.

A small residual network is trained with the same global batches under synchronous training and under DTS. Ranks are
threads of this process: nothing is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import results
import tensorflow as tf
from absl import flags

import hop_tf
from hop_tf.testing import InProcessCluster

_DATASET = flags.DEFINE_enum("dataset", "cifar10", ["cifar10", "fashion_mnist"], "What is trained for accuracy.")
_CIFAR10 = flags.DEFINE_string(
    "cifar10", None, "An .npz file with x_train, y_train, x_test, y_test; else Keras's data."
)
_NUM_SAMPLES = flags.DEFINE_integer("num_samples", None, "So many of the data, at most. Default: all.")
_SETTINGS = flags.DEFINE_list("settings", ["4:4", "8:8", "12:8", "20:12"], "D:p of the trainings for accuracy.")
_CODECS = flags.DEFINE_list("codecs", ["identity"], "Codecs of these trainings.")
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Epochs of a training.", lower_bound=2)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Trainings of each kind.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Samples of a step, of all ranks together.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.05, "At its highest: a warm-up comes first, then a cosine.")

_SYNCHRONOUS = "synchronous"
_MOMENTUM = 0.9
_TIMEOUT_SECONDS = 4 * 3600.0
_Part = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A training.

    Attributes:
      label: What it was trained with.
      seed: Its seed.
      losses: Training loss of each epoch, as the first rank has seen it.
      accuracy: On the test data, at the end.
    """

    label: str
    seed: int
    losses: Sequence[float]
    accuracy: float


def run(world_size: int, momentum: float, folder: str | None) -> None:
    """Trains, prints accuracies, and writes a table and a figure of the losses.

    Args:
      world_size: Number of ranks.
      momentum: Of the optimizers.
      folder: Where to write; None for nowhere.
    """
    data = _load()
    print(f"\naccuracy, {_DATASET.value}, {len(data[0][0])} samples, {_EPOCHS.value} epochs, {world_size} ranks")
    print(f"  {'':20} {'mean':>8} {'- synchronous':>14}  of each seed")
    trained: list[Trained] = []
    for label, make_strategy in _strategies().items():
        for seed in range(_SEEDS.value):
            train = functools.partial(_train, data=data, momentum=momentum, seed=seed)
            cluster = InProcessCluster(world_size, make_strategy, timeout_seconds=_TIMEOUT_SECONDS)
            trained.append(Trained(label, seed, *cluster.run(train)[0]))
        _print(label, trained)
    if folder:
        _write(trained, folder)


def _strategies() -> Mapping[str, Callable]:
    """What makes a strategy for a cluster resolver, by labels."""
    strategies = {_SYNCHRONOUS: lambda resolver: hop_tf.PipeSGDStrategy(pipeline_width=1, cluster_resolver=resolver)}
    for settings, codec in itertools.product(_SETTINGS.value, _CODECS.value):
        delay, interval = map(int, settings.split(":"))

        def make(resolver, delay=delay, interval=interval, codec=codec):
            return hop_tf.DTSStrategy(delay=delay, interval=interval, codec=codec, cluster_resolver=resolver)

        strategies[f"D={delay} p={interval} {codec}".removesuffix(" identity")] = make
    return strategies


def _train(strategy, *, data: tuple[_Part, _Part], momentum: float, seed: int) -> tuple[list[float], float | None]:
    """The loss of each epoch; at the first rank the accuracy on test data, too."""
    (x, y), test = data
    num_batches = len(x) // _BATCH_SIZE.value
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, num_batches * (_EPOCHS.value - 1), warmup_target=_LEARNING_RATE.value, warmup_steps=num_batches
    )
    with strategy.scope():
        model = _residual_network(x.shape[1:], seed)
        optimizer = keras.optimizers.SGD(rate, momentum=momentum)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed)
    batches = batches.batch(_BATCH_SIZE.value, drop_remainder=True)
    losses = model.fit(batches, epochs=_EPOCHS.value, shuffle=False, verbose=0).history["loss"]
    return losses, model.evaluate(*test, batch_size=500, verbose=0)[1] if strategy.is_chief else None


def _residual_network(shape: Sequence[int], seed: int) -> keras.Model:
    """A convolution and three residual blocks. Layers have seeds of their own: ranks are threads."""
    layers, seeds = keras.layers, itertools.count(1000 * seed)

    def convolution(x, filters: int, size: int, strides: int = 1):
        initializer = keras.initializers.HeNormal(seed=next(seeds))
        layer = layers.Conv2D(filters, size, strides, "same", use_bias=False, kernel_initializer=initializer)
        return layers.BatchNormalization(momentum=0.9)(layer(x))

    inputs = keras.Input(shape)
    x = layers.MaxPooling2D()(layers.ReLU()(convolution(inputs, 16, 3)))
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        inner = layers.ReLU()(convolution(x, filters, 3, strides))
        inner = convolution(inner, filters, 3)
        x = layers.ReLU()(inner + (x if strides == 1 else convolution(x, filters, 1, strides)))
    initializer = keras.initializers.GlorotUniform(seed=next(seeds))
    outputs = layers.Dense(10, activation="softmax", kernel_initializer=initializer)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


def _load() -> tuple[_Part, _Part]:
    if _DATASET.value == "fashion_mnist":
        (x, y), (x_test, y_test) = keras.datasets.fashion_mnist.load_data()
        x, x_test = x[..., None], x_test[..., None]
    elif _CIFAR10.value is not None:
        with np.load(_CIFAR10.value) as arrays:
            x, y, x_test, y_test = (arrays[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    else:
        (x, y), (x_test, y_test) = keras.datasets.cifar10.load_data()
    x, y, x_test, y_test = (array[: _NUM_SAMPLES.value] for array in (x, y, x_test, y_test))
    mean, deviation = x.mean(), x.std()
    x, x_test = (((part - mean) / deviation).astype(np.float32) for part in (x, x_test))
    return (x, y), (x_test, y_test)


def _print(label: str, trained: Sequence[Trained]) -> None:
    accuracies = _accuracies(label, trained)
    difference = np.mean(accuracies) - np.mean(_accuracies(_SYNCHRONOUS, trained))
    shown = " ".join(f"{accuracy:.4f}" for accuracy in accuracies)
    print(f"  {label:20} {np.mean(accuracies):8.4f} {difference:+14.4f}  {shown}", flush=True)


def _accuracies(label: str, trained: Sequence[Trained]) -> list[float]:
    return [each.accuracy for each in trained if each.label == label]


def _write(trained: Sequence[Trained], folder: str) -> None:
    rows = [
        (each.label, each.seed, epoch, loss, each.accuracy)
        for each in trained
        for epoch, loss in enumerate(each.losses, start=1)
    ]
    results.write_table(folder, "dts_accuracy", ["label", "seed", "epoch", "loss", "accuracy at the end"], rows)
    with results.figure(folder, "dts_accuracy") as (axes,):
        for label in dict.fromkeys(each.label for each in trained):
            losses = np.mean([each.losses for each in trained if each.label == label], axis=0)
            axes.plot(range(1, len(losses) + 1), losses, label=label)
        axes.set(xlabel="epoch", ylabel="training loss, mean over seeds")
        axes.legend()
