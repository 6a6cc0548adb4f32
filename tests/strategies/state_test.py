"""Tests the owner of each kind of state under every strategy: the table of `docs/data.md`, compared with plain Keras.

Both ranks see the rows that one process sees, unless a test says otherwise. So they make the same steps.
"""

import contextlib
import os
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.errors import HopError
from hop_tf.tools.testing import InProcessCluster
from support import MEMBERS, TWO_DEVICES

_NUM_ROWS = 32
_BATCH_SIZE = 8
_LEARNING_RATE = 0.05

# Each strategy with settings whose steps equal those of one process, if possible. Other settings have a name.
_MEMBERS = {name: (member, {}) for name, member in MEMBERS.items() if name != "own"}
_MEMBERS["pipe_sgd"] = (MEMBERS["pipe_sgd"], {"pipeline_width": 1})
_MEMBERS["pipe_sgd_wide"] = (MEMBERS["pipe_sgd"], {"pipeline_width": 2})
# Ranks that do not wait for each other make other steps than one process does.
_ASYNCHRONOUS = ("canary", "shat")
_EXACT = [name for name in _MEMBERS if name not in _ASYNCHRONOUS]
# Strategies that keep a second copy of the weights.
_KEEPS_A_COPY = ("pipe_sgd_wide", "shat")


def _rows(num_columns, seed=0):
    return np.random.default_rng(seed).normal(size=(_NUM_ROWS, num_columns)).astype(np.float32)


def _twice(rows):
    """Repeats the rows of each batch, so that both ranks see the rows that one process sees."""
    batches = rows.reshape(-1, _BATCH_SIZE, *rows.shape[1:])
    return np.concatenate([batches, batches], axis=1).reshape(-1, *rows.shape[1:])


def _fit(model, strategy, **arguments):
    repeat, factor = (lambda rows: rows, 1) if strategy is None else (_twice, 2)
    x, y = repeat(_rows(6)), repeat(_rows(6)[:, :1] * 2 + 1)
    model.fit(x, y, batch_size=factor * _BATCH_SIZE, shuffle=False, verbose=0, **{"epochs": 2, **arguments})


def _scope(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def _of_ranks(name, run):
    member, settings = _MEMBERS[name]
    return member.run(run, **settings)


def _compiled(model, momentum=0.0):
    model.compile(keras.optimizers.SGD(_LEARNING_RATE, momentum=momentum), "mse")
    return model


def _dense(size=1, **arguments):
    return keras.layers.Dense(size, kernel_initializer=keras.initializers.RandomNormal(stddev=0.5, seed=1), **arguments)


def _weights(model):
    return [weight.numpy() for weight in model.weights]


def _normalized():
    layer = keras.layers.SpectralNormalization(_dense(8))
    model = keras.Sequential([keras.Input((6,)), layer, _dense()])
    layer.vector_u.assign(np.linspace(-1, 1, 8, dtype=np.float32)[np.newaxis])  # Otherwise drawn at random.
    return _compiled(model)


def _linear():
    return _compiled(keras.Sequential([keras.Input((6,)), _dense()]), momentum=0.5)


class Queue(keras.layers.Layer):
    """Keeps unit rows of the latest features, as contrastive learning does."""

    def build(self, shape):
        self.rows = self.add_weight(
            shape=(16, shape[-1]), trainable=False, initializer=keras.initializers.Orthogonal(seed=1), name="rows"
        )

    def call(self, inputs, training=False):
        if training:
            features = tf.math.l2_normalize(inputs, axis=1)
            rows = tf.math.l2_normalize(self.rows, axis=1)
            self.rows.assign(tf.concat([features, rows], 0)[:16])
        return inputs


class Program(keras.Model):
    """A model with a state of each kind, assigned before and after the update."""

    def __init__(self):
        super().__init__()
        self.student = keras.Sequential([keras.Input((6,)), Queue(), _dense(4), _normalization(), _dense()])
        self.teacher = hop_tf.state(
            keras.Sequential([keras.Input((6,)), _dense(4), _normalization(), _dense()]), "mean"
        )
        self.unmarked = keras.Sequential([keras.Input((6,)), _dense(4)])
        self.num_rows = self.add_weight(shape=(), dtype="int32", trainable=False, aggregation="sum", name="num_rows")
        self.largest = hop_tf.state(
            self.add_weight(shape=(6,), trainable=False, initializer="zeros", name="largest"), "max"
        )
        self.of_first = self.add_weight(
            shape=(), trainable=False, initializer="zeros", aggregation="only_first_replica", name="of_first"
        )
        self.was_large = hop_tf.state(self.add_weight(shape=(), dtype="bool", trainable=False, name="was_large"), "max")
        self.num_steps = self.add_weight(shape=(), dtype="int32", trainable=False, name="num_steps")

    def call(self, inputs):
        return self.student(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.student(x, training=True) - y))
        self.num_rows.assign_add(tf.shape(x)[0])
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(tf.abs(x), 0)))
        weights = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for mine, other in zip(self.teacher.trainable_variables, weights, strict=True):
            mine.assign(0.9 * mine + 0.1 * other)
        for mine, other in zip(self.unmarked.trainable_variables, weights[:2], strict=True):
            mine.assign(0.9 * mine + 0.1 * other)
        self.of_first.assign(x[0, 0])
        self.was_large.assign(self.was_large | (x[0, 0] > 1))
        self.num_steps.assign_add(1)
        return {"loss": loss}


