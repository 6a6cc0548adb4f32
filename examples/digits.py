"""Trains scikit-learn's handwritten digits on several processes.

    python -m hop_tf launch --num_workers=4 examples/digits.py                         # on one machine
    python -m hop_tf launch --hosts=node1,node2:3 examples/digits.py                   # on several, over ssh

Each process is one rank of a ring. The model code is plain Keras; the strategy is the one line that differs from a
program for one process. Without the launcher, the same script trains alone. If Slurm, mpirun or another launcher
starts it, it trains with the other processes there (see docs/launch.md).
"""

import argparse
import time

import keras
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hop_tf


def load_data():
    """1797 images of 8 x 8 pixels in 10 classes, a quarter of them for validation."""
    digits = load_digits()
    images = digits.images[..., np.newaxis].astype("float32") / 16.0
    return train_test_split(images, digits.target, test_size=0.25, random_state=0, stratify=digits.target)


def build_model():
    """A small convolutional network."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def print_summary(reports, consensus_accuracy):
    """Prints each rank's progress, and the quality of the averaged model."""
    table = Table("rank", "steps", "seconds", "accuracy", "MB sent", "wait (s)", title="HopStrategy on digits")
    for report in reports:
        table.add_row(
            str(report["rank"]),
            str(report["steps"]),
            f"{report['seconds']:.1f}",
            f"{report['accuracy']:.4f}",
            f"{report.get('bytes_sent', 0) / 1e6:.1f}",
            f"{report['wait_seconds']:.1f}",
        )
    Console(width=80).print(table)
    print(f"accuracy of the consensus model: {consensus_accuracy:.4f}", flush=True)


def main():
    """Trains, then averages the replicas."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch_size", type=int, default=64, help="global batch, shared among the ranks")
    parser.add_argument("--topology", default="ring")
    parser.add_argument("--save", help="where rank 0 saves the averaged model (.keras)")
    args = parser.parse_args()

    keras.utils.set_random_seed(0)  # The same on all ranks, which take disjoint parts of each shuffled batch.
    x_train, x_test, y_train, y_test = load_data()

    strategy = hop_tf.HopStrategy(topology=args.topology, cluster_resolver=hop_tf.cluster_from_environment())
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    start = time.monotonic()
    history = model.fit(
        x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, validation_data=(x_test, y_test), verbose=2
    )
    seconds = time.monotonic() - start

    strategy.synchronize(model)
    _, consensus_accuracy = model.evaluate(x_test, y_test, verbose=0)
    reports = strategy.gather_reports(seconds=seconds, accuracy=history.history["val_accuracy"][-1])
    if strategy.is_chief:
        print_summary(reports, consensus_accuracy)
        if args.save:
            model.save(args.save)


if __name__ == "__main__":
    main()
