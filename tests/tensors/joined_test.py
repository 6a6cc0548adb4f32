"""Variables of a bucket as one flat variable."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf.tensors.joined import JoinedGroup
from hop_tf.tensors.packing import Packing, TensorSpec

_SHAPES = [(3, 5), (), (64,), (7,), (2, 2)]
_NUM_TRAINED = 3


def _variables(dtypes):
    rng = np.random.default_rng(0)
    return [tf.Variable(rng.normal(size=shape), dtype=dtype) for shape, dtype in zip(_SHAPES, dtypes, strict=True)]


def _packing(variables):
    """The packing of a group: its variables, and another tensor."""
    specs = [TensorSpec(f"v{i}", tuple(v.shape), v.dtype, i >= _NUM_TRAINED) for i, v in enumerate(variables)]
    return Packing([*specs, TensorSpec("beside", (2,), tf.float32, True)])


@parameterized.parameters(
    ([tf.float32] * 5, 1),
    ([tf.float32, tf.float64, tf.float32, tf.float32, tf.float64], 2),
    ([tf.float16, tf.float16, tf.bfloat16, tf.float32, tf.float32], 2),
)
class JoinedGroupTest(tf.test.TestCase, parameterized.TestCase):
    def test_buckets_are_those_of_the_variables(self, dtypes, num_trained):
        variables = _variables(dtypes)
        packing = _packing(variables)
        joined = JoinedGroup(variables, _NUM_TRAINED, packing)
        self.assertEqual(joined.num_trained, num_trained)
        beside = tf.constant([8.0, 9.0])
        expected = packing.pack([*(v.read_value() for v in variables), beside])
        found = joined.packing.pack([*(each.read_value() for each in joined.variables), beside])
        for one, other in zip(found, expected, strict=True):
            self.assertEqual(one.dtype, other.dtype)
            self.assertAllEqual(one, other)

    def test_joined_variables_are_assigned(self, dtypes, num_trained):
        variables = _variables(dtypes)
        joined = JoinedGroup(variables, _NUM_TRAINED, _packing(variables))
        values = [np.asarray(v) for v in variables]
        for each in joined.variables:
            each.assign(2 * each.read_value())
            each.assign_add(tf.ones(each.shape, each.dtype))
        for variable, value in zip(variables, values, strict=True):
            self.assertAllEqual(variable, 2 * value + np.ones_like(value))

    def test_splits_what_it_joins(self, dtypes, num_trained):
        variables = _variables(dtypes)
        joined = JoinedGroup(variables, _NUM_TRAINED, _packing(variables))
        values = [2 * v for v in variables]
        for piece, value in zip(joined.split(joined.join(values)), values, strict=True):
            self.assertAllEqual(piece, value)

    def test_a_value_for_each_variable_is_at_all_of_its_places(self, dtypes, num_trained):
        variables = _variables(dtypes)
        joined = JoinedGroup(variables, _NUM_TRAINED, _packing(variables))
        spread = [each.spread(tf.range(float(len(each.variables)))) for each in joined.variables]
        numbers = {id(v): i for each in joined.variables for i, v in enumerate(each.variables)}
        for variable, piece in zip(variables, joined.split(spread), strict=True):
            self.assertAllEqual(piece, np.full(variable.shape, numbers[id(variable)]))


if __name__ == "__main__":
    absltest.main()
