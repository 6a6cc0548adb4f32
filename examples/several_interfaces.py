"""Several network interfaces under Canary: a BCube sends half of the data over each of two.

    HOP_TF_INTERFACES=127.0.0.1,127.0.0.2 python -m hop_tf launch --num_workers=4 examples/several_interfaces.py

On several machines, give each machine the addresses of its own interfaces, and its own TF_CONFIG:

    HOP_TF_INTERFACES=10.0.0.1,10.1.0.1 TF_CONFIG=... python examples/several_interfaces.py

"bcube:2,2" is for 2^2 = 4 ranks with 2 interfaces each. The data are generated.
"""

import argparse

import keras
import numpy as np

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--algorithm", default="bcube:2,2")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=64, help="of all ranks together")
args = parser.parse_args()

# Points around the centers of 10 classes. All ranks make the same points.
generator = np.random.default_rng(0)
y = generator.integers(10, size=2400)
x = (generator.normal(size=(10, 20))[y] + generator.normal(size=(2400, 20))).astype("float32")

keras.utils.set_random_seed(0)
strategy = hop_tf.CanaryStrategy(algorithm=args.algorithm)  # Reads TF_CONFIG and HOP_TF_INTERFACES.
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])

history = model.fit(
    x[:2000],
    y[:2000],
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(x[2000:], y[2000:]),
    verbose=2 if strategy.is_chief else 0,
)
# Lane 0 is for small messages. Lane 1 is the first interface, lane 2 the second one.
for name, value in strategy.report().items():
    if name.startswith("bytes_sent_on_lane_"):
        print(f"{name}: {value / 1e6:.2f} MB")
