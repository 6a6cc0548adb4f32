"""Two sites with an ocean between them, under DTS: ranks average several steps at a time, and many steps late.

    python examples/emulated_ocean.py examples/two_sites.py                             # on one machine, as root
    python -m hop_tf launch --hosts=tokyo,london examples/two_sites.py                  # on several, over ssh

A rank waits only if the mean of 10 steps has not arrived 20 steps later. So a step may be shorter than a round trip.
The data are generated.
"""

import argparse
import time

import keras
import numpy as np

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=32, help="of all ranks together")
args = parser.parse_args()

# Points around the centers of 10 classes. All ranks make the same points.
generator = np.random.default_rng(0)
y = generator.integers(10, size=2400)
x = (generator.normal(size=(10, 20))[y] + generator.normal(size=(2400, 20))).astype("float32")

keras.utils.set_random_seed(0)
strategy = hop_tf.DTSStrategy(delay=20, interval=10)  # Reads TF_CONFIG.
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])

start = time.monotonic()
history = model.fit(
    x[:2000],
    y[:2000],
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(x[2000:], y[2000:]),
    verbose=2 if strategy.is_chief else 0,
)
seconds = time.monotonic() - start

loss, accuracy = model.evaluate(x[2000:], y[2000:], verbose=0)  # The weights are equal on all ranks.
report = strategy.report()
print(
    f"rank {strategy.rank}: {report['steps']} steps in {seconds:.1f} s, of which it waited "
    f"{report['wait_seconds']:.1f} s; validation loss {loss:.6f}, accuracy {accuracy:.4f}",
    flush=True,
)
