"""Find out which worker is slow, and give it less to do: the job of docs/walk_through.md.

    python -m hop_tf launch --num_workers=3 --step_seconds=0.1 --slowdown=1:3x examples/find_the_slow_worker.py
    python -m hop_tf diagnose logs
    python -m hop_tf launch --num_workers=3 --step_seconds=0.1 --slowdown=1:3x \
        examples/find_the_slow_worker.py --batch_shares=auto --log_dir=mended
    python -m hop_tf launch --hosts=node1,node2,node3 examples/find_the_slow_worker.py  # on several machines, over ssh

On one machine, `--step_seconds` and `--slowdown` emulate steps of 0.1 seconds, and 0.3 on worker 1. Every rank records
what it does in `--log_dir`, which must be the same directory on all ranks. The data are generated.
"""

import argparse

import keras
import numpy as np

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--log_dir", default="logs")
parser.add_argument("--batch_shares", choices=["auto"], help="auto: ranks take parts of a batch as they are fast")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch_size", type=int, default=84, help="of all ranks together")
args = parser.parse_args()

# Points around the centers of 10 classes. All ranks make the same points.
generator = np.random.default_rng(0)
y = generator.integers(10, size=2520)
x = (generator.normal(size=(10, 20))[y] + generator.normal(size=(2520, 20))).astype("float32")

keras.utils.set_random_seed(0)
strategy = hop_tf.PipeSGDStrategy(
    batch_shares=args.batch_shares, communication_options=hop_tf.CommunicationOptions(log_dir=args.log_dir)
)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])

history = model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs, verbose=2 if strategy.is_chief else 0)
if strategy.is_chief:
    print("parts of a batch:", ", ".join(f"rank {rank} {part:.2f}" for rank, part in enumerate(strategy.batch_shares)))
