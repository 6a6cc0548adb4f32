"""Tests of every strategy with a process for each rank: Ctrl-C, and a rank that is killed."""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
import support
from hop_tf.tools.testing import MultiProcessRunner
from support import ON_TWO_DEVICES, TWO_DEVICES, make_two_devices

MEMBERS = {**support.MEMBERS, **ON_TWO_DEVICES}
_NUM_RANKS = 3
_BATCH_SIZE = 6
_NUM_STEPS = 20
_VICTIM = 1
_LAST_STEP = 5  # Of the victim.


def _signal_victim(strategy, signum):
    def check(batch, logs):
        if strategy.rank == _VICTIM and batch == _LAST_STEP:
            os.kill(os.getpid(), signum)

    return keras.callbacks.LambdaCallback(on_train_batch_end=check)


def _train(name):
    """Trains twice: the victim is interrupted in the first training, and killed in the second.

    Returns:
      For each training, the error and the number of steps.
    """
    if name in ON_TWO_DEVICES:
        make_two_devices()
    strategy = MEMBERS[name].make(communication_options=hop_tf.CommunicationOptions(timeout_seconds=20))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.ones((_NUM_STEPS * _BATCH_SIZE, 4), "float32")
    results = []
    for signum in (signal.SIGINT, signal.SIGKILL):
        error, steps = "", []
        count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, steps=steps: steps.append(batch))
        try:
            callbacks = [count, _signal_victim(strategy, signum)]
            model.fit(x, x[:, :1], batch_size=_BATCH_SIZE, verbose=0, callbacks=callbacks)
        except (KeyboardInterrupt, hop_tf.errors.HopError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        results.append((error, len(steps)))
        print(results[-1], flush=True)
    strategy.shutdown()
    return results


_WAYS = {
    "momentum": (lambda: keras.optimizers.SGD(0.05, momentum=0.9), {}),
    "adam": (lambda: keras.optimizers.Adam(0.02), {}),
    "eagerly": (lambda: keras.optimizers.SGD(0.05, momentum=0.9), {"run_eagerly": True}),
}


def _train_in_ways(strategy):
    """Trains in each of `_WAYS`; returns the weights. Batch normalization is over the whole batch."""
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    results = []
    for make_optimizer, arguments in _WAYS.values():
        with strategy.scope():
            kernels = [keras.initializers.RandomNormal(seed=seed) for seed in (1, 2)]
            # No bias, because normalization removes it, and Adam would make steps of the rounding errors.
            hidden = keras.layers.Dense(4, use_bias=False, kernel_initializer=kernels[0])
            normalization = keras.layers.BatchNormalization(momentum=0.5, synchronized=True)
            last = keras.layers.Dense(1, kernel_initializer=kernels[1])
            model = keras.Sequential([keras.Input((3,)), hidden, normalization, last])
            model.compile(make_optimizer(), "mse", **arguments)
        model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    return results


def _train_on_two_devices():
    make_two_devices()
    strategy = hop_tf.PipeSGDStrategy(pipeline_width=1, devices=TWO_DEVICES)
    results = _train_in_ways(strategy)
    strategy.shutdown()
    return results


class TwoDevicesTest(tf.test.TestCase):
    @pytest.mark.stress
    def test_two_processes_train_as_one_device_with_the_whole_batch(self):
        expected = _train_in_ways(tf.distribute.get_strategy())
        with MultiProcessRunner(_train_on_two_devices, 2, timeout_seconds=200) as runner:
            values = runner.join().raise_for_errors().values
        for of_rank in values:
            for name, weights, others in zip(_WAYS, of_rank, expected, strict=True):
                with self.subTest(name):
                    self.assertAllClose(weights, others, rtol=1e-5, atol=1e-5)


class ContractProcessesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress
    def test_a_rank_is_interrupted_and_killed(self, name):
        member = MEMBERS[name]
        with MultiProcessRunner(_train, _NUM_RANKS, num_ps=member.num_ps, args=(name,), timeout_seconds=120) as runner:
            results = runner.join().raise_for_errors(except_ranks=[_VICTIM])
        outputs = "\n".join(result.output for result in results)
        self.assertEqual(results[_VICTIM].exit_code, -signal.SIGKILL, msg=outputs)
        self.assertIn(f"('KeyboardInterrupt: ', {_LAST_STEP + 1})", results[_VICTIM].output)
        for rank in {*range(_NUM_RANKS)} - {_VICTIM}:
            after_interrupt, after_kill = results[rank].value
            self.assertEqual(after_interrupt, ("", _NUM_STEPS))
            if member.goes_on_without_lost:
                self.assertEqual(after_kill, ("", _NUM_STEPS))
            else:
                error, num_steps = after_kill
                self.assertRegex(error, f"PeerLostError: .*rank {_VICTIM}")
                self.assertBetween(num_steps, 1, _NUM_STEPS - 1)


if __name__ == "__main__":
    absltest.main()
