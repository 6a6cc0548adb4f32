"""Tests of rows with data that are hard to share: generators, shuffles, the tf.data service, ranks without data."""

import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from support import MEMBERS, NUM_RANKS, error_of

_BATCH_SIZE = 4
_EPOCHS, _STEPS = 2, 3


class Recorder(keras.Sequential):
    """Records the rows that it is trained with, by their only column, step by step."""

    def __init__(self):
        super().__init__([keras.layers.Dense(1)])  # Not built: Keras takes a batch for that.
        self.steps = []

    def train_step(self, data):
        tf.numpy_function(lambda rows: self.steps.append(rows[:, 0].astype(int).tolist()), [data[0]], [])
        return super().train_step(data)


def _recorder(strategy):
    with strategy.scope():
        model = Recorder()
        model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def _batch(index):
    rows = np.arange(index * _BATCH_SIZE, (index + 1) * _BATCH_SIZE, dtype=np.float32)[:, None]
    return rows, np.zeros_like(rows)


def _slice(index, rank):
    """Returns the rows of a rank in a batch."""
    half = _BATCH_SIZE // NUM_RANKS
    first = index * _BATCH_SIZE + rank * half
    return list(range(first, first + half))


class GeneratorTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*MEMBERS)
    @pytest.mark.slow(after=3)
    @pytest.mark.stress(but=1)
    def test_no_batch_is_lost(self, name):
        """Ranks share the batches in order, over epochs, and from one `fit` to the next. None is read ahead."""

        def run(strategy):
            model, batches = _recorder(strategy), (_batch(index) for index in range(100))
            for _ in range(2):
                model.fit(batches, epochs=_EPOCHS, steps_per_epoch=_STEPS, verbose=0)
            return model.steps, next(batches)[0]

        for rank, (steps, next_rows) in enumerate(MEMBERS[name].run(run)):
            expected = [_slice(index, rank) for index in range(2 * _EPOCHS * _STEPS)]
            self.assertAllEqual(next_rows, _batch(2 * _EPOCHS * _STEPS)[0])
            if not MEMBERS[name].is_in_lock_step:  # A slow rank may skip steps.
                expected = [each for each in expected if each in steps]
            self.assertEqual(steps, expected)


class ShuffleTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*MEMBERS)
    @pytest.mark.slow(after=3)
    @pytest.mark.stress(but=1)
    def test_without_a_seed_no_row_is_lost(self, name):
        """All targets are equal, so that ranks cannot detect the order from them."""
        tf.random.set_seed(None)
        num_rows = 24

        def run(strategy):
            rows = np.arange(num_rows, dtype=np.float32)[:, None]
            dataset = tf.data.Dataset.from_tensor_slices((rows, np.zeros_like(rows)))
            model = _recorder(strategy)
            model.fit(dataset.shuffle(num_rows).batch(_BATCH_SIZE), epochs=_EPOCHS, verbose=0)
            return model.steps

        ranks = MEMBERS[name].run(run)
        rows = [row for steps in ranks for step in steps for row in step]
        if MEMBERS[name].is_in_lock_step:
            self.assertCountEqual(rows, _EPOCHS * [*range(num_rows)])
            for steps in ranks:
                half = len(steps) // _EPOCHS
                self.assertNotEqual(steps[:half], steps[half:])
        else:  # A slow rank may skip steps.
            self.assertLessEqual(max(map(rows.count, rows)), _EPOCHS)

    def test_in_a_custom_loop(self):
        tf.random.set_seed(None)

        def run(strategy):
            dataset = tf.data.Dataset.range(24).shuffle(24).batch(_BATCH_SIZE)
            return [row for batch in strategy.experimental_distribute_dataset(dataset) for row in batch.numpy()]

        first, second = MEMBERS["pipe_sgd"].run(run)
        self.assertCountEqual(first + second, range(24))


