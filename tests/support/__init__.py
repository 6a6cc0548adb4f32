"""Strategies, models and callbacks for tests of several strategies."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import runpy
import subprocess
import threading
from collections.abc import Callable, Mapping
from unittest import mock

import keras
import tensorflow as tf

import hop_tf
from hop_tf.errors import HopError, PeerLostError
from hop_tf.runtime import choices
from hop_tf.runtime.autotuning import Autotuner, Times
from hop_tf.tools.testing import InProcessCluster

# True in `make stress`, which tries many events. `make test` tries some.
IS_STRESS = "HOP_TF_SCHEDULE_SEED" in os.environ
NUM_RANKS = 2  # Of `Member.run`, and of `in_process` by default.
# The error of a rank that refuses, or the error of the other rank if it has heard of the first one's.
REFUSALS = (ValueError, PeerLostError)
_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
_WAIT_SECONDS = 60.0
_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=60)

LocalSGDStrategy = runpy.run_path(str(_EXAMPLES / "own_strategy.py"))["LocalSGDStrategy"]


def in_process(make: Callable, world_size: int = NUM_RANKS, num_ps: int = 0, **settings) -> InProcessCluster:
    """Returns a cluster in this process.

    Args:
      make: Makes the strategy of a rank from `cluster_resolver`, `communication_options` and the settings.
      world_size: Number of ranks.
      num_ps: Number of parameter servers.
      **settings: Further arguments of the strategy, in which `communication_options` replace those for tests.
    """
    settings = {"communication_options": _OPTIONS, **settings}
    return InProcessCluster(
        world_size,
        lambda cluster_resolver: make(cluster_resolver=cluster_resolver, **settings),
        num_ps=num_ps,
    )


@dataclasses.dataclass(frozen=True)
class Member:
    """A strategy and its promises.

    Attributes:
      make: Makes the strategy; called with `cluster_resolver` and `communication_options`.
      num_ps: Number of parameter servers that the strategy needs.
      is_in_lock_step: True if ranks wait for each other anyway, so that values of all ranks may be combined.
      is_equal_after_fit: True if trained variables are equal on all ranks, to the bit, when `fit` has ended.
      goes_on_without_lost: True if the others go on when a rank dies. Otherwise they raise PeerLostError.
      num_devices: Number of devices of each rank.
      refuses: By the name of each test whose promise the strategy cannot keep, the error that users get instead.
    """

    make: Callable
    num_ps: int = 0
    is_in_lock_step: bool = False
    is_equal_after_fit: bool = False
    goes_on_without_lost: bool = False
    num_devices: int = 1
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def run(self, fn, options=_OPTIONS, world_size=NUM_RANKS, **settings):
        """Calls `fn(strategy)` on each rank in this process; returns the results.

        Args:
          fn: Called on each rank.
          options: Communication options.
          world_size: Number of ranks.
          **settings: Further arguments of the strategy.
        """
        return in_process(self.make, world_size, self.num_ps, communication_options=options, **settings).run(fn)


MEMBERS = {
    "hop": Member(hop_tf.HopStrategy),
    "pipe_sgd": Member(hop_tf.PipeSGDStrategy, is_in_lock_step=True, is_equal_after_fit=True),
    "dts": Member(hop_tf.DTSStrategy, is_in_lock_step=True, is_equal_after_fit=True),
    "canary": Member(
        hop_tf.CanaryStrategy,
        is_equal_after_fit=True,
        goes_on_without_lost=True,
        refuses={"test_several_optimizers": "a step must use one optimizer only"},
    ),
    "shat": Member(
        hop_tf.SHATParameterServerStrategy,
        num_ps=1,
        goes_on_without_lost=True,
    ),
    "own": Member(LocalSGDStrategy),  # Equal but for rounding.
    "canary_synchronous": Member(
        lambda **arguments: hop_tf.CanaryStrategy(consistency="bsp", **arguments),
        is_in_lock_step=True,
        is_equal_after_fit=True,
    ),
}
# The same, with two devices in each rank. `conftest.py` makes them of the processor, and so does a test's process.
TWO_DEVICES = ["CPU:0", "CPU:1"]
ON_TWO_DEVICES = {
    f"{name}_on_two_devices": dataclasses.replace(
        member, make=functools.partial(member.make, devices=TWO_DEVICES), num_devices=len(TWO_DEVICES)
    )
    for name, member in MEMBERS.items()
}


def make_two_devices():
    """Makes `TWO_DEVICES` of the processor. Call this before TensorFlow is in use."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(TWO_DEVICES))


