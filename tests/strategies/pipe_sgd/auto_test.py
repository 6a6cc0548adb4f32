"""Tests of Pipe-SGD that chooses its settings: changes during a training, and programs that allow none."""

import contextlib
import io
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.runtime import choices
from hop_tf.runtime import ways as ways_module
from hop_tf.runtime.autotuning import Autotuner, Setting
from hop_tf.strategies.pipe_sgd.exchange import PipeSGDSettings
from hop_tf.tensors.packing import TensorSpec
from support import in_process, linear, linear_loss, scripted_choices, train_with_late_determinism

_OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)),
    "no_twin": lambda: keras.optimizers.Nadam(0.05),
    "use_ema": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.8),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0),
}
# K of each step: several changes, some in successive steps, and at the end of an epoch.
_WIDTHS = [1, 1, 2, 2, 2, 1, 2, 1, 1, 2, 2, 2, 2, 1, 1, 2, 1, 2, 2, 2, 1, 1, 1, 2]


def _cluster(world_size=2, **settings):
    return in_process(hop_tf.PipeSGDStrategy, world_size, **settings)


class AutoTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *((name, {}, 2 if name == "momentum" else 1) for name in _OPTIMIZERS),
        ("adamw", {"steps_per_execution": 3}, 1),
        ("adamw", {"run_eagerly": True}, 1),
    )
    @pytest.mark.slow(after=1)
    def test_a_change_of_width_loses_no_gradient(self, optimizer, arguments, num_fits):
        def run(strategy):
            widths, weights = [], []
            for _ in range(num_fits):  # The second `fit` begins with the last width of the first.
                record = keras.callbacks.LambdaCallback(
                    on_train_batch_end=lambda batch, logs: widths.append(strategy.training.groups[0].exchange.width)
                )
                weights += linear.fit_in(strategy, _OPTIMIZERS[optimizer], [record], **arguments).get_weights()
            return weights, widths

        with scripted_choices(lambda step: Setting(0, [*_WIDTHS, 1][step])):
            results = _cluster(codec=None).run(run)
        expected = linear.weights_alone(_OPTIMIZERS[optimizer])
        for weights, widths in results:
            self.assertAllClose(weights, expected * num_fits, rtol=1e-5, atol=1e-5)
            self.assertEqual(set(widths), {1, 2})
            for mine, first in zip(weights, results[0][0], strict=True):
                self.assertAllEqual(mine, first)

    @pytest.mark.slow
    def test_computes_at_once_with_own_gradients_only_if_the_pipe_is_wide(self):
        """Within an epoch, weights are equal on all ranks while K = 1, and not while K = 2."""

        def run(strategy):
            seen = []
            record = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: seen.append(record.model.get_weights()[0])
            )
            linear.fit_in(strategy, _OPTIMIZERS["momentum"], [record], epochs=1)
            return seen

        with scripted_choices(lambda step: Setting(0, 2 if 4 <= step < 8 else 1)):
            first, second = _cluster(codec=None).run(run)
        are_equal = [np.array_equal(*pair) for pair in zip(first, second, strict=True)]
        # Step 7 has chosen K = 1. When step 8 has ended, all ranks surely have that mean.
        self.assertEqual(are_equal, [step < 4 or step > 8 for step in range(len(first))])

    @parameterized.parameters(1, 3)
    @pytest.mark.slow(after=1)
    def test_a_change_of_codec_loses_no_gradient(self, num_segments):
        def run(strategy):
            return linear.fit_in(strategy, _OPTIMIZERS["momentum"]).get_weights()

        ways = scripted_choices(lambda step: Setting(step // 2 % 4, 1))  # Mesh and ring, with and without int8.
        with ways, mock.patch.object(ways_module, "_LEAST_BYTES", 0):
            results = _cluster(3, num_segments=num_segments, pipeline_width=1).run(run)
        expected = linear.weights_alone(_OPTIMIZERS["momentum"])
        for weights in results:
            self.assertAllClose(weights, expected, rtol=0.02, atol=0.2)
            for mine, first in zip(weights, results[0], strict=True):
                self.assertAllEqual(mine, first)

    @parameterized.parameters(
        codecs.Int8(error_feedback=True), codecs.TopK(ratio=0.2, error_feedback=True), codecs.LowRank(rank=1)
    )
    @pytest.mark.slow(after=1)
    def test_what_a_codec_has_lost_goes_along_with_a_change_of_the_algorithm(self, codec):
        """The updates and the residuals of all ranks add up to the sum of all gradients."""

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, use_bias=False)])
                model.set_weights([np.zeros((6, 2))])
                model.compile(keras.optimizers.SGD(1.0), linear_loss)
            model.fit(*linear.data(), batch_size=linear.BATCH_SIZE, epochs=1, shuffle=False, verbose=0)
            (group,) = strategy.training.groups
            (reduction,) = group.exchange._reductions
            reduction.choose(1 - reduction._chosen)  # Brings together what is held back.
            bucket, where = group.packing.place(0)
            return model.get_weights()[0], reduction._lost[bucket][where].reshape(6, 2)

        factorizes = mock.patch.object(codecs.LowRank, "factorizes", lambda self, spec: spec.shape == (6, 2))
        with factorizes, scripted_choices(lambda step: Setting(step // 2 % 2, 1)):
            results = _cluster(3, codec=codec, pipeline_width=1).run(run)
        x, y = linear.data()
        all_gradients = x.T @ y / linear.BATCH_SIZE
        held_back = np.mean([lost for _, lost in results], axis=0)
        self.assertGreater(np.abs(held_back).max(), 1e-4)
        for weights, _ in results:
            self.assertAllClose(weights, held_back - all_gradients, rtol=1e-4, atol=1e-4)


class SettingsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ([(512, 256)], ["identity", "int8", "low_rank"]),
        ([(512, 256), (3, 3, 64, 256)], ["identity", "int8"]),  # Most values are those of a convolution.
        ([(128, 64)], ["identity", "int8"]),
        ([(8, 8)], ["identity"]),
    )
    def test_codecs_that_ranks_choose_from(self, shapes, names):
        settings = PipeSGDSettings(pipeline_width=1, codec="auto")
        specs = [TensorSpec("kernel", shape, tf.float32) for shape in shapes]
        specs.append(TensorSpec("statistics", (1 << 20,), tf.float32, exact=True))
        self.assertEqual([way.codec.name for way in settings.ways(2, specs)], names)
        not_factorized = [name for name in names if name != "low_rank"]
        self.assertEqual([way.codec.name for way in settings.ways(2, specs, factorizes=False)], not_factorized)

    def test_what_is_told_keeps_the_settings(self):
        """The printed arguments keep the given codec."""
        codec = codecs.TopK(ratio=0.2, error_feedback=True)
        low_rank = codecs.LowRank(rank=2)
        for given, told in (
            (codec, repr(codec)),
            ("int8", "'int8'"),
            (None, "None"),
            ("low_rank", "'low_rank'"),
            (low_rank, repr(low_rank)),
        ):
            strategy = hop_tf.PipeSGDStrategy(codec=given)
            (way,) = PipeSGDSettings(pipeline_width=1, codec=codecs.get_for_means(given)).ways(2)
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                strategy._tell(way, 1, "text")
            self.assertEqual(
                stderr.getvalue(),
                f"hop_tf: text. To keep these settings, pass codec={told}, algorithm='mesh', pipeline_width=1.\n",
            )

    def test_nothing_is_chosen_by_times_if_operations_are_deterministic(self):
        with mock.patch.object(choices, "is_deterministic", return_value=True):
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                strategy = hop_tf.PipeSGDStrategy()
            self.assertEqual(
                strategy._settings, PipeSGDSettings(pipeline_width=1, codec=codecs.Identity(), algorithm="mesh")
            )
            self.assertIn(
                "operations are deterministic, so ranks choose nothing by measured times. To keep", stderr.getvalue()
            )
            given = hop_tf.PipeSGDStrategy(pipeline_width=2, codec="int8", algorithm="ring")
            self.assertEqual((given._settings.pipeline_width, given._settings.algorithm), (2, "ring"))

    def test_operations_that_become_deterministic_too_late(self):
        with self.assertRaisesRegex(ValueError, "Call it before you create the strategy"):
            train_with_late_determinism(
                _cluster(), 2, lambda strategy: linear.fit_in(strategy, _OPTIMIZERS["momentum"])
            )

    @pytest.mark.slow
    def test_ranks_with_one_setting_to_choose_from(self):
        """Two ranks have only one algorithm, but still measure the times of all steps."""

        def run(strategy):
            return linear.fit_in(strategy, _OPTIMIZERS["momentum"], epochs=4).get_weights()

        expected = linear.weights_alone(_OPTIMIZERS["momentum"], epochs=4)
        for weights in _cluster(pipeline_width=1, codec=None).run(run):
            self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_two_models_in_turns(self):
        """A choice in the middle of one model's `fit` does not reach the other model."""

        def run(strategy):
            with strategy.scope():
                models = [linear.make_model() for _ in range(2)]
                for model in models:
                    model.compile(_OPTIMIZERS["momentum"](), linear_loss)
            for _ in range(2):
                for model in models:
                    model.fit(*linear.data(), batch_size=linear.BATCH_SIZE, epochs=1, shuffle=False, verbose=0)
            return [model.get_weights() for model in models]

        expected = linear.weights_alone(_OPTIMIZERS["momentum"])
        widths = [1, 1, 2, 2, 1, 2, 2, 1, 1, 1, 1, 1, 2]  # The last choice of a `fit` comes too late for that `fit`.
        with scripted_choices(lambda step: Setting(0, widths[step % 12 or 12])):
            results = _cluster(codec=None).run(run)
        for of_models in results:
            for weights in of_models:
                self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)


