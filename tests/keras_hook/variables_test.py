"""A function that makes variables is traced once."""

import tensorflow as tf

from hop_tf.keras_hook.variables import made_beside_the_trace


class MadeBesideTheTraceTest(tf.test.TestCase):
    def _calls(self, lifted, scope):
        """Returns how often TensorFlow traces a function that makes a variable. Checks the values of two calls."""
        variables, traces = [], []

        @tf.function
        def add_one():
            traces.append(None)
            with scope():
                if not variables:
                    if lifted:
                        with tf.init_scope():
                            variables.append(tf.Variable(1.0, name="made"))
                    else:
                        variables.append(tf.Variable(1.0, name="made"))
            return variables[0].assign_add(1.0)

        values = [add_one().numpy(), add_one().numpy()]
        self.assertEqual(values, [2.0, 3.0])
        return len(traces)

    def test_a_function_is_traced_once(self):
        self.assertEqual(self._calls(lifted=True, scope=tf.init_scope), 2)  # TensorFlow's rule, without this one.
        self.assertEqual(self._calls(lifted=True, scope=made_beside_the_trace), 1)

    def test_what_the_graph_makes_is_left_to_tensorflow(self):
        self.assertEqual(self._calls(lifted=False, scope=made_beside_the_trace), 2)

    def test_other_creators_are_asked(self):
        """The strategy's and the user's own: their order is kept."""
        strategy, names = tf.distribute.OneDeviceStrategy("/cpu:0"), []

        def record(next_creator, **arguments):
            names.append(arguments["name"])
            return next_creator(**arguments)

        @tf.function
        def make():
            with made_beside_the_trace(), tf.init_scope():
                names.append(tf.Variable(1.0, name="made"))

        with strategy.scope(), tf.variable_creator_scope(record):
            make()
        name, variable = names
        self.assertEqual(name, "made")
        self.assertIs(variable._distribute_strategy, strategy)

    def test_without_a_trace(self):
        with made_beside_the_trace():
            self.assertAllEqual(tf.Variable([1.0, 2.0]), [1.0, 2.0])


if __name__ == "__main__":
    tf.test.main()
