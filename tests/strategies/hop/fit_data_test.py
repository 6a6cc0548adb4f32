"""Tests of sharing training data between two ranks under HopStrategy's `fit`."""

from __future__ import annotations

import tempfile
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner

_WORLD_SIZE = 2
_BATCH_SIZE = 8
_NUM_EPOCHS = 2
_AutoShardPolicy = tf.data.experimental.AutoShardPolicy

# By name of the dataset: the rows that the two ranks see of the rows 0 to 31, or of fewer if there are fewer.
_HALVES = [
    [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19], [24, 25, 26, 27]],
    [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23], [28, 29, 30, 31]],
]
_EXPECTED = {
    "auto": _HALVES,
    # Fewer rows than ranks are left: both take the same one.
    "auto_33": [[*rows, [32]] for rows in _HALVES],
    "data_33": [[*rows, [32]] for rows in _HALVES],
    "file": [[list(range(start, start + 4)) for start in range(first, first + 16, 4)] for first in (0, 16)],
    "from_function": [[[0, 2, 4, 6], [8, 10, 12, 14]], [[1, 3, 5, 7], [9, 11, 13, 15]]],
}


def _with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def _as_example(row):
    """Returns the features and targets of a row."""
    row = tf.cast(row, tf.float32)
    return tf.stack([row, row]), tf.zeros([2])


def _range(num_rows):
    return tf.data.Dataset.range(num_rows).map(_as_example).batch(_BATCH_SIZE)


def _records(directory):
    """Returns a dataset of two files of 16 rows, one after the other."""
    paths = [f"{directory}/{index}.tfrecord" for index in range(2)]
    for index, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for row in range(16 * index, 16 * (index + 1)):
                writer.write(str(row))
    dataset = tf.data.TFRecordDataset(paths).map(lambda text: _as_example(tf.strings.to_number(text)))
    return dataset.batch(_BATCH_SIZE)


def _for_one_rank(context):
    """Returns a dataset of every second row of 16."""
    rows = tf.data.Dataset.range(16).shard(context.num_input_pipelines, context.input_pipeline_id)
    return rows.map(_as_example).batch(context.get_per_replica_batch_size(_BATCH_SIZE))


def _dataset(strategy, name, directory):
    if name == "from_function":
        return strategy.distribute_datasets_from_function(_for_one_rank)
    return {
        "auto": lambda: _range(32),
        "auto_33": lambda: _range(33),
        "data_33": lambda: _with_policy(_range(33), _AutoShardPolicy.DATA),
        "file": lambda: _with_policy(_records(directory), _AutoShardPolicy.FILE),
    }[name]()


class RecordingModel(keras.Model):
    """Notes the first feature of every row it trains on."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.seen = []

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.seen.append(data[0][:, 0].numpy().astype(int).tolist())
        return super().train_step(data)


# In the processes.


def _run(names):
    strategy = hop_tf.HopStrategy(
        topology="complete", communication_options=hop_tf.CommunicationOptions(timeout_seconds=60)
    )
    with tempfile.TemporaryDirectory() as directory:
        results = {name: _fit(strategy, _dataset(strategy, name, directory)) for name in names}
    results["shuffled_arrays"] = _fit_shuffled_arrays(strategy)
    results["steps_per_epoch"] = _fit(strategy, _range(32).repeat(), steps_per_epoch=3)
    strategy.shutdown()
    return results


def _fit(strategy, *data, shuffle=False, **fit_args):
    """Trains; returns the rows that the model saw, the number of steps, and the warnings."""
    with strategy.scope():
        model = RecordingModel()
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    before = strategy.report()["steps"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*data, epochs=_NUM_EPOCHS, shuffle=shuffle, verbose=0, **fit_args)
    return {
        "rows": [list(rows) for rows in model.seen],
        "steps": strategy.report()["steps"] - before,
        "warnings": [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)],
    }


def _fit_shuffled_arrays(strategy):
    """Fits 33 rows in batches of 8: the last batch has one row for two ranks."""
    rows = np.arange(33, dtype="float32")
    x = np.stack([rows, rows], axis=1)
    return _fit(strategy, x, np.zeros((33, 2)), batch_size=_BATCH_SIZE, shuffle=True)


@pytest.mark.slow
class HopFitDataTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with MultiProcessRunner(_run, num_workers=_WORLD_SIZE, args=(list(_EXPECTED),), timeout_seconds=300) as runner:
            cls.values = runner.join().raise_for_errors().values

    def _results(self, name):
        return [values[name] for values in self.values]

    @parameterized.parameters(*_EXPECTED)
    def test_rows_of_each_rank(self, name):
        for result, expected in zip(self._results(name), _EXPECTED[name], strict=True):
            self.assertEqual(result["rows"], expected * _NUM_EPOCHS)
            self.assertEqual(result["steps"], _NUM_EPOCHS * len(expected))

    # Not "file": Keras warns of every dataset of unknown length, also without a strategy.
    @parameterized.parameters("auto", "auto_33", "data_33", "from_function", "shuffled_arrays", "steps_per_epoch")
    def test_no_warning(self, name):
        self.assertEqual([result["warnings"] for result in self._results(name)], [[], []])

    def test_steps_per_epoch(self):
        for result, half in zip(self._results("steps_per_epoch"), _HALVES, strict=True):
            self.assertEqual(result["rows"], [half[step % 4] for step in range(6)])

    def test_ranks_share_shuffled_arrays(self):
        first, second = (result["rows"] for result in self._results("shuffled_arrays"))
        for epoch in (slice(0, 5), slice(5, 10)):
            self.assertEqual([len(rows) for rows in first[epoch]], [4, 4, 4, 4, 1])
            self.assertEqual([len(rows) for rows in second[epoch]], [4, 4, 4, 4, 1])
            self.assertEqual(first[epoch][-1], second[epoch][-1])
            everything = [row for rows in first[epoch] + second[epoch][:-1] for row in rows]
            self.assertCountEqual(everything, range(33))
            self.assertNotEqual(everything, sorted(everything))


if __name__ == "__main__":
    tf.test.main()
