"""Tests of a rank with several devices, which trains as with one device that has the rank's whole batch.

Without GPUs, devices are logical ones of the processor. `make stress` runs the contract of all strategies with two
devices in each rank.
"""

import functools
import itertools
import os
import pathlib
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import nccl_ops

import hop_tf
from hop_tf.keras_hook import devices
from hop_tf.options import DEVICES_VARIABLE
from hop_tf.tools.testing import InProcessCluster
from support import NUM_RANKS, ON_TWO_DEVICES, TWO_DEVICES, linear_loss

_NUM_ROWS = 24
_BATCH_SIZE = 8  # The global batch.


def _rows():
    x = np.random.default_rng(0).normal(size=(_NUM_ROWS, 3)).astype(np.float32)
    return x, np.tanh(x @ np.array([[1.0], [-2.0], [0.5]], np.float32))


class OwnStep(keras.Sequential):
    """A train_step that does not divide its loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, self(x))


class TwoOptimizers(keras.Sequential):
    """A model with an optimizer for each layer."""

    def compile(self, optimizer, **arguments):
        super().compile(optimizer, **arguments)
        self.other = keras.optimizers.Adam(0.02)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        for optimizer, layer in zip((self.optimizer, self.other), self.layers, strict=True):
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return self.compute_metrics(x, y, self(x))


def _momentum(**arguments):
    return keras.optimizers.SGD(0.05, momentum=0.9, **arguments)


# Ways to train: arguments of `_train` by name.
_CASES = {
    "momentum": {},
    "adam": {"optimizer": lambda: keras.optimizers.Adam(0.02)},
    "accumulation": {"optimizer": lambda: _momentum(gradient_accumulation_steps=2)},
    "own_step": {"kind": OwnStep},
    "two_optimizers": {"kind": TwoOptimizers},
    "averages": {"optimizer": lambda: keras.optimizers.AdamW(0.02, use_ema=True, ema_overwrite_frequency=3)},
    "loss_scale": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(_momentum())},
    "steps_per_execution": {"steps_per_execution": 3},
    "run_eagerly": {"run_eagerly": True},
    "uneven_devices": {"batch_size": 6},  # Three rows a rank.
    "nadam": {"optimizer": lambda: keras.optimizers.Nadam(0.02)},
    "normalization": {"layers": [lambda: keras.layers.BatchNormalization(momentum=0.5, synchronized=True)]},
    # At a larger scale gradients overflow sooner on several devices: means of fewer rows are larger.
    "float16": {
        "optimizer": lambda: keras.optimizers.LossScaleOptimizer(_momentum(), initial_scale=8),
        "policy": "mixed_float16",
    },
    "bfloat16": {"policy": "mixed_bfloat16"},
    "several_types": {
        "layers": [
            lambda: keras.layers.Dense(2, kernel_initializer=keras.initializers.RandomNormal(seed=3), dtype="float64"),
            lambda: keras.layers.Dense(2, kernel_initializer=keras.initializers.RandomNormal(seed=4), dtype="bfloat16"),
        ]
    },
}
_TOLERANCES = {"float16": 5e-3, "bfloat16": 3e-2, "several_types": 3e-2}  # A graph may round differently.


def _train(
    strategy, optimizer=_momentum, kind=keras.Sequential, batch_size=_BATCH_SIZE, policy=None, layers=(), **arguments
):
    """Trains; returns weights, slots, the epochs' metrics, and the results of `evaluate` and `predict`."""
    with strategy.scope():
        kernels = [keras.initializers.RandomNormal(seed=seed) for seed in (1, 2)]
        dense = [
            keras.layers.Dense(size, activation, kernel_initializer=kernel, dtype=policy)
            for size, activation, kernel in zip((4, 1), ("tanh", None), kernels, strict=True)
        ]
        model = kind([keras.Input((3,)), dense[0], *(make() for make in layers), dense[1]])
        model.compile(optimizer(), loss="mse", metrics=["mae", keras.metrics.R2Score()], **arguments)
    x, y = _rows()
    history = model.fit(x, y, batch_size=batch_size, shuffle=False, epochs=2, verbose=0, validation_data=(x[:7], y[:7]))
    # In a scope Keras builds an optimizer for all layers: of two optimizers, the second layer's slots are not used.
    slots = [variable.numpy() for variable in model.optimizer.variables[: 4 if kind is TwoOptimizers else None]]
    evaluated = model.evaluate(x[:9], y[:9], batch_size=4, verbose=0)  # One row is left for the last batch.
    validated = {name: of_epochs for name, of_epochs in history.history.items() if name.startswith("val_")}
    return model.get_weights(), slots, validated, evaluated, model.predict(x[:9], batch_size=4, verbose=0)