def _normalization():
    return keras.layers.BatchNormalization(momentum=0.8)


def _state_of(program):
    return {
        "student": _weights(program.student)[1:],
        "queue": [program.student.layers[0].rows.numpy()],
        "teacher": _weights(program.teacher),
        "unmarked": _weights(program.unmarked),
        "counts": [program.num_rows.numpy(), program.num_steps.numpy()],
        "extremes": [program.largest.numpy(), program.was_large.numpy()],
        "of_first": [program.of_first.numpy()],
    }


class AssignedWeightsTest(tf.test.TestCase, parameterized.TestCase):
    """Tests of weights that a program assigns, in a step or between two steps."""

    def _assert_equals_one_process(self, name, run, rtol=1e-4, atol=1e-4):
        expected = run(None)
        for values in _of_ranks(name, run):
            for value, each in zip(values, expected, strict=True):
                self.assertAllClose(value, each, rtol=rtol, atol=atol)

    def _assert_refused(self, name, run, when):
        with self.assertRaisesRegex(ValueError, f"weights were assigned {when}.*kernel.*pipeline_width=1"):
            _of_ranks(name, run)

    @parameterized.parameters(*_MEMBERS)
    @pytest.mark.slow(after=3)
    @pytest.mark.stress(but=1)
    def test_in_a_step_before_the_update(self, name):
        """Spectral normalization assigns the kernel for good."""

        def run(strategy):
            with _scope(strategy):
                model = _normalized()
            _fit(model, strategy)
            return _weights(model)

        if name in _KEEPS_A_COPY:
            self._assert_refused(name, run, "in a training step, before the update")
        elif name == "canary":  # The other rank's changes are added, at worst all at the end.
            for weights in _of_ranks(name, run):
                self.assertBetween(np.linalg.norm(weights[0], 2), 0.8, 2.0)
        else:
            self._assert_equals_one_process(name, run)

    @parameterized.parameters(*_MEMBERS)
    @pytest.mark.slow(after=3)
    @pytest.mark.stress(but=1)
    def test_between_two_steps(self, name):
        """A callback applies a mask to weights after each step."""

        def run(strategy):
            with _scope(strategy):
                model = _linear()
            kernel, mask = model.layers[0].kernel, np.array([[1], [0], [1], [0], [0], [1]], np.float32)
            _fit(model, strategy, callbacks=[_at_batch_end(lambda batch: kernel.assign(kernel * mask))])
            return _weights(model)

        if name in _KEEPS_A_COPY:
            self._assert_refused(name, run, "between two training steps")
        elif name == "canary":  # The masking is sent as any change: through a codec, and late.
            for kernel, _ in _of_ranks(name, run):
                self.assertAllClose(kernel[[1, 3, 4], 0], np.zeros(3), atol=0.2)
        else:
            self._assert_equals_one_process(name, run)

    @parameterized.parameters("pipe_sgd_wide", "shat", "canary", "hop")
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_eagerly_behind_the_update(self, name):
        """In eager steps no graph shows assignments. The assignments of constraints belong to the optimizer."""

        class Clipped(keras.Sequential):
            def train_step(self, data):
                logs = super().train_step(data)
                for weight in self.trainable_weights if self.clips else ():
                    weight.assign(tf.clip_by_value(weight, -0.1, 0.1))
                return logs

        def run(strategy, clips):
            with strategy.scope():
                constraint = keras.constraints.MaxNorm(0.5)
                model = Clipped([keras.Input((6,)), _dense(kernel_constraint=constraint)])
                model.compile(keras.optimizers.SGD(_LEARNING_RATE), "mse", run_eagerly=True)
            model.clips = clips
            _fit(model, strategy, epochs=1)
            return model.layers[-1].kernel.numpy()

        for kernel in _of_ranks(name, lambda strategy: run(strategy, False)):
            self.assertLess(np.linalg.norm(kernel), 0.51)
        if name == "hop":
            for kernel in _of_ranks(name, lambda strategy: run(strategy, True)):
                self.assertLess(np.abs(kernel).max(), 0.11)
        else:
            with self.assertRaisesRegex((ValueError, HopError), "Give the layer a constraint"):
                _of_ranks(name, lambda strategy: run(strategy, True))

    @parameterized.parameters(*_KEEPS_A_COPY)
    @pytest.mark.stress
    def test_eagerly_and_on_two_devices(self, name):
        """Eager steps and two devices refuse the same as a graph, and accept plain training with weight decay."""
        member, settings = _MEMBERS[name]

        def fit(model, strategy, is_masked):
            kernel = model.layers[-1].kernel
            callbacks = [_at_batch_end(lambda batch: kernel.assign(kernel * 0.5))] if is_masked else []
            _fit(model, strategy, callbacks=callbacks)
            return _weights(model)

        initial = _dense().kernel_initializer((6, 1))

        def decayed():
            model = keras.Sequential([keras.Input((6,)), _dense()])
            model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
            return model

        for arguments, is_eager in (({}, True), ({"devices": TWO_DEVICES}, False)):
            for build, is_masked, refused in (
                (_normalized, False, "in a training step, before the update"),
                (_linear, True, "between two training steps"),
                (decayed, False, None),
            ):

                def run(strategy, build=build, is_masked=is_masked, is_eager=is_eager):
                    with strategy.scope():
                        model = build()
                    model.run_eagerly = is_eager
                    return fit(model, strategy, is_masked)

                with self.subTest(refused=refused, is_eager=is_eager):
                    if refused is None:
                        for kernel, _ in member.run(run, **settings, **arguments):
                            self.assertNotAllClose(kernel, initial)
                    else:
                        with self.assertRaisesRegex(ValueError, f"weights were assigned {refused}.*kernel"):
                            member.run(run, **settings, **arguments)

    @parameterized.parameters(*_KEEPS_A_COPY)
    @pytest.mark.stress(but=1)
    @pytest.mark.slow
    def test_a_function_that_was_traced_before_the_first_step(self, name):
        def run(strategy):
            with strategy.scope():
                model = _linear()
            kernel = model.layers[0].kernel
            halve = tf.function(lambda: kernel.assign(kernel * 0.5))
            begin = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: halve())
            _fit(model, strategy, callbacks=[begin, _at_batch_end(lambda batch: halve())])

        self._assert_refused(name, run, "between two training steps")

    @parameterized.parameters(*_EXACT)
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_a_checkpoint_restored_in_a_loop(self, name):
        def run(strategy):
            with _scope(strategy):
                model = _linear()
                checkpoint = tf.train.Checkpoint(model=model)
            step = _loop_step(model, strategy)
            with tempfile.TemporaryDirectory() as folder:
                path = checkpoint.save(os.path.join(folder, "start"))
                for number in range(10):
                    if number == 5:
                        checkpoint.restore(path)
                    step()
            if strategy is not None:
                strategy.synchronize(model)
            return _weights(model)

        if name in _KEEPS_A_COPY:
            with self.assertRaisesRegex((ValueError, tf.errors.InvalidArgumentError), "right after strategy.synchron"):
                _of_ranks(name, run)
        else:
            self._assert_equals_one_process(name, run)

    @pytest.mark.slow
    def test_a_wide_pipe_takes_what_a_loop_assigns_after_synchronize(self):
        def run(strategy):
            with _scope(strategy):
                model = _linear()
            step, kernel = _loop_step(model, strategy), model.layers[0].kernel
            for number in range(10):
                if number == 5:
                    if strategy is not None:
                        strategy.synchronize(model)
                    kernel.assign(kernel * 0.5)
                step()
            if strategy is not None:
                strategy.synchronize(model)
            return _weights(model)

        self._assert_equals_one_process("pipe_sgd_wide", run)

    @parameterized.parameters("pipe_sgd_wide", "shat", "dts")
    @pytest.mark.stress(but=1)
    @pytest.mark.slow
    def test_between_two_epochs(self, name):
        def run(strategy):
            with _scope(strategy):
                model = _linear()
            kernel = model.layers[0].kernel
            halve = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kernel.assign(kernel * 0.5))
            _fit(model, strategy, callbacks=[halve], epochs=3)
            return _weights(model)

        if name == "shat":
            self._assert_refused(name, run, "between two epochs")
        else:
            self._assert_equals_one_process(name, run)

    @pytest.mark.slow
    def test_weights_that_are_swapped_for_validation_and_back(self):
        """This works under SHAT, too, because the servers do not see the swap."""

        def run(strategy):
            with _scope(strategy):
                model = keras.Sequential([keras.Input((6,)), _dense()])
                model.compile(keras.optimizers.SGD(_LEARNING_RATE, use_ema=True), "mse")
            _fit(model, strategy, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
            return _weights(model)

        for weights in _of_ranks("shat", run):
            self.assertAllClose(weights, run(None), rtol=0.1, atol=0.1)


class StatesTest(tf.test.TestCase, parameterized.TestCase):
    """Tests of states that no optimizer updates."""

    @parameterized.parameters(*_MEMBERS)
    @pytest.mark.slow(after=3)
    @pytest.mark.stress(but=1)
    def test_each_kind(self, name):
        def run(strategy):
            keras.utils.set_random_seed(1)
            with _scope(strategy):
                program = _compiled(Program())
            with mock.patch.object(logging, "warning", wraps=logging.warning) as warning:
                _fit(program, strategy)
            warnings = [call.args[0] % call.args[1:] for call in warning.call_args_list]
            before = _state_of(program)
            if strategy is not None:
                strategy.synchronize(program)
            return before, _state_of(program), [text for text in warnings if "hop_tf.state" in text]

        expected, *_ = run(None)
        ranks = _of_ranks(name, run)
        num_rows = sum(_BATCH_SIZE * before["counts"][1] for before, *_ in ranks)  # Some ranks skip steps.
        for _, after, _ in ranks:
            self.assertAllClose(np.linalg.norm(after["queue"][0], axis=1), np.ones(16), atol=1e-5)
            self.assertEqual(after["counts"][0], num_rows)
        if _MEMBERS[name][0].is_in_lock_step:  # Ranks agree at the end of each epoch.
            self.assertAllEqual([before["counts"][0] for before, *_ in ranks], [num_rows] * len(ranks))
        for kind in ("student", "teacher", "extremes", "of_first"):  # Equal to the bit.
            self.assertAllEqual(*[np.concatenate([np.ravel(v) for v in after[kind]]) for _, after, _ in ranks])
        if name in _EXACT:
            for before, _, _ in ranks:
                for kind in ("student", "queue", "teacher", "unmarked", "extremes", "of_first"):
                    for value, each in zip(before[kind], expected[kind], strict=True):
                        self.assertAllClose(value, each, rtol=1e-4, atol=1e-4)
                self.assertAllEqual(before["counts"][1], expected["counts"][1])
        texts = [text for *_, warnings in ranks for text in warnings]
        self.assertTrue(any("rows" in text and "dense" in text for text in texts), texts)
        self.assertFalse(any("teacher" in text or "largest" in text for text in texts), texts)

    @parameterized.product(name=["pipe_sgd", "dts", "hop"], mark=["sum", "max", "first", "own"])
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_a_mark_of_a_layer_leaves_its_trained_weights_out(self, name, mark):
        """Trained weights belong to the strategy, in `fit` and in `synchronize`."""

        class Counting(keras.layers.Dense):
            def build(self, shape):
                super().build(shape)
                self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False)

            def call(self, inputs, training=False):
                if training:
                    self.rows.assign_add(tf.cast(tf.shape(inputs)[0], tf.float32))
                return super().call(inputs)

        def run(strategy, mark=mark):
            with _scope(strategy):
                layer = Counting(1, kernel_initializer="ones")
                model = _compiled(
                    keras.Sequential([keras.Input((6,)), layer if mark is None else hop_tf.state(layer, mark)])
                )
            model.fit(_rows(6), _rows(6)[:, :1] * 2, batch_size=8, epochs=2, shuffle=False, verbose=0)
            if strategy is not None:
                strategy.synchronize(model)
            return layer.kernel.numpy(), float(layer.rows)

        unmarked = _of_ranks(name, lambda strategy: run(strategy, None))
        plain, num_rows = run(None, None)
        ranks = _of_ranks(name, run)
        for kernel, rows in ranks:
            self.assertAllEqual(kernel, ranks[0][0])
            self.assertEqual(rows, num_rows if mark == "sum" else num_rows / 2)
            if name != "hop":  # Hop's ranks make other steps in each run.
                self.assertAllClose(kernel, unmarked[0][0], rtol=1e-6)
            self.assertAllClose(kernel, plain, atol=0.3)

    @parameterized.parameters("sum", "only_first_replica")
    @pytest.mark.stress(but=1)
    def test_an_aggregation_of_a_trained_weight(self, aggregation):
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.weight = self.add_weight(shape=(6, 1), initializer="ones", aggregation=aggregation)

            def call(self, inputs):
                return inputs @ self.weight

        def run(strategy):
            with _scope(strategy):
                model = _compiled(Model())
            _fit(model, strategy)
            return _weights(model)

        expected = run(None)
        for weights in _of_ranks("pipe_sgd", run):
            self.assertAllClose(weights, expected, rtol=1e-4)

    def test_sums_of_truth_values(self):
        """An aggregation or a mark of such a variable is refused. A mark of its layer leaves the variable out."""

        class Flagged(keras.Model):
            def __init__(self, aggregation):
                super().__init__()
                self.network = _dense()
                self.flag = self.add_weight(
                    shape=(), dtype="bool", initializer="zeros", trainable=False, aggregation=aggregation, name="flag"
                )

            def call(self, inputs):
                return self.network(inputs)

        def run(strategy, aggregation):
            with strategy.scope():
                model = _compiled(Flagged(aggregation))
                if aggregation == "none":
                    hop_tf.state(model, "sum")
            _fit(model, strategy)
            strategy.synchronize(model)
            return bool(model.flag.numpy())

        with self.assertRaisesRegex(ValueError, r"must not be 'sum' for a boolean state.*'max'.*variable='.*flag"):
            _of_ranks("pipe_sgd", lambda strategy: run(strategy, "sum"))
        self.assertEqual(_of_ranks("pipe_sgd", lambda strategy: run(strategy, "none")), [False, False])

    @parameterized.product(freezes=["before it is built", "when it is built", "after it was trained"])
    @pytest.mark.stress(but=1)
    @pytest.mark.slow
    def test_synchronize_leaves_a_frozen_teacher_alone(self, freezes):
        """Keras's `trainable` says that the teacher is frozen. TensorFlow's variable is still marked as trainable."""

        class Taught(keras.Model):
            def __init__(self):
                super().__init__()
                self.network, self.teacher = _dense(), _dense()
                self.is_assigned = False

            def call(self, inputs):
                return self.network(inputs) + self.teacher(inputs)

            def train_step(self, data):
                logs = super().train_step(data)
                if self.is_assigned:
                    self.teacher.bias.assign(data[0][0, :1])
                return logs

        def run(strategy):
            with strategy.scope():
                model = _compiled(Taught())
                model.teacher.trainable = freezes != "before it is built"
                model(_rows(6))  # `build` of a model without that method builds no layer.
                if freezes == "after it was trained":
                    model.fit(_rows(6), _rows(6)[:, :1], batch_size=8, verbose=0)
                model.teacher.trainable = False
                _compiled(model)
            model.is_assigned = freezes != "after it was trained"
            model.fit(_rows(6), _rows(6)[:, :1], batch_size=8, shuffle=False, verbose=0)
            before = model.teacher.bias.numpy()
            strategy.synchronize(model)
            return before[0], model.teacher.bias.numpy()[0]

        name = "hop" if freezes == "after it was trained" else "pipe_sgd"
        (first, of_first), (second, of_second) = _of_ranks(name, run)
        if freezes == "after it was trained":  # Ranks average weights that they have trained.
            self.assertEqual(of_first, of_second)
        else:
            self.assertNotEqual(first, second)
            self.assertEqual((first, second), (of_first, of_second))

    @parameterized.parameters(*_EXACT)
    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_sums_that_a_program_assigns(self, name):
        """Assigns at the begin of each epoch, between two fits, in a callback at the end, and after a failed `fit`."""

        def run(strategy):
            with _scope(strategy):
                program = _compiled(RowCounter())
            count, seen = program.num_rows, []

            def fit(**arguments):
                _fit(program, None, **arguments)  # Ranks share each batch.
                note()

            def note():
                if strategy is not None:
                    strategy.synchronize(program)
                seen.append(int(count))

            def fail(batch):
                if batch == 2:
                    raise KeyError

            fit(callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: count.assign(0))])
            saved = program.get_weights()
            fit()
            program.set_weights(saved)
            note()
            fit()
            program.set_weights(saved)
            fit()
            fit(callbacks=[keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)])
            with self.assertRaises((KeyError, HopError)):
                _fit(program, None, callbacks=[_at_batch_end(fail)])
            count.assign(5)
            fit()
            return seen

        expected = run(None)
        self.assertEqual(expected, [32, 96, 32, 96, 96, 128, 69])
        if name == "hop":  # `EarlyStopping` restores a rank's own counts since `synchronize`.
            expected[5] = 96 + 16
        self.assertEqual(_of_ranks(name, run), [expected] * 2)

    @parameterized.parameters("pipe_sgd", "hop")
    @pytest.mark.stress(but=1)
    def test_sums_of_a_custom_loop(self, name):
        """A value assigned right after `synchronize` counts from the next `synchronize` on."""

        def run(strategy):
            with _scope(strategy):
                model = _linear()
                count = hop_tf.state(model.add_weight(shape=(), dtype="int64", trainable=False), "sum")
                count.assign(0)
            step, seen = _loop_step(model, strategy, lambda: count.assign_add(1)), []
            for _ in range(2):
                for _ in range(3):
                    step()
                strategy.synchronize(model)
                seen.append(int(count))
            count.assign(0)
            strategy.synchronize(model)
            seen.append(int(count))
            step()
            strategy.synchronize(model)
            return [*seen, int(count)]

        self.assertEqual(_of_ranks(name, run), [[6, 12, 0, 2]] * 2)

    def test_sums_of_epochs_of_different_lengths(self):
        """A rank that misses an agreement counts once in the next one, in which all ranks take part."""

        def run(strategy):
            with strategy.scope():
                program = _compiled(StepCounter())
            data = strategy.distribute_datasets_from_function(
                lambda context: tf.data.Dataset.from_tensors((np.ones((8, 6)), np.ones((8, 1)))).repeat()
            )
            length = 4 if strategy.rank == 2 else 2
            program.fit(data, steps_per_epoch=length, epochs=8 // length, verbose=0)
            after_fit = int(program.num_steps.numpy())
            strategy.synchronize(program)
            return after_fit, int(program.num_steps.numpy())

        def make(cluster_resolver):
            return hop_tf.PipeSGDStrategy(pipeline_width=1, cluster_resolver=cluster_resolver)

        self.assertAllEqual(InProcessCluster(3, make).run(run), [(24, 24)] * 3)

    @parameterized.parameters("pipe_sgd_wide", "dts", "hop")
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_scales_of_float8(self, name):
        """Scales fit the rows of all ranks. One rank's rows are 100 times larger."""
        member, settings = _MEMBERS[name]
        x = _rows(6).reshape(4, 8, 6)
        x[:, 4:] *= 100  # Rank 1's.

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((6,)), _dense(8), _dense()])
                model.layers[0].quantize("float8")
                model.compile(keras.optimizers.SGD(1e-6), "mse")
            model.fit(x.reshape(32, 6), np.ones((32, 1)), batch_size=8, shuffle=False, verbose=0)
            if not member.is_in_lock_step:
                strategy.synchronize(model)
            return model.layers[0].inputs_amax_history.numpy(), model.layers[0].inputs_scale.numpy()

        first, second = member.run(run, **settings)
        self.assertAllEqual(first[1], second[1])
        for history, scale in (first, second):
            self.assertAllClose(history.max(), np.abs(x).max())
            self.assertGreater(scale * 448, np.abs(x[:-1]).max() * 0.99)  # The largest number of float8 e4m3.


