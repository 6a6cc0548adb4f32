"""A strategy of your own in a few lines: local SGD, for which hop_tf brings the rest.

    python -m hop_tf launch --num_workers=4 examples/own_strategy.py                   # on one machine
    python -m hop_tf launch --hosts=node1,node2:3 examples/own_strategy.py             # on several, over ssh

Each rank trains alone for `period` steps. Then all ranks average what these steps have changed. (Stich. Local SGD
Converges Fast and Communicates Little. ICLR 2019.)
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from hop_tf.runtime import AveragingExchange, LateChanges
from hop_tf.strategy import ExchangeStrategy, training_cluster


class LocalSGDStrategy(ExchangeStrategy):
    """Averages the ranks' models every `period` steps, and at the end of `fit`.

    Args:
      period: Steps between two averages. Default 8.
      devices: This process's devices. Default: all GPUs that it sees, or one CPU.
      cluster_resolver: The description of the cluster. Default: TF_CONFIG.
      communication_options: Deadlines, credentials, records.
    """

    def __init__(self, *, period=8, devices=None, cluster_resolver=None, communication_options=None):
        self._period = period
        cluster = training_cluster(cluster_resolver, "LocalSGDStrategy")
        super().__init__(
            cluster=cluster,
            devices=devices,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
            identity={"period": str(period)},  # Ranks with another period are refused.
            neighbors=range(cluster.world_size),  # The ranks with which a rank exchanges messages.
        )

    def make_exchange(self, context):
        exchange = AveragingExchange(context)
        exchange.changes = LateChanges(context.variables, context.values())
        return exchange

    def begin_training(self, groups):
        for group in groups:
            group.exchange.changes.reset()  # Weights that callbacks have loaded are no change.

    def before_update(self, group, values, gradients):
        return gradients, None  # The rank's own gradients: each makes its own step.

    def after_update(self, group, state):
        window, rest = (group.step + 1) // self._period - 1, (group.step + 1) % self._period
        tf.cond(tf.equal(rest, 0), lambda: self._average(group, window), lambda: None)
        return tf.constant(0, tf.int64)  # The number of steps to skip.

    def finish_training(self, group):
        if int(group.step) % self._period:
            self._average(group, group.step // self._period)
            group.constrain()

    def _average(self, group, window):
        own = group.exchange.changes.take()
        group.submit(own, step=window)
        means, _ = group.collect(own, step=window)
        group.exchange.changes.add([mean - change for mean, change in zip(means, own, strict=True)])


def main():
    """Trains scikit-learn's digits."""
    x, y = load_digits(return_X_y=True)
    strategy = LocalSGDStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    model.fit(x[:1400] / 16, y[:1400], batch_size=64, epochs=10, validation_data=(x[1400:] / 16, y[1400:]), verbose=2)


if __name__ == "__main__":
    main()
