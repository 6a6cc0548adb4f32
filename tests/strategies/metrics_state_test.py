"""Tests of metrics over all ranks, by their states, and of stop requests: under all strategies, as in plain Keras."""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
import support
from hop_tf.errors import MismatchError, PeerLostError
from support import NUM_RANKS, Member, StopRank1

_NUM_ROWS = 48
_BATCH_SIZE = 8
_STEPS = _NUM_ROWS // _BATCH_SIZE
_LOCK_STEP = {name: member for name, member in support.MEMBERS.items() if member.is_in_lock_step} | {
    "pipe_sgd_1": Member(functools.partial(hop_tf.PipeSGDStrategy, pipeline_width=1), is_in_lock_step=True),
    "shat_synchronous": Member(
        functools.partial(hop_tf.SHATParameterServerStrategy, consistency="bsp"), num_ps=1, is_in_lock_step=True
    ),
}
# An asynchronous Canary skips steps, so the rows that it sees are not known in advance.
_MEMBERS = {**support.MEMBERS, **_LOCK_STEP, "two_devices": support.ON_TWO_DEVICES["pipe_sgd_on_two_devices"]}
_SEES_ALL = [name for name in _MEMBERS if name != "canary"]


class _Plain:
    """Plain Keras instead of a strategy."""

    rank = 0

    def scope(self):
        return tf.distribute.OneDeviceStrategy("/cpu:0").scope()


