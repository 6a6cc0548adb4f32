"""A search for hyperparameters by KerasTuner: all ranks train the model of each trial together.

    pip install keras-tuner
    python -m hop_tf launch --num_workers=2 examples/tune.py                           # on one machine
    python -m hop_tf launch --hosts=node1,node2 examples/tune.py                       # on several, over ssh

Every rank runs the same search, so all ranks need the same seed and the same metrics. Under Pipe-SGD, ranks average
metrics. Each rank has a directory of its own.
"""

import argparse

import keras
import keras_tuner
import numpy as np

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--trials", type=int, default=5)
parser.add_argument("--epochs", type=int, default=4, help="of each trial")
parser.add_argument("--directory", default="search", help="each rank adds a folder of its own")
args = parser.parse_args()

rng = np.random.default_rng(0)  # All ranks make the same values.
x = rng.uniform(-1, 1, size=(512, 2)).astype("float32")
y = (np.hypot(x[:, 0], x[:, 1]) < 0.8).astype("float32")

strategy = hop_tf.PipeSGDStrategy()  # Reads TF_CONFIG, which the launcher sets.


def build(parameters):
    """The model of a trial. The tuner calls this in the strategy's scope."""
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(parameters.Int("units", 4, 32), activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(parameters.Choice("rate", [0.001, 0.03])), "binary_crossentropy")
    return model


tuner = keras_tuner.RandomSearch(
    build,
    objective="val_loss",
    max_trials=args.trials,
    seed=1,  # The same on all ranks, so that they try the same hyperparameters.
    directory=f"{args.directory}/rank_{strategy.rank}",
    distribution_strategy=strategy,
)
tuner.search(x[:384], y[:384], batch_size=32, epochs=args.epochs, validation_data=(x[384:], y[384:]), verbose=0)

(best,) = tuner.get_best_hyperparameters()
with strategy.scope():  # A new model: at the ends of epochs, each rank has kept weights of its own.
    model = build(best)
history = model.fit(x, y, batch_size=32, epochs=args.epochs, verbose=0)
if strategy.is_chief:
    print(f"best of {args.trials} trials: {best.values}")
