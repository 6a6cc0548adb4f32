"""Tests of the promises of every strategy: one table of strategies, one test for each promise.

A new strategy is a line of `support.MEMBERS`. Promises about whole processes are in `contract_processes_test.py`.
"""

import contextlib
import functools
import pathlib
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
import support
from hop_tf.errors import HopError, MismatchError, PeerFailedError
from hop_tf.runtime.curves import find_curve
from support import NUM_RANKS, AbortOnRank1, error_of

_NUM_ROWS = 24
_BATCH_SIZE = 4  # The global batch of both ranks.
_STEPS = _NUM_ROWS // _BATCH_SIZE
MEMBERS = {**support.MEMBERS, **support.ON_TWO_DEVICES}
# `make test` leaves out the last two, because the example, and Canary's synchronous form, share nearly all with others.
# It also leaves out those on two devices, of which `devices_test.py` tests a part.
_MOST = len(support.MEMBERS) - 2


def _kind(name):
    """Returns the name of the member with one device in each rank."""
    return name.removesuffix("_on_two_devices")


def _all_members(test):
    return parameterized.parameters(*MEMBERS)(pytest.mark.stress(after=_MOST)(test))


class _Rows(keras.metrics.Metric):
    """The number of rows."""

    def __init__(self):
        super().__init__(name="rows")
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

    def result(self):
        return self.total


class Recorder(keras.Sequential):
    """Records the rows that it is trained with, by their first column, and the number of traces of its step."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.seen = []
        self.num_traces = 0

    def train_step(self, data):
        self.num_traces += 1
        tf.numpy_function(lambda column: self.seen.extend(column.tolist()), [data[0][:, 0]], [])
        return super().train_step(data)


class TwoOptimizers(keras.Model):
    """A custom train_step, with an optimizer for each of two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(1)
        self.other = keras.optimizers.SGD(0.02)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        for optimizer, layer in ((self.optimizer, self.first), (self.other, self.second)):
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return {"loss": loss}


class InAFunction(keras.Model):
    """A train_step that is a tf.function."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class _PyData(keras.utils.PyDataset):
    def __len__(self):
        return _STEPS

    def __getitem__(self, index):
        part = slice(index * _BATCH_SIZE, (index + 1) * _BATCH_SIZE)
        return tuple(each[part] for each in _data())


def _data():
    x = np.random.default_rng(0).normal(size=(_NUM_ROWS, 3)).astype(np.float32)
    x[:, 0] = np.arange(_NUM_ROWS) / _NUM_ROWS
    return x, x @ np.array([[1.0], [-2.0], [0.5]], np.float32)


def _batches():
    x, y = _data()
    for start in range(0, _NUM_ROWS, _BATCH_SIZE):
        yield x[start : start + _BATCH_SIZE], y[start : start + _BATCH_SIZE]


def _endless():
    """Keras takes batches of a generator before training begins, to build metrics."""
    while True:
        yield from _batches()


def _dataset():
    return tf.data.Dataset.from_tensor_slices(_data()).batch(_BATCH_SIZE)


def _dataset_of_unknown_length():
    specs = tuple(tf.TensorSpec([None, size], tf.float32) for size in (3, 1))
    return tf.data.Dataset.from_generator(_batches, output_signature=specs)


# Of `make test` the first one; the others are tested under Hop there.
_SOURCES = {
    "dataset_of_unknown_length": lambda: {"x": _dataset_of_unknown_length()},
    "tensors": lambda: dict(zip("xy", map(tf.constant, _data()), strict=True), batch_size=_BATCH_SIZE, shuffle=False),
    "py_dataset": lambda: {"x": _PyData(), "shuffle": False},
    "generator": lambda: {"x": _endless(), "steps_per_epoch": _STEPS},
    "dataset": lambda: {"x": _dataset()},
}


def _compiled(strategy, make_model=None, optimizer=None, **arguments):
    """Returns a compiled model, made in the strategy's scope, with the same weights on all ranks."""
    with strategy.scope():
        keras_model = (make_model or _linear)()
        keras_model(np.zeros((1, 3), np.float32))  # Otherwise Keras takes batches of a generator to build it.
        arguments.setdefault("loss", "mse")
        keras_model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.02, momentum=0.5), **arguments)
    return keras_model


