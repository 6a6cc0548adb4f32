"""HopStrategy under `fit` in two processes, feature by feature, against plain Keras.

All features run one after the other in the same two processes: so each is a further `fit` under one strategy, too. The
expected weights come from `_reference`: two models under no strategy at all, averaged by hand as Figure 7 has it.
"""

import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.testing import MultiProcessRunner

_WORLD_SIZE = 2
_BATCH_SIZE = 8
_NUM_ROWS = 32


def _data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_NUM_ROWS, 6)).astype("float32")
    return x, (x @ rng.normal(size=(6, 2)) > 0).astype("float32")


def _build(make_layers=lambda: ()):
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.layers.Input((6,)), *make_layers(), keras.layers.Dense(2)])


def _dense():
    return _build(lambda: [keras.layers.Dense(5, activation="tanh")])


def _with_batch_norm():
    return _build(lambda: [keras.layers.Dense(5), keras.layers.BatchNormalization()])


def _local_batches(rank):
    """The batches that `rank` sees in one epoch without shuffling."""
    x, y = _data()
    half = _BATCH_SIZE // _WORLD_SIZE
    for start in range(rank * half, _NUM_ROWS, _BATCH_SIZE):
        yield x[start : start + half], y[start : start + half]


_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "sgd_weight_decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.05),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "use_ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.7)),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


