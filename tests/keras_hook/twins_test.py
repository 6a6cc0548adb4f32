"""A twin makes the same updates as the optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.keras_hook import updates
from hop_tf.keras_hook.optimizers import iterations_variable, slots_of
from hop_tf.keras_hook.twins import Twin, has_twin
from hop_tf.keras_hook.updates import update

_RATE = 0.01
_SHAPES = ((7,), (3, 5), (), (2, 3, 4), (200, 100), (1,), (129, 128))  # Two are large.
_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(_RATE),
    "momentum": lambda: keras.optimizers.SGD(_RATE, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda: keras.optimizers.SGD(_RATE, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(_RATE, momentum=0.5, centered=True),
    "adam": lambda: keras.optimizers.Adam(_RATE, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(_RATE, weight_decay=0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(_RATE),
    "adagrad": lambda: keras.optimizers.Adagrad(_RATE),
    "adamax": lambda: keras.optimizers.Adamax(_RATE),
    "lion": lambda: keras.optimizers.Lion(_RATE, weight_decay=0.1),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(_RATE, 2, 0.5)),
}


class _Own(keras.optimizers.SGD):
    pass


def _values(seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in _SHAPES]


def _variables(dtypes=("float32",), **arguments):
    names = ["bias" if not index % 3 else "kernel" for index in range(len(_SHAPES))]
    dtypes = [dtypes[index % len(dtypes)] for index in range(len(_SHAPES))]
    each = zip(_values(0), names, dtypes, strict=True)
    return [keras.Variable(value, name=name, dtype=dtype, **arguments) for value, name, dtype in each]


def _built(make_optimizer, of_keras):
    optimizer = make_optimizer()
    if optimizer.weight_decay is not None:
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build(of_keras)
    return optimizer, [variable.value for variable in of_keras]


def _gradients(seed, variables):
    return [tf.cast(value, variable.dtype) for value, variable in zip(_values(seed), variables, strict=True)]


def _state(optimizer, variables):
    state = [*variables, *slots_of(optimizer, variables).values(), iterations_variable(optimizer)]
    return [tf.cast(variable, tf.float64).numpy() for variable in state]


class TwinTest(parameterized.TestCase):
    def check_equal(self, found, expected):
        self.assertEqual(len(found), len(expected))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)

    @parameterized.product(name=list(_OPTIMIZERS), in_graph=(False, True))
    @pytest.mark.slow(after=8)
    def test_its_updates_are_the_optimizers(self, name, in_graph):
        optimizer, variables = _built(_OPTIMIZERS[name], _variables())
        expected, expected_variables = _built(_OPTIMIZERS[name], _variables())
        self.assertTrue(has_twin(optimizer, variables))
        twin = Twin(optimizer, variables)
        twin.take(variables)

        def step(*gradients):
            twin.update(twin.join(gradients))

        def expected_step(*gradients):
            update(expected, gradients, expected_variables)

        if in_graph:  # There TensorFlow takes its fast root, whose last bit depends on a value's place in a vector.
            step, expected_step = tf.function(step), tf.function(expected_step)
        before = _state(optimizer, variables)
        for seed in range(1, 5):
            expected_step(*_gradients(seed, variables))
            step(*_gradients(seed, variables))
        self.check_equal(_state(optimizer, variables), before)  # Until it gives them.
        twin.give()
        found, wanted = _state(optimizer, variables), _state(expected, expected_variables)
        if not in_graph:
            self.check_equal(found, wanted)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)

    def test_variables_of_several_types(self):
        optimizer, variables = _built(_OPTIMIZERS["adam"], _variables(("float32", "bfloat16")))
        expected, expected_variables = _built(_OPTIMIZERS["adam"], _variables(("float32", "bfloat16")))
        twin = Twin(optimizer, variables)
        twin.take(variables)
        twin.update(twin.join(_gradients(1, variables)))
        update(expected, _gradients(1, variables), expected_variables)
        twin.give()
        self.check_equal(_state(optimizer, variables), _state(expected, expected_variables))

    def test_small_variables_of_the_same_decay_lie_together(self):
        optimizer, variables = _built(_OPTIMIZERS["adamw"], _variables())
        self.assertEqual(
            [each.shape for each in Twin(optimizer, variables).weights], [(31,), (17,), (200, 100), (129, 128)]
        )

    def test_the_rate_of_another_step(self):
        optimizer, variables = _built(_OPTIMIZERS["sgd"], _variables())
        twin = Twin(optimizer, variables)
        twin.take(variables)
        twin.update(twin.join(_gradients(1, variables)), tf.constant(0.5))
        twin.give()
        for variable, value, gradient in zip(variables, _values(0), _values(1), strict=True):
            np.testing.assert_allclose(variable, value - 0.5 * gradient, rtol=1e-6)
        self.assertAlmostEqual(float(optimizer.learning_rate), _RATE)

    def test_a_setting_that_is_changed_later(self):
        optimizer, variables = _built(_OPTIMIZERS["sgd"], _variables())
        twin = Twin(optimizer, variables)
        twin.take(variables)
        optimizer._learning_rate = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)  # As for a rank that joins.
        for seed in (1, 2):
            twin.update(twin.join(_gradients(seed, variables)))
        twin.give()
        for variable, value, first, second in zip(variables, *map(_values, range(3)), strict=True):
            np.testing.assert_allclose(variable, value - 0.5 * first - 0.25 * second, rtol=1e-5, atol=1e-6)

    @parameterized.parameters("adamw", "momentum", "adam")
    def test_decayed_weights_are_given_and_not_kept(self, name):
        optimizer, variables = _built(_OPTIMIZERS[name], _variables())
        expected, expected_variables = _built(_OPTIMIZERS[name], _variables())
        twin = Twin(optimizer, variables)
        twin.take(variables)
        before = _state(optimizer, variables)
        twin.give(decayed=True)
        with updates._in_replica():
            expected._apply_weight_decay(expected_variables)
        self.check_equal(_state(optimizer, variables), _state(expected, expected_variables))
        twin.give()
        self.check_equal(_state(optimizer, variables), before)

    def test_some_of_the_variables_in_another_order(self):
        optimizer, variables = _built(_OPTIMIZERS["adamw"], _variables())
        expected, expected_variables = _built(_OPTIMIZERS["adamw"], _variables())
        chosen = [5, 0, 4, 1]
        twin = Twin(optimizer, [variables[index] for index in chosen])
        twin.take([variables[index] for index in chosen])
        gradients = _gradients(1, variables)
        twin.update(twin.join([gradients[index] for index in chosen]))
        twin.give()
        update(expected, [gradients[index] for index in chosen], [expected_variables[index] for index in chosen])
        self.check_equal(_state(optimizer, variables), _state(expected, expected_variables))

    def test_gradients_of_another_type(self):
        optimizer, variables = _built(_OPTIMIZERS["sgd"], _variables())
        twin = Twin(optimizer, variables)
        twin.take(variables)
        twin.update(twin.join([tf.cast(gradient, tf.float16) for gradient in _gradients(1, variables)]))
        twin.give()
        for variable, value, gradient in zip(variables, _values(0), _values(1), strict=True):
            np.testing.assert_allclose(variable, value - _RATE * gradient, atol=1e-4)

    def test_weight_decay_that_is_excluded_too_late(self):
        optimizer, variables = _built(_OPTIMIZERS["adamw"], _variables())
        twin = Twin(optimizer, variables)
        optimizer.exclude_from_weight_decay(var_names=["kernel"])
        with self.assertRaisesRegex(ValueError, "before the training begins"):
            twin.update(twin.join(_gradients(1, variables)))

    def test_the_optimizer_saves_nothing_of_it(self):
        optimizer, variables = _built(_OPTIMIZERS["adamw"], _variables())
        before = [id(variable) for variable in optimizer.variables]
        twin = Twin(optimizer, variables)
        twin.update(twin.join(_gradients(1, variables)))
        self.assertEqual([id(variable) for variable in optimizer.variables], before)
        self.assertEqual(int(optimizer.iterations), 0)

    @parameterized.parameters(
        (lambda: keras.optimizers.Lamb(_RATE),),
        (lambda: keras.optimizers.Nadam(_RATE),),
        (lambda: keras.optimizers.Ftrl(_RATE),),
        (lambda: _Own(_RATE),),
        (lambda: keras.optimizers.SGD(_RATE, use_ema=True),),
        (lambda: keras.optimizers.SGD(_RATE, gradient_accumulation_steps=2),),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(_RATE)),),
    )
    def test_others_have_none(self, make_optimizer):
        optimizer, of_keras = make_optimizer(), _variables()
        optimizer.build(of_keras)
        self.assertFalse(has_twin(optimizer, [variable.value for variable in of_keras]))

    def test_a_constraint_looks_at_a_whole_variable(self):
        of_keras = _variables()
        of_keras[1].constraint = keras.constraints.UnitNorm()
        self.assertFalse(has_twin(*_built(_OPTIMIZERS["sgd"], of_keras)))


if __name__ == "__main__":
    tf.test.main()