def _linear(make=keras.Sequential):
    return make([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])


def _deep(make=keras.Sequential):
    kernels = [keras.initializers.RandomNormal(seed=seed) for seed in range(2)]
    dense = [keras.layers.Dense(size, kernel_initializer=kernel) for size, kernel in zip((3, 1), kernels, strict=True)]
    rescaling = keras.layers.BatchNormalization(trainable=False)
    return make([keras.Input((3,)), dense[0], keras.layers.BatchNormalization(), rescaling, dense[1]])


def _fit(model, epochs=1, **arguments):
    x, y = _data()
    arguments = {"x": x, "y": y, "batch_size": _BATCH_SIZE, "shuffle": False, **arguments}
    return model.fit(**arguments, epochs=epochs, verbose=0).history


def _initial(model):
    """Returns copies of the weights that a step at a learning rate of zero keeps: trained ones and a frozen layer's."""
    return [*_trained(model), *map(np.copy, model.layers[2].get_weights())]


def _trained(model):
    return [np.array(weight) for weight in model.trainable_weights]


def _loss(model):
    """Returns the loss of all data, as in validation."""
    x, y = _data()
    return float(tf.reduce_mean(tf.square(model(x, training=False) - y)))


class _OfAllMembers(tf.test.TestCase, parameterized.TestCase):
    def run_ranks(self, name, fn):
        """Calls `fn(strategy)` on each rank; returns the results.

        If the strategy's line in the table says that the strategy refuses, checks the errors and returns None.
        """
        reason = MEMBERS[name].refuses.get(self._testMethodName.rstrip("0123456789"))
        if reason is None:
            return MEMBERS[name].run(fn)
        for error in MEMBERS[name].run(lambda strategy: error_of(fn, strategy)):
            self.assertIsInstance(error, ValueError | HopError)
            self.assertRegex(str(error), reason)
        return None

    def assert_equal_weights(self, of_ranks):
        for weights in of_ranks[1:]:
            for mine, first in zip(weights, of_ranks[0], strict=True):
                self.assertAllEqual(mine, first)  # To the bit.

    def assert_own_rows(self, name, rank, seen):
        own = np.arange(_NUM_ROWS).reshape(_STEPS, NUM_RANKS, -1)[:, rank].ravel()
        if _kind(name) == "canary" and 0 < len(seen) < own.size:  # It may skip batches, but takes only its own rows.
            self.assertContainsSubset(np.round(np.array(seen) * _NUM_ROWS), own)
        else:
            self.assertAllClose(np.array(seen) * _NUM_ROWS, own, atol=1e-3)

    def assert_steps(self, name, steps, expected):
        if _kind(name) == "canary":  # Canary may drop steps.
            self.assertBetween(steps, 1, expected)
        else:
            self.assertEqual(steps, expected)


class _Logs(keras.callbacks.Callback):
    """Records for each epoch the sum of losses and the number of rows of this rank, and the loss in `logs`."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        total, number = (float(keras.ops.convert_to_numpy(each)) for each in self.model.metrics[0].variables)
        self.seen.append((total, number, logs["loss"]))


@functools.cache
def _one_training(name):
    """Runs typical uses of a model one after the other; returns the results of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        return MEMBERS[name].run(lambda s: _train_in_turn(s, pathlib.Path(folder, f"{s.rank}.keras")))


