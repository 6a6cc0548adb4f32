"""Shuffles without a seed come in the same order on all ranks."""

import os
import re

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.keras_hook.common_order import CannotOrderError, in_common_order, order_of, with_common_order

_NUM_ROWS = 24
_PARALLEL = {"num_parallel_calls": 2}


def _shuffled(**arguments):
    return tf.data.Dataset.range(_NUM_ROWS).shuffle(_NUM_ROWS, **arguments)


def _twice(row):
    return tf.data.Dataset.from_tensors(row).repeat(2)


def _rows(dataset):
    return [int(row) for batch in dataset for leaf in tf.nest.flatten(batch) for row in np.ravel(leaf)]


# Each yields all rows; some yield them twice.
_PIPELINES = {
    "batch": lambda: _shuffled().batch(5, drop_remainder=False),
    "parallel_batch": lambda: _shuffled().batch(5, **_PARALLEL, deterministic=True),
    "map": lambda: _shuffled().map(tf.identity),
    "parallel_map": lambda: (
        _shuffled().map(tf.identity, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    ),
    "filter": lambda: _shuffled().filter(lambda row: row >= 0),
    "repeat": lambda: _shuffled().repeat(2).take(2 * _NUM_ROWS).skip(0),
    "cache": lambda: _shuffled().cache(),
    "zip": lambda: tf.data.Dataset.zip({"x": _shuffled(), "y": (_shuffled(),)}),
    "concatenate": lambda: _shuffled().concatenate(_shuffled()),
    "enumerate": lambda: _shuffled().enumerate().map(lambda index, row: row),
    "interleave": lambda: _shuffled().interleave(_twice, cycle_length=3),
    "parallel_interleave": lambda: _shuffled().interleave(_twice, cycle_length=3, **_PARALLEL),
    "flat_map": lambda: _shuffled().flat_map(_twice),
    "unbatch": lambda: _shuffled().batch(5).unbatch(),
    "window": lambda: _shuffled().window(5).flat_map(lambda window: window),
    "padded_batch": lambda: _shuffled().map(lambda row: row[None]).padded_batch(5, padded_shapes=[1]),
    "options": lambda: _shuffled().with_options(tf.data.Options()),
    "shard": lambda: _shuffled().shard(1, 0),
    "shuffled_again": lambda: _shuffled().shuffle(10, seed=3),
    "two_shuffles": lambda: _shuffled().shuffle(10),
    "one_order": lambda: _shuffled(reshuffle_each_iteration=False),
}


class CommonOrderTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        tf.random.set_seed(None)

    @parameterized.named_parameters(*_PIPELINES.items())
    def test_orders(self, make):
        datasets = [with_common_order(make(), seed) for seed in (1, 1, 2)]
        epochs = [[_rows(dataset) for dataset in datasets] for _ in range(2)]
        for mine, others, with_other_seed in epochs:
            self.assertEqual(mine, others)
            self.assertNotEqual(mine, with_other_seed)
            self.assertCountEqual(mine, _rows(make()))
        is_repeated = make in (_PIPELINES["cache"], _PIPELINES["one_order"])
        self.assertEqual(epochs[0][0] == epochs[1][0], is_repeated)
        self.assertEqual(datasets[0].element_spec, make().element_spec)
        self.assertEqual(int(datasets[0].cardinality()), int(make().cardinality()))

    def test_file_names(self):
        for name in "abcdefgh":
            tf.io.write_file(os.path.join(self.get_temp_dir(), name), name)
        pattern = os.path.join(self.get_temp_dir(), "*")
        orders = [list(with_common_order(tf.data.Dataset.list_files(pattern), 1).as_numpy_iterator()) for _ in range(2)]
        self.assertEqual(*orders)

    def test_what_has_a_seed_is_left(self):
        dataset = _shuffled(seed=3).batch(5)
        self.assertIs(with_common_order(dataset, 1), dataset)

    @parameterized.named_parameters(
        ("unknown", lambda: _shuffled().batch(4).ragged_batch(2), "behind it DenseToRaggedDataset"),
        (
            "within",
            lambda: tf.data.Dataset.range(3).interleave(lambda _: _shuffled()).batch(4),
            "within the function of InterleaveDataset",
        ),
    )
    def test_refusals(self, make, received):
        with self.assertRaisesRegex(ValueError, rf"shuffle\(buffer_size, seed=0\)`.*{re.escape(received)}"):
            in_common_order(make(), 1, takes_slices=True)
        dataset = make()
        self.assertIs(in_common_order(dataset, 1, takes_slices=False), dataset)  # Ranks share files.

    @parameterized.product(global_seed=[None, 0, 1], seed=[None, 0, 1])
    def test_seeds_within_functions(self, global_seed, seed):
        tf.random.set_seed(global_seed)
        self.addCleanup(tf.random.set_seed, None)
        dataset = tf.data.Dataset.range(3).interleave(lambda _: _shuffled(seed=seed))
        if global_seed is None and seed is None:
            with self.assertRaises(CannotOrderError):
                with_common_order(dataset, 1)
        else:
            self.assertIs(with_common_order(dataset, 1), dataset)

    @parameterized.named_parameters(
        (
            "map",
            lambda: tf.data.Dataset.range(3).map(tf.identity, **_PARALLEL, deterministic=False),
            "ParallelMapDataset",
        ),
        ("options", lambda: tf.data.Dataset.range(3).interleave(_twice, **_PARALLEL), "ParallelInterleaveDataset"),
    )
    def test_any_order_is_warned_of(self, make, name):
        options = tf.data.Options()
        options.deterministic = False
        with self.assertLogs(level="WARNING") as logs:
            in_common_order(make().with_options(options), 1, takes_slices=True)
        self.assertIn(f"because of {name}. Each rank trains on its slice", logs.output[0])

    def test_order(self):
        self.assertEqual(order_of(_shuffled(seed=1).batch(2)), order_of(_shuffled(seed=1)))
        self.assertNotEqual(order_of(_shuffled(seed=1)), order_of(_shuffled(seed=2)))
        self.assertNotEqual(order_of(_shuffled(seed=1)), order_of(tf.data.Dataset.range(3)))


if __name__ == "__main__":
    tf.test.main()
