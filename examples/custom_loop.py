"""A custom training loop, as under any `tf.distribute.Strategy`: `strategy.run`, and no `fit`.

    python -m hop_tf launch --num_workers=2 examples/custom_loop.py                    # on one machine
    python -m hop_tf launch --hosts=node1,node2 examples/custom_loop.py                # on several, over ssh

Losses are divided by the size of the batch of all ranks, and gradients add up. The data are generated.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import hop_tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch_size", type=int, default=64, help="of all ranks together")
args = parser.parse_args()

# Points of a plane, inside and outside of a circle. All ranks make the same points.
x = np.random.default_rng(0).uniform(-1, 1, size=(2048, 2)).astype("float32")
y = (np.linalg.norm(x, axis=1, keepdims=True) < 0.8).astype("float32")
x_train, y_train, x_test, y_test = x[:1536], y[:1536], x[1536:], y[1536:]

keras.utils.set_random_seed(0)
strategy = hop_tf.PipeSGDStrategy()  # Reads TF_CONFIG, which the launcher sets.
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01)
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    train_accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)

# All ranks shuffle alike, because the seed is the same. Each rank gets its part of every batch.
dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train), seed=0).batch(args.batch_size)
dataset = strategy.experimental_distribute_dataset(dataset)


def train_step(x, y):
    """Trains on this rank's part of a batch. Returns this part's share of the loss of the whole batch."""
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = tf.nn.compute_average_loss(loss_fn(y, logits))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    train_accuracy.update_state(y, logits)
    return loss


@tf.function
def distributed_train_step(batch):
    """The loss of the whole batch."""
    return strategy.reduce("SUM", strategy.run(train_step, args=batch), axis=None)


losses = []
for epoch in range(args.epochs):
    losses.append(np.mean([distributed_train_step(batch) for batch in dataset]))
    if strategy.is_chief:
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, accuracy of rank 0's part {train_accuracy.result():.4f}")
    train_accuracy.reset_state()

strategy.synchronize(model)  # Merges the means in flight. All ranks must call it.
accuracy = np.mean((model.predict(x_test, verbose=0) > 0) == y_test)
print(f"accuracy on new points: {accuracy:.4f}")