def _train_in_turn(strategy, path):
    result = {}
    model = _compiled(strategy, lambda: _deep(Recorder), metrics=[_Rows()], weighted_metrics=["mae"])

    result["initial"] = _initial(model)
    model.set_weights([weight + strategy.rank for weight in model.get_weights()])
    model.optimizer.learning_rate, logs = 0.0, _Logs()
    result["history"] = _fit(model, callbacks=[logs, hop_tf.callbacks.MetricAverage()])
    result["averaged"] = logs.seen
    result |= {"begin": _initial(model), "seen": list(model.seen), "loss": _loss(model)}

    model.optimizer.learning_rate = 0.02
    x, y = _data()
    checkpoint = keras.callbacks.ModelCheckpoint(path.with_suffix(".checkpoint.keras"))
    result["validation"] = _fit(model, 3, validation_data=(x[:18], y[:18]), callbacks=[checkpoint])["val_rows"]
    result |= {"trained": _trained(model), "traces": model.num_traces, "predicted": model.predict(x, verbose=0)}
    result["reports"] = strategy.gather_reports(accuracy=0.5)
    model.save(path)
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        loaded = keras.models.load_model(path, compile=False, custom_objects={"Recorder": Recorder})
    result |= {
        "of loaded": loaded.predict(x, verbose=0),
        "has checkpoint": path.with_suffix(".checkpoint.keras").exists(),
    }
    strategy.synchronize(model)
    result |= {"synchronized": model.get_weights(), "last loss": _loss(model)}

    stop = keras.callbacks.EarlyStopping("loss", min_delta=1e9)
    result["epochs"] = len(_fit(model, 4, callbacks=[stop] if strategy.rank == 1 else [])["loss"])
    strategy.synchronize(model)

    fails = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: {}["on purpose"])
    result["error"] = error_of(_fit, model, 3, callbacks=[fails] if strategy.rank == 1 else [])
    strategy.synchronize(model)

    def attempt(epoch, logs):
        for call in (strategy.synchronize, lambda model: strategy.gather_reports(), _fit):
            result["refused"].append(error_of(call, model))

    result["refused"] = []
    _fit(model, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=attempt)])

    model.layers[0].trainable = False
    model.compile(keras.optimizers.Adam(0.02), "mse")  # Outside of the scope, an easy mistake.
    result["before"], logs = [layer.get_weights() for layer in model.layers], _Logs()
    _fit(model, callbacks=[logs])
    return result | {"frozen": [layer.get_weights() for layer in model.layers], "by default": logs.seen}


