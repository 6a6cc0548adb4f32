"""Tests of the slices of a global batch that ranks train on."""

import re

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.keras_hook.batch_rows import with_equal_rows
from hop_tf.keras_hook.data import divide, slice_global_batches, without_autotuning
from hop_tf.keras_hook.pipelines import datasets_behind


def _slices(dataset, world_size):
    return [list(slice_global_batches(dataset, rank, world_size)) for rank in range(world_size)]


class SliceGlobalBatchesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(world_size=[1, 2, 3, 7], num_rows=[1, 2, 5, 8, 21])
    @pytest.mark.stress(but=10)
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
        """Otherwise the second of two inputs in a tuple of one would become the label."""
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


def _parts(items, negatives):
    return {"items": tf.ones([items, 4]), "negatives": tf.ones([negatives, 4])}


class PartsOfBatchesTest(tf.test.TestCase, parameterized.TestCase):
    """All parts of a batch have the same number of rows."""

    @parameterized.named_parameters(
        ("dictionary", _parts(16, 8), "['items'] with 16 rows, ['negatives'] with 8 rows"),
        ("weights", (tf.ones([4, 1]), tf.ones(4), tf.ones(3)), "x with 4 rows, y with 4 rows, sample_weight with 3"),
        ("scalar", (tf.ones([4, 1]), tf.constant(1.0)), "x with 4 rows, y with no rows"),
        ("sparse", (tf.sparse.from_dense(tf.eye(3)), tf.ones(2)), "x with 3 rows, y with 2 rows"),
        ("ragged", (tf.ragged.constant([[1], [], [2, 3]]), tf.ones(2)), "x with 3 rows, y with 2 rows"),
    )
    def test_known_rows(self, batch, received):
        dataset = tf.data.Dataset.from_tensors(batch)
        for refuses in (lambda: slice_global_batches(dataset, 0, 2), lambda: divide(batch, 2)):
            with self.assertRaisesRegex(ValueError, re.escape(f"Received: {received}")):
                refuses()

    @parameterized.parameters(8, 24)
    def test_unknown_rows(self, num_negatives):
        """The second batch is wrong."""
        spec = {name: tf.TensorSpec((None, 4)) for name in ("items", "negatives")}
        batches = [_parts(16, 16), _parts(16, num_negatives)]
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
        for checked in (slice_global_batches(dataset, 0, 2), with_equal_rows(dataset)):
            iterator = iter(checked)
            next(iterator)
            with self.assertRaisesRegex(
                tf.errors.InvalidArgumentError, rf"same number of rows.*\[16 {num_negatives}\]"
            ):
                next(iterator)

    def test_rows_are_checked_once_and_before_batches_are_prefetched(self):
        spec = {name: tf.TensorSpec((None, 4)) for name in ("items", "negatives")}
        batches = [_parts(16, 16), _parts(16, 8)]
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec).prefetch(3)
        sliced = without_autotuning(slice_global_batches(dataset, 0, 2))
        self.assertIs(with_equal_rows(sliced), sliced)
        options = tf.data.Options()
        options.deterministic = True
        checked = with_equal_rows(dataset.with_options(options))
        self.assertTrue(checked.options().deterministic)
        names = [type(each).__name__ for each in datasets_behind(checked)]
        self.assertEqual(names[:3], ["_OptionsDataset", "_PrefetchDataset", "_MapDataset"])
        (prefetched,) = checked._inputs()
        self.assertEqual(int(prefetched._buffer_size), 3)
        self.assertIs(with_equal_rows(checked), checked)
        iterator = iter(checked)
        next(iterator)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "same number of rows"):
            next(iterator)

    def test_equal_rows_cost_nothing_where_they_are_known(self):
        dataset = tf.data.Dataset.from_tensors((tf.ones([4, 1]), None, tf.ones(4)))
        self.assertIs(with_equal_rows(dataset), dataset)
        ((x, absent, weights),) = slice_global_batches(dataset, 1, 2)
        self.assertIsNone(absent)
        self.assertEqual((len(x), len(weights)), (2, 2))


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