class RowCounter(keras.Model):
    """Counts the rows of all ranks."""

    def __init__(self):
        super().__init__()
        self.network = _dense()
        self.num_rows = self.add_weight(shape=(), dtype="int64", trainable=False, aggregation="sum")

    def call(self, inputs):
        return self.network(inputs)

    def train_step(self, data):
        self.num_rows.assign_add(tf.cast(tf.shape(data[0])[0], tf.int64))
        return super().train_step(data)


class StepCounter(keras.Model):
    """Counts the steps of all ranks."""

    def __init__(self):
        super().__init__()
        self.network = _dense()
        self.num_steps = self.add_weight(shape=(), dtype="int64", trainable=False, aggregation="sum")

    def call(self, inputs):
        return self.network(inputs)

    def train_step(self, data):
        self.num_steps.assign_add(1)
        return super().train_step(data)


def _at_batch_end(call):
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: call(batch))


def _loop_step(model, strategy, count=lambda: None):
    """Returns a step of a custom loop, which trains on the same batch in a tf.function and calls `count`."""
    x, y = tf.constant(_rows(6)[:_BATCH_SIZE]), tf.constant(_rows(6)[:_BATCH_SIZE, :1])

    def replica_step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
            loss = loss if strategy is None else loss / strategy.num_replicas_in_sync
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        count()

    return tf.function(replica_step if strategy is None else lambda: strategy.run(replica_step))


if __name__ == "__main__":
    absltest.main()
