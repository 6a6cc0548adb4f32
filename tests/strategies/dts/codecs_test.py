"""Tests of DTS with codecs, on both algorithms: all ranks apply the same means, also with a lossy codec."""

import functools
import itertools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.collectives import ALGORITHMS, AllReduce
from hop_tf.collectives.operation import Operation
from support import in_process

_SHAPE = (6, 16)
_ROWS_OF_RANK = 2
_RATE = 0.05


def _cluster(world_size, **settings):
    return in_process(hop_tf.DTSStrategy, world_size, **settings)


@functools.cache
def _data(num_rows):
    random = np.random.default_rng(0)
    return tuple(random.normal(size=(num_rows, size)).astype(np.float32) for size in _SHAPE)


def _fit(strategy, num_steps, momentum):
    """Trains; returns the final weights. The gradient of a step is the mean of x y over its rows."""
    with strategy.scope():
        kernel = keras.layers.Dense(_SHAPE[1], use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input(_SHAPE[:1]), kernel])
        model.compile(
            keras.optimizers.SGD(_RATE, momentum=momentum), lambda y, y_pred: tf.reduce_sum(y * y_pred, axis=-1)
        )
    batch_size = _ROWS_OF_RANK * strategy.world_size
    model.fit(*_data(num_steps * batch_size), batch_size=batch_size, shuffle=False, verbose=0)
    return model.get_weights()[0]


def _synchronous(world_size, num_steps, momentum):
    x, y = (np.split(each.astype(np.float64), num_steps) for each in _data(num_steps * _ROWS_OF_RANK * world_size))
    w, v = np.zeros(_SHAPE), np.zeros(_SHAPE)
    for rows, labels in zip(x, y, strict=True):
        v = momentum * v - _RATE * rows.T @ labels / len(rows)
        w += v
    return w


_CODECS = {
    "top_k of truncate16 with feedback": codecs.TopK(ratio=0.1, values="truncate16", error_feedback=True),
    "top_k": codecs.TopK(ratio=0.1, warmup_steps=2),
    "top_k of truncate16": codecs.TopK(ratio=0.1, values="truncate16"),
    "top_k of int8": codecs.TopK(ratio=0.1, values="int8"),
    "top_k of int8 with feedback": codecs.TopK(ratio=0.1, values="int8", error_feedback=True),
    # Whole vectors take fewer bytes.
    "half of truncate16": codecs.TopK(ratio=0.5, values="truncate16"),
    "top_k of bits2": codecs.TopK(ratio=0.1, values="bits2"),
    "int8": codecs.Int8(),
    "bits4 with feedback": codecs.Bits4(error_feedback=True),
    "truncate16 with feedback": codecs.Truncate16(error_feedback=True),
    "sketch": codecs.QuantileSketch(),
}


class CodecsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*itertools.product(_CODECS, ALGORITHMS))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=1)
    def test_all_apply_the_same_means(self, name, algorithm):
        """Means are equal to the bit on all ranks, and the final weights contain nothing else."""
        world_size, interval, num_steps, momentum, seen = 3, 2, 11, 0.9, {}
        mean = AllReduce.mean

        def recorded(reduction, *args, **kwargs):
            means = mean(reduction, *args, **kwargs)
            seen[reduction._membership.rank, kwargs["codec_step"]] = means[0].copy()
            return means

        with mock.patch.object(AllReduce, "mean", recorded):
            results = _cluster(world_size, delay=3, interval=interval, codec=_CODECS[name], algorithm=algorithm).run(
                lambda strategy: _fit(strategy, num_steps, momentum)
            )
        ends = [*range(interval, num_steps, interval), num_steps]
        means = [seen[0, window] for window in range(len(ends))]
        self.assertLen(seen, world_size * len(ends))
        for (_, window), other in seen.items():
            self.assertAllEqual(other, means[window])
        expected = np.zeros(_SHAPE, np.float32)
        for mean in means:
            expected += mean.reshape(_SHAPE)
        for last in results:
            self.assertAllEqual(last, expected)
        if name == "top_k":
            self.assertAllClose(expected, _synchronous(world_size, num_steps, momentum), rtol=1e-5, atol=1e-5)

    @parameterized.parameters(*itertools.product((codecs.Truncate16(), codecs.Int8()), (0.1, 0.5), ALGORITHMS))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_error_feedback_of_selected_values(self, values, ratio, algorithm):
        """Errors of the selected values are sent later, with indices or in whole vectors."""
        num_steps, errors = 48, {}
        for error_feedback in (False, True):
            codec = codecs.TopK(ratio=ratio, values=values, error_feedback=error_feedback)
            cluster = _cluster(2, delay=1, interval=1, codec=codec, algorithm=algorithm)
            first, second = cluster.run(lambda strategy: _fit(strategy, num_steps, 0.0))
            self.assertAllEqual(first, second)
            errors[error_feedback] = np.sqrt(np.mean(np.square(first - _synchronous(2, num_steps, 0.0))))
        self.assertLess(errors[True], 0.7 * errors[False])

    @parameterized.parameters(*ALGORITHMS)
    @pytest.mark.stress
    def test_warm_up_sends_no_message_in_vain(self, algorithm):
        """In warm-up, windows with many selected values are sent as whole vectors from the start."""
        num_steps, sent_in_vain = 5, []
        send = Operation.send

        def recorded(operation, rank, turn, chunk, data, *args):
            if not sum(map(np.size, data if isinstance(data, list) else [data])):
                sent_in_vain.append(operation.step)
            send(operation, rank, turn, chunk, data, *args)

        codec = codecs.TopK(ratio=0.01, warmup_steps=20)
        with mock.patch.object(Operation, "send", recorded):
            _cluster(4, delay=2, interval=2, codec=codec, algorithm=algorithm).run(
                lambda strategy: _fit(strategy, num_steps, 0.9)
            )
        self.assertEmpty(sent_in_vain)


if __name__ == "__main__":
    tf.test.main()
