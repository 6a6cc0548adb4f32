"""Learning rates that callbacks change on one rank: those of rank 0 are used, or the difference is an error."""

import itertools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import HopError
from hop_tf.runtime.rates import CommonRate
from support import fewer_steps, in_process

_STRATEGIES = {
    "replay": lambda **arguments: hop_tf.PipeSGDStrategy(pipeline_width=3, **arguments),
    "synchronous": lambda **arguments: hop_tf.PipeSGDStrategy(pipeline_width=1, **arguments),
    "bsp": lambda **arguments: hop_tf.CanaryStrategy(consistency="bsp", codec=None, **arguments),
    "none": lambda **arguments: hop_tf.PipeSGDStrategy(pipeline_width=2, compensation="none", **arguments),
}


def _cluster(name):
    return in_process(_STRATEGIES[name])


class _Assigns(keras.callbacks.Callback):
    """Assigns a learning rate within an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.optimizer.learning_rate = 0.02


# Callbacks that change the learning rate of 0.1.
_CALLBACKS = {
    "plateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", factor=0.25, patience=0, min_delta=100.0),
    "scheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)),
    "assigns": _Assigns,
}


def _train(strategy, callbacks, weight_decay=None, epochs=3, learning_rate=0.1):
    random = np.random.default_rng(0)
    x = random.normal(size=(48, 4)).astype(np.float32)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(learning_rate, momentum=0.9, weight_decay=weight_decay), "mse")
    model.fit(x, x[:, :3] ** 2, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    slots = [variable.numpy() for variable in model.optimizer.variables if "learning_rate" not in variable.path]
    return [*model.get_weights(), *slots], float(model.optimizer.learning_rate)


class RatesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *dict.fromkeys(
            [
                *(("replay", "assigns", 1), ("synchronous", "plateau", 1), ("bsp", "scheduler", 1)),
                *itertools.product(("replay", "synchronous", "bsp"), sorted(_CALLBACKS), (1, 0)),
            ]
        )
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_a_callback_of_one_rank(self, strategy, callback, rank):
        """Training uses the rate of rank 0 if a rank has another rate."""

        def run(strategy):
            return _train(strategy, [_CALLBACKS[callback]()] if strategy.rank == rank else [])

        with self.assertLogs(level="WARNING") as logs:
            (weights, rate), (others, rate_there) = _cluster(strategy).run(run)
        for mine, other in zip(weights, others, strict=True):
            self.assertAllEqual(mine, other)
        expected, _ = _train(tf.distribute.OneDeviceStrategy("/cpu:0"), [_CALLBACKS[callback]()] if rank == 0 else [])
        if strategy != "replay":  # A replay's gradients are of other weights.
            for mine, plain in zip(weights, expected, strict=True):
                self.assertAllClose(mine, plain, rtol=1e-4, atol=1e-5)
        warnings = [line for line in logs.output if "the learning rate of rank 1 in step" in line]
        self.assertLen(warnings, 1)
        self.assertRegex(
            warnings[0], "is [0-9.]+, that of rank 0 is [0-9.]+. .* rank 1 uses the learning rate of rank 0"
        )
        if callback == "assigns":
            self.assertEqual(rate, rate_there)

    @parameterized.parameters("replay", "bsp", "synchronous", "none")
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_the_same_callback_on_all_ranks(self, strategy):
        with self.assertLogs(level="WARNING") as logs:
            logging.warning("There is one at least.")
            (weights, rate), (others, _) = _cluster(strategy).run(
                lambda strategy: _train(strategy, [_CALLBACKS["scheduler"]()], weight_decay=0.1)
            )
        self.assertEmpty([line for line in logs.output if "learning rate" in line])
        for mine, other in zip(weights, others, strict=True):
            self.assertAllEqual(mine, other)
        self.assertAllClose(rate, 0.1 / 3)

    @parameterized.parameters(("none", None), ("synchronous", 0.1), ("bsp", 0.1))
    @pytest.mark.stress(after=1)
    def test_where_a_difference_is_an_error(self, strategy, weight_decay):
        """The rank's steps or weight decay have already used the other rate."""

        def run(strategy):
            try:
                _train(strategy, [_Assigns()] if strategy.rank == 1 else [], weight_decay)
            except HopError as error:
                return str(error)

        for message in _cluster(strategy).run(run):
            self.assertRegex(
                message, "the learning rate of rank 1 in step 2 is 0.02, that of rank 0 is 0.1: .*val_loss"
            )

    @parameterized.parameters("replay", "synchronous")
    @pytest.mark.stress
    def test_a_schedule_where_ranks_have_counted_different_steps(self, strategy):
        """A schedule cannot be replaced. If a `fit` ended early on a rank, `synchronize` makes the counts equal."""
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)

        def run(strategy, synchronizes):
            with strategy.scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones")])
                model.compile(keras.optimizers.SGD(schedule), "mse")
            x = np.ones((32, 4), np.float32)
            model.fit(x, x[:, :3], batch_size=8, verbose=0, **fewer_steps(strategy, 1))
            if synchronizes:
                strategy.synchronize(model)
            try:
                model.fit(x, x[:, :3], batch_size=8, verbose=0)
            except HopError as error:
                return str(error)
            return model.get_weights()[0]

        self.assertAllEqual(*_cluster(strategy).run(lambda strategy: run(strategy, True)))
        for message in _cluster(strategy).run(lambda strategy: run(strategy, False)):
            self.assertRegex(message, "rate of rank 1 in step 0 is 0.05, that of rank 0 is 0.00625: .*synchronize")

    @parameterized.parameters(2, 1)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_eagerly_with_weight_decay(self, num_fits):
        """Weights decay before ranks know each other's rates. The merged weights have decayed by rank 0's."""

        def run(strategy):
            def assign(logs):
                model.optimizer.learning_rate = 0.05 if strategy.rank == 1 else 0.1

            with strategy.scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones")])
                model.compile(keras.optimizers.SGD(weight_decay=0.1), "mse", run_eagerly=True)
            x = np.ones((32, 4), np.float32)
            for _ in range(num_fits):
                callbacks = [keras.callbacks.LambdaCallback(on_train_begin=assign)]
                model.fit(x, x[:, :3], batch_size=8, verbose=0, callbacks=callbacks)
            return model.get_weights()[0]

        self.assertAllEqual(*_cluster("replay").run(run))

    def test_a_rank_that_has_ended_is_not_asked(self):
        """The rate of the lowest remaining rank counts."""
        rate = CommonRate(1, 3, adopts=False)
        rate.check(np.array([[0.0, 0.1, 0.1], [0.0, 0.5, 0.5]]), 7)
        with self.assertRaisesRegex(HopError, "rank 1 in step 7 is 0.2, that of rank 0 is 0.1"):
            rate.check(np.array([[0.1, 0.2, 0.1], [1.0, 1.0, 1.0]]), 7)
        rate.check(np.zeros((2, 3)), 7)
        optimizer = keras.optimizers.SGD(0.25)
        self.assertAllClose(rate.adopt(optimizer, tf.zeros((2, 3), tf.float64)), 0.25)
        self.assertAllClose(rate.adopt(optimizer, tf.constant([[0, 0.1, 0.2], [0, 0.5, 0.5]], tf.float64)), 0.2)
        self.assertAllClose(optimizer.learning_rate, 0.25)
        self.assertAllClose(rate.adopt(optimizer, tf.constant([[0.5, 0.1, 0], [1, 0.5, 0]], tf.float64)), 0.5)
        self.assertAllClose(optimizer.learning_rate, 0.5)


if __name__ == "__main__":
    tf.test.main()
