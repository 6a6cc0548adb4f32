"""A slow worker under Hop: the others do not wait for it.

    python -m hop_tf launch --num_workers=3 --step_seconds=0.05 --slowdown=1:4x examples/slow_worker.py
    python -m hop_tf launch --hosts=node1,node2,node3 examples/slow_worker.py          # on several machines, over ssh

On one machine, `--step_seconds` and `--slowdown` emulate steps of 0.05 seconds, and 0.2 on worker 1. With a backup
worker, a rank goes on when all of its neighbors but one have sent their weights. A rank that falls behind skips steps.
The data are generated.
"""

import argparse
import time

import keras
import numpy as np

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=48, help="of all ranks together")
args = parser.parse_args()

# Points around the centers of 10 classes. All ranks make the same points.
generator = np.random.default_rng(0)
y = generator.integers(10, size=2400)
x = (generator.normal(size=(10, 20))[y] + generator.normal(size=(2400, 20))).astype("float32")

keras.utils.set_random_seed(0)
strategy = hop_tf.HopStrategy(
    topology="complete", num_backup_workers=1, skip=hop_tf.SkipIterations(max_jump=10, trigger=2)
)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10, activation="softmax")]
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

strategy.synchronize(model)  # Averages the ranks' weights.
loss, accuracy = model.evaluate(x[2000:], y[2000:], verbose=0)
reports = strategy.gather_reports(seconds=seconds)
if strategy.is_chief:
    for report in reports:
        print(f"rank {report['rank']}: {report['steps']} steps in {report['seconds']:.1f} s")
    print(f"accuracy of the averaged model: {accuracy:.4f}")