class ServiceTest(tf.test.TestCase, parameterized.TestCase):
    """Tests with the tf.data service."""

    @parameterized.parameters(*MEMBERS)
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_ranks_share_a_job(self, name):
        """Only one rank reads a batch, and makes as many steps of it as there are ranks."""
        service = tf.data.experimental.service
        dispatcher = service.DispatchServer()
        worker = service.WorkerServer(service.WorkerConfig(dispatcher.target.partition("://")[-1]))
        dataset = tf.data.Dataset.range(10_000).map(lambda row: (tf.cast(row, tf.float32)[None], 0.0))
        dataset = dataset.batch(_BATCH_SIZE)
        number = service.register_dataset(dispatcher.target, dataset)

        def run(strategy):
            model = _recorder(strategy)
            place = ("parallel_epochs", dispatcher.target, number)
            shared = service.from_dataset_id(*place, dataset.element_spec, "job", max_outstanding_requests=2)
            model.fit(shared, epochs=_EPOCHS, steps_per_epoch=4, verbose=0)
            return model.steps

        steps = [tuple(step) for steps in MEMBERS[name].run(run) for step in steps]
        parts = [tuple(_slice(index, part)) for index in range(2500) for part in range(NUM_RANKS)]
        self.assertContainsSubset(steps, parts)
        self.assertLen(set(steps), len(steps))  # No row twice.
        if MEMBERS[name].is_in_lock_step:
            self.assertLen(steps, NUM_RANKS * _EPOCHS * 4)
            self.assertContainsSubset([(0, 1), (2, 3)], steps)
        worker.stop()
        dispatcher.stop()


class RefusalTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*MEMBERS)
    @pytest.mark.slow(after=2)
    def test_parts_with_other_rows(self, name):
        x = {"items": np.ones((16, 4), np.float32), "negatives": np.ones((8, 4), np.float32)}
        dataset = tf.data.Dataset.from_tensors((x, np.ones(16, np.float32)))

        def run(strategy):
            return str(error_of(_recorder(strategy).fit, dataset, verbose=0))

        for message in MEMBERS[name].run(run):
            self.assertIn("Received: x['items'] with 16 rows, x['negatives'] with 8 rows, y with 16 rows.", message)

    @parameterized.parameters(*MEMBERS)
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_rank_without_data(self, name):
        """The rank raises an error. Errors or logs of the others name the rank."""

        def run(strategy):
            def make_dataset(context):
                return tf.data.Dataset.from_tensors(_batch(0)).repeat(3 * (1 - context.input_pipeline_id))

            dataset = strategy.distribute_datasets_from_function(make_dataset)
            return error_of(_recorder(strategy).fit, dataset, verbose=0)

        with self.assertLogs(level="WARNING") as logs:
            first, second = MEMBERS[name].run(run)
        self.assertIsInstance(second, ValueError)
        self.assertStartsWith(str(second), "rank 1 of 2 has no data")
        self.assertIn("rank 1 of 2 has no data", "".join([str(first), *logs.output]))
        self.assertEqual(first is None, MEMBERS[name].goes_on_without_lost)

    def test_one_file(self):
        path = os.path.join(self.get_temp_dir(), "rows")
        pathlib.Path(path).write_text("1\n2\n3\n4\n")
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
        dataset = (
            tf.data.Dataset.from_tensor_slices([path])
            .interleave(tf.data.TextLineDataset)
            .map(lambda row: (tf.strings.to_number(row)[None], 0.0))
        )
        dataset = dataset.batch(2).with_options(options)

        def run(strategy):
            return str(error_of(_recorder(strategy).fit, dataset, verbose=0))

        first, second = MEMBERS["pipe_sgd"].run(run)
        self.assertStartsWith(second, "rank 1 of 2 has no data")
        self.assertIn("or take AutoShardPolicy.DATA", second)
        self.assertRegex(first, "rank 1 of 2 has no data|the dataset only has 1 file")  # The latter is TensorFlow's.

    @pytest.mark.slow
    def test_models_for_one_batch_size(self):
        """The settings that the error recommends work."""
        x, y = np.ones((32, 3, 2), np.float32), np.ones((32, 1), np.float32)

        def run(strategy):
            with strategy.scope():
                layers = [keras.Input(batch_shape=(8, 3, 2)), keras.layers.SimpleRNN(2, stateful=True)]
                model = keras.Sequential([*layers, keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            error = error_of(model.fit, x, y, batch_size=8, verbose=0)
            sizes = {"batch_size": 16, "validation_batch_size": 8}
            history = model.fit(x, y, **sizes, validation_data=(x, y), verbose=0)
            error_of_validation = error_of(model.evaluate, x, y, batch_size=16, verbose=0)
            return str(error), history.history["val_loss"], str(error_of_validation)

        self._check_one_batch_size(MEMBERS["hop"].run(run))
        self._check_one_batch_size(MEMBERS["pipe_sgd"].run(run, on_peer_loss="continue"))

    def _check_one_batch_size(self, results):
        for error, losses, error_of_validation in results:
            self.assertIn("`model.fit(..., batch_size=16, validation_batch_size=8)`", error)
            self.assertIn("`model.evaluate(..., batch_size=8)`", error_of_validation)
            self.assertAllInRange(losses, 0.0, 10.0)


if __name__ == "__main__":
    tf.test.main()