class OneTrainingTest(_OfAllMembers):
    """Tests of promises about the training in `_one_training`."""

    @_all_members
    def test_all_begin_with_rank_0s_weights(self, name):
        first, *_ = of_ranks = _one_training(name)
        for result in of_ranks:  # After steps that change nothing.
            self.assertAllClose(result["begin"], first["initial"])

    @_all_members
    def test_ranks_share_arrays(self, name):
        for rank, result in enumerate(_one_training(name)):
            self.assert_own_rows(name, rank, result["seen"])

    @_all_members
    def test_every_rank_sees_all_validation_data(self, name):
        for result in _one_training(name):
            self.assertEqual(result["validation"], [18.0] * 3)

    @_all_members
    def test_metrics_are_averaged(self, name):
        """Metrics are averaged on request, and by default if ranks wait for each other anyway."""
        of_ranks = _one_training(name)
        for key, are_averaged in {"averaged": True, "by default": MEMBERS[name].is_in_lock_step}.items():
            total, number, told = np.moveaxis([result[key] for result in of_ranks], -1, 0)  # [rank, epoch]
            own = total / number
            self.assertNotAllClose(own[0], own[1])
            mean = total.sum(0) / number.sum(0)
            self.assertAllClose(told, np.broadcast_to(mean, own.shape) if are_averaged else own)
        self.assertEqual(of_ranks[0]["history"], of_ranks[1]["history"])

    @_all_members
    def test_a_step_is_traced_once(self, name):
        """Once for each device, although the optimizer and the metrics are built in the first step."""
        traces = [result["traces"] for result in _one_training(name)]
        self.assertEqual(traces, [MEMBERS[name].num_devices] * NUM_RANKS)

    @_all_members
    def test_weights_after_fit(self, name):
        of_ranks = _one_training(name)
        for result in of_ranks:
            self.assertLess(result["last loss"], result["loss"])
        if MEMBERS[name].is_equal_after_fit:
            self.assert_equal_weights([result["trained"] for result in of_ranks])
        elif _kind(name) == "own":
            self.assertAllClose(of_ranks[0]["trained"], of_ranks[1]["trained"])

    @_all_members
    def test_synchronize_makes_weights_equal(self, name):
        self.assert_equal_weights([result["synchronized"] for result in _one_training(name)])

    @_all_members
    def test_models_are_saved(self, name):
        for result in _one_training(name):
            self.assertAllClose(result["of loaded"], result["predicted"], rtol=1e-5, atol=1e-5)
            self.assertTrue(result["has checkpoint"])

    @_all_members
    def test_rank_0_gets_all_reports(self, name):
        reports, at_rank_1 = (result["reports"] for result in _one_training(name))
        self.assertIsNone(at_rank_1)
        for rank, report in enumerate(reports):
            self.assertEqual((report["rank"], report["accuracy"]), (rank, 0.5))
            self.assertGreater(report["bytes_sent"], 0)
            self.assert_steps(name, report["steps"], 4 * _STEPS)

    @_all_members
    def test_tensorboard_names_each_counter(self, name):
        for report in _one_training(name)[0]["reports"]:
            counters = report.keys() - {"rank", "steps", "accuracy"}
            self.assertEmpty([counter for counter in counters if find_curve(counter) is None])

    @_all_members
    def test_one_stops_early(self, name):
        """If ranks wait for each other, all stop. Otherwise the others go on."""
        num_epochs = [result["epochs"] for result in _one_training(name)]
        self.assertEqual(num_epochs, [2, 2] if MEMBERS[name].is_in_lock_step else [4, 2])

    @_all_members
    def test_one_raises_and_all_train_again(self, name):
        first, second = (result["error"] for result in _one_training(name))
        self.assertIsInstance(first, type(None) if MEMBERS[name].goes_on_without_lost else PeerFailedError)
        self.assertIsInstance(second, KeyError)

    @_all_members
    def test_what_is_refused_within_a_fit(self, name):
        for result in _one_training(name):
            for call, error in zip(("synchronize", "gather_reports", "fit"), result["refused"], strict=True):
                self.assertRegex(str(error), f"`{call}` was called while a `fit` under this strategy runs")

    @_all_members
    def test_frozen_layers_and_compiling_again(self, name):
        for result in _one_training(name):
            self.assertAllEqual(result["frozen"][0][0], result["before"][0][0])
            self.assertNotAllClose(result["frozen"][-1][0], result["before"][-1][0])


