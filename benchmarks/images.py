"""The images that benchmarks train with."""

from __future__ import annotations

import keras
import numpy as np

Part = tuple[np.ndarray, np.ndarray]
_EVALUATION_BATCH = 500
_DIGITS_TO_TEST = 357


def load(name: str, cifar10: str | None = None, num_rows: int | None = None) -> tuple[Part, Part]:
    """Returns images and labels to train with, and to test with.

    Args:
      name: "mnist", "fashion_mnist" or "cifar10", from `keras.datasets`; or "digits", which scikit-learn has without
        a download: 1,797 images of 8 x 8, of which the last 357 are to test with, enlarged to 28 x 28.
      cifar10: Instead of Keras's CIFAR-10, an .npz file with x_train, y_train, x_test and y_test.
      num_rows: Largest number of images to train with. Default: all.

    Returns:
      (x, y), (x_test, y_test): float32 [rows, height, width, channels], where the values to train with have mean 0 and
      standard deviation 1; and integer labels.
    """
    if name == "cifar10" and cifar10 is not None:
        with np.load(cifar10) as arrays:
            x, y, x_test, y_test = (arrays[part] for part in ("x_train", "y_train", "x_test", "y_test"))
    elif name == "digits":
        (x, y), (x_test, y_test) = _load_digits()
    else:
        (x, y), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    x, y = x[:num_rows], y[:num_rows]
    mean, deviation = x.mean(), x.std()
    x, x_test = (((part - mean) / deviation).astype(np.float32) for part in (x, x_test))
    if x.ndim == 3:
        x, x_test = x[..., None], x_test[..., None]
    return (x, y), (x_test, y_test)


def _load_digits() -> tuple[Part, Part]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.pad(np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    return (images[:-_DIGITS_TO_TEST], labels[:-_DIGITS_TO_TEST]), (
        images[-_DIGITS_TO_TEST:],
        labels[-_DIGITS_TO_TEST:],
    )


def accuracy(model: keras.Model, part: Part) -> float:
    """Returns the share of labels that a model predicts correctly."""
    x, y = part
    found = np.argmax(model.predict(x, batch_size=_EVALUATION_BATCH, verbose=0), axis=-1)
    return float(np.mean(found == np.reshape(y, found.shape)))