@functools.cache
def _trained_by_one_device(name):
    """Trains without a strategy."""
    return _train(tf.distribute.get_strategy(), **_CASES[name])


_instance_keys = itertools.count()
_NCCL_TYPES = next(attr for attr in op_def_registry.get("NcclAllReduce").attr if attr.name == "T").allowed_values


def _all_sum(tensors):
    """Replaces NCCL's sum: it also waits for all devices. TensorFlow leaves out devices that are not needed."""
    key = next(_instance_keys)
    sums = []
    for tensor in tensors:
        assert tensor.dtype.as_datatype_enum in _NCCL_TYPES.list.type, tensor.dtype
        with tf.device(tensor.device):
            sums.append(
                tf.raw_ops.CollectiveReduce(
                    input=tensor,
                    group_size=len(tensors),
                    group_key=1,
                    instance_key=key,
                    merge_op="Add",
                    final_op="Id",
                    subdiv_offsets=[0],
                    timeout_seconds=60,
                )
            )
    return sums


class DevicesTest(tf.test.TestCase, parameterized.TestCase):
    def check(self, computed, name):
        expected, tolerance = _trained_by_one_device(name), _TOLERANCES.get(name, 1e-5)
        for mine, other in zip(tf.nest.flatten(computed), tf.nest.flatten(expected), strict=True):
            self.assertAllClose(mine, other, rtol=tolerance, atol=tolerance)

    # Eager steps are tested in `contract_processes_test.py`, because these ranks are threads. If two threads make eager
    # steps on logical devices, TensorFlow sometimes takes a shape of the other one, also without hop_tf.
    @parameterized.parameters(*(name for name in _CASES if name != "run_eagerly"))
    @pytest.mark.stress
    def test_ranks_with_two_devices_train_as_one_device_with_the_whole_batch(self, name):
        make = _CountedDevices(dict.fromkeys(range(NUM_RANKS), TWO_DEVICES))
        for of_rank in InProcessCluster(NUM_RANKS, make).run(functools.partial(_train, **_CASES[name])):
            self.check(of_rank, name)

    @parameterized.parameters(*_CASES)
    @pytest.mark.stress
    def test_a_rank_alone_trains_as_one_device(self, name):
        self.check(_train(hop_tf.HopStrategy(devices=TWO_DEVICES), **_CASES[name]), name)

    @pytest.mark.stress
    def test_ranks_with_different_numbers_of_devices(self):
        make = _CountedDevices({0: TWO_DEVICES, 1: TWO_DEVICES[:1]})
        for of_rank in InProcessCluster(NUM_RANKS, make).run(_train):
            self.check(of_rank, "momentum")

    @parameterized.product(name=["momentum", "accumulation", "loss_scale", "several_types"], num_ranks=[NUM_RANKS, 1])
    @pytest.mark.stress
    def test_sums_that_are_there_on_all_devices(self, name, num_ranks):
        """NCCL leaves sums on all devices."""
        with (
            mock.patch.object(devices, "_have_nccl", lambda devices: True),
            mock.patch.object(nccl_ops, "all_sum", _all_sum),
        ):
            make = _CountedDevices(dict.fromkeys(range(num_ranks), TWO_DEVICES))
            for of_rank in InProcessCluster(num_ranks, make).run(functools.partial(_train, **_CASES[name])):
                self.check(of_rank, name)

    @pytest.mark.slow
    def test_bytes_on_the_wire_do_not_depend_on_the_number_of_devices(self):
        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            model.fit(*_rows(), batch_size=_BATCH_SIZE, verbose=0)
            return strategy.report()["bytes_sent_on_lane_1"]  # The bytes of all arrays.

        of_one, of_two = (
            InProcessCluster(NUM_RANKS, _CountedDevices(dict.fromkeys(range(2), names))).run(run)
            for names in (TWO_DEVICES[:1], TWO_DEVICES)
        )
        self.assertGreater(min(of_one), 0)
        self.assertEqual(of_one, of_two)

    def test_moving_statistics_are_means_over_devices(self):
        """Each device normalizes with the statistics of its own rows, as each rank does."""
        x, _ = _rows()
        strategy = hop_tf.HopStrategy(devices=TWO_DEVICES)
        with strategy.scope():
            layer = keras.layers.BatchNormalization(momentum=0.75)
            model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        mean, variance = np.zeros(3), np.ones(3)
        for batch in np.split(x, _NUM_ROWS // _BATCH_SIZE):
            halves = np.split(batch, 2)
            mean = 0.75 * mean + 0.25 * np.mean([half.mean(0) for half in halves], 0)
            variance = 0.75 * variance + 0.25 * np.mean([half.var(0) for half in halves], 0)
        model.fit(x, x[:, :1], batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
        for variable, expected in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
            for copy in variable.value.values:
                self.assertAllClose(copy, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_single_batches_and_models_that_are_saved(self):
        x, y = _rows()
        strategy = hop_tf.PipeSGDStrategy(devices=TWO_DEVICES)

        def make():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(_momentum(), "mse")
            return model

        with strategy.scope():
            model = make()
        expected = make()
        for rows in (slice(0, 5), slice(5, 6)):
            self.assertAllClose(model.train_on_batch(x[rows], y[rows]), expected.train_on_batch(x[rows], y[rows]))
            self.assertAllClose(model.test_on_batch(x[rows], y[rows]), expected.test_on_batch(x[rows], y[rows]))
            self.assertAllClose(model.predict_on_batch(x[rows]), expected.predict_on_batch(x[rows]))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.keras")
            model.save(path)
            self.assertAllClose(keras.models.load_model(path).get_weights(), expected.get_weights())
            with strategy.scope():
                loaded = keras.models.load_model(path)
        for each in (loaded, expected):
            each.fit(x, y, shuffle=False, verbose=0)  # With the optimizer's slots.
        self.assertAllClose(loaded.get_weights(), expected.get_weights())

    @parameterized.parameters(
        ("CPU:0", "list of different devices"),
        ([], "list of different devices"),
        (["CPU:0", "/device:CPU:0"], "list of different devices"),
        (["CPU:0", "GPU:0"], "list of different devices of one kind"),
        ([1], "list of different devices"),
        (["CPU:0", "CPU:7"], "devices that this process sees"),
    )
    def test_refuses_devices(self, names, message):
        with self.assertRaisesRegex(ValueError, f"`devices` must be .*{message}.* Received: devices="):
            hop_tf.HopStrategy(devices=names)

    def test_as_many_devices_as_the_launcher_says(self):
        with mock.patch.dict(os.environ, {DEVICES_VARIABLE: "2"}):
            self.assertLen(hop_tf.HopStrategy().extended.worker_devices, 2)
        with mock.patch.dict(os.environ, {DEVICES_VARIABLE: "3"}), self.assertRaisesRegex(ValueError, "at the start"):
            hop_tf.HopStrategy()
        with mock.patch.dict(os.environ, {DEVICES_VARIABLE: "x"}), self.assertRaisesRegex(ValueError, "positive"):
            hop_tf.HopStrategy()
        self.assertLen(hop_tf.HopStrategy().extended.worker_devices, 1)

    @parameterized.parameters((2, 2, True), (2, 4, False), (1, 1, False), (0, 0, False))
    def test_takes_the_gpus_that_a_program_has_not_hidden(self, num_visible, num_logical, has_nccl):
        """There are four GPUs. Visible ones may be split."""
        logical = [tf.config.LogicalDevice(f"/device:GPU:{index}", "GPU") for index in range(num_logical)]
        with (
            mock.patch.object(tf.config, "list_physical_devices", lambda kind: [None] * 4),
            mock.patch.object(tf.config, "get_visible_devices", lambda kind: [None] * num_visible),
            mock.patch.object(tf.config, "list_logical_devices", lambda kind: logical),
        ):
            found = devices._default_devices()
            self.assertEqual(len(found) > 1 and devices._have_nccl(found), has_nccl)
        self.assertLen(found, max(1, num_logical))
        self.assertEqual(tf.DeviceSpec.from_string(found[0]).device_type, "GPU" if num_visible else "CPU")

    @parameterized.parameters(["CPU:1"], TWO_DEVICES)
    def test_own_variables_are_where_the_strategy_says(self, *names):
        """`tf.data` cannot read shares of a batch on a GPU."""
        with hop_tf.HopStrategy(devices=names).scope(), tf.device("/cpu:0"):
            variable = tf.Variable(0, name="hop_tf_shares")
        self.assertEndsWith(variable.device, "CPU:0")


_RATE = 0.05


class Recorder(keras.Sequential):
    """Records the gradients of a linear loss, computed by NumPy, of all rows of its devices."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.gradients = []

    def train_step(self, data):
        tf.numpy_function(lambda x, y: self.gradients.append(_gradient(x, y)), data, [])
        return super().train_step(data)


def _gradient(x, y):
    return np.mean(x.astype(np.float64) * y, axis=0)[:, None]


@functools.cache
def _linear_gradients():
    """Returns the gradients of two epochs: [step, rank, input, 1]."""
    of_epoch = [[_gradient(*half) for half in _halves(step)] for step in range(_NUM_ROWS // _BATCH_SIZE)]
    return np.array(of_epoch * 2)


def _halves(step):
    parts = [np.split(each[step * _BATCH_SIZE :][:_BATCH_SIZE], NUM_RANKS) for each in _rows()]
    return zip(*parts, strict=True)


def _train_kernel(strategy):
    """Trains; returns the kernel after `fit`, and after `synchronize`."""
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = Recorder([keras.Input((3,)), layer])
        model.compile(keras.optimizers.SGD(_RATE), linear_loss)
    model.fit(*_rows(), batch_size=_BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    own = model.get_weights()[0]
    strategy.synchronize(model)
    return own, model.get_weights()[0], np.sum(model.gradients, axis=0) / len(TWO_DEVICES)


class ReferenceTest(tf.test.TestCase, parameterized.TestCase):
    """Tests that each strategy, with two devices in each rank, moves a kernel as its definition says.

    With a linear loss gradients do not depend on weights. So merged gradients add up in any order.
    """

    def run_ranks(self, name, **settings):
        return ON_TWO_DEVICES[f"{name}_on_two_devices"].run(_train_kernel, **settings)

    @parameterized.parameters(
        ("pipe_sgd", {"pipeline_width": 3}),
        ("dts", {"delay": 3, "interval": 2}),
        ("shat", {"pushes": "steps"}),
        ("pipe_sgd", {"pipeline_width": 1, "num_segments": 2}),
        ("pipe_sgd", {"batch_shares": [3, 1]}),
        ("dts", {"delay": 0, "interval": 1}),
        ("dts", {"delay": 3, "interval": 2, "batch_shares": [3, 1]}),
        ("canary_synchronous", {"codec": None}),
        ("canary_synchronous", {"codec": None, "batch_shares": [1, 3]}),
        ("shat", {"consistency": "bsp"}),
        ("shat", {"pushes": "steps", "batch_shares": [3, 1]}),
        ("hop", {"batch_shares": [3, 1]}),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=1)
    def test_kernels_move_by_mean_gradients(self, name, settings):
        expected = -_RATE * _linear_gradients().mean(1).sum(0)
        for _, kernel, _ in self.run_ranks(name, **settings):
            self.assertAllClose(kernel, expected, rtol=0, atol=1e-5)

    @parameterized.parameters("parallel", "serial")
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_hop(self, update_order):
        steps = -_RATE * _linear_gradients()
        is_ahead = update_order == "parallel"  # A rank's last step is not averaged yet.
        mean = steps[: len(steps) - is_ahead].mean(1).sum(0)
        for rank, (own, kernel, _) in enumerate(self.run_ranks("hop", update_order=update_order)):
            self.assertAllClose(own, mean + is_ahead * steps[-1, rank], rtol=0, atol=1e-5)
            self.assertAllClose(kernel, steps.mean(1).sum(0), rtol=0, atol=1e-5)

    @pytest.mark.slow
    def test_canary(self):
        """Canary adds the steps that ranks have made. Ranks may skip some."""
        of_ranks = self.run_ranks("canary", codec=None)
        expected = -_RATE * np.mean([made for _, _, made in of_ranks], axis=0)
        for own, _, _ in of_ranks:
            self.assertAllClose(own, expected, rtol=0, atol=1e-5)


class LoopTest(tf.test.TestCase):
    """Tests of custom loops, whose batches have a part for each device."""

    def test_what_a_step_makes_is_there_before_it_runs(self):
        """Weights exist early, so that ranks can begin with equal ones. So do slots, because a pipeline copies them."""

        def train(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
                optimizer = _momentum()

            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.nn.compute_average_loss(linear_loss(y, model(x)))
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

            run = tf.function(lambda batch: strategy.run(step, args=batch), reduce_retracing=True)
            dataset = tf.data.Dataset.from_tensor_slices(_rows()).batch(_BATCH_SIZE)
            for batch in strategy.experimental_distribute_dataset(dataset):
                run(batch)
            if isinstance(strategy, hop_tf.PipeSGDStrategy):
                strategy.synchronize(model)
            return model.get_weights()

        expected = train(tf.distribute.get_strategy())
        for weights in ON_TWO_DEVICES["pipe_sgd_on_two_devices"].run(train):
            self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)

    def test_a_batch_that_is_taken_within_the_step_is_refused(self):
        strategy = hop_tf.HopStrategy(devices=TWO_DEVICES)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        dataset = tf.data.Dataset.from_tensor_slices(_rows()).batch(_BATCH_SIZE)
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        for run in (strategy.run, tf.function(strategy.run)):
            with self.assertRaisesRegex(ValueError, r"take the batch outside of `strategy.run`"):
                run(lambda: model(next(iterator)[0]))

    def test_variables_are_numbers_as_those_of_one_device(self):
        with hop_tf.HopStrategy(devices=TWO_DEVICES).scope():
            number = tf.Variable(2.5)
        self.assertEqual((float(number), int(number)), (2.5, 2))


class _CountedDevices:
    """Makes a rank's strategy, on its devices."""

    def __init__(self, by_rank):
        self._by_rank = by_rank

    def __call__(self, cluster_resolver):
        names = self._by_rank[cluster_resolver.task_id]
        return hop_tf.PipeSGDStrategy(pipeline_width=1, devices=names, cluster_resolver=cluster_resolver)


if __name__ == "__main__":
    absltest.main()
