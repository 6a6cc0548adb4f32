"""Variables of a bucket as one flat variable."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf.tensors.joined import JoinedGroup, JoinedVariables
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


_F16, _F32, _F64 = tf.float16, tf.float32, tf.float64


@parameterized.parameters(
    ([_F32] * 5, 1000, 1),
    ([_F32] * 5, 20, 2),  # The third one is larger than that.
    ([_F32] * 5, 1, 3),
    ([_F32, _F64, _F32, _F32, _F64], None, 3),
    ([_F32, _F64, _F32, _F32, _F64], 1000, 2),
    ([_F16, _F16, tf.bfloat16, _F32, _F32], 1000, 2),
)
class JoinedGroupTest(tf.test.TestCase, parameterized.TestCase):
    def test_buckets_are_those_of_the_variables(self, dtypes, max_values, num_trained):
        variables = _variables(dtypes)
        packing = _packing(variables)
        joined = JoinedGroup(variables, _NUM_TRAINED, packing, max_values)
        self.assertEqual(joined.num_trained, num_trained)
        beside = tf.constant([8.0, 9.0])
        expected = packing.pack([*(v.read_value() for v in variables), beside])
        found = joined.packing.pack([*(each.read_value() for each in joined.variables), beside])
        for one, other in zip(found, expected, strict=True):
            self.assertEqual(one.dtype, other.dtype)
            self.assertAllEqual(one, other)

    def test_joined_variables_are_assigned(self, dtypes, max_values, num_trained):
        variables = _variables(dtypes)
        joined = JoinedGroup(variables, _NUM_TRAINED, _packing(variables), max_values)
        values = [np.asarray(v) for v in variables]
        for each in joined.variables:
            each.assign(2 * each.read_value())
            each.assign_add(tf.ones(each.shape, each.dtype))
        for variable, value in zip(variables, values, strict=True):
            self.assertAllEqual(variable, 2 * value + np.ones_like(value))

    def test_splits_what_it_joins(self, dtypes, max_values, num_trained):
        variables = _variables(dtypes)
        joined = JoinedGroup(variables, _NUM_TRAINED, _packing(variables), max_values)
        values = [2 * v for v in variables]
        for piece, value in zip(joined.split(joined.join(values)), values, strict=True):
            self.assertAllEqual(piece, value)

    def test_a_value_for_each_variable_is_at_all_of_its_places(self, dtypes, max_values, num_trained):
        variables = _variables(dtypes)
        joined = JoinedGroup(variables, _NUM_TRAINED, _packing(variables), max_values)
        numbers, spread = iter(joined.arrange(tf.range(_NUM_TRAINED)).numpy()), []
        for each in joined.variables[: joined.num_trained]:
            if isinstance(each, JoinedVariables):
                spread.append(each.spread(tf.constant([next(numbers) for _ in each.variables])))
            else:
                spread.append(tf.fill(each.shape, next(numbers)))
        pieces = joined.split([*spread, *joined.join(variables)[joined.num_trained :]])
        for number, (variable, piece) in enumerate(zip(variables[:_NUM_TRAINED], pieces, strict=False)):
            self.assertAllEqual(piece, np.full(variable.shape, number))


if __name__ == "__main__":
    absltest.main()