class ProgramsTest(tf.test.TestCase, parameterized.TestCase):
    """Tests that programs that a wide pipe cannot follow train with K = 1, without an error."""

    def _check_stays_narrow(self, run, skipped=0):
        """Checks that ranks report a narrow pipe, except in the first `skipped` steps."""
        with scripted_choices(lambda step: Setting(0, 1)), mock.patch.object(Autotuner, "own", _noting(seen := {})):
            _cluster(codec=None).run(run)
        for of_rank in seen.values():
            self.assertNotEmpty(of_rank[skipped:])
            self.assertTrue(all(of_rank[skipped:]))

    def test_an_optimizer_that_is_applied_twice(self):
        def run(strategy):
            with strategy.scope():
                first, second = (keras.Variable(np.ones(4, np.float32)) for _ in range(2))
                optimizer = keras.optimizers.SGD(0.1)
                optimizer.build([first, second])

            def step():
                for variable in (first, second):
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(variable.value)
                    optimizer.apply(tape.gradient(loss, [variable]), [variable])

            run_step = tf.function(lambda: strategy.run(step))
            for _ in range(4):
                run_step()
            for variable in (first, second):
                self.assertAllClose(variable, np.full(4, 1 - 4 * 0.1 * 2))  # A custom loop sums over ranks.

        self._check_stays_narrow(run)

    def test_accumulation_within_a_loss_scale(self):
        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
                inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
                model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0), linear_loss)
            double = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: model.set_weights([2 * each for each in model.get_weights()])
            )
            model.fit(*linear.data(), batch_size=linear.BATCH_SIZE, epochs=1, verbose=0, callbacks=[double])
            (group,) = strategy.training.groups
            self.assertEqual(group.exchange.width, 1)

        _cluster().run(run)

    @pytest.mark.slow
    def test_callbacks_that_assign_weights(self):
        """Callbacks assign in each step, on all ranks, as a program that bounds weights."""

        class Clips(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.set_weights([np.clip(each, -0.5, 0.5) for each in self.model.get_weights()])

        expected = linear.fit(_OPTIMIZERS["momentum"], [Clips()]).get_weights()

        def run(strategy):
            model = linear.fit_in(strategy, _OPTIMIZERS["momentum"], [Clips()])
            self.assertAllClose(model.get_weights(), expected, rtol=1e-5, atol=1e-5)

        self._check_stays_narrow(run, skipped=2)

    @parameterized.parameters("before", "after")
    def test_a_step_that_assigns_weights(self, when):
        class Bounded(keras.Model):
            def train_step(self, data):
                if when == "before":
                    self._bound()
                logs = super().train_step(data)
                if when == "after":
                    self._bound()
                return logs

            def _bound(self):
                for variable in self.trainable_variables:
                    variable.assign(tf.clip_by_value(variable, -0.5, 0.5))

        def fit():
            inputs = keras.Input((6,))
            model = Bounded(inputs, keras.layers.Dense(2, kernel_initializer="ones")(inputs))
            model.compile(_OPTIMIZERS["momentum"](), linear_loss)
            model.fit(*linear.data(), batch_size=linear.BATCH_SIZE, shuffle=False, verbose=0)
            return model.get_weights()

        expected = fit()

        def run(strategy):
            with strategy.scope():
                self.assertAllClose(fit(), expected, rtol=1e-5, atol=1e-5)

        self._check_stays_narrow(run)


def _noting(seen):
    own = Autotuner.own

    def note(self, times, is_late):
        seen.setdefault(id(self), []).append(self.is_narrow)
        return own(self, times, is_late)

    return note


if __name__ == "__main__":
    tf.test.main()
