"""Tests that a strategy tells its own assignments of trained weights from the program's, and loses none of these."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf.errors import HopError
from support import MEMBERS

_BATCH_SIZE = 8
_STEPS = 4

_MEMBERS = {name: (member, {}) for name, member in MEMBERS.items() if name != "own"}
_MEMBERS["pipe_sgd"] = (MEMBERS["pipe_sgd"], {"pipeline_width": 1})
_MEMBERS["pipe_sgd_wide"] = (MEMBERS["pipe_sgd"], {"pipeline_width": 2})
# Strategies that keep a second copy of the weights.
_KEEPS_A_COPY = ("pipe_sgd_wide", "shat")
_BY_IMPORTANCE = [*_KEEPS_A_COPY, *(name for name in _MEMBERS if name not in _KEEPS_A_COPY)]
_WITH_LOOPS = [name for name in _BY_IMPORTANCE if name != "canary"]  # Canary refuses custom loops.
# With rows that are alike, both ranks make the steps of one process.
_EXACT = [name for name in _MEMBERS if name not in ("canary", "shat")]
_MEMBERS["shat_interval"] = (MEMBERS["shat"], {"interval": 2})

_ROWS = np.random.default_rng(0).normal(size=(_BATCH_SIZE, 6)).astype(np.float32)
_X = np.tile(_ROWS, (2 * _STEPS, 1))
_Y = _X[:, :1] * 2 + 1


def _of_ranks(name, run):
    member, settings = _MEMBERS[name]
    return member.run(run, **settings)


def _scope(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def _layers(**arguments):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="ones", **arguments)])


def _linear(strategy, **arguments):
    with _scope(strategy):
        model = _layers(**arguments)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    return model


def _fit(model, strategy, **arguments):
    size = _BATCH_SIZE if strategy is None else 2 * _BATCH_SIZE
    x, y = (_X[: _STEPS * _BATCH_SIZE], _Y[: _STEPS * _BATCH_SIZE]) if strategy is None else (_X, _Y)
    model.fit(x, y, **{"batch_size": size, "epochs": 2, "shuffle": False, "verbose": 0, **arguments})


def _at_batch_end(call):
    return [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: call(batch))]


def _loop_step(model, optimizer, strategy):
    x, y = tf.constant(_ROWS), tf.constant(_ROWS[:, :1] * 2 + 1)

    def replica_step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y)) / (1 if strategy is None else strategy.num_replicas_in_sync)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    return tf.function(replica_step if strategy is None else lambda: strategy.run(replica_step))


def _assigned_in_a_loop(strategy):
    """Assigns a weight after some steps of a loop. Returns the model, and the step."""
    model = _linear(strategy)
    step = _loop_step(model, model.optimizer, strategy)
    for _ in range(3):
        step()
    model.layers[0].kernel.assign(tf.fill([6, 1], 7.0))
    return model, step


def _kernel_in_the_end(model, strategy):
    """Returns the mean over ranks."""
    if strategy is not None:
        strategy.synchronize(model)
    return model.layers[0].kernel.numpy()


class Critic(keras.Model):
    """A model with two optimizers. It clips the first one's weights before the second one's update, as in a WGAN."""

    def __init__(self):
        super().__init__()
        self.critic, self.generator = (keras.layers.Dense(1, kernel_initializer="ones") for _ in range(2))
        self.optimizers = [keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.05)]

    def call(self, inputs):
        return self.critic(inputs) + self.generator(inputs)

    def train_step(self, data):
        x, y = data
        for optimizer, layer in zip(self.optimizers, (self.critic, self.generator), strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            for weight in weights if layer is self.critic else ():
                weight.assign(tf.clip_by_value(weight, -0.1, 0.1))
        return {"loss": loss}


class OwnAssignmentsTest(tf.test.TestCase, parameterized.TestCase):
    """Programs that assign nothing while the strategy itself merges, pulls, averages or constrains weights."""

    def _assert_equals_one_process(self, name, run):
        results = _of_ranks(name, run)
        if name in _EXACT:
            expected = run(None)
            for kernel in results:
                self.assertAllClose(kernel, expected, rtol=1e-4, atol=1e-4)
        else:
            for kernel in results:
                self.assertAllInRange(kernel, -2.0, 4.0)

    @parameterized.parameters(*_BY_IMPORTANCE)
    @pytest.mark.slow(after=1)
    def test_weight_decay_that_the_optimizer_makes_by_itself(self, name):
        """This optimizer decays weights without `merge_call`, unlike others."""

        def run(strategy):
            with _scope(strategy):
                model = _layers()
                model.compile(keras.optimizers.Muon(0.01, weight_decay=0.1, adam_weight_decay=0.1, ns_steps=1), "mse")
            _fit(model, strategy)
            return _kernel_in_the_end(model, strategy)

        self._assert_equals_one_process(name, run)

    @parameterized.product(other=[False, True], name=_BY_IMPORTANCE)
    @pytest.mark.slow
    @pytest.mark.stress(after=1)
    def test_evaluate_and_predict_within_an_epoch(self, name, other):
        """Keras resets the metrics, and a wide pipe merges gradients in flight."""

        def run(strategy):
            model = _linear(strategy)
            called = _linear(strategy) if other else model

            def call(batch):
                if batch == 1:
                    called.evaluate(_ROWS, _ROWS[:, :1], verbose=0)
                elif batch == 2:
                    called.predict(_ROWS, verbose=0)

            _fit(model, strategy, callbacks=_at_batch_end(call))
            return model.layers[0].kernel.numpy()

        self._assert_equals_one_process(name, run)

    @parameterized.parameters(*_WITH_LOOPS)
    @pytest.mark.slow(after=0)
    @pytest.mark.stress(after=1)
    def test_fit_and_a_loop_with_another_optimizer(self, name):
        def run(strategy):
            model = _linear(strategy, kernel_constraint=keras.constraints.MaxNorm(3.0))
            _fit(model, strategy)
            with _scope(strategy):
                optimizer = keras.optimizers.SGD(0.01)
            step = _loop_step(model, optimizer, strategy)
            for _ in range(3):
                step()
            return _kernel_in_the_end(model, strategy)

        self._assert_equals_one_process(name, run)

    @parameterized.parameters(*_WITH_LOOPS)
    @pytest.mark.slow(after=0)
    @pytest.mark.stress(after=1)
    def test_fit_compile_and_train_on_batch(self, name):
        def run(strategy):
            model = _linear(strategy)
            _fit(model, strategy)
            with _scope(strategy):
                model.compile(keras.optimizers.SGD(0.01), "mse")
            for _ in range(3):
                model.train_on_batch(_ROWS, _ROWS[:, :1] * 2 + 1)
            return _kernel_in_the_end(model, strategy)

        self._assert_equals_one_process(name, run)

    @parameterized.parameters(*_WITH_LOOPS)
    @pytest.mark.slow(after=0)
    @pytest.mark.stress(after=1)
    def test_synchronize_within_a_loop(self, name):
        def run(strategy):
            model = _linear(strategy, kernel_constraint=keras.constraints.MaxNorm(3.0))
            step = _loop_step(model, model.optimizer, strategy)
            for number in range(6):
                if number == 3 and strategy is not None:
                    strategy.synchronize(model)
                step()
            return _kernel_in_the_end(model, strategy)

        self._assert_equals_one_process(name, run)


class ProgramsAssignmentsTest(tf.test.TestCase, parameterized.TestCase):
    def _assert_refused(self, name, run, when):
        with self.assertRaisesRegex(ValueError, f"weights were assigned {when}.*kernel.*pipeline_width=1"):
            _of_ranks(name, run)

    @parameterized.product(name=_KEEPS_A_COPY, evaluates=[False, True])
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_after_the_only_step_of_an_epoch_or_before_an_evaluation(self, name, evaluates):
        """The end of an epoch and an evaluation assign weights, too, because a wide pipe merges gradients in flight."""

        def run(strategy):
            model = _linear(strategy)
            kernel = model.layers[0].kernel

            def call(batch):
                if evaluates is (batch == 1):
                    kernel.assign(kernel * 0.5)
                if evaluates:
                    model.evaluate(_ROWS, _ROWS[:, :1], verbose=0)

            steps = None if evaluates else 1
            _fit(model, strategy, callbacks=_at_batch_end(call), steps_per_epoch=steps)

        self._assert_refused(name, run, "between two training steps")

    @parameterized.product(name=_KEEPS_A_COPY, device=("CPU:1", "CPU:0"), trial=(0, 1, 2))
    @pytest.mark.stress(after=4)
    def test_between_two_steps_of_a_loop(self, name, device, trial):
        """The refusal is what the program sees, not the error of an operation that was cancelled by it."""
        del trial

        def run(strategy):
            _, step = _assigned_in_a_loop(strategy)
            with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "weights were assigned between two training"):
                step()

        member, settings = _MEMBERS[name]
        member.run(run, devices=[device], **settings)

    @parameterized.product(name=[*_WITH_LOOPS, "shat_interval"], how=["synchronize", "fit"])
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=4)
    def test_after_the_last_step_of_a_loop(self, name, how):
        """Merging, by `synchronize` or a following `fit`, does not take such weights back in silence."""

        def run(strategy):
            model, _ = _assigned_in_a_loop(strategy)
            try:
                if how == "fit":
                    model.compile(keras.optimizers.SGD(0.0), "mse")
                    _fit(model, strategy, epochs=1)
                return _kernel_in_the_end(model, strategy)
            except ValueError as error:
                return str(error)

        for result in _of_ranks(name, run):
            if name in ("pipe_sgd_wide", "shat_interval") or (name == "shat" and how == "synchronize"):
                self.assertRegex(result, "weights were assigned after the last training step.*rank [01]: .*kernel")
            else:
                self.assertAllClose(result, np.full([6, 1], 7.0), rtol=1e-5, atol=1e-5)

    @parameterized.parameters(*_BY_IMPORTANCE)
    @pytest.mark.stress(but=3)
    @pytest.mark.slow(after=1)
    def test_when_the_last_epoch_has_ended(self, name):
        """No step follows in which the assignment would count. SHAT ends with the servers' weights, and refuses it."""

        def run(strategy):
            model = _linear(strategy)
            kernel = model.layers[0].kernel
            assign = lambda epoch, logs: kernel.assign(tf.fill([6, 1], 7.0)) if epoch == 1 else None  # noqa: E731
            try:
                _fit(model, strategy, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=assign)])
            except ValueError as error:
                return str(error)
            return kernel.numpy()

        for result in _of_ranks(name, run):
            if name == "shat":
                self.assertRegex(result, "weights were assigned between two epochs.* rank [01]: .*kernel")
            else:
                # Under Canary, steps of the other rank in flight are added.
                self.assertAllClose(result, np.full([6, 1], 7.0), atol=0.3 if name == "canary" else 1e-5)

    @parameterized.product(name=[*_KEEPS_A_COPY, "pipe_sgd"], is_eager=[False, True])
    @pytest.mark.slow(after=3)
    @pytest.mark.stress(but=1)
    def test_between_the_updates_of_two_optimizers(self, name, is_eager):
        def run(strategy):
            with _scope(strategy):
                model = Critic()
                model.compile(run_eagerly=is_eager)
            _fit(model, strategy)
            return np.concatenate([model.critic.kernel.numpy(), model.generator.kernel.numpy()])

        if name in _KEEPS_A_COPY:
            with self.assertRaisesRegex((ValueError, HopError), "Give the layer a constraint.*Received: .*kernel"):
                _of_ranks(name, run)
        else:
            for kernels in _of_ranks(name, run):
                self.assertAllClose(kernels, run(None), rtol=1e-4, atol=1e-4)

    @pytest.mark.stress
    def test_a_loop_with_two_optimizers_takes_what_is_assigned_after_synchronize(self):
        x, y = tf.constant(_ROWS), tf.constant(_ROWS[:, :1] * 2 + 1)

        def run(strategy):
            models = [_linear(strategy) for _ in range(2)]

            def replica_step():
                for model in models:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_mean(tf.square(model(x) - y))
                        loss /= 1 if strategy is None else strategy.num_replicas_in_sync
                    weights = model.trainable_variables
                    model.optimizer.apply(tape.gradient(loss, weights), weights)

            def synchronize():
                for model in models if strategy is not None else ():
                    strategy.synchronize(model)

            step = tf.function(replica_step if strategy is None else lambda: strategy.run(replica_step))
            for number in range(6):
                if number == 3:
                    synchronize()
                    for model in models:
                        model.layers[0].kernel.assign(tf.fill([6, 1], 7.0))
                step()
            synchronize()
            return np.concatenate([model.layers[0].kernel.numpy() for model in models])

        for kernels in _of_ranks("pipe_sgd_wide", run):
            self.assertAllClose(kernels, run(None), rtol=1e-4, atol=1e-4)

    @parameterized.parameters(False, True)
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_before_the_first_epoch_of_a_later_fit(self, stays):
        """SHAT compares with the weights at the begin of this `fit`."""

        def run(strategy):
            model = _linear(strategy)
            _fit(model, strategy)
            model.set_weights([each * 0 + 3 for each in model.get_weights()])

            def swap(epoch, logs):
                weights = model.get_weights()
                model.set_weights([2 * each for each in weights])
                if not stays:
                    model.set_weights(weights)

            _fit(model, strategy, epochs=1, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=swap)])
            return model.layers[0].kernel.numpy()

        if stays:
            self._assert_refused("shat", run, "between two epochs")
        else:
            for kernel in _of_ranks("shat", run):
                self.assertAllInRange(kernel, -2.0, 4.0)

    @pytest.mark.slow
    def test_weights_that_a_callback_swaps_evaluates_and_swaps_back(self):
        """The evaluation does not count as a new end of an epoch."""

        def run(strategy):
            model = _linear(strategy)

            def swap(epoch, logs):
                weights = model.get_weights()
                model.set_weights([2 * each for each in weights])
                model.evaluate(_ROWS, _ROWS[:, :1], verbose=0)
                model.set_weights(weights)

            _fit(model, strategy, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=swap)])
            return model.layers[0].kernel.numpy()

        for kernel in _of_ranks("shat", run):
            self.assertAllInRange(kernel, -2.0, 4.0)


if __name__ == "__main__":
    absltest.main()
