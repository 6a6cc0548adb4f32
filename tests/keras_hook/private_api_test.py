"""The private parts of Keras and TensorFlow that `hop_tf/keras_hook` stands on.

Where one of these tests fails, a new version of Keras or TensorFlow has changed something below the hooks: look at the
hook first, then at the test.
"""

import contextlib
import inspect
import json
import os
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras.src.backend.tensorflow import optimizer as keras_tf_optimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.layers.preprocessing import index_lookup
from keras.src.optimizers import loss_scale_optimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.data.ops import dataset_ops, prefetch_op
from tensorflow.python.distribute import distribute_lib, input_ops, one_device_strategy
from tensorflow.python.framework import config, random_seed
from tensorflow.python.ops import control_flow_util, summary_ops_v2

import hop_tf
from hop_tf.keras_hook import (
    adapted,
    backups,
    common_order,
    context,
    determinism,
    first_batch,
    metric_states,
    optimizers,
    pipelines,
    random_streams,
    updates,
)
from hop_tf.runtime.fit_loop import FitLoop


def _parameters(function):
    return list(inspect.signature(function).parameters)


class _MergeCalls(one_device_strategy._OneDeviceReplicaContext):
    """Records what an optimizer passes to merge_call."""

    def __init__(self, strategy, calls):
        super().__init__(strategy)
        self._calls = calls

    def all_reduce(self, reduce_op, value, options=None):
        return value

    def merge_call(self, merge_fn, args=(), kwargs=None):
        self._calls.append((merge_fn, args))
        return super().merge_call(merge_fn, args, kwargs)


def _merge_calls(make_optimizer):
    """The merge calls of one `optimizer.apply`; the optimizer and its one variable."""
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    calls = []
    with strategy.scope():
        optimizer = make_optimizer()
        variable = keras.Variable(np.ones(3, "float32"), name="w")
        optimizer.build([variable])
    with _MergeCalls(strategy, calls):
        optimizer.apply([tf.ones([3])], [variable])
    return calls, optimizer, variable


