"""Tests of optimizers' slots under Canary after dropped steps."""

import keras
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.keras_hook.optimizers import slots_of
from hop_tf.strategies.canary.slots import SlotsBefore

_COLAYERS = {0: 1, 1: 1, 2: 0}


class SlotsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        make_optimizer=(
            lambda: keras.optimizers.SGD(0.1, momentum=0.9),
            lambda: keras.optimizers.Adam(0.1, amsgrad=True),
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.1)),
        ),
        num_left=(0, 1, 2),
    )
    def test_those_of_colayers_that_have_not_left_are_as_before(self, make_optimizer, num_left):
        """Compares two steps, of which the second is dropped in part or as a whole, with one step."""
        optimizer, variables = self._after_a_step(make_optimizer())
        before = SlotsBefore(optimizer, variables)
        optimizer.apply([2.0 * tf.ones_like(variable) for variable in variables])
        whole = self._values(optimizer, variables)
        before.restore(_COLAYERS, tf.constant(num_left, tf.int64))
        once = self._values(*self._after_a_step(make_optimizer()))
        for (name, index), values in self._values(optimizer, variables).items():
            expected = whole if index is None or _COLAYERS[index] < num_left else once
            self.assertAllEqual(values, expected[name, index])
        self.assertNotAllEqual(list(once.values())[-1], list(whole.values())[-1])

    def test_an_optimizer_without_slots(self):
        optimizer, variables = self._after_a_step(keras.optimizers.SGD(0.1))
        expected = self._values(optimizer, variables)
        SlotsBefore(optimizer, variables).restore(_COLAYERS, tf.constant(0, tf.int64))
        self.assertEqual(self._values(optimizer, variables), expected)

    def _after_a_step(self, optimizer):
        variables = [keras.Variable(tf.ones([size])) for size in (3, 2, 1)]
        optimizer.build(variables)
        optimizer.apply([tf.ones_like(variable.value) for variable in variables])
        return optimizer, [variable.value for variable in variables]

    def _values(self, optimizer, variables):
        return {where: slot.numpy() for where, slot in slots_of(optimizer, variables).items()}


if __name__ == "__main__":
    tf.test.main()