@keras.saving.register_keras_serializable()
class Largest(keras.metrics.Metric):
    """The largest target. Its state is no sum."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_weight(initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.cast(y_true, tf.float32))))

    def result(self):
        return tf.identity(self.value)


class Positives(keras.metrics.Metric):
    """The number of positive targets, an integer whose state is a sum."""

    def __init__(self, name="positives"):
        super().__init__(name=name)
        self.number = self.add_weight(initializer="zeros", dtype="int32", name="number")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.number.assign_add(tf.reduce_sum(tf.cast(y_true > 0, tf.int32)))

    def result(self):
        return {"positives": tf.identity(self.number), "half": self.number / 2}


def _data():
    """Returns inputs, which are predictions, targets, and weights. The rows of rank 1 differ from those of rank 0."""
    random = np.random.default_rng(0)
    part = np.arange(_NUM_ROWS) % _BATCH_SIZE >= _BATCH_SIZE // 2  # Rank 1's rows, if parts are equal.
    binary = (random.random(_NUM_ROWS) < np.where(part, 0.15, 0.8)).astype(np.float32)
    numbers = random.normal(1, np.where(part, 3.0, 1.0)[:, None], (_NUM_ROWS, 3))
    x = {
        "binary": np.clip(0.6 * binary + 0.5 * random.random(_NUM_ROWS), 0.02, 0.98)[:, None],
        "numbers": np.abs(numbers + random.normal(0, 1, numbers.shape)),
    }
    y = {"binary": binary[:, None], "numbers": np.abs(numbers)}
    x, y = ({name: value.astype(np.float32) for name, value in each.items()} for each in (x, y))
    return x, y, {name: random.uniform(0.5, 2.0, _NUM_ROWS).astype(np.float32) for name in y}


def _model(strategy, metrics, weighted_metrics=None, names=("binary", "numbers"), **settings):
    """Returns a model whose outputs are its inputs plus trained values, which stay the same at a rate of 0."""
    widths = {"binary": 1, "numbers": 3}
    with strategy.scope():
        inputs = {name: keras.Input((widths[name],), name=f"{name}_in") for name in names}
        added = {n: keras.layers.Dense(widths[n], kernel_initializer="zeros")(each) for n, each in inputs.items()}
        outputs = {name: keras.layers.Add(name=name)([each, added[name]]) for name, each in inputs.items()}
        model = keras.Model(inputs, outputs)
        optimizer = keras.optimizers.SGD(0.0)
        model.compile(
            optimizer, dict.fromkeys(names, "mse"), metrics=metrics, weighted_metrics=weighted_metrics, **settings
        )
    return model


def _history(strategy, metrics, names, *, average=True, weighted_metrics=None, **settings):
    x, y, weights = ({name: each[name] for name in names} for each in _data())
    model = _model(strategy, metrics(), weighted_metrics and weighted_metrics(), names, **settings)
    callbacks = [hop_tf.callbacks.MetricAverage()] if average else []
    return model.fit(
        x,
        y,
        sample_weight=weights if weighted_metrics else None,
        batch_size=_BATCH_SIZE,
        epochs=2,
        shuffle=False,
        validation_data=(x, y),
        callbacks=callbacks,
        verbose=0,
    ).history


def _some_metrics():
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.F1Score(threshold=0.5, name="f1")]
    return {"binary": [*metrics, keras.metrics.Precision(name="precision"), hop_tf.state(Positives(), "sum")]}


class SumsTest(parameterized.TestCase):
    def _compare(self, name, metrics, names, member_settings=None, **settings):
        def run(strategy):
            return _history(strategy, metrics, names, **settings)

        expected = run(_Plain())
        for history in _MEMBERS[name].run(run, **(member_settings or {})):
            self.assertEqual(history.keys(), expected.keys())
            for metric, values in expected.items():
                np.testing.assert_allclose(history[metric], values, rtol=1e-5, atol=1e-6, err_msg=metric)
        return expected

    @parameterized.parameters(*_SEES_ALL)
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(after=1)
    def test_as_plain_keras(self, name):
        self._compare(name, _some_metrics, ["binary"])

    @pytest.mark.stress
    def test_sample_weights(self):
        settings = {"metrics": lambda: None, "names": ["binary", "numbers"]}
        weighted = lambda: {"binary": ["auc", "precision"], "numbers": ["r2_score", "mae"]}  # noqa: E731
        self._compare("dts", **settings, weighted_metrics=weighted)

    @pytest.mark.stress
    def test_shares(self):
        self._compare("pipe_sgd", _some_metrics, ["binary"], {"batch_shares": [3, 1]})

    @pytest.mark.slow
    def test_several_steps_per_execution(self):
        self._compare("pipe_sgd", _some_metrics, ["binary"], steps_per_execution=4)

    @pytest.mark.stress
    def test_states_that_are_no_sums(self):
        """Ranks leave such states as they are, and log the mean of the results, as for all unknown metrics."""

        def run(strategy):
            return _history(strategy, lambda: {"numbers": [Largest(), "mae"]}, ["numbers"], average=False)

        y = _data()[1]["numbers"].reshape(_STEPS, NUM_RANKS, -1)
        expected = run(_Plain())
        for history in _MEMBERS["pipe_sgd"].run(run):
            np.testing.assert_allclose(history["largest"], [y.max((0, 2)).mean()] * 2, rtol=1e-6)
            np.testing.assert_allclose(history["mae"], expected["mae"], rtol=1e-5)

    def test_what_a_step_returns_by_the_name_of_a_metric(self):
        """Logs contain the mean over ranks of the returned value, not the metric's result."""

        class Own(keras.Model):
            def train_step(self, data):
                return {**super().train_step(data), "mean_absolute_error": tf.reduce_min(data[1])}

        def make():
            inputs = keras.Input((3,))
            return Own(inputs, keras.layers.Dense(3)(inputs))

        make()  # With the first model Keras changes the class. Two threads must not do that at once.

        def run(strategy):
            with strategy.scope():
                model = make()
                model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mean_absolute_error"])
            x, y, _ = _data()
            # If names are the same, Keras itself takes the metrics for the training's logs.
            model.get_metrics_result = lambda: {"loss": 1.0}
            return model.fit(x["numbers"], y["numbers"], batch_size=_BATCH_SIZE, shuffle=False, verbose=0).history

        last = _data()[1]["numbers"].reshape(_STEPS, NUM_RANKS, -1)[-1]
        for history in _MEMBERS["pipe_sgd"].run(run):
            np.testing.assert_allclose(history["mean_absolute_error"], [last.min(1).mean()], rtol=1e-6)


def _unknown(x, y):
    """Returns data whose length TensorFlow does not know."""
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(_BATCH_SIZE).filter(lambda x, y: True)


