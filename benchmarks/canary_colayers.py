"""The experiment `colayers` of `benchmark_canary.py`: what it is worth to divide layers by time, and not by bytes.

Nothing is run. Back-propagation goes from the last layer to the first, and takes of its time in each what that has of
the multiplications; a colayer is sent when its last layer is through and the one before it was sent. So it is known
when all is sent, for a given division: by bytes, as `colayers.bundle` does it, by the same rule with times, and for the
best of all divisions into as many parts of consecutive layers.
"""

from __future__ import annotations

import functools
import math

import keras
import numpy as np
import results
import tensorflow as tf
from absl import flags

from hop_tf.strategies.canary import colayers
from hop_tf.tensors.packing import TensorSpec

LOADS = flags.DEFINE_list("loads", ["0.5", "1", "2"], "Time of communication over that of computation.")

_NUM_COLAYERS = 10
_LATENCY = 0.005  # Of a colayer, over the time of back-propagation.
_MODELS = {
    "VGG16": keras.applications.VGG16,
    "ResNet50": keras.applications.ResNet50,
    "MobileNetV2": keras.applications.MobileNetV2,
}
_TITLES = ("model", "load", "by bytes", "by time", "best")


def run(folder: str | None) -> None:
    """Prints when all is sent, in times of back-propagation, and writes it.

    Args:
      folder: Where to write; None for nowhere.
    """
    print(f"\ncolayers: when all is sent, in times of back-propagation, {_NUM_COLAYERS} colayers")
    print("  " + "".join(f"{title:>13s}" for title in _TITLES))
    with results.table(folder, "canary_colayers", _TITLES) as add:
        for name, make_model in _MODELS.items():
            shapes, sizes, times = _layers(make_model(weights=None))
            for load in map(float, LOADS.value):
                sending = load * sizes / sizes.sum()
                ends = [_end(_lengths(shapes, by), sending, times) for by in (sizes, times)]
                row = (name, load, *ends, _best_end(sending, times))
                add(row)
                print("  " + "".join(f"{cell:13.2f}" if isinstance(cell, float) else f"{cell:>13s}" for cell in row))


def _layers(model: keras.Model) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Of the layers with a kernel, the last one first: its dimensions, its values, and its share of the time."""
    layers = [layer for layer in model.layers if getattr(layer, "kernel", None) is not None]
    # Multiplications of a forward pass: each value of a kernel takes part in every place of the output.
    places = [math.prod(layer.output.shape[1:-1]) for layer in layers]
    products = np.array([math.prod(layer.kernel.shape) * each for layer, each in zip(layers, places, strict=True)])
    sizes = np.array([layer.count_params() for layer in layers])
    dimensions = [len(layer.kernel.shape) for layer in reversed(layers)]
    return dimensions, sizes[::-1], (products / products.sum())[::-1]


def _lengths(dimensions: list[int], by: np.ndarray) -> list[int]:
    """How many layers each colayer has where `bundle` takes `by` for sizes."""
    whole = np.maximum(1, np.round(1e6 * by / by.sum())).astype(int)
    shapes = [(int(size), *[1] * (number - 1)) for size, number in zip(whole, dimensions, strict=True)]
    specs = [TensorSpec("", shape, tf.float32) for shape in reversed(shapes)]
    return [len(members) for members in colayers.bundle(specs, _NUM_COLAYERS)]


def _end(lengths: list[int], sending: np.ndarray, times: np.ndarray) -> float:
    """When all is sent."""
    now, ready, first = 0.0, np.cumsum(times), 0
    for length in lengths:
        last = first + length
        now = max(now, ready[last - 1]) + _LATENCY + sending[first:last].sum()
        first = last
    return float(now)


def _best_end(sending: np.ndarray, times: np.ndarray) -> float:
    ready, sent = np.cumsum(times), np.concatenate([[0], np.cumsum(sending)])

    @functools.cache
    def best(last: int, number: int) -> float:
        """When the first `last` layers are sent at the earliest, in so many colayers at most."""
        if last == 0:
            return 0.0
        if number == 0:
            return math.inf
        return min(
            max(best(first, number - 1), ready[last - 1]) + _LATENCY + sent[last] - sent[first] for first in range(last)
        )

    return float(best(len(times), _NUM_COLAYERS))
