"""Images that benchmarks train with, and the accuracy of models on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np

Part = tuple[np.ndarray, np.ndarray]
_EVALUATION_BATCH = 500
_DIGITS_TO_TEST = 357


def load(name: str, num_rows: int | None = None) -> tuple[Part, Part]:
    """Returns images and labels to train with, and to test with.

    Args:
      name: "fashion_mnist", from `keras.datasets`; or "digits", which scikit-learn has without a download: 1,797
        images of 8 x 8, of which the last 357 are to test with, enlarged to 28 x 28.
      num_rows: Largest number of images to train with. Default: all.

    Returns:
      (x, y), (x_test, y_test): float32 [rows, 28, 28, 1], where the values to train with have mean 0 and standard
      deviation 1; and integer labels.
    """
    (x, y), (x_test, y_test) = _load_digits() if name == "digits" else getattr(keras.datasets, name).load_data()
    x, y = x[:num_rows], y[:num_rows]
    mean, deviation = x.mean(), x.std()
    x, x_test = (((part[..., None] - mean) / deviation).astype(np.float32) for part in (x, x_test))
    return (x, y), (x_test, y_test)


def _load_digits() -> tuple[Part, Part]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.pad(np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    train, test = slice(-_DIGITS_TO_TEST), slice(-_DIGITS_TO_TEST, None)
    return (images[train], labels[train]), (images[test], labels[test])


def accuracy(model: keras.Model, part: Part) -> float:
    """Returns the share of labels that a model predicts correctly."""
    x, y = part
    return float(np.mean(np.argmax(model.predict(x, batch_size=_EVALUATION_BATCH, verbose=0), axis=-1) == y))


class Clock:
    """Notes weights during the training, and evaluates them afterwards, when no rank waits.

    Args:
      evaluate_every: Steps between two notes; None for no notes.

    Attributes:
      steps: Number of steps that have ended.
      seconds: Time from the end of the first step, which traces, to the end of the last, without the time for notes.
    """

    def __init__(self, evaluate_every: int | None):
        self.steps = 0
        self.seconds = 0.0
        self._evaluate_every = evaluate_every
        self._start: float | None = None
        self._spent = 0.0
        self._noted: list[tuple[float, Sequence[np.ndarray]]] = []

    def step(self, get_weights: Callable[[], Sequence[np.ndarray]]) -> None:
        """Called when a step has ended."""
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        self.steps += 1
        self.seconds = now - self._start - self._spent
        if self._evaluate_every and self.steps % self._evaluate_every == 0:
            self._noted.append((self.seconds, get_weights()))
            self._spent += time.monotonic() - now

    def evaluate(self, model: keras.Model, part: Part) -> Iterator[tuple[float, float]]:
        """Yields the seconds of each note and the accuracy with its weights, which replace those of `model`."""
        for seconds, weights in self._noted:
            model.set_weights(weights)
            yield seconds, accuracy(model, part)
