"""The experiment `colayers` of `benchmark_canary.py`: the gain of dividing layers by time instead of bytes.

Nothing is run. Back-propagation goes from the last layer to the first. Its time in each layer is in proportion to the
layer's multiplications. A colayer is sent when its last layer is ready and the previous colayer was sent. That gives
the time at which all is sent for a given division: by bytes, as in `colayers.bundle`; by the same rule with times; and
for the best of all divisions into as many parts of consecutive layers.
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
_LATENCY = 0.005  # Latency of a colayer, over the time of back-propagation.
_MODELS = {
    "VGG16": keras.applications.VGG16,
    "ResNet50": keras.applications.ResNet50,
    "MobileNetV2": keras.applications.MobileNetV2,
}
_TITLES = ("model", "load", "by bytes", "by time", "best")


def run(folder: str | None) -> None:
    """Prints and writes the time at which all is sent, in times of back-propagation.

    Args:
      folder: Folder for the results, or None to write nothing.
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
    """Returns dimensions, values, and shares of the time of the layers with a kernel, the last layer first."""
    layers = [layer for layer in model.layers if getattr(layer, "kernel", None) is not None]
    # Multiplications of a forward pass: each value of a kernel takes part in every place of the output.
    places = [math.prod(layer.output.shape[1:-1]) for layer in layers]
    products = np.array([math.prod(layer.kernel.shape) * each for layer, each in zip(layers, places, strict=True)])
    sizes = np.array([layer.count_params() for layer in layers])
    dimensions = [len(layer.kernel.shape) for layer in reversed(layers)]
    return dimensions, sizes[::-1], (products / products.sum())[::-1]


def _lengths(dimensions: list[int], by: np.ndarray) -> list[int]:
    """Returns the number of layers of each colayer if `bundle` takes `by` for sizes."""
    whole = np.maximum(1, np.round(1e6 * by / by.sum())).astype(int)
    shapes = [(int(size), *[1] * (number - 1)) for size, number in zip(whole, dimensions, strict=True)]
    specs = [TensorSpec("", shape, tf.float32) for shape in reversed(shapes)]
    return [len(members) for members in colayers.bundle(specs, _NUM_COLAYERS)]


def _end(lengths: list[int], sending: np.ndarray, times: np.ndarray) -> float:
    """Returns the time at which all colayers are sent."""
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
        """Returns the earliest time at which the first `last` layers are sent, in at most `number` colayers."""
        if last == 0:
            return 0.0
        if number == 0:
            return math.inf
        return min(
            max(best(first, number - 1), ready[last - 1]) + _LATENCY + sent[last] - sent[first] for first in range(last)
        )

    return float(best(len(times), _NUM_COLAYERS))