class UnknownLengthTest(parameterized.TestCase):
    @parameterized.product(name=["pipe_sgd", "hop", "shat_synchronous"], steps_per_execution=[1, 4])
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(after=1)
    def test_metrics_are_averaged_and_all_stop_together(self, name, steps_per_execution):
        """With its own data only, rank 1 would stop in another epoch."""

        def run(strategy):
            model = _model(strategy, None, names=["binary"], steps_per_execution=steps_per_execution)
            x, y, _ = _data()
            stop = keras.callbacks.EarlyStopping("loss", patience=2, min_delta=1e-3)
            data = _unknown({"binary": x["binary"]}, {"binary": y["binary"]})
            callbacks = [hop_tf.callbacks.MetricAverage(), stop]
            return model.fit(data, epochs=6, callbacks=callbacks, verbose=0).history["loss"]

        expected = run(_Plain())
        self.assertLen(expected, 3)
        for losses in _MEMBERS[name].run(run):
            np.testing.assert_allclose(losses, expected, rtol=1e-5)


def _trained(strategy, callbacks, *, epochs=3, x=None, rate=0.01, **settings):
    """Trains; returns the number of steps, the number of epochs in History, and the weights."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(rate), "mse", **settings)
    x = np.ones((_NUM_ROWS, 3), np.float32) if x is None else x
    callbacks = callbacks(model)
    history = model.fit(
        x, np.ones((_NUM_ROWS, 1)), batch_size=_BATCH_SIZE, epochs=epochs, shuffle=False, callbacks=callbacks, verbose=0
    )
    return int(model.optimizer.iterations), len(history.epoch), model.get_weights()


class _StopAt(keras.callbacks.Callback):
    """Stops the training in one call of one method."""

    def __init__(self, method, number=0):
        super().__init__()
        self._remaining = number

        def call(*arguments, **keywords):
            self._remaining -= 1
            if self._remaining == -1:
                self.model.stop_training = True

        setattr(self, method, call)


class StopTest(parameterized.TestCase):
    @parameterized.parameters(*_LOCK_STEP)
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_a_callback_of_one_rank_stops_all_after_the_same_step(self, name):
        def run(strategy):
            return _trained(strategy, lambda model: [StopRank1(strategy.rank, batch=2)])

        (num_steps, *_), _ = results = _LOCK_STEP[name].run(run)
        for other, num_epochs, weights in results:
            self.assertEqual((other, num_epochs), (num_steps, 1))
            if name != "shat_synchronous":
                for mine, first in zip(weights, results[0][2], strict=True):
                    np.testing.assert_array_equal(mine, first)
        self.assertBetween(num_steps, 3, _STEPS)

    @parameterized.parameters("pipe_sgd", "dts")
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_terminate_on_nan(self, name):
        """The rows of rank 1 are nan in one step. Rank 0 has no such callback."""
        x = np.ones((_NUM_ROWS, 3), np.float32)
        x[2 * _BATCH_SIZE + _BATCH_SIZE // 2 :][:2] = np.nan

        def run(strategy):
            callbacks = [keras.callbacks.TerminateOnNaN()] if strategy.rank == 1 else []
            return _trained(strategy, lambda model: callbacks, x=x)[:2]

        first, second = _LOCK_STEP[name].run(run)
        self.assertEqual(first, second)
        self.assertBetween(first[0], 3, _STEPS)
        self.assertEqual(first[1], 1)

    @parameterized.parameters(
        ("on_train_batch_end", 8, 9, 2),
        ("on_train_batch_begin", 8, 9, 2),
        ("on_epoch_begin", 1, 7, 2),
        ("on_train_begin", 0, None, None),
        ("on_epoch_end", 1, 12, 2),
        ("on_test_end", 0, 6, 1),
    )
    @pytest.mark.stress
    def test_where_all_ask_they_stop_as_plain_keras(self, method, number, num_steps, num_epochs):
        def run(strategy):
            stop = _StopAt(method, number)
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            x, y = np.ones((_NUM_ROWS, 3)), np.ones((_NUM_ROWS, 1))
            history = model.fit(
                x, y, batch_size=_BATCH_SIZE, epochs=3, validation_data=(x, y), callbacks=[stop], verbose=0
            )
            return int(model.optimizer.iterations), len(history.epoch)

        expected = run(_Plain())
        if num_steps is not None:
            self.assertEqual(expected, (num_steps, num_epochs))
        self.assertEqual(_LOCK_STEP["pipe_sgd"].run(run), [expected] * NUM_RANKS)

    @parameterized.parameters("on_epoch_end", "on_test_end", "on_epoch_begin")
    @pytest.mark.stress
    def test_moments_at_which_one_asks(self, method):
        def run(strategy):
            number = 0 if method == "on_test_end" else 1
            callbacks = [_StopAt(method, number)] if strategy.rank == 1 else []
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            x, y = np.ones((_NUM_ROWS, 3)), np.ones((_NUM_ROWS, 1))
            model.fit(x, y, batch_size=_BATCH_SIZE, epochs=4, validation_data=(x, y), callbacks=callbacks, verbose=0)
            return int(model.optimizer.iterations)

        first, second = _LOCK_STEP["pipe_sgd"].run(run)
        self.assertEqual(first, second)
        self.assertIn(first, {"on_epoch_end": [12], "on_test_end": [6], "on_epoch_begin": [7, 8]}[method])

    @parameterized.parameters({"steps_per_execution": 4}, {"run_eagerly": True})
    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_settings_of_compile(self, **settings):
        def run(strategy):
            return _trained(strategy, lambda model: [_StopAt("on_train_batch_end")] * strategy.rank, **settings)[:2]

        first, second = _LOCK_STEP["pipe_sgd"].run(run)
        self.assertEqual(first, second)
        self.assertIn(first, [(4, 1), (6, 1)] if "steps_per_execution" in settings else [(1, 1), (2, 1)])

    @parameterized.product(name=["pipe_sgd", "pipe_sgd_1", "dts"], all_ask=[True, False])
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_stop_in_an_execution_for_which_few_batches_are_left(self, name, all_ask):
        """The epoch ends after two of an execution's four steps, so that no rank has begun more."""

        def run(strategy):
            asks = all_ask or strategy.rank == NUM_RANKS - 1
            stops = [_StopAt("on_train_batch_end", 1)] * asks
            return _trained(strategy, lambda model: stops, steps_per_execution=4)[:2]

        stop = _StopAt("on_train_batch_end", 1)
        self.assertEqual(_trained(_Plain(), lambda model: [stop], steps_per_execution=4)[:2], (6, 1))
        self.assertEqual(_LOCK_STEP[name].run(run), [(6, 1)] * NUM_RANKS)

    @parameterized.product(data=["shorter", "longer", "endless", "of unknown length"], at=[1, 2])
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_all_ask_in_executions_of_several_steps(self, data, at):
        """Keras's `steps_per_epoch=5` makes eight steps in executions of four, if the data has them."""

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse", steps_per_execution=4)
            num_batches = 5 if data == "shorter" else 14
            x, y = np.ones((num_batches * _BATCH_SIZE, 3)), np.ones((num_batches * _BATCH_SIZE, 1))
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(_BATCH_SIZE)
            if data == "of unknown length":
                dataset = _unknown(x[: 6 * _BATCH_SIZE], y[: 6 * _BATCH_SIZE])
            settings = {} if data == "of unknown length" else {"steps_per_epoch": 5}
            dataset = dataset.repeat() if data == "endless" else dataset
            stop = _StopAt("on_train_batch_end", at)
            history = model.fit(dataset, epochs=4, callbacks=[stop], verbose=0, **settings)
            return int(model.optimizer.iterations), len(history.epoch)

        self.assertEqual(_LOCK_STEP["pipe_sgd_1"].run(run), [run(_Plain())] * NUM_RANKS)

    @pytest.mark.slow
    def test_accumulated_gradients(self):
        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), "mse")
            x, y = np.ones((_NUM_ROWS, 3)), np.ones((_NUM_ROWS, 1))
            batches = []
            count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
            stop = StopRank1(strategy.rank, batch=3)
            model.fit(x, y, batch_size=_BATCH_SIZE, epochs=3, callbacks=[count, stop], verbose=0)
            return len(batches)

        first, second = _LOCK_STEP["pipe_sgd"].run(run)
        self.assertEqual(first, second)
        self.assertBetween(first, 4, 2 * _STEPS)

    @pytest.mark.slow
    def test_early_stopping_on_one_rank(self):
        def run(strategy):
            stop = keras.callbacks.EarlyStopping("loss", min_delta=1e9)
            return _trained(strategy, lambda model: [stop] * strategy.rank)[:2]

        self.assertEqual(_LOCK_STEP["dts"].run(run), [(2 * _STEPS, 2)] * NUM_RANKS)

    @pytest.mark.slow
    def test_ranks_that_do_not_wait_for_each_other_stop_alone(self):
        def run(strategy):
            return _trained(strategy, lambda model: [StopRank1(strategy.rank, batch=2)])[0]

        self.assertEqual(_MEMBERS["hop"].run(run), [3 * _STEPS, 3])

    @pytest.mark.slow
    def test_the_end_of_an_epoch_where_metrics_are_averaged(self):
        def run(strategy):
            callbacks = [hop_tf.callbacks.MetricAverage(), *[_StopAt("on_epoch_end", 1)] * strategy.rank]
            return _trained(strategy, lambda model: callbacks)[:2]

        self.assertEqual(_MEMBERS["hop"].run(run), [(2 * _STEPS, 2)] * NUM_RANKS)

    def test_metrics_are_averaged_on_all_ranks_or_on_none(self):
        def run(strategy):
            callbacks = [] if strategy.rank else [hop_tf.callbacks.MetricAverage()]
            error = MismatchError if strategy.rank else PeerLostError
            with self.assertRaisesRegex(error, "rank 0 averages its metrics, and rank 1 does not"):
                _trained(strategy, lambda model: callbacks)
            return True

        self.assertEqual(_MEMBERS["hop"].run(run), [True] * NUM_RANKS)

    @pytest.mark.slow
    def test_an_exception_stops_nobody_else(self):
        def run(strategy):
            def fail(batch, logs):
                if strategy.rank == 1 and batch == 2:
                    raise KeyboardInterrupt

            callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=fail)]
            try:
                return _trained(strategy, lambda model: callbacks)[0]
            except KeyboardInterrupt:
                return None

        self.assertEqual(_LOCK_STEP["pipe_sgd"].run(run), [3 * _STEPS, None])

    def test_a_second_fit(self):
        """The second `fit` forgets a stop that was requested in the first."""

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            x, y = np.ones((_NUM_ROWS, 3)), np.ones((_NUM_ROWS, 1))
            counts = []
            for stops in (True, False):
                callbacks = [StopRank1(strategy.rank, batch=2)] if stops else []
                model.fit(x, y, batch_size=_BATCH_SIZE, callbacks=callbacks, verbose=0)
                counts.append(int(model.optimizer.iterations))
            return counts

        (first, both), other = _LOCK_STEP["pipe_sgd"].run(run)
        self.assertEqual([first, both], other)
        self.assertEqual(both - first, _STEPS)
        self.assertLess(first, _STEPS)


class LogsTest(absltest.TestCase):
    @pytest.mark.slow
    @pytest.mark.stress
    def test_the_end_of_training_gets_those_of_the_last_epoch(self):
        def run(strategy):
            ends = []
            callback = keras.callbacks.LambdaCallback(on_train_end=lambda logs: ends.append(logs["loss"]))
            history = _history_of_binary(strategy, [callback])
            return ends, history["loss"][-1:]

        for ends, last in _MEMBERS["pipe_sgd"].run(run):
            self.assertEqual(ends, last)
            self.assertFalse(math.isnan(last[0]))


def _history_of_binary(strategy, callbacks):
    x, y, _ = _data()
    model = _model(strategy, None, names=["binary"])
    data = {"binary": x["binary"]}, {"binary": y["binary"]}
    return model.fit(*data, batch_size=_BATCH_SIZE, epochs=2, callbacks=callbacks, verbose=0).history


if __name__ == "__main__":
    absltest.main()