def noting_operations(note):
    """Returns a context in which `note(operation)` is called for each operation that is traced."""
    create = tf.Graph._create_op_internal

    def noted(*args, **kwargs):
        operation = create(*args, **kwargs)
        note(operation)
        return operation

    return mock.patch.object(tf.Graph, "_create_op_internal", noted)


def linear_loss(y, y_pred):
    """A loss whose gradients do not depend on the weights, so that their sum is known in advance."""
    return tf.reduce_sum(y * y_pred, axis=-1)


def two_kernels(num_inputs, num_outputs, kernel="ones", names=("first", "second")):
    """A model that adds the products of the inputs with two kernels.

    Args:
      num_inputs: Length of an input.
      num_outputs: Length of an output.
      kernel: Initializer of both kernels.
      names: Names of the layers.
    """
    inputs = keras.Input((num_inputs,))
    layers = [keras.layers.Dense(num_outputs, use_bias=False, kernel_initializer=kernel, name=name) for name in names]
    return keras.Model(inputs, keras.layers.add([layer(inputs) for layer in layers]))


def error_of(call, *arguments, **keywords):
    """Returns the error that a call raises, or None."""
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return error
    return None


class OneWeight(keras.Model):
    """One weight, whose gradient is the mean of the inputs."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, x):
        return x * self.w


class OwnOptimizers(keras.Model):
    """A model with an optimizer for each kernel and a linear loss. Optimizers get their variables in the first step."""

    def __init__(self, network, optimizers):
        super().__init__()
        self.network = network
        self.optimizers = optimizers
        self.output_shape = network.output_shape

    def call(self, inputs):
        return self.network(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(linear_loss(y, self.network(x)))
        kernels = self.network.trainable_variables
        for optimizer, gradient, kernel in zip(self.optimizers, tape.gradient(loss, kernels), kernels, strict=True):
            optimizer.apply([gradient], [kernel])
        return {"loss": loss}


class Unused(keras.layers.Layer):
    """A layer with a variable that gets no gradient."""

    def build(self, shape):
        self.unused = self.add_weight(shape=(3,), initializer="ones")

    def call(self, inputs):
        return inputs


def fewer_steps(strategy, num_steps, rank=1):
    """Returns arguments of `fit` with which one rank makes only `num_steps` steps, and the others go on."""
    return {"epochs": 1, "steps_per_epoch": num_steps} if strategy.rank == rank else {}


class StopRank1(keras.callbacks.Callback):
    """Stops the training of rank 1 after the batch `batch` of an epoch."""

    def __init__(self, rank, batch):
        super().__init__()
        self._rank = rank
        self._batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if self._rank == 1 and batch == self._batch:
            self.model.stop_training = True


def start_program(test, command, **arguments):
    """Starts a program whose output `test` can read. Kills the program when the test has ended."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **arguments)
    test.addCleanup(process.stdout.close)
    test.addCleanup(process.wait)
    test.addCleanup(process.kill)
    return process


class AbortOnRank1(keras.callbacks.Callback):
    """Raises an error on rank 1. The others wait between two steps until they have heard of the error."""

    def __init__(self, strategy):
        super().__init__()
        self._strategy = strategy

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            if self._strategy.rank == 1:
                raise HopError("broken on purpose")
            with contextlib.suppress(HopError):
                self._strategy.training.runtime.membership.wait_until(lambda: False, _WAIT_SECONDS)


def train_with_late_determinism(cluster, world_size, train):
    """Trains on all ranks. Operations become deterministic only after all strategies have been made."""
    all_are_made = threading.Barrier(world_size)

    def run(strategy):
        all_are_made.wait(_WAIT_SECONDS)
        is_deterministic.return_value = True
        train(strategy)

    with mock.patch.object(choices, "is_deterministic", return_value=False) as is_deterministic:
        cluster.run(run)


def scripted_choices(script):
    """Patches `Autotuner.hear` so that `script(step)` chooses the setting of a step, instead of measured times."""

    def hear(self, mean, setting):
        self._num_steps += 1
        assert mean.size == 4 * self._world_size
        self.setting = script(self._num_steps)

    return mock.patch.object(Autotuner, "hear", hear)


def undisturbed_times():
    """Patches `Autotuner.own`: each rank reports equal, short exchanges. So ranks keep the first candidate."""
    own = Autotuner.own
    return mock.patch.object(Autotuner, "own", lambda self, times, is_late=False: own(self, Times(0.01, 1e-4), is_late))
