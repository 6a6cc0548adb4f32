"""Fine-tuning: a trained model learns new classes, with frozen layers, and LoRA in a dense layer.

    python -m hop_tf launch --num_workers=2 examples/fine_tuning.py                    # on one machine
    python -m hop_tf launch --hosts=node1,node2 examples/fine_tuning.py                # on several, over ssh

Ranks exchange only trained values: a small part of the model. `--synthetic` uses generated images, and downloads
nothing.
"""

import argparse

import keras
import numpy as np

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=64, help="of all ranks together")
parser.add_argument("--synthetic", action="store_true", help="train on generated images")
args = parser.parse_args()

keras.utils.set_random_seed(0)


def synthetic_data(num_rows):
    """A pattern for each of the 10 classes, under noise."""
    patterns = np.random.default_rng(0).uniform(0, 255, size=(10, 28, 28))
    generator = np.random.default_rng(num_rows)
    y = generator.integers(10, size=num_rows)
    return (patterns[y] + generator.normal(0, 100, size=(num_rows, 28, 28))).clip(0, 255), y


def load_data():
    """Handwritten digits (MNIST), for training and for validation."""
    return (synthetic_data(2000), synthetic_data(400)) if args.synthetic else keras.datasets.mnist.load_data()


def classes(data, first, last):
    """The images and labels of some of the classes."""
    x, y = data
    chosen = (y >= first) & (y <= last)
    return x[chosen].reshape(-1, 28 * 28).astype("float32") / 255, y[chosen]


def train_base(data):
    """Stands for a large model that someone else has trained: it knows the digits 0 to 4."""
    model = keras.Sequential(
        [
            keras.Input((28 * 28,)),
            keras.layers.Dense(256, activation="relu", name="first"),
            keras.layers.Dense(256, activation="relu", name="second"),
            keras.layers.Dense(5, activation="softmax", name="head"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(*classes(data, 0, 4), batch_size=64, epochs=1, verbose=0)
    return model


training, validation = load_data()
base = train_base(training)  # Without a strategy, each rank trains its own base. Later, that of rank 0 counts.

strategy = hop_tf.PipeSGDStrategy()  # Reads TF_CONFIG, which the launcher sets.
with strategy.scope():  # A model to train must be made in the scope: by `load_model`, or as this copy.
    model = keras.models.clone_model(base)
    model.set_weights(base.get_weights())
    model.pop()
    model.add(keras.layers.Dense(10, activation="softmax", name="new_head"))
    model.get_layer("first").trainable = False
    model.get_layer("second").enable_lora(rank=4)
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])

history = model.fit(
    *classes(training, 0, 9),
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=classes(validation, 0, 9),
    verbose=2 if strategy.is_chief else 0,
)
if strategy.is_chief:
    print(f"ranks exchanged {strategy.num_exchanged_values} of the model's {model.count_params()} values")
    model.save("fine_tuning.keras")
