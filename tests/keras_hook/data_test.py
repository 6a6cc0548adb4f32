"""How ranks share a global batch."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.keras_hook.data import slice_global_batches, without_autotuning


def _slices(dataset, world_size):
    return [list(slice_global_batches(dataset, rank, world_size)) for rank in range(world_size)]


class SliceGlobalBatchesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(world_size=[1, 2, 3, 7], num_rows=[1, 2, 5, 8, 21])
    def test_slices_join_to_the_batch(self, world_size, num_rows):
        parts = [part for (part,) in _slices(tf.data.Dataset.range(num_rows).batch(num_rows), world_size)]
        self.assertTrue(all(len(part) >= 1 for part in parts))
        for rank, part in enumerate(parts):
            start = num_rows * rank // world_size
            end = max(num_rows * (rank + 1) // world_size, start + 1)
            self.assertAllEqual(part, np.arange(start, end))
        if num_rows >= world_size:
            self.assertAllEqual(tf.concat(parts, axis=0), np.arange(num_rows))

    def test_keeps_structure_and_cardinality(self):
        data = tf.data.Dataset.from_tensor_slices(({"a": np.arange(10), "b": np.ones((10, 3))}, np.arange(10)))
        dataset = data.batch(4)
        ranks = _slices(dataset, 2)
        self.assertEqual(int(slice_global_batches(dataset, 0, 2).cardinality()), 3)
        self.assertEqual([len(steps) for steps in ranks], [3, 3])
        features, labels = ranks[1][0]
        self.assertAllEqual(features["a"], [2, 3])
        self.assertEqual(features["b"].shape, (2, 3))
        self.assertAllEqual(labels, [2, 3])

    def test_single_component(self):
        (batch,) = slice_global_batches(tf.data.Dataset.range(4).batch(4), 1, 2)
        self.assertAllEqual(batch, [2, 3])

    @parameterized.parameters(
        lambda x: x, lambda x: (x,), lambda x: ((x, x),), lambda x: {"a": x}, lambda x: ({"a": x},), lambda x: (x, x)
    )
    def test_a_batch_keeps_its_structure(self, structured):
        """Else the second of two inputs in a tuple of one would become the label."""
        dataset = tf.data.Dataset.from_tensors(structured(np.arange(4)))
        sliced = slice_global_batches(dataset, 0, 2)
        tf.nest.assert_same_structure(sliced.element_spec, dataset.element_spec)
        (batch,) = sliced
        tf.nest.map_structure(self.assertAllEqual, batch, structured(np.arange(2)))

    def test_sparse_and_ragged(self):
        dense = tf.constant([[1, 0], [0, 2], [3, 0], [0, 4]])
        ragged = tf.ragged.constant([[1], [2, 2], [], [4]])
        dataset = tf.data.Dataset.from_tensors((tf.sparse.from_dense(dense), ragged))
        ((sparse_part, ragged_part),) = slice_global_batches(dataset, 1, 2)
        self.assertAllEqual(tf.sparse.to_dense(sparse_part), dense[2:])
        self.assertAllEqual(ragged_part.to_list(), [[], [4]])

    def test_digests_of_first_batches(self):
        """Of the targets, however these and the batch look."""
        x, ragged = tf.constant([[1.0], [2.0]]), tf.ragged.constant([[1], [2, 3]])
        sparse = tf.sparse.from_dense([[0, 1], [2, 0]])
        batches = [x, (x,), (x, x), (x, x + 1), (x, ragged), (x, ragged + 1), (x, sparse), (x, x, x, x), {"a": x}]
        digests = []
        for batch in batches:
            dataset = tf.data.Dataset.from_tensors(batch).repeat(2)
            self.assertLen(list(slice_global_batches(dataset, 0, 2, digests.append)), 2)
        self.assertLen(digests, len(batches))  # Once each.
        self.assertEqual(digests[0], digests[1])
        self.assertEqual(digests[0], digests[2])  # The targets are the same.
        self.assertLen({*digests[2:8]}, 6)


class WithoutAutotuningTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((None, False), (True, True), (False, False))
    def test_keeps_the_users_choice(self, chosen, expected):
        options = tf.data.Options()
        if chosen is not None:
            options.autotune.enabled = chosen
        options.deterministic = False
        dataset = without_autotuning(tf.data.Dataset.range(3).with_options(options))
        self.assertEqual(dataset.options().autotune.enabled, expected)
        self.assertIs(dataset.options().deterministic, False)
        self.assertAllEqual(list(dataset), [0, 1, 2])


if __name__ == "__main__":
    tf.test.main()
