"""Ranks shuffle alike: between them they see each row once in an epoch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.keras_hook.shuffling import Shuffled, draw_seed
from hop_tf.tools.testing import InProcessCluster

_NUM_ROWS = 50
_BATCH_SIZE = 8
_EPOCHS = 3


class Recorder(keras.Sequential):
    """Records the rows that it is trained with, by their only column, for each epoch."""

    def __init__(self):
        super().__init__([keras.Input((1,)), keras.layers.Dense(1)])
        self.epochs = []

    def train_step(self, data):
        tf.numpy_function(lambda rows: self.epochs[-1].extend(rows[:, 0].astype(int)), [data[0]], [])
        return super().train_step(data)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-_NUM_ROWS // _BATCH_SIZE)

    def __getitem__(self, index):
        return tuple(part[index * _BATCH_SIZE : (index + 1) * _BATCH_SIZE] for part in _rows().values())


class BatchesOfWorkers(Batches):
    def __init__(self):
        super().__init__(workers=2)


def _rows():
    rows = np.arange(_NUM_ROWS, dtype=np.float32)[:, None]
    return {"x": rows, "y": np.zeros_like(rows)}


def _seen(strategy, arguments):
    """The rows of each epoch."""
    with strategy.scope():
        model = Recorder()
        model.compile(keras.optimizers.SGD(0.0), "mse")
    begin = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: model.epochs.append([]))
    model.fit(**arguments, epochs=_EPOCHS, verbose=0, callbacks=[begin])
    return [list(map(int, rows)) for rows in model.epochs]


def _of_ranks(world_size=2, **arguments):
    arguments = arguments or {**_rows(), "batch_size": _BATCH_SIZE}

    def make_strategy(cluster_resolver):
        return hop_tf.HopStrategy(topology="complete", cluster_resolver=cluster_resolver)

    return InProcessCluster(world_size, make_strategy).run(lambda strategy: _seen(strategy, arguments))


class ShufflingTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        """Lets Keras make what datasets with workers count by: were two ranks in a process the first, each made one."""
        super().setUpClass()
        _seen(tf.distribute.get_strategy(), {"x": BatchesOfWorkers()})

    def tearDown(self):
        tf.random.set_seed(None)
        super().tearDown()

    @parameterized.named_parameters(
        ("arrays", {}), ("py_dataset", {"x": Batches()}), ("py_dataset_of_workers", {"x": BatchesOfWorkers()})
    )
    @pytest.mark.slow
    def test_ranks_see_each_row_once(self, arguments):
        tf.random.set_seed(None)
        first, second = _of_ranks(**arguments)
        # A last batch of 2 rows: one for each rank.
        epochs = [mine + others for mine, others in zip(first, second, strict=True)]
        for epoch in epochs:
            self.assertCountEqual(epoch, range(_NUM_ROWS))
        self.assertLen({tuple(epoch) for epoch in [*epochs, list(range(_NUM_ROWS))]}, _EPOCHS + 1)

    @parameterized.parameters({}, {"x": Batches()})
    @pytest.mark.stress(but=1)
    def test_steps_that_are_no_epochs(self, **arguments):
        """Of 7 batches: the second epoch goes on where the first one ended."""
        tf.random.set_seed(None)
        arguments = arguments or {**_rows(), "batch_size": _BATCH_SIZE}
        first, second = _of_ranks(**arguments, steps_per_epoch=5)
        epochs = [mine + others for mine, others in zip(first, second, strict=True)]
        self.assertCountEqual(epochs[0] + epochs[1], range(_NUM_ROWS))
        self.assertLen(set(epochs[2]), len(epochs[2]))

    @pytest.mark.stress
    def test_the_order_follows_from_the_seed(self):
        seen = []
        for seed in (1, 1, 2, None, None):
            tf.random.set_seed(seed)
            seen.append(_of_ranks())
        self.assertEqual(seen[0], seen[1])
        for position in (2, 3, 4):
            self.assertNotIn(seen[position], seen[:position])

    def test_what_is_drawn_later_is_not_touched(self):
        """A seed of the user's is the user's."""
        drawn = []
        for fits in (False, True):
            tf.random.set_seed(5)
            if fits:
                draw_seed(1)
            drawn.append(tf.random.uniform([3]))
        self.assertAllEqual(*drawn)

    @parameterized.parameters(False, "batch")
    @pytest.mark.stress(but=1)
    def test_the_users_choice(self, shuffle):
        first, second = _of_ranks(**_rows(), batch_size=_BATCH_SIZE, shuffle=shuffle)
        for mine, others in zip(first, second, strict=True):
            self.assertCountEqual(mine + others, range(_NUM_ROWS))
            if not shuffle:
                self.assertEqual(mine, sorted(mine))

    def test_without_several_ranks_keras_shuffles(self):
        tf.random.set_seed(None)
        ((first, second, _),) = _of_ranks(world_size=1)
        self.assertCountEqual(first, range(_NUM_ROWS))
        self.assertNotEqual(first, second)


class ShuffledTest(tf.test.TestCase):
    def test_an_epoch_may_have_another_length(self):
        class Growing(keras.utils.PyDataset):
            length = 2

            def __len__(self):
                return self.length

            def __getitem__(self, index):
                return index

            def on_epoch_end(self):
                self.length += 3

        shuffled = Shuffled(Growing(), seed=0)
        self.assertCountEqual([shuffled[index] for index in range(shuffled.num_batches)], range(2))
        shuffled.on_epoch_end()
        shuffled.draw_order()
        self.assertCountEqual([shuffled[index] for index in range(shuffled.num_batches)], range(5))


if __name__ == "__main__":
    tf.test.main()
