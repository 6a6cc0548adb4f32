"""Tests of windows: when they end and are merged, and the selection of the values that are sent."""

import itertools

import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.runtime.outer_optimizer import OuterOptimizer
from hop_tf.strategies.dts.windows import Schedule, largest
from hop_tf.tensors.joined import JoinedGroup
from hop_tf.tensors.packing import Packing, TensorSpec


class ScheduleTest(tf.test.TestCase):
    def test_windows_are_merged_in_order_and_their_slots_are_free(self):
        for delay, interval in itertools.product(range(30), range(1, 20)):
            schedule, in_flight, num_merged = Schedule(delay, interval), [], 0
            for num_steps in range(1, 90):
                has_ended, window = schedule.ended(num_steps)
                if has_ended:
                    self.assertEqual((window + 1) * interval, num_steps)
                    in_flight.append(window)
                # The last window of a `fit`, which may be shorter, needs one more slot, wherever the `fit` ends.
                self.assertLessEqual(len(in_flight) + (num_steps % interval > 0), schedule.num_slots)
                is_due, window = schedule.due(num_steps)
                if is_due:
                    self.assertLen(in_flight, schedule.num_newer + 1)
                    self.assertEqual((window, in_flight.pop(0)), (num_merged, num_merged))
                    self.assertEqual((window + 1) * interval + delay, num_steps)
                    num_merged += 1
                self.assertEqual([*schedule.in_flight(num_steps)], in_flight)
                # A window that sends values held back needs a slot even after a whole window.
                self.assertLessEqual(len(in_flight) + 1, schedule.num_slots)


class SelectionTest(tf.test.TestCase):
    def test_the_largest_are_handed_out(self):
        """Smaller values stay this rank's own changes until they are among the largest."""
        selection = codecs.TopK(ratio=0.4)
        variable = tf.Variable(tf.zeros(5))
        outer = OuterOptimizer([variable], [variable.read_value()], num_trained=1, max_newer=0)

        def train(window, change, mean):
            variable.assign_add(change)
            (own,) = outer.take(lambda changes: largest(selection, tf.constant(window, tf.int64), changes))
            outer.merge([tf.constant(mean)])
            outer.give(0)
            return own.numpy(), variable.numpy()

        own, w = train(0, [1.0, -5.0, 2.0, 0.5, -3.0], [0.0, -1.0, 0.0, 0.0, 1.0])
        self.assertAllEqual(own, [0.0, -5.0, 0.0, 0.0, -3.0])
        self.assertAllEqual(w, [1.0, -1.0, 2.0, 0.5, 1.0])
        own, w = train(1, [1.5, 0.5, 1.0, 0.0, 0.0], [0.0] * 5)
        self.assertAllEqual(own, [2.5, 0.0, 3.0, 0.0, 0.0])
        self.assertAllEqual(w, [0.0, -0.5, 0.0, 0.5, 1.0])
        own = outer.take()[0].numpy()
        outer.merge([tf.zeros(5)])
        outer.give(0)
        self.assertAllEqual(own, [0.0, 0.5, 0.0, 0.5, 0.0])
        self.assertAllEqual(variable, [0.0, -1.0, 0.0, 0.0, 1.0])

    def test_the_threshold_is_not_that_of_one_column(self):
        """The sample meets all columns of a kernel, one without changes among others."""
        shape, ratio = (1 << 17, 64), 0.01
        changes = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        changes[:, 0] = 0.0
        (chosen,) = largest(codecs.TopK(ratio=ratio), tf.constant(0, tf.int64), [tf.constant(changes)])
        # About 1250 values of the sample pass: their share is a few percent off.
        self.assertAllClose(np.mean(chosen), ratio, rtol=0.15)

    def test_a_value_that_is_no_number_is_handed_out(self):
        changes = tf.constant([1.0, float("nan"), 2.0, 0.5, -3.0])
        (chosen,) = largest(codecs.TopK(ratio=0.2), tf.constant(0, tf.int64), [changes])
        self.assertTrue(chosen[1])


class OuterOptimizerTest(tf.test.TestCase):
    def test_weights_are_what_is_merged_however_long_it_takes(self):
        """Own changes that are merged leave no rounding behind."""
        random = np.random.default_rng(0)
        start = tf.constant(random.normal(size=50), tf.float32)
        ranks = [tf.Variable(start) for _ in range(2)]
        outers = [OuterOptimizer([rank], [start], num_trained=1, max_newer=2) for rank in ranks]
        submitted = []
        for _ in range(300):
            for rank in ranks:
                rank.assign_add(1e-3 * random.normal(size=50).astype(np.float32))
            submitted.append(np.mean([outer.take()[0] for outer in outers], axis=0))
            if len(submitted) > 2:
                for outer in outers:
                    outer.merge([submitted[0]])
                    outer.give(2)
                submitted.pop(0)
            self.assertLess(np.abs(ranks[0] - ranks[1]).max(), 0.02)
        for num_newer, mean in reversed([*enumerate(reversed(submitted))]):
            for outer in outers:
                outer.merge([mean])
                outer.give(num_newer)
        self.assertAllEqual(*ranks)

    def test_joined_variables_are_merged_as_each_by_itself(self):
        """Gently, with means one window late. The program assigns a variable whose type comes between two others."""
        shapes = [
            ((3, 4), tf.float32),
            ((5,), tf.float64),
            ((2, 3), tf.float32),
            ((7,), tf.float32),
            ((4,), tf.float64),
        ]
        specs = [TensorSpec(f"v{i}", shape, dtype) for i, (shape, dtype) in enumerate(shapes)]
        weights = [self._merge_gently(max_values, specs) for max_values in (None, 1000)]
        for separate, joined in zip(*weights, strict=True):
            self.assertAllClose(separate, joined, rtol=1e-6)
        self.assertAllEqual(weights[1][1], np.full(5, 9.0))  # What was assigned stays.

    def _merge_gently(self, max_values, specs):
        random = np.random.default_rng(0)
        variables = [tf.Variable(tf.zeros(spec.shape, spec.dtype)) for spec in specs]
        operands = JoinedGroup(variables, len(variables), Packing(specs), max_values)
        start = operands.join([variable.read_value() for variable in variables])
        outer = OuterOptimizer(operands.variables, start, num_trained=operands.num_trained, max_newer=1, gently=True)
        assigned, due = tf.fill([len(variables)], False), None
        for window in range(6):
            for variable, spec in zip(variables, specs, strict=True):
                # The others' changes are as large: the second variable is no longer trained when it is assigned.
                size = 0.0 if window > 2 and variable is variables[1] else 1.0
                variable.assign_add(tf.constant(size * random.normal(size=spec.shape), spec.dtype))
            own = outer.take(assigned=operands.arrange(assigned))
            assigned = tf.fill([len(variables)], False)
            if due is not None:
                outer.merge(due)
                outer.follow(due, 1)
            outer.approach(1, 1, follows_take=True)
            due = [0.5 * change for change in own] if window < 2 else own
            if window == 2:
                variables[1].assign(tf.fill([5], tf.constant(9.0, tf.float64)))
                assigned = tf.tensor_scatter_nd_update(assigned, [[1]], [True])
                outer.note_assigned(operands.arrange(assigned), 1)
        return [variable.numpy() for variable in variables]


if __name__ == "__main__":
    tf.test.main()
