"""A strategy of your own in a few lines: local SGD, for which hop_tf brings the rest.

    python -m hop_tf launch --num_workers=4 examples/own_strategy.py                   # on one machine
    python -m hop_tf launch --hosts=node1,node2:3 examples/own_strategy.py             # on several, over ssh

Each rank trains alone for `period` steps. Then all ranks average the changes of these steps. (Stich. Local SGD
Converges Fast and Communicates Little. ICLR 2019.)
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from hop_tf.runtime import Algorithm, AveragingExchange, DeltaTracker
from hop_tf.strategy import ExchangeStrategy


class LocalSGDStrategy(ExchangeStrategy):
    """Averages the ranks' models every `period` steps, and at the end of `fit`.

    Args:
      period: Steps between two averages. Default 8.
      **arguments: See `ExchangeStrategy`.
    """

    def __init__(self, *, period=8, **arguments):
        self._period = period
        super().__init__(identity={"period": str(period)}, **arguments)  # Ranks with another period are refused.

    def make_exchange(self, context):
        return AveragingExchange(context)

    def make_algorithm(self, group):
        return LocalSGD(group, self._period)


class LocalSGD(Algorithm):
    """The strategy's half in the training graph, for the variables of one optimizer."""

    def __init__(self, group, period):
        super().__init__(group)
        self._period = period
        self._changes = DeltaTracker(group.variables, group.context.values())

    def begin_training(self):
        self._changes.reset()  # Weights that callbacks have loaded do not count as changes.

    def before_update(self, values, gradients):
        return gradients  # The rank's own gradients: each makes its own step.

    def after_update(self):
        step = self.group.step + 1
        tf.cond(tf.equal(step % self._period, 0), lambda: self._average(step // self._period - 1), lambda: None)
        return super().after_update()

    def finish(self):
        if int(self.group.step) % self._period:
            self._average(self.group.step // self._period)
            self.group.constrain()

    def _average(self, window):
        own = self._changes.take()
        self.group.submit(own, step=window)
        means, _ = self.group.collect(own, step=window)
        self._changes.add([mean - change for mean, change in zip(means, own, strict=True)])


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