class PrivateApiTest(tf.test.TestCase):
    def test_update_is_one_merge_call_with_all_gradients(self):
        calls, optimizer, variable = _merge_calls(lambda: keras.optimizers.SGD(0.5, momentum=0.9))
        ((merge_fn, args),) = calls
        self.assertTrue(merge_fn.__qualname__.endswith(context._UPDATE))
        self.assertIs(merge_fn.__self__, optimizer)
        grads_and_vars, learning_rate = args
        ((gradient, updated),) = grads_and_vars
        self.assertAllEqual(gradient, [1.0, 1.0, 1.0])
        self.assertIs(updated, variable.value)
        self.assertAllClose(learning_rate, 0.5)

    def test_weight_decay_comes_before_the_update(self):
        calls, _, _ = _merge_calls(lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1))
        names = [merge_fn.__qualname__ for merge_fn, _ in calls]
        self.assertLen(names, 2)
        self.assertIn("_apply_weight_decay", names[0])
        self.assertTrue(names[1].endswith(context._UPDATE))

    def test_loss_scaled_update_surrounds_the_update(self):
        calls, optimizer, _ = _merge_calls(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)))
        merge_fn, (grads, trainable_variables) = calls[0]
        self.assertTrue(merge_fn.__qualname__.endswith(context._LOSS_SCALED_UPDATE))
        self.assertIs(inspect.getclosurevars(merge_fn).nonlocals["self"], optimizer)
        self.assertLen(grads, 1)
        self.assertLen(trainable_variables, 1)

    def test_updates_go_through_the_optimizers_own_assignments(self):
        """`out_of_place` writes updates to new memory instead of copying the old values first, with the same result."""
        for make_optimizer in (
            lambda: keras.optimizers.SGD(0.5),
            lambda: keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True),
            lambda: keras.optimizers.Adam(0.5),
            lambda: keras.optimizers.RMSprop(0.5, momentum=0.9),
        ):
            results = []
            for update in (contextlib.nullcontext, updates.out_of_place):
                optimizer, variable = make_optimizer(), keras.Variable(np.ones(3, "float32"))
                optimizer.build([variable])
                raw, known = type(variable.value), set(vars(optimizer))
                with (
                    mock.patch.object(raw, "assign_add", autospec=True, side_effect=raw.assign_add) as add,
                    mock.patch.object(raw, "assign_sub", autospec=True, side_effect=raw.assign_sub) as sub,
                ):
                    for _ in range(3):
                        with update(optimizer):
                            optimizer.update_step(tf.constant([1.0, -2.0, 0.1]), variable, optimizer.learning_rate)
                results.append(variable.numpy())
                self.assertEqual(add.called or sub.called, update is contextlib.nullcontext)
            self.assertEqual(set(vars(optimizer)), known)
            self.assertAllEqual(*results)

    def test_sparse_updates_stay_in_place(self):
        optimizer, variable = keras.optimizers.SGD(0.5), keras.Variable(np.ones(3, "float32"))
        optimizer.build([variable])
        with updates.out_of_place(optimizer):
            optimizer.update_step(tf.IndexedSlices(tf.constant([2.0]), [1], [3]), variable, optimizer.learning_rate)
        self.assertAllEqual(variable, [1.0, 0.0, 1.0])

    def test_gradients_are_reduced_through_the_replica_context(self):
        optimizer = keras_tf_optimizer.TFOptimizer
        self.assertEqual(_parameters(optimizer._all_reduce_sum_gradients), ["self", "grads_and_vars"])
        source = inspect.getsource(optimizer._all_reduce_sum_gradients)
        self.assertIn("get_replica_context().all_reduce(", source)
        self.assertIn("self._all_reduce_sum_gradients(", inspect.getsource(optimizer._backend_update_step))

    def test_training_data_is_the_first_dataset_that_fit_distributes(self):
        source = inspect.getsource(TFEpochIterator.__init__)
        self.assertIn("experimental_distribute_dataset(", source)
        fit = inspect.getsource(TensorFlowTrainer.fit)
        self.assertLess(
            fit.index("epoch_iterator = TFEpochIterator("), fit.index("_eval_epoch_iterator = TFEpochIterator(")
        )

    def test_an_epoch_takes_its_steps_from_the_enumeration(self):
        """If it ends early, `fit` goes on with the end of the epoch, as where a callback has stopped it."""
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        enumerate_steps, calls = TFEpochIterator._enumerate_iterator, []

        def two_steps(self):
            return (step for step, _ in zip(enumerate_steps(self), range(2), strict=False))

        record = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: calls.append(batch),
            on_epoch_end=lambda epoch, logs: calls.append("end"),
        )
        with mock.patch.object(TFEpochIterator, "_enumerate_iterator", two_steps):
            model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=1, epochs=2, callbacks=[record], verbose=0)
        self.assertEqual(calls, [0, 1, "end"] * 2)

    def test_executions_of_several_steps_are_counted_as_full_before_they_begin(self):
        enumerate_steps, calls = TFEpochIterator._enumerate_iterator, []

        def noting(self):
            for step in enumerate_steps(self):
                calls.append((step[0], self._steps_seen, self._num_batches))
                yield step

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=4)
        known = tf.data.Dataset.from_tensor_slices((np.ones((10, 2)), np.ones((10, 1)))).batch(1)
        with mock.patch.object(TFEpochIterator, "_enumerate_iterator", noting):
            model.fit(known, epochs=2, steps_per_epoch=5, verbose=0)
            model.fit(known.repeat(), epochs=2, steps_per_epoch=5, verbose=0)
        # The first epoch of five steps makes eight: only the end of the data cuts an execution off.
        self.assertEqual(calls[:3], [(0, 4, 10), (4, 8, 10), (0, 12, 10)])
        self.assertEqual(calls[-4:], [(0, 4, None), (4, 8, None), (0, 12, None), (4, 16, None)])

    def test_metrics_of_compile_are_lists_of_metrics(self):
        metric, weighted = keras.metrics.AUC(), keras.metrics.Precision()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile("sgd", "mse", metrics=[metric], weighted_metrics=[weighted])
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
        loss, of_compile = model.metrics
        self.assertIs(type(of_compile), CompileMetrics)
        self.assertEqual(metric_states.metrics_of(model), [loss, metric, weighted])

    def test_train_step_is_run_as_a_bound_method(self):
        source = inspect.getsource(TensorFlowTrainer.make_train_function)
        self.assertIn("_make_function(self.train_step)", source)
        self.assertIn("self.distribute_strategy.run(step_function", inspect.getsource(TensorFlowTrainer._make_function))

    def test_trainer_methods_exist(self):
        for name in ("fit", "evaluate", "predict", "distribute_strategy"):
            self.assertTrue(hasattr(TensorFlowTrainer, name), name)
        self.assertTrue(issubclass(keras.Model, TensorFlowTrainer))

    def test_layers_list_their_own_untrained_variables(self):
        layer = keras.layers.BatchNormalization()
        layer.build((None, 3))
        self.assertEqual([v.name for v in layer._non_trainable_variables], ["moving_mean", "moving_variance"])
        model = keras.Sequential([keras.layers.Input((3,)), layer])
        self.assertIn(layer, list(model._flatten_layers()))

    def test_signatures(self):
        extended = one_device_strategy.OneDeviceExtended
        self.assertEqual(_parameters(extended._call_for_each_replica), ["self", "fn", "args", "kwargs"])
        self.assertEqual(_parameters(extended._experimental_distribute_dataset), ["self", "dataset", "options"])
        self.assertEqual(_parameters(extended._distribute_datasets_from_function), ["self", "dataset_fn", "options"])
        context = distribute_lib.ReplicaContextBase
        self.assertEqual(_parameters(context.merge_call), ["self", "merge_fn", "args", "kwargs"])
        self.assertEqual(_parameters(extended._reduce_to), ["self", "reduce_op", "value", "destinations", "options"])
        self.assertEqual(
            _parameters(extended._gather_to_implementation), ["self", "value", "destinations", "axis", "options"]
        )
        self.assertEqual(
            _parameters(distribute.batch_sizes_for_worker)[1:],
            ["num_workers", "num_replicas_per_worker", "worker_index"],
        )
        self.assertEqual(
            _parameters(input_ops.auto_shard_dataset), ["dataset", "num_shards", "index", "num_replicas_in_sync"]
        )

    def test_contexts_ask_for_the_number_of_a_replica_and_of_its_device(self):
        strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
        found = []

        def step():
            replica = tf.distribute.get_replica_context()
            found.append((replica._replica_id_in_sync_group, replica._replica_id))

        with (
            mock.patch.object(strategy.extended, "_get_replica_id_in_sync_group", lambda replica_id: replica_id + 6),
            mock.patch.object(strategy.extended, "_get_local_replica_id", lambda replica_id: replica_id - 6),
        ):
            strategy.run(step)
        self.assertEqual(found, [(6, 0), (7, 1)])

    def test_which_replica_records_summaries(self):
        strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
        before = summary_ops_v2._summary_state.is_recording_distribution_strategy
        for replica in range(2):
            with distribute_lib.ReplicaContext(strategy, replica):
                self.assertEqual(summary_ops_v2._summary_state.is_recording_distribution_strategy(), replica == 0)
        self.assertIs(summary_ops_v2._summary_state.is_recording_distribution_strategy, before)

    def test_seeds_are_drawn_here(self):
        """Keras's from a generator's `next`, or from a number; TensorFlow's by `get_seed`, within its modulus."""
        with mock.patch.object(seed_generator.SeedGenerator, "next", lambda self, ordered=True: [7, ordered]):
            self.assertEqual(seed_generator.draw_seed(keras.random.SeedGenerator(1)), [7, True])
            self.assertEqual(seed_generator.draw_seed(None), [7, False])
            self.assertAllEqual(seed_generator.draw_seed(5), [5, 0])
        with mock.patch.object(random_seed, "get_seed", lambda op_seed: (3, 4)), tf.Graph().as_default() as graph:
            tf.random.normal([4])
            tf.nn.dropout(tf.ones([4]), 0.5)
        random = [op for op in graph.get_operations() if op.type.startswith("Random")]
        self.assertEqual([(op.get_attr("seed"), op.get_attr("seed2")) for op in random], [(3, 4)] * 2)
        self.assertEqual(random_seed._MAXINT32, random_streams._TF_MODULUS)
        self.assertEqual(tf.int32.max - 1, random_streams._MODULUS)  # In `_cast_seed` of Keras.

    def test_op_determinism_can_be_asked_for(self):
        self.assertFalse(determinism.is_deterministic())
        self.addCleanup(config.disable_op_determinism)
        tf.config.experimental.enable_op_determinism()
        self.assertTrue(determinism.is_deterministic())

    def test_xla_is_detected(self):
        seen = []

        @tf.function(jit_compile=True)
        def compiled():
            seen.append(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
            return tf.constant(0)

        compiled.get_concrete_function()
        self.assertEqual(seen, [True])

    def test_fit_finalizes_the_variables_after_its_last_step(self):
        """And before `on_train_end`, also where the optimizer is wrapped."""
        for wrap in (lambda optimizer: optimizer, keras.optimizers.LossScaleOptimizer):
            events = []
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(wrap(keras.optimizers.SGD()), "mse")
            record = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs, events=events: events.append("step"),
                on_train_end=lambda logs, events=events: events.append("end"),
            )
            with mock.patch.object(
                BaseOptimizer, "finalize_variable_values", lambda self, *_, events=events: events.append("finalize")
            ):
                model.fit(np.zeros((4, 2)), np.zeros((4, 1)), batch_size=2, verbose=0, callbacks=[record])
            self.assertEqual(events, ["step", "step", "finalize", "end"])

    def test_loss_scale_is_a_variable_of_the_optimizer(self):
        _, optimizer, _ = _merge_calls(
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=64.0)
        )
        self.assertEqual(optimizers.loss_scale(optimizer).numpy(), 64.0)
        self.assertIsNone(optimizers.loss_scale(keras.optimizers.SGD()))

    def test_loss_scaling_keeps_its_trainable_variables(self):
        source = inspect.getsource(loss_scale_optimizer.LossScaleOptimizer._stateful_handle_finite_grads)
        self.assertIn("self._trainable_variables", source)


