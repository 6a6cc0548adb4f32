"""Trains scikit-learn's handwritten digits on the workers of a Ray cluster, under Ray Train.

    python examples/ray_digits.py --num_workers=2

Ray starts a cluster on this machine alone, or uses the cluster to which this machine belongs. Only `tensorflow_config`,
the strategy and the callback differ from a program for Ray's own TensorflowTrainer.

If a worker fails, Ray starts all workers again, and they go on from the last checkpoint. With `--restart=worker`, Ray
starts only the failed worker again. That worker joins the others, which train on.
"""

import argparse
import os
import tempfile

import keras
import numpy as np
import ray
import ray.train
from ray.train.tensorflow import TensorflowTrainer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hop_tf
from hop_tf.integrations.ray import ClusterConfig, ReportCheckpointCallback


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
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def train_loop(config):
    """Trains the model. Ray runs this function on each worker."""
    keras.utils.set_random_seed(0)  # The same on all ranks, which take disjoint parts of each shuffled batch.
    x_train, x_test, y_train, y_test = load_data()

    options = hop_tf.CommunicationOptions(cluster_token=os.environ["HOP_TF_CLUSTER_TOKEN"])
    strategy = hop_tf.HopStrategy(on_peer_loss="continue", communication_options=options)
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    model.fit(
        x_train,
        y_train,
        batch_size=config["batch_size"],
        epochs=config["epochs"],
        validation_data=(x_test, y_test),
        callbacks=[ReportCheckpointCallback()],
        verbose=2,
    )


def main():
    """Starts the workers, and evaluates the last checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=64, help="global batch, shared among the ranks")
    parser.add_argument("--restart", choices=("group", "worker"), default="group")
    parser.add_argument("--storage", default=tempfile.gettempdir(), help="where checkpoints go; all nodes must see it")
    args = parser.parse_args()

    trainer = TensorflowTrainer(
        train_loop,
        train_loop_config={"epochs": args.epochs, "batch_size": args.batch_size},
        tensorflow_config=ClusterConfig(restart=args.restart),
        scaling_config=ray.train.ScalingConfig(num_workers=args.num_workers),
        run_config=ray.train.RunConfig(
            storage_path=args.storage,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()

    _, x_test, _, y_test = load_data()
    with result.checkpoint.as_directory() as directory:
        model = keras.models.load_model(os.path.join(directory, "model.keras"))
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"accuracy after epoch {result.metrics['epoch'] + 1}: {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