class ContractTest(_OfAllMembers):
    @parameterized.parameters("data", "stop_training")
    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_an_epoch_of_fewer_steps_than_announced(self, why):
        """A rank that comes to its end does not wait for others that need its next step. All stop together."""

        def run(strategy):
            x, y = _data()
            num_rows = 3 * _STEPS // 2 if why == "data" and strategy.rank == 1 else 2 * _STEPS
            dataset = strategy.distribute_datasets_from_function(
                lambda context: tf.data.Dataset.from_tensor_slices((x[:1], y[:1])).repeat(num_rows).batch(1)
            )
            model = _compiled(strategy, lambda: _deep(Recorder))
            stop = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", batch == 1)
            )
            callbacks = [stop] if why == "stop_training" and strategy.rank == 1 else []
            history = model.fit(dataset, steps_per_epoch=_STEPS, epochs=2, callbacks=callbacks, verbose=0)
            return len(history.epoch)

        self.assertEqual(MEMBERS["pipe_sgd"].run(run), [2, 2] if why == "data" else [1, 1])

    # Data.

    @parameterized.product(source=list(_SOURCES), name=list(MEMBERS))
    @pytest.mark.stress(but=1)
    @pytest.mark.slow(after=2)
    def test_ranks_share_each_batch(self, name, source):
        def train(strategy):
            model = _compiled(strategy, lambda: _linear(Recorder))
            model.fit(**_SOURCES[source](), verbose=0)
            return model.seen

        for rank, seen in enumerate(self.run_ranks(name, train)):
            if source == "generator":
                per_rank = _BATCH_SIZE // NUM_RANKS
                parts = np.round(np.array(seen) * _NUM_ROWS) % _BATCH_SIZE // per_rank
                self.assertNotEmpty(parts)
                self.assertAllEqual(parts, np.full(len(parts), rank))
            else:
                self.assert_own_rows(name, rank, seen)

    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress(but=1)
    @pytest.mark.slow
    def test_a_split_for_validation(self, name):
        def train(strategy):
            return _fit(_compiled(strategy, metrics=[_Rows()]), validation_split=0.25)["val_rows"]

        for rows in self.run_ranks(name, train):
            self.assertEqual(rows, [6.0])

    @_all_members
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_weights_of_samples_and_classes(self, name):
        def train(strategy):
            model = _compiled(strategy)
            before = model.get_weights()
            _fit(model, sample_weight=np.zeros(_NUM_ROWS))
            classes = {"y": np.zeros((_NUM_ROWS, 1), np.float32), "class_weight": {0: 0.0}}
            _fit(model, **classes)
            return before, model.get_weights()

        for before, after in self.run_ranks(name, train):
            self.assertAllClose(before, after)

    # Ways to train.

    @parameterized.product(how=({"run_eagerly": True}, {"steps_per_execution": 2}), name=list(MEMBERS))
    @pytest.mark.stress(but=1)
    @pytest.mark.slow(after=1)
    def test_ways_to_run_steps(self, name, how):
        if _kind(name) == "canary" and how.get("run_eagerly"):
            self.skipTest("What is late cannot be skipped in eager steps: its synchronous form is tested.")
        if MEMBERS[name].num_devices > 1 and how.get("run_eagerly"):
            self.skipTest(
                "TensorFlow mixes up threads in eager steps on logical devices: see `contract_processes_test.py`."
            )

        def train(strategy):
            model = _compiled(strategy, _deep, **how)
            losses = [_loss(model)]
            _fit(model, 3)
            strategy.synchronize(model)
            return [*losses, _loss(model)], strategy.report()["steps"], model.get_weights()

        of_ranks = self.run_ranks(name, train)
        for losses, steps, _ in of_ranks:
            self.assertLess(losses[1], losses[0])
            self.assert_steps(name, steps, 3 * _STEPS)
        self.assert_equal_weights([weights for *_, weights in of_ranks])

    @_all_members
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_several_optimizers(self, name):
        def train(strategy):
            model = _compiled(strategy, TwoOptimizers, optimizer=lambda: keras.optimizers.SGD(0.02))
            before = model.get_weights()
            _fit(model, 2)
            strategy.synchronize(model)
            return before, model.get_weights()

        of_ranks = self.run_ranks(name, train)
        if of_ranks is None:
            return
        for before, after in of_ranks:
            for one, other in zip(before, after, strict=True):
                self.assertNotAllClose(one, other)
        self.assert_equal_weights([after for _, after in of_ranks])

    @_all_members
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_a_decorated_train_step(self, name):
        def train(strategy):
            model = _compiled(strategy, InAFunction)
            before = _trained(model)
            _fit(model, 2)
            return before, _trained(model), strategy.report()["steps"]

        for before, after, steps in self.run_ranks(name, train):
            self.assertNotAllClose(before[0], after[0])
            self.assert_steps(name, steps, 2 * _STEPS)

    @_all_members
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_accumulated_gradients(self, name):
        def train(strategy):
            model = _compiled(
                strategy, optimizer=lambda: keras.optimizers.SGD(0.02, gradient_accumulation_steps=_STEPS)
            )
            before = model.get_weights()
            _fit(model)
            once = model.get_weights()
            strategy.synchronize(model)
            return before, once, strategy.report()["steps"]

        for before, once, steps in self.run_ranks(name, train):
            self.assertNotAllClose(before, once)
            self.assertEqual(steps, 1)  # Updates are counted.

    @_all_members
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_mixed_precision_with_clipping(self, name):
        def make_model():
            inputs = keras.Input((3,))
            return keras.Model(inputs, keras.layers.Dense(1, dtype="mixed_float16")(inputs))

        def train(strategy):
            model = _compiled(
                strategy,
                make_model,
                lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.02, clipnorm=1.0), initial_scale=8),
            )
            before = model.get_weights()
            _fit(model)
            return before, model.get_weights()

        of_ranks = self.run_ranks(name, train)
        for before, after in of_ranks or ():
            self.assertNotAllClose(before, after)
            self.assertTrue(all(np.isfinite(each).all() for each in after))

    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress(but=1)
    @pytest.mark.slow(after=1)
    def test_an_abort_is_heard_between_steps(self, name):
        """The other rank is alone afterwards and waits for no rank, but must raise the error, too."""

        def train(strategy):
            return error_of(_fit, _compiled(strategy), callbacks=[AbortOnRank1(strategy)])

        first, second = self.run_ranks(name, train)
        self.assertIsInstance(first, HopError)
        self.assertIn("broken on purpose", str(first))
        self.assertEqual(str(second), "broken on purpose")

    @_all_members
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_an_exception_on_one_rank(self, name):
        """An exception has the effects of a lost rank: all raise, or the others go on and say so."""

        def train(strategy):
            membership = strategy.training.runtime.membership

            def check(batch, logs):
                if strategy.rank == 1:
                    return 1 // (batch - 2)
                return batch != 3 or membership.wait_until(lambda: membership.departure(1), 60.0)

            callback = keras.callbacks.LambdaCallback(on_train_batch_end=check)
            return error_of(_fit, _compiled(strategy), callbacks=[callback]), strategy.report()

        with self.assertLogs(level="WARNING") as logs:
            (first, report), (second, _) = self.run_ranks(name, train)
        self.assertIsInstance(second, ZeroDivisionError)
        told = [line for line in logs.output if "rank 0: " in line and "ZeroDivisionError" in line]
        self.assertLen(told, 1)
        self.assertIn("rank 1", told[0])
        if MEMBERS[name].goes_on_without_lost:
            self.assertIsNone(first)
            self.assertEqual((report["ranks_left"], report["ranks_lost"]), (1, 0))
            self.assert_steps(name, report["steps"], _STEPS)
        else:
            self.assertIsInstance(first, PeerFailedError)
            self.assertRegex(str(first), "rank 0: rank 1 has failed, .* without it: ZeroDivisionError")

    @_all_members
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_values_that_are_not_finite(self, name):
        """A warning names the rank that sends such values first. On request they are an error on all ranks."""

        def train(strategy, waits=False):
            membership = strategy.training.runtime.membership

            def wait(batch, logs):  # Otherwise rank 0 might end before rank 1 fails.
                if waits and (strategy.rank, batch) == (0, 3):
                    membership.wait_until(lambda: membership.departure(1), 60.0)

            x, _ = _data()
            x.reshape(_STEPS, NUM_RANKS, -1)[2:, 1] = np.nan  # Of rank 1, from the third step on.
            callback = keras.callbacks.LambdaCallback(on_train_batch_end=wait)
            error = error_of(_fit, _compiled(strategy), x=x, callbacks=[callback])
            return error, strategy.report()["nonfinite_steps"]

        with self.assertLogs(level="WARNING") as logs:
            self.assertEqual([error for error, _ in self.run_ranks(name, train)], [None, None])
        told = [line for line in logs.output if "this rank sends values that are not finite" in line]
        self.assertRegex(told[0], r"rank 1, step \d: ")
        self.assertLen({line.partition(", step")[0] for line in told}, len(told))  # Once for each rank.

        options = hop_tf.CommunicationOptions(timeout_seconds=60, on_nonfinite="raise")
        of_ranks = MEMBERS[name].run(functools.partial(train, waits=True), options=options)
        for error, _ in of_ranks:
            self.assertIsInstance(error, HopError)
            self.assertIn("rank 1, step", str(error))
            self.assertIn("this rank sends values that are not finite", str(error))
        self.assertEqual(of_ranks[0][1], 0)

    # What is refused.

    @_all_members
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_another_model_on_one_rank(self, name):
        def train(strategy):
            return error_of(_fit, _compiled(strategy, _deep if strategy.rank else _linear))

        errors = self.run_ranks(name, train)
        self.assertTrue(any(isinstance(error, MismatchError) for error in errors), errors)
        self.assertTrue(all(isinstance(error, HopError) for error in errors), errors)

    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress(but=1)
    def test_other_batches_on_one_rank(self, name):
        def train(strategy):
            return error_of(_fit, _compiled(strategy), batch_size=_BATCH_SIZE * (1 + strategy.rank))

        errors = self.run_ranks(name, train)
        self.assertTrue(any(isinstance(error, MismatchError) for error in errors), errors)
        for error in errors:
            self.assertRegex(str(error), "disagree on the number of batches in an epoch. Rank 0 has 6, rank 1 has 3.")

    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress(but=1)
    @pytest.mark.slow(after=1)
    def test_an_optimizer_that_does_not_follow_the_weights(self, name):
        """Only strategies that average gradients accept such an optimizer."""
        averages_gradients = _kind(name) in ("pipe_sgd", "canary_synchronous")

        def train(strategy):
            return error_of(_fit, _compiled(strategy, optimizer=lambda: keras.optimizers.Ftrl(0.1)))

        for error in self.run_ranks(name, train):
            if averages_gradients:
                self.assertIsNone(error)
            else:
                self.assertRegex(str(error), "Ftrl recomputes weights from its own state")

    @_all_members
    @pytest.mark.stress(but=2)
    def test_xla_is_refused(self, name):
        def train(strategy):
            return error_of(_fit, _compiled(strategy, jit_compile=True))

        for error in self.run_ranks(name, train):
            self.assertRegex(str(error), "`jit_compile` must be False or 'auto' under hop_tf")

    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress(after=2)
    def test_a_loop_that_does_not_go_through_run_is_refused(self, name):
        """Also in a tf.function or eagerly, called in the scope or outside, made in the scope or outside."""

        def train(strategy):
            def step(model, optimizer):
                x, y = _data()
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x) - y))
                optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)

            errors = []
            for scope in (strategy.scope, contextlib.nullcontext):
                with scope():
                    model, optimizer = _linear(), keras.optimizers.SGD(0.1)
                    optimizer.build(model.trainable_weights)
                for run in (step, tf.function(step)):
                    errors.append(error_of(run, model, optimizer))
                    with strategy.scope():
                        errors.append(error_of(run, model, optimizer) if scope is strategy.scope else errors[-1])
            return errors

        for errors in self.run_ranks(name, train):
            for error in errors[:4]:
                self.assertRegex(
                    str(error), r"updated variables outside of `strategy.run`, so this rank would train alone"
                )
            for error in errors[4:]:
                self.assertRegex(str(error), r"SGD, which is asked for an update, was created outside of the scope")

    @_all_members
    def test_a_forgotten_scope_is_refused(self, name):
        def train(strategy):
            model = _linear()
            model.compile("sgd", "mse")
            return error_of(_fit, model)

        for error in self.run_ranks(name, train):
            self.assertRegex(str(error), "`fit` was called on a model that was created outside of the scope")

    # A world of one.

    @parameterized.parameters(*(name for name, member in MEMBERS.items() if not member.num_ps))
    @pytest.mark.stress(but=1)
    @pytest.mark.slow(after=3)
    def test_a_world_of_one_trains_as_plain_keras(self, name):
        def train(strategy):
            model = _compiled(strategy)
            _fit(model, 2)
            return model.get_weights()

        alone = MEMBERS[name].make()
        try:
            weights = train(alone)
        finally:
            alone.shutdown()
        expected = train(tf.distribute.OneDeviceStrategy("/cpu:0"))
        if MEMBERS[name].num_devices == 1:
            self.assert_equal_weights([weights, expected])
        else:
            self.assertAllClose(weights, expected, rtol=1e-6, atol=1e-6)  # Sums of halves of batches round differently.


if __name__ == "__main__":
    absltest.main()