def _reference(make_optimizer, epochs=2):
    """Weights of both ranks, trained by Figure 7's rule: gradient at x_k, mean of the x_k, optimizer's step."""
    models = [_dense() for _ in range(_WORLD_SIZE)]
    optimizers = [make_optimizer() for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    every = optimizers[0].gradient_accumulation_steps or 1
    for _ in range(epochs):
        for step, batches in enumerate(zip(*(_local_batches(rank) for rank in range(_WORLD_SIZE)), strict=True)):
            gradients = [_gradient(model, *batch) for model, batch in zip(models, batches, strict=True)]
            if (step + 1) % every == 0:
                means = [np.mean(values, axis=0) for values in zip(*(m.get_weights() for m in models), strict=True)]
                for model in models:
                    model.set_weights(means)
            for model, optimizer, gradient in zip(models, optimizers, gradients, strict=True):
                optimizer.apply(gradient, model.trainable_variables)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.finalize_variable_values(model.trainable_variables)
    return [model.get_weights() for model in models]


def _gradient(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    return tape.gradient(loss, model.trainable_variables)


# What runs in the processes.


def _run(strategy, feature):
    """One feature; returns what the test compares."""
    return _FEATURES[feature](strategy) if feature in _FEATURES else _fit_with_optimizer(strategy, feature)


def _run_features(features):
    strategy = hop_tf.HopStrategy(
        topology="complete", communication_options=hop_tf.CommunicationOptions(timeout_seconds=20)
    )
    results = {feature: _run(strategy, feature) for feature in features}
    strategy.shutdown()
    return results


def _fit_with_optimizer(strategy, name):
    with strategy.scope():
        model = _dense()
        model.compile(_OPTIMIZERS[name](), "mse")
    history = model.fit(*_data(), batch_size=_BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "epochs": len(history.history["loss"])}


def _fit(strategy, *, data=None, build=_dense, optimizer=None, compile_args=None, **fit_args):
    """Compiles and fits; returns steps taken, the loss and the weights."""
    with strategy.scope():
        model = build()
        model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", **(compile_args or {}))
    before = strategy.report()["steps"]
    x_and_y = data if data is not None else _data()
    positional = x_and_y if isinstance(x_and_y, tuple) else (x_and_y,)
    fit_args = {"batch_size": _BATCH_SIZE, "shuffle": False, "verbose": 0, "epochs": 2} | fit_args
    if data is not None:
        del fit_args["batch_size"]
    history = model.fit(*positional, **fit_args)
    steps = strategy.report()["steps"] - before
    return model, {"steps": steps, "weights": model.get_weights(), "history": history.history}


def _steps_per_execution(strategy):
    return _fit(strategy, compile_args={"steps_per_execution": 3})[1]


def _run_eagerly(strategy):
    return _fit(strategy, compile_args={"run_eagerly": True})[1]


def _tf_data(strategy):
    return _fit(strategy, data=tf.data.Dataset.from_tensor_slices(_data()).batch(_BATCH_SIZE))[1]


def _generator(strategy):
    def batches():
        x, y = _data()
        while True:
            for start in range(0, _NUM_ROWS, _BATCH_SIZE):
                yield x[start : start + _BATCH_SIZE], y[start : start + _BATCH_SIZE]

    return _fit(strategy, data=batches(), steps_per_epoch=_NUM_ROWS // _BATCH_SIZE)[1]


class _Batches(keras.utils.PyDataset):
    def __len__(self):
        return _NUM_ROWS // _BATCH_SIZE

    def __getitem__(self, index):
        x, y = _data()
        rows = slice(index * _BATCH_SIZE, (index + 1) * _BATCH_SIZE)
        return x[rows], y[rows]


def _py_dataset(strategy):
    return _fit(strategy, data=_Batches(), shuffle=False)[1]


def _recompile(strategy):
    model, _ = _fit(strategy, epochs=1)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.set_weights(_dense().get_weights())
    model.fit(*_data(), batch_size=_BATCH_SIZE, shuffle=False, verbose=0, epochs=2)
    return {"weights": model.get_weights()}


def _second_fit(strategy):
    model, _ = _fit(strategy, epochs=1)
    model.fit(*_data(), batch_size=_BATCH_SIZE, shuffle=False, verbose=0, epochs=1)
    return {"weights": model.get_weights()}


class CustomStep(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def _custom_train_step(strategy):
    return _fit(strategy, build=lambda: CustomStep(_dense()))[1]


def _custom_loop(strategy):
    with strategy.scope():
        model = _dense()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    @tf.function
    def train_step(batch):
        def replica_step(x, y):
            optimizer.apply(_gradient(model, x, y), model.trainable_variables)

        strategy.run(replica_step, args=batch)

    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(_data()).batch(_BATCH_SIZE))
    for _ in range(2):
        for batch in dataset:
            train_step(batch)
    return {"weights": model.get_weights()}


_SAME_AS_SGD = {
    "steps_per_execution": _steps_per_execution,
    "run_eagerly": _run_eagerly,
    "tf_data": _tf_data,
    "py_dataset": _py_dataset,
    "recompile": _recompile,
    "second_fit": _second_fit,
    "custom_train_step": _custom_train_step,
    "custom_loop": _custom_loop,
}


def _batch_norm(strategy):
    model, result = _fit(strategy, build=_with_batch_norm)
    norm = next(layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization))
    result["moving"] = [norm.moving_mean.numpy(), norm.moving_variance.numpy()]
    strategy.synchronize(model)
    result["synchronized"] = model.get_weights()
    return result


class RecordingModel(keras.Model):
    """Notes the first feature of every row it trains on."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.seen = []

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.seen.append(data[0][:, 0].numpy().tolist())
        return super().train_step(data)


def _rows_of_an_epoch(strategy):
    """33 rows in batches of 8, shuffled: the last batch has one row, for two ranks."""
    with strategy.scope():
        keras.utils.set_random_seed(11)
        model = RecordingModel()
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    rows = np.arange(33, dtype="float32")
    model.fit(np.stack([rows, rows], axis=1), np.zeros((33, 2)), batch_size=_BATCH_SIZE, shuffle=True, verbose=0)
    return {"rows": [list(rows) for rows in model.seen]}


def _dropout(strategy):
    return _fit(strategy, build=lambda: _build(lambda: [keras.layers.Dense(8), keras.layers.Dropout(0.5)]))[1]


def _embedding(strategy):
    def build():
        keras.utils.set_random_seed(7)
        return keras.Sequential(
            [keras.layers.Input((3,)), keras.layers.Embedding(10, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
        )

    tokens = np.random.default_rng(0).integers(0, 10, size=(_NUM_ROWS, 3))
    data = tf.data.Dataset.from_tensor_slices((tokens, _data()[1])).batch(_BATCH_SIZE)
    return _fit(strategy, build=build, data=data)[1]


def _class_weight(strategy):
    with strategy.scope():
        model = _dense()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labels = _data()[1][:, 0].astype(int)
    history = model.fit(_data()[0], labels, batch_size=8, class_weight={0: 1.0, 1: 5.0}, verbose=0)
    return {"history": history.history}


def _validation(strategy):
    model, result = _fit(strategy, validation_data=_data(), validation_batch_size=5, shuffle=True)
    result["evaluate"] = model.evaluate(*_data(), batch_size=7, verbose=0)
    result["predict"] = model.predict(_data()[0], batch_size=7, verbose=0)
    expected = np.mean(np.square(result["predict"] - _data()[1]))
    result["expected"] = float(expected)
    return result


def _mixed_precision(strategy):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model, result = _fit(strategy, optimizer="sgd", epochs=3)
        result["optimizer"] = type(model.optimizer).__name__
        return result
    finally:
        keras.mixed_precision.set_global_policy("float32")


def _one_rank_overflows(strategy):
    """Rank 1's second batch makes its gradients infinite."""
    x, y = _data()
    x = x.copy()
    x[_BATCH_SIZE + _BATCH_SIZE // 2 : 2 * _BATCH_SIZE] = np.inf
    with strategy.scope():
        model = _build()
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
    model.fit(x, y, batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "iterations": int(model.optimizer.iterations)}


class Gan(keras.Model):
    """Two networks, two optimizers."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(3)
        self.generator = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(6)])
        self.discriminator = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
        self.built = True

    def compile(self, generator_optimizer, discriminator_optimizer):
        super().compile(optimizer=discriminator_optimizer)
        self.generator_optimizer = generator_optimizer

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape(persistent=True) as tape:
            fake = self.discriminator(self.generator(x[:, :2]))
            real = self.discriminator(x)
            discriminator_loss = tf.reduce_mean(fake) - tf.reduce_mean(real)
            generator_loss = -tf.reduce_mean(fake)
        for loss, network, optimizer in (
            (discriminator_loss, self.discriminator, self.optimizer),
            (generator_loss, self.generator, self.generator_optimizer),
        ):
            optimizer.apply(tape.gradient(loss, network.trainable_variables), network.trainable_variables)
        return {"loss": generator_loss}


def _two_optimizers(strategy):
    with strategy.scope():
        model = Gan()
        model.compile(keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.01))
    before = strategy.report()["steps"]
    model.fit(*_data(), batch_size=_BATCH_SIZE, verbose=0)
    steps = strategy.report()["steps"] - before
    strategy.synchronize(model)
    return {"steps": steps, "weights": model.get_weights()}


def _callbacks(strategy):
    """ModelCheckpoint, BackupAndRestore after a crash, TensorBoard; each rank has its own paths."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = f"{directory}/model.keras"
        backup = f"{directory}/backup"

        class Crash(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch == 1:
                    raise RuntimeError("crash")

        callbacks = [keras.callbacks.BackupAndRestore(backup), keras.callbacks.ModelCheckpoint(checkpoint)]
        try:
            _fit(strategy, epochs=4, callbacks=[*callbacks, Crash()])
        except RuntimeError as error:
            crash = str(error)
        board = keras.callbacks.TensorBoard(f"{directory}/board")
        model, result = _fit(strategy, epochs=4, callbacks=[*callbacks, board])
        loaded = keras.models.load_model(checkpoint)
        strategy.synchronize(model)
        result["crash"] = crash
        result["loaded"] = np.allclose(loaded.predict(_data()[0], verbose=0).shape, (_NUM_ROWS, 2))
        return result


def _early_stopping_on_one_rank(strategy):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if strategy.rank == 1 and batch == 2:
                self.model.stop_training = True

    return _fit(strategy, epochs=3, callbacks=[Stop()])[1]


def _jit_compile(strategy):
    try:
        _fit(strategy, compile_args={"jit_compile": True})
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


_FEATURES = {
    **_SAME_AS_SGD,
    "generator": _generator,
    "rows_of_an_epoch": _rows_of_an_epoch,
    "batch_norm": _batch_norm,
    "dropout": _dropout,
    "embedding": _embedding,
    "class_weight": _class_weight,
    "validation": _validation,
    "mixed_precision": _mixed_precision,
    "one_rank_overflows": _one_rank_overflows,
    "two_optimizers": _two_optimizers,
    "callbacks": _callbacks,
    "early_stopping_on_one_rank": _early_stopping_on_one_rank,
    "jit_compile": _jit_compile,
}


class HopFitTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with MultiProcessRunner(
            _run_features, num_workers=_WORLD_SIZE, args=([*_OPTIMIZERS, *_FEATURES],), timeout_seconds=500
        ) as runner:
            cls.values = runner.join().raise_for_errors().values

    def _results(self, feature):
        return [values[feature] for values in self.values]

    def _check_weights(self, feature, expected, tolerance=1e-5):
        for result, weights in zip(self._results(feature), expected, strict=True):
            for got, want in zip(result["weights"], weights, strict=True):
                self.assertAllClose(got, want, rtol=tolerance, atol=tolerance)

    @parameterized.parameters(*_OPTIMIZERS)
    def test_optimizer_equals_figure_7(self, name):
        expected = _reference(_OPTIMIZERS[name])
        # Ranks see different data: were nothing exchanged, or everything averaged at the end, this would differ.
        self.assertNotAllClose(expected[0][0], expected[1][0], atol=1e-4, rtol=0)
        self._check_weights(name, expected)

    @parameterized.parameters(*_SAME_AS_SGD)
    def test_same_as_sgd(self, feature):
        self._check_weights(feature, _reference(_OPTIMIZERS["sgd"]))

    def test_moving_statistics_are_averaged_along(self):
        first, second = self._results("batch_norm")
        for got, other, initial in zip(first["moving"], second["moving"], (0.0, 1.0), strict=True):
            self.assertNotAllClose(got, np.full_like(got, initial), atol=1e-3)
            # Half of one step's change is left between two ranks that average in every step.
            self.assertLess(np.abs(got - other).max(), 0.05)
        for got, other in zip(first["synchronized"], second["synchronized"], strict=True):
            self.assertAllEqual(got, other)

    @parameterized.parameters("generator", "dropout", "embedding", "mixed_precision")
    def test_trains(self, feature):
        for result in self._results(feature):
            self.assertEqual(result["steps"], len(result["history"]["loss"]) * _NUM_ROWS // _BATCH_SIZE)
            self.assertLess(result["history"]["loss"][-1], result["history"]["loss"][0])

    def test_mixed_precision_scales_the_loss(self):
        self.assertEqual(
            [result["optimizer"] for result in self._results("mixed_precision")], ["LossScaleOptimizer"] * 2
        )

    def test_class_weight(self):
        self.assertTrue(all(np.isfinite(result["history"]["loss"][0]) for result in self._results("class_weight")))

    def test_ranks_share_shuffled_arrays(self):
        first, second = (result["rows"] for result in self._results("rows_of_an_epoch"))
        self.assertEqual([len(rows) for rows in first], [4, 4, 4, 4, 1])
        self.assertEqual([len(rows) for rows in second], [4, 4, 4, 4, 1])
        self.assertEqual(first[-1], second[-1])
        everything = [row for rows in first + second[:-1] for row in rows]
        self.assertCountEqual(everything, range(33))
        self.assertNotEqual(everything, sorted(everything))

    def test_validation_sees_all_data(self):
        for result in self._results("validation"):
            self.assertEqual(result["predict"].shape, (_NUM_ROWS, 2))
            self.assertAllClose(result["evaluate"], result["expected"], rtol=1e-5)
            self.assertAllClose(result["history"]["val_loss"][-1], result["expected"], rtol=1e-5)

    def test_an_overflow_on_one_rank_skips_its_step_only(self):
        first, second = self._results("one_rank_overflows")
        num_steps = _NUM_ROWS // _BATCH_SIZE
        self.assertEqual((first["iterations"], second["iterations"]), (num_steps, num_steps - 1))
        self.assertTrue(all(np.all(np.isfinite(w)) for w in first["weights"] + second["weights"]))

    def test_two_optimizers(self):
        first, second = self._results("two_optimizers")
        self.assertEqual(first["steps"], _NUM_ROWS // _BATCH_SIZE)
        for got, other in zip(first["weights"], second["weights"], strict=True):
            self.assertAllEqual(got, other)

    def test_callbacks_restore(self):
        for result in self._results("callbacks"):
            self.assertEqual(result["crash"], "crash")
            # Epoch 1 was backed up when it crashed: epochs 2 and 3 are left.
            self.assertLen(result["history"]["loss"], 2)
            self.assertTrue(result["loaded"])

    def test_the_others_go_on_when_one_stops_early(self):
        first, second = self._results("early_stopping_on_one_rank")
        self.assertEqual((first["steps"], second["steps"]), (3 * _NUM_ROWS // _BATCH_SIZE, 3))

    def test_xla_is_refused(self):
        for result in self._results("jit_compile"):
            self.assertIn("`jit_compile` must be False or 'auto'", result["error"])


if __name__ == "__main__":
    tf.test.main()
