"""Branches of a step that run only if a condition holds."""

import tensorflow as tf
from absl.testing import absltest, parameterized
from tensorflow.python.eager import context

from hop_tf.keras_hook.branches import when


class WhenTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(condition=[False, True], in_graph=[False, True], is_tensor=[False, True])
    def test_one_branch_runs(self, condition, in_graph, is_tensor):
        variable = tf.Variable(1.0)

        def step(condition):
            when(condition, lambda: variable.assign_add(1), lambda: variable.assign_sub(1))
            when(condition, lambda: variable.assign(10 * variable))
            return variable.read_value()

        step = tf.function(step) if in_graph else step
        self.assertEqual(float(step(tf.constant(condition) if is_tensor else condition)), 20 if condition else 0)

    def test_operations_keep_their_order(self):
        """Of reads and assignments before, within and behind a branch."""
        variable, seen = tf.Variable(0.0), tf.Variable(0.0)

        @tf.function
        def step():
            before = variable.read_value()
            variable.assign_add(1)
            when(tf.equal(variable % 2, 1), lambda: seen.assign(10 * variable + before))
            variable.assign_add(1)
            return variable.read_value(), seen.read_value()

        for number in range(3):
            self.assertAllEqual(step(), [2 * number + 2, 10 * (2 * number + 1) + 2 * number])

    def test_a_branch_that_does_not_run_is_not_part_of_the_step(self):
        variables = [tf.Variable(0.0) for _ in range(100)]

        def assign():
            for variable in variables:
                variable.assign_add(1)

        @tf.function
        def step(condition):
            when(condition, assign)

        context.enable_graph_collection()
        step(tf.constant(False))
        collected = context.export_run_metadata()
        context.disable_graph_collection()
        operations = {node.op for each in collected.function_graphs for node in each.post_optimization_graph.node}
        self.assertIn("StatefulPartitionedCall", operations)
        self.assertNotIn("AssignAddVariableOp", operations)
        step(tf.constant(True))
        self.assertAllEqual(variables, [1.0] * len(variables))


if __name__ == "__main__":
    absltest.main()