_IS_KERAS_3_12 = keras.version().startswith("3.12.")
# That of Keras 3.12 updates no variable of TensorFlow.
_MUON = () if _IS_KERAS_3_12 else ("Muon",)
_OPTIMIZERS = {
    **{
        name: getattr(keras.optimizers, name)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", *_MUON)
    },
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True),
    "Nadam": keras.optimizers.Nadam,
    "RMSprop": lambda: keras.optimizers.RMSprop(centered=True, momentum=0.9),
    "SGD": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


def _is_optimizer(kind):
    return isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)


class OptimizerTest(tf.test.TestCase, parameterized.TestCase):
    """Tests of `slots_of`, `serialized_for_server` and other knowledge of Keras's optimizers."""

    @parameterized.parameters(sorted(_OPTIMIZERS))
    def test_slots_are_all_variables_that_tell_of_former_updates(self, name):
        optimizer = _OPTIMIZERS[name]()
        variables = [keras.Variable(np.ones(shape, "float32"), name=f"v{len(shape)}") for shape in ((3, 2), (4,))]
        optimizer.build(variables)
        found = {id(slot) for slot in optimizers.slots_of(optimizer, [v.value for v in variables]).values()}
        others = [optimizer.iterations, optimizer.learning_rate, *getattr(optimizer, "_accumulated_gradients", ())]
        others = {id(getattr(variable, "value", None)) for variable in (optimizer._iterations, *others)}
        self.assertLessEqual({id(variable.value) for variable in optimizer.variables} - others, found)

    def test_which_follow_the_weights(self):
        names = [kind.__name__ for kind in vars(keras.optimizers).values() if _is_optimizer(kind)]
        self.assertContainsSubset(["Adam", "Ftrl", "Muon", "SGD"], names)
        found = [name for name in names if not updates.follows_weights(getattr(keras.optimizers, name))]
        self.assertEqual(found, ["Ftrl"])

    def test_to_try_an_optimizer_uses_up_no_names(self):
        """Ranks compare names that Keras numbers: each must have made as many."""

        def number(made):
            return int(made.name.rpartition("_")[2])

        # Keras 3.12 does not number optimizers.
        for make in (*(() if _IS_KERAS_3_12 else (keras.optimizers.SGD,)), lambda: keras.Variable(1.0)):
            make()
            before = number(make())
            self.assertTrue(updates.follows_weights.__wrapped__(keras.optimizers.SGD))
            self.assertEqual(number(make()), before + 1)

    def test_who_needs_arguments_is_not_judged(self):
        class Slow(keras.optimizers.SGD):
            def __init__(self, speed):
                super().__init__(0.1 * speed)

        self.assertTrue(updates.follows_weights(Slow))

    @parameterized.product(in_graph=(True, False), name=sorted(_OPTIMIZERS))
    @pytest.mark.stress(after=3)
    @pytest.mark.slow(after=4)
    def test_update_is_what_apply_does(self, name, in_graph):
        results = []
        for update in (updates.update, lambda optimizer, gradients, values: optimizer.apply(gradients)):
            keras.utils.set_random_seed(1)
            optimizer = _OPTIMIZERS[name]()
            optimizer.weight_decay, optimizer.gradient_accumulation_steps = 0.1, None
            optimizer.use_ema, optimizer.ema_momentum, optimizer.ema_overwrite_frequency = True, 0.5, 2
            variables = [keras.Variable(tf.random.normal(shape), name=f"v{len(shape)}") for shape in ((3, 2), (4,))]
            variables[1].constraint = keras.constraints.NonNeg()
            optimizer.build(variables)
            values = [variable.value for variable in variables]
            run = (tf.function if in_graph else lambda f: f)(update)
            for _ in range(3):
                run(optimizer, [tf.random.normal(value.shape) for value in values], values)
            results.append([*values, *(variable.value for variable in optimizer.variables)])
        for mine, of_keras in zip(*results, strict=True):
            self.assertAllClose(mine, of_keras, rtol=1e-6, atol=1e-6)

    def test_what_workers_do_is_left_out(self):
        optimizer = keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
            weight_decay=0.25,
            clipnorm=1.0,
            loss_scale_factor=2.0,
            gradient_accumulation_steps=2,
            beta_1=0.75,
        )
        text = optimizers.serialized_for_server(keras.optimizers.LossScaleOptimizer(optimizer))
        made = keras.optimizers.deserialize(json.loads(text))
        self.assertIs(type(made), keras.optimizers.AdamW)
        self.assertEqual((made.weight_decay, made.beta_1, float(made.learning_rate)), (0.25, 0.75, 0.0))
        left_out = (made.clipnorm, made.loss_scale_factor, made.gradient_accumulation_steps)
        self.assertEqual(left_out, (None, None, None))

    @parameterized.product(name=sorted(_OPTIMIZERS), decay=(None, 0.1))
    def test_weight_decay_of_each_variable(self, name, decay):
        """Muon has one of its own for what it updates as AdamW does."""
        optimizer = _OPTIMIZERS[name]()
        optimizer.weight_decay, optimizer.adam_weight_decay = decay, 0.2
        optimizer.learning_rate = 0.5
        variables = [keras.Variable(np.ones(shape, "float32"), name=f"v{len(shape)}") for shape in ((3, 2), (4,))]
        optimizer.build(variables)
        found = optimizers.weight_decays(optimizer, [variable.value for variable in variables])
        optimizer._apply_weight_decay(variables)
        for variable, each in zip(variables, found, strict=True):
            self.assertAllClose(variable.value, np.full(variable.shape, 1 - 0.5 * each))

    def test_weight_decay_and_its_exclusions(self):
        optimizer = keras.optimizers.AdamW(weight_decay=0.1)
        variables = [keras.Variable(np.ones(2, "float32"), name=name) for name in ("kernel", "bias", "gamma")]
        optimizer.exclude_from_weight_decay(var_list=[variables[2]], var_names=["bias"])
        optimizer.build(variables)
        self.assertEqual(optimizers.decays(optimizer, [v.value for v in variables]), [True, False, False])
        self.assertEqual(optimizers.paths(optimizer, [v.value for v in variables]), ["kernel", "bias", "gamma"])

    @parameterized.parameters(False, True)
    def test_begin_comes_behind_the_callbacks(self, as_list):
        events = []
        strategy = hop_tf.HopStrategy()
        self.addCleanup(strategy.shutdown)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        mine = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: events.append("mine"),
            on_train_batch_begin=lambda batch, logs: events.append("step"),
        )
        callbacks = keras.callbacks.CallbackList([mine], add_history=True, model=model)
        with mock.patch.object(FitLoop, "begin_training", lambda self, model: events.append("begin")):
            for _ in range(2):
                given = [mine] if as_list else callbacks
                model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=given)
        self.assertEqual(events, ["mine", "begin", "step"] * 2)


class StepTraceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_fit_shows_the_model_that_trains(self, run_eagerly):
        """`Strategy.run` passes the model's `train_step` on in a wrapper."""
        strategy = hop_tf.HopStrategy()
        self.addCleanup(strategy.shutdown)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=run_eagerly)
        seen = []
        with mock.patch.object(FitLoop, "enter_step", lambda self, trace: seen.append(trace.model)):
            model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
            self.assertTrue(seen)
            self.assertTrue(all(each is model for each in seen))
            seen.clear()
            strategy.run(lambda: tf.constant(1.0))
            self.assertEqual(seen, [None])


class BackupsTest(tf.test.TestCase):
    def test_the_callback_saves_and_loads_by_these(self):
        callback = keras.callbacks.BackupAndRestore("backup")
        names = {"_current_epoch", "_last_batch_seen", "_weights_path", "_training_metadata_path"}
        self.assertContainsSubset(names, vars(callback))
        self.assertEqual(_parameters(callback._load_model), [])
        self.assertEqual(_parameters(callback._save_model), [])
        files = {os.path.basename(path) for path in (callback._weights_path, callback._training_metadata_path)}
        self.assertEqual(files, {backups._WEIGHTS, backups._METADATA})

    def test_weights_are_made_in_memory_by_these(self):
        wanted = ["saveable", "weights_store", "assets_store", "inner_path", "visited_saveables"]
        self.assertEqual(_parameters(saving_lib._save_state), wanted)
        self.assertContainsSubset({"path_or_io", "mode"}, _parameters(saving_lib.H5IOStore))


class TablesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*adapted._REMEDIES)
    def test_layers_are_noted_when_they_are_made(self, kind):
        adapted.watch_tables()
        self.assertIn("__new__", vars(kind))
        inherited = {name for base in kind.__mro__[1:] for name in vars(base)}
        self.assertIn("__new__", inherited)

    def test_text_vectorization_keeps_its_table_in_a_layer(self):
        layer = keras.layers.TextVectorization(vocabulary=["a"], idf_weights=[2.0], output_mode="tf_idf")
        self.assertIsInstance(layer._lookup_layer, index_lookup.IndexLookup)
        self.assertEqual(int(layer._lookup_layer.lookup_table.size()), 1)
        self.assertAllClose(layer._lookup_layer.idf_weights_const, [2.0, 2.0])

    def test_another_vocabulary_is_another_table(self):
        layer = keras.layers.StringLookup(vocabulary=["a"])
        before = layer.lookup_table
        layer.set_vocabulary(["b"])
        self.assertIsNot(layer.lookup_table, before)


class DataTest(tf.test.TestCase):
    def test_keras_prefetches_generators(self):
        adapter = GeneratorDataAdapter((np.ones(2),) for _ in range(3))
        dataset = adapter.get_tf_dataset()
        behind = pipelines.without_prefetch(dataset)
        self.assertIsNot(behind, dataset)
        self.assertTrue(pipelines.reads_generator(behind))
        self.assertIs(pipelines.without_prefetch(behind), behind)
        self.assertFalse(pipelines.reads_generator(tf.data.Dataset.range(3).map(tf.identity).prefetch(2)))

    def test_prefetches_and_options_are_datasets(self):
        prefetched = tf.data.Dataset.range(3).prefetch(2)
        self.assertIsInstance(prefetched, prefetch_op._PrefetchDataset)
        self.assertEqual(int(prefetched._buffer_size), 2)
        with_options = prefetched.with_options(tf.data.Options())
        self.assertIsInstance(with_options, dataset_ops._OptionsDataset)
        self.assertEqual(with_options._inputs(), [prefetched])

    def test_seeds_of_shuffles(self):
        tf.random.set_seed(None)
        rows = tf.data.Dataset.range(3)
        self.assertEqual([common_order._seeds_of(rows.shuffle(3, seed)) for seed in (None, 5)], [(0, 0), (87654321, 5)])
        tf.random.set_seed(7)
        self.assertEqual(common_order._seeds_of(rows.shuffle(3))[0], 7)

    def test_batch_sizes_of_stateful_layers(self):
        inputs = keras.Input(batch_shape=(8, 3, 2))
        model = keras.Model(inputs, keras.layers.LSTM(2, stateful=True)(inputs))
        self.assertEqual(first_batch._fixed_batch_size(model), 8)
        self.assertTrue(any(getattr(layer, "stateful", False) for layer in model._flatten_layers()))


if __name__ == "__main__":
    tf.test.main()
