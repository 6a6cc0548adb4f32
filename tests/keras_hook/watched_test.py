"""Assignments between two training steps, by each way that a program has."""

import gc
import os
import tempfile
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf.keras_hook.trace import StepTrace
from hop_tf.keras_hook.updates import as_own_updates
from hop_tf.keras_hook.watched import Watch


def _model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def _restore(model):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tf.train.Checkpoint(model=model)
        checkpoint.restore(checkpoint.save(os.path.join(folder, "checkpoint")))


def _load(model):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "saved.weights.h5")
        model.save_weights(path)
        model.load_weights(path)


def _in_function(model):
    kernel = model.layers[0].kernel
    tf.function(lambda: kernel.assign(kernel * 0.5))()


def _scattered(name):
    return lambda model: getattr(model.layers[0].kernel.value, name)([[0, 0]], [1.0])


def _sliced_in_function(model):
    kernel = model.layers[0].kernel.value
    tf.function(lambda: kernel[:2].assign(tf.zeros([2, 3])))()


_WAYS = {
    "assign": lambda model: model.layers[0].kernel.assign(model.layers[0].kernel * 2),
    "assign_add": lambda model: model.layers[0].kernel.value.assign_add(tf.ones([4, 3])),
    "scatter": lambda model: model.layers[0].kernel.value.scatter_update(tf.IndexedSlices(tf.ones([1, 3]), [0])),
    **{f"scatter_nd_{name}": _scattered(f"scatter_nd_{name}") for name in ("update", "add", "sub", "max", "min")},
    "slice": lambda model: model.layers[0].kernel[0:2].assign(tf.zeros([2, 3])),
    "slice in a function": _sliced_in_function,
    "scatter_nd in a function": lambda model: tf.function(lambda: _scattered("scatter_nd_add")(model))(),
    "set_weights": lambda model: model.set_weights(model.get_weights()),
    "restore": _restore,
    "load_weights": _load,
    "in a function": _in_function,
}


class WatchTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self._model = _model()
        self._kernel = self._model.layers[0].kernel.value
        self._watch = Watch()
        self._group = self._watch.add([variable.value for variable in self._model.layers[0].weights])

    def _names(self):
        return [variable.name for variable in self._watch.assigned()]

    @parameterized.parameters(*_WAYS)
    @pytest.mark.stress(but=12)
    def test_is_noticed(self, way):
        self.assertEmpty(self._names())
        _WAYS[way](self._model)
        self.assertIn(self._kernel.name, self._names())
        self._watch.forget()
        self.assertEmpty(self._names())

    def test_a_function_is_noticed_each_time(self):
        function = tf.function(lambda: self._kernel.assign(self._kernel * 0.5))
        for _ in range(2):
            function()
            self.assertEqual(self._names(), [self._kernel.name])
            self._watch.forget()
        self.assertEmpty(self._names())

    def test_graphs_know_it(self):
        halve = tf.function(lambda: self._kernel.assign(self._kernel * 0.5))
        halve()
        is_assigned = tf.function(self._group.is_assigned)
        for assign in (halve, lambda: self._kernel.assign_add(tf.ones([4, 3]))):
            self._watch.forget()
            self.assertFalse(bool(is_assigned()))
            assign()
            self.assertTrue(bool(is_assigned()))
        tf.function(self._group.forget)()
        self.assertFalse(bool(is_assigned()))

    def test_each_group_forgets_what_it_has_taken(self):
        other = tf.Variable([1.0])
        group = self._watch.add([other])
        are_assigned = [tf.function(each.is_assigned) for each in (self._group, group)]
        double = tf.function(lambda: other.assign(other * 2))
        for assign in (lambda: other.assign([2.0]), double):
            for is_assigned in are_assigned:
                is_assigned()
            self._kernel.assign_add(tf.ones([4, 3]))
            assign()
            self.assertEqual([bool(each()) for each in are_assigned], [True, True])
            tf.function(self._group.forget)()
            self.assertEqual([bool(each()) for each in are_assigned], [False, True])
            group.forget()
            self.assertEqual([bool(each()) for each in are_assigned], [False, False])

    def test_no_flag_is_read_of_variables_that_are_not_watched(self):
        """A step would pay for a teacher of many variables that a function assigns."""
        teacher = [tf.Variable([1.0]) for _ in range(5)]
        self._watch.listen(teacher)
        tf.function(lambda: [each.assign(each * 0.9) for each in teacher])()
        flag = mock.MagicMock()
        noted = self._watch._in_functions
        self.assertLen(noted, 5)
        self._watch._in_functions = {key: (reference, flag) for key, (reference, _) in noted.items()}
        self.assertEmpty(self._names())
        self._watch.forget()
        self.assertEmpty(flag.mock_calls)

    def test_what_is_gone_leaves_nothing_behind(self):
        """A new variable may have the identity of one that is gone."""
        watch = Watch()

        def assign():
            variable = tf.Variable([1.0])
            watch.add([variable])
            variable.assign([2.0])
            tf.function(lambda: variable.assign([3.0]))()
            self.assertLen({id(each) for each in watch.assigned()}, 1)
            return weakref.ref(variable)

        watched = assign()
        gc.collect()
        self.assertIsNone(watched())
        self.assertEqual([watch._watched, watch._assigned, watch._in_functions], [{}, {}, {}])

    def test_a_function_that_was_traced_before_counts_once_its_variable_is_watched(self):
        variable = tf.Variable([1.0])
        self._watch.listen([variable])
        double = tf.function(lambda: variable.assign(variable * 2))
        double()
        self.assertEmpty(self._names())
        self._watch.add([variable])
        self._watch.forget()
        double()
        self.assertLen(self._watch.assigned(), 1)

    def test_what_a_step_assigns_is_told_to_the_step(self):
        self._watch.trace = trace = StepTrace(lambda: None)
        before = self._kernel.numpy()
        self._kernel.assign_add(tf.ones([4, 3]))
        with trace.updating():
            self._model.layers[0].bias.value.assign_add(tf.ones([3]))
        self.assertEmpty(self._names())
        (assigned,) = trace.assigned_before_update([self._kernel, self._model.layers[0].bias.value])
        self.assertAllEqual(assigned.at_start, before)
        self.assertAllEqual(assigned.before_update, before + 1)
        self.assertIsNotNone(self._watch.trace)
        trace.has_ended = True
        self.assertIsNone(self._watch.trace)
        self._kernel.assign_add(tf.ones([4, 3]))
        self.assertLen(self._names(), 1)

    def test_a_step_is_not_kept_alive(self):
        trace = StepTrace(lambda: None)
        self._watch.trace, step = trace, weakref.ref(trace)
        del trace
        gc.collect()
        self.assertIsNone(step())

    def test_what_is_watched_in_steps_only(self):
        other = tf.Variable([1.0])
        self._watch.listen([other])
        other.assign([2.0])
        self.assertEmpty(self._names())

    def test_what_a_strategy_assigns_is_not_noticed(self):
        with as_own_updates():
            self._kernel.assign_add(tf.ones([4, 3]))
        self.assertEmpty(self._names())

    def test_what_was_taken_back_has_not_changed(self):
        self._watch.remember()
        self._kernel.assign_add(0.1 * tf.ones([4, 3]))
        self._kernel.assign_sub(0.1 * tf.ones([4, 3]))  # But for rounding.
        self.assertEmpty(self._watch.changed())
        self._watch.remember()
        self._kernel.assign_add(0.1 * tf.ones([4, 3]))
        self.assertLen(self._watch.changed(), 1)

    def test_a_value_that_was_put_back_does_not_count(self):
        """But for assignments of functions, which are not compared."""
        watch = Watch(ignores_undone=True)
        kernel, bias = variables = [tf.Variable(tf.ones([4])), tf.Variable([1.0])]
        group = watch.add(variables)
        are_assigned = tf.function(group.are_assigned)
        self.assertAllEqual(are_assigned(), [False, False])
        kernel.assign_add(0.1 * tf.ones([4]))
        bias.assign([2.0])
        self.assertAllEqual(are_assigned(), [True, True])
        kernel.assign_sub(0.1 * tf.ones([4]))  # But for rounding.
        self.assertAllEqual(are_assigned(), [False, True])
        self.assertEqual([id(variable) for variable in watch.assigned()], [id(bias)])
        tf.function(lambda: kernel.assign(kernel))()
        self.assertAllEqual(are_assigned(), [True, True])
        watch.forget()
        self.assertAllEqual(are_assigned(), [False, False])
        bias.assign([1.0])
        self.assertAllEqual(are_assigned(), [False, True])  # Its former value is the one that was taken.
        tf.function(group.forget)()
        bias.assign([2.0])
        self.assertAllEqual(are_assigned(), [False, True])  # As above, where a graph has taken it.

    @parameterized.parameters(([np.nan, 1.0], [0.5, 1.0]), ([np.inf, 1.0], [np.inf, 2.0]))
    def test_values_beside_nan_and_infinity_have_changed(self, before, now):
        variable = tf.Variable(before)
        watch = Watch()
        watch.add([variable])
        watch.remember()
        variable.assign(now)
        self.assertLen(watch.changed(), 1)

    def test_nan_that_stays_has_not_changed(self):
        self._kernel.assign(np.full([4, 3], np.nan, np.float32))
        self._watch.remember()
        self._kernel.assign(np.full([4, 3], np.nan, np.float32))
        self.assertEmpty(self._watch.changed())

    def test_a_variable_stays_what_it_was(self):
        self.assertIsInstance(self._kernel, tf.Variable)
        self.assertAllEqual(self._kernel + 0.0, self._kernel.numpy())
        self._model.fit(np.ones([8, 4]), np.ones([8, 3]), verbose=0)
        self.assertLen(tf.function(lambda variable: [variable * 2])(self._kernel), 1)


if __name__ == "__main__":
    absltest.main()
