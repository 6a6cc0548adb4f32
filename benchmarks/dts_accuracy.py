"""The experiment `accuracy` of `benchmark_dts.py`: the effect of delays and intervals on accuracy.

A small residual network is trained with the same initial values and global batches, synchronously and by DTS. Ranks,
each with its own batch statistics, are simulated (`dts_simulation`): nothing is timed. Processes may share the seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import images
import keras
import models
import numpy as np
import results
from absl import flags
from dts_simulation import make_job

from hop_tf import codecs

_DATASET = flags.DEFINE_enum("dataset", "cifar10", ["cifar10", "fashion_mnist"], "What is trained for accuracy.")
_CIFAR10 = flags.DEFINE_string(
    "cifar10", None, "An .npz file with x_train, y_train, x_test, y_test; else Keras's data."
)
_NUM_ROWS = flags.DEFINE_integer("num_rows", 20_000, "Images to train with, at most.", lower_bound=1)
SETTINGS = flags.DEFINE_list(
    "settings", ["4:4", "8:8", "12:8", "20:12"], "D:p of the trainings for accuracy, and of `latencies`."
)
_CODECS = flags.DEFINE_multi_enum("codecs", ["identity"], ["identity", "top_k"], "Codecs of these trainings.")
_COMPENSATIONS = flags.DEFINE_multi_enum(
    "compensations",
    ["gentle"],
    ["gentle", "eager", "momentum"],
    "Rules of these trainings; momentum takes --weight_decay=0, and no top_k.",
)
_EPOCHS = flags.DEFINE_integer("epochs", 30, "Epochs of a training.", lower_bound=2)
_AUGMENT = flags.DEFINE_bool("augment", False, "Whether images are mirrored and moved at random, as in the paper.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds; each is a training of each kind.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Samples of a step, of all ranks together.", lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.025, "At its highest: a warm-up comes first, then a cosine.")
_MOMENTUM = flags.DEFINE_float("momentum", 0.9, "Of the optimizers of `accuracy`.")
_WEIGHT_DECAY = flags.DEFINE_float("weight_decay", 0.01, "Of these, times the learning rate in each step.")

_SYNCHRONOUS = "synchronous"


@dataclasses.dataclass(frozen=True)
class Trained:
    """A training.

    Attributes:
      label: Label of the settings.
      seed: Seed of the training.
      losses: Training loss of each epoch.
      accuracy: Final accuracy on the test data.
    """

    label: str
    seed: int
    losses: Sequence[float]
    accuracy: float


def run(world_size: int) -> None:
    """Trains, prints accuracies, and writes a table and a figure of the losses.

    Args:
      world_size: Number of ranks.
    """
    data = images.load(_DATASET.value, _CIFAR10.value, _NUM_ROWS.value)
    print(f"\naccuracy, {_DATASET.value}, {len(data[0][0])} rows, {_EPOCHS.value} epochs, {world_size} ranks")
    print(f"  {'':20} {'mean':>8} {'- synchronous':>14} {'std. error':>11}  of each seed")
    trained: list[Trained] = []
    for label, settings in _kinds().items():
        for seed in map(int, _SEEDS.value):
            trained.append(_train(label, settings, world_size, seed, data))
        _print(label, trained)


def _kinds() -> Mapping[str, Mapping]:
    """Returns the settings of each kind of training, by label."""
    kinds = {_SYNCHRONOUS: {"delay": 0, "interval": 1}}
    for settings, codec, rule in itertools.product(SETTINGS.value, _CODECS.value, _COMPENSATIONS.value):
        delay, interval = map(int, settings.split(":"))
        selection = codecs.get(codec) if codec == codecs.TopK.name else None
        if selection is None or rule != "momentum":
            label = f"D={delay} p={interval} {codec} {rule}".replace(" identity", "").removesuffix(" gentle")
            kinds[label] = {"delay": delay, "interval": interval, "selection": selection, "compensation": rule}
    return kinds


def _train(label: str, settings: Mapping, world_size: int, seed: int, data) -> Trained:
    (x, y), test = data
    num_batches = len(x) // _BATCH_SIZE.value
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, num_batches * (_EPOCHS.value - 1), warmup_target=_LEARNING_RATE.value, warmup_steps=num_batches
    )
    job = make_job(
        world_size,
        lambda: models.residual_network(x.shape[1:], seed),
        lambda: keras.optimizers.SGD(rate, _MOMENTUM.value, weight_decay=_WEIGHT_DECAY.value),
        keras.losses.sparse_categorical_crossentropy,
        **settings,
    )
    generator, losses = np.random.default_rng(seed), []
    augment = functools.partial(images.augmented, generator=generator) if _AUGMENT.value else np.asarray
    for _ in range(_EPOCHS.value):
        order = generator.permutation(len(x))[: num_batches * _BATCH_SIZE.value]
        losses.append(np.mean([job.step(augment(x[rows]), y[rows]) for rows in np.split(order, num_batches)]))
    job.finish()
    trained = Trained(label, seed, losses, images.accuracy(job.ranks[0].model, test))
    keras.backend.clear_session()
    return trained


def _print(label: str, trained: Sequence[Trained]) -> None:
    accuracies = _accuracies(label, trained)
    differences = np.subtract(accuracies, _accuracies(_SYNCHRONOUS, trained))
    error = results.standard_error(differences)
    shown = accuracies if label == _SYNCHRONOUS else differences
    of_seeds = " ".join(f"{each:.4f}" if label == _SYNCHRONOUS else f"{each:+.4f}" for each in shown)
    print(
        f"  {label:20} {np.mean(accuracies):8.4f} {np.mean(differences):+14.4f} {error:11.4f}  {of_seeds}", flush=True
    )
    results.note("accuracy", label, accuracies)


def _accuracies(label: str, trained: Sequence[Trained]) -> list[float]:
    return [each.accuracy for each in trained if each.label == label]
