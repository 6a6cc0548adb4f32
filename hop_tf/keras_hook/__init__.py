"""The one file that knows private parts of TensorFlow and Keras: how a training step is seen and changed.

Under an unmodified `fit`, one training step runs through these hooks, in this order:

    Strategy.run(model.train_step)           -> Extended._call_for_each_replica -> TrainingHooks.enter_step
      forward, backward, clipping, decay
      ReplicaContext.all_reduce(gradients)   -> identity: there is one replica a process
      ReplicaContext.merge_call(update)      -> TrainingHooks.exchange: the scheme's half of the graph
        optimizer update                     -> TrainingHooks.after_update
                                             -> TrainingHooks.leave_step

Hooks run while the step is traced and emit operations; with `run_eagerly=True` they run in every step.

What private names used here mean is asserted in `tests/keras_hook/private_api_test.py`, which fails where they change;
those that are imported fail at once where they are gone.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.distribute import input_ops, one_device_strategy
from tensorflow.python.ops import control_flow_v2_func_graphs
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

# Optimizer methods that Keras passes to `merge_call`, by the end of their qualified names.
_UPDATE = "_distributed_tf_update_step"
_LOSS_SCALED_UPDATE = "LossScaleOptimizer._tf_apply.<locals>._handle_cross_replica"
_CONTROL_FLOW_GRAPHS = (
    control_flow_v2_func_graphs.CondBranchFuncGraph,
    control_flow_v2_func_graphs.WhileBodyFuncGraph,
    control_flow_v2_func_graphs.WhileCondFuncGraph,
)
# Arguments of optimizers about gradients that are not reduced, or not complete, yet.
_DONE_BY_WORKERS = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps", "loss_scale_factor")
# Attributes of optimizers that hold variables, but none that tell of former updates.
_NO_SLOTS = ("_variables", "_trainable_variables", "_accumulated_gradients", "_iterations", "_learning_rate")
# Operations that only look at a variable.
_READ_ONLY_OPS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"}
)


class TrainingHooks(abc.ABC):
    """What a strategy is asked by the hooks. Its `extended` is an `Extended`."""

    @abc.abstractmethod
    def fit_session(self, x: Any, callbacks: Any = None) -> contextlib.AbstractContextManager:
        """Surrounds `model.fit(x, callbacks=callbacks, ...)`."""

    @abc.abstractmethod
    def keras_call(self) -> contextlib.AbstractContextManager:
        """Surrounds `fit`, `evaluate` and `predict`."""

    @abc.abstractmethod
    def shard(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """This rank's part of a dataset that is to be distributed."""

    @property
    @abc.abstractmethod
    def input_context(self) -> tf.distribute.InputContext:
        """This rank among the input pipelines."""

    @abc.abstractmethod
    def enter_step(self, trace: StepTrace) -> None:
        """Called when `run(fn)` begins, before `fn` is."""

    @abc.abstractmethod
    def exchange(self, optimizer: Any, trace: StepTrace, gradients: list, variables: list[tf.Variable]) -> list:
        """Called right before `optimizer` updates `variables`; returns the gradients that it is to apply."""

    @abc.abstractmethod
    def after_update(self, optimizer: Any, trace: StepTrace, variables: list[tf.Variable]) -> None:
        """Called right after `optimizer` has updated `variables`; follows every `exchange`."""

    @abc.abstractmethod
    def around_step(self, step: Callable[[], Any], arguments: Any, model: keras.Model) -> Any:
        """Called with the whole of a model's `train_step`, enter_step to leave_step; runs it or passes it over."""

    @abc.abstractmethod
    def leave_step(self, trace: StepTrace) -> None:
        """Called when `fn` has returned."""

    @abc.abstractmethod
    def begin_training(self) -> None:
        """Called when `fit` is about to make its first step, after the callbacks' `on_train_begin`."""

    @abc.abstractmethod
    def begin_epoch(self) -> None:
        """Called when an epoch of `fit` is about to begin, after the callbacks' `on_epoch_begin`."""

    @abc.abstractmethod
    def end_epoch(self) -> None:
        """Called when `fit` has made the last step of an epoch, before it validates and asks callbacks; also twice."""

    @abc.abstractmethod
    def finish_training(self) -> None:
        """Called when `fit` has made its last step, before the variables get their final values."""


def when_here(arguments: Any) -> contextlib.AbstractContextManager:
    """What is emitted in this context runs when the tensors in `arguments` are there.

    At the end of data of unknown length Keras begins a step whose batch never comes. Nothing of it must happen.
    """
    leaves = tf.nest.flatten(arguments, expand_composites=True)
    tensors = [leaf for leaf in leaves if tf.is_symbolic_tensor(leaf) and leaf.dtype not in (tf.resource, tf.variant)]
    return tf.control_dependencies([tf.identity(tensor) for tensor in tensors])


def trained_model(fn: Callable) -> keras.Model | None:
    """The model whose `train_step` is `fn`; None for any other function."""
    method = inspect.unwrap(fn)  # `Strategy.run` wraps it for AutoGraph.
    owner = getattr(method, "__self__", None) if getattr(method, "__name__", "") == "train_step" else None
    return owner if isinstance(owner, keras.Model) else None


class StepTrace:
    """What is known of one call of `run(fn)` while it is traced (or, run eagerly, executed).

    Attributes:
      model: The model whose `train_step` is `fn`; None for any other function.
      started_at: `tf.timestamp()` at the start of the step, where somebody wants to know.
      num_updates: Optimizer updates seen so far.
      states: For each exchange group, what its scheme keeps from before the update for after it.
    """

    def __init__(self, fn: Callable, arguments: Any = ()):
        self.model = trained_model(fn)
        self.started_at: tf.Tensor | None = None
        self.num_updates = 0
        self.states: dict[str, Any] = {}
        self.inside_loss_scaling = False
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._arguments = arguments
        self._at_start: dict[int, tuple[tf.Variable, tf.Tensor]] = {}
        self._claimed: set[int] = set()

    def when_data_is_here(self) -> contextlib.AbstractContextManager:
        """What is emitted in this context runs when the step's batch is there: see `when_here`."""
        return when_here(self._arguments)

    def refuse_nested_function(self) -> None:
        """Raises ValueError within a tf.function in the step: it is traced more than once, and cached apart."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph and isinstance(graph, _CONTROL_FLOW_GRAPHS):
            graph = graph.outer_graph
        if graph is not self._graph:
            raise ValueError(
                "a step under hop_tf must not update variables within a tf.function of its own. Decorate the function "
                "that calls strategy.run, not the one that it runs; a model's train_step needs none, as `fit` compiles "
                f"it. Received: an update within {graph.name!r}."
            )

    def read_untrained(self) -> None:
        """Reads the model's untrained float weights now, before the step assigns them."""
        # Eagerly there is no graph that tells what a step assigns: a layer that trains counts as assigning.
        training_layers = [layer for layer in self.model._flatten_layers() if layer.trainable]
        assigning = {id(weight) for layer in training_layers for weight in layer._non_trainable_variables}
        for weight in self.model.non_trainable_weights:
            variable = weight.value
            if variable.dtype.is_floating and (self._graph is not None or id(weight) in assigning):
                self._at_start[id(variable)] = (variable, variable.read_value())

    def value_at_start(self, variable: tf.Variable) -> tf.Tensor:
        """The variable's value at the start of the step; trained variables do not change before the update."""
        known = self._at_start.get(id(variable))
        return known[1] if known is not None else variable.read_value()

    def claim(self, variables: Sequence[tf.Variable]) -> None:
        """Notes that these variables are exchanged: with several optimizers, each variable by one of them."""
        self._claimed.update(id(variable) for variable in variables)

    def unclaimed_assigned(self) -> list[tf.Variable]:
        """The untrained float weights that the step, as far as it is traced, assigns, and nobody exchanges yet."""
        unclaimed = [variable for key, (variable, _) in self._at_start.items() if key not in self._claimed]
        if self._graph is None:
            return unclaimed
        return [variable for variable in unclaimed if _is_assigned(variable, self._graph)]


def _is_assigned(variable: tf.Variable, graph: tf.Graph) -> bool:
    """Whether an operation of `graph` does more than look at the variable."""
    for handle, placeholder in graph.captures:
        if handle is variable.handle:
            return any(op.type not in _READ_ONLY_OPS for op in placeholder.consumers())
    return False


def tf_variables(*lists: Iterable) -> list[tf.Variable]:
    """The TensorFlow variables behind Keras variables; those that hold numbers."""
    variables = (getattr(variable, "value", variable) for variable in itertools.chain(*lists))
    return [v for v in variables if isinstance(v, tf.Variable) and (v.dtype.is_floating or v.dtype.is_integer)]


def iterations_variable(optimizer: Any) -> tf.Variable:
    """What counts an optimizer's steps, each of an accumulated gradient too."""
    return _innermost(optimizer)._iterations.value


def use_ema(optimizer: Any) -> bool:
    """Whether the optimizer keeps averages of the weights."""
    return bool(_innermost(optimizer).use_ema)


def gradient_accumulation_steps(optimizer: Any) -> int:
    """How many training steps make one update."""
    return _innermost(optimizer).gradient_accumulation_steps or 1


def loss_scale(optimizer: Any) -> tf.Variable | None:
    """What the gradients that `optimizer` gets are multiplied with; None where they are not."""
    scale = getattr(optimizer, "dynamic_scale", None)
    return None if scale is None else scale.value


def ema_overwrite_frequency(optimizer: Any) -> int | None:
    """In how many updates weights become their moving average once; None: never during training."""
    inner = _innermost(optimizer)
    return inner.ema_overwrite_frequency if inner.use_ema else None


def averages_of(optimizer: Any, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """The moving averages that a built optimizer keeps of some of its variables (`use_ema`)."""
    slots = slots_of(optimizer, variables)
    return [slots["_model_variables_moving_average", index] for index in range(len(variables))]


def learning_rate(optimizer: Any) -> tf.Tensor:
    """The learning rate of the step that is to be made."""
    return tf.convert_to_tensor(_innermost(optimizer).learning_rate)


def assign_learning_rate(optimizer: Any, rate: tf.Tensor) -> None:
    """Gives the optimizer another learning rate, unless it has a schedule: that goes by the count of steps."""
    if not has_schedule(optimizer):
        _innermost(optimizer)._learning_rate.assign(rate)


def has_schedule(optimizer: Any) -> bool:
    """Whether the learning rate is a schedule's, and cannot be assigned."""
    return not isinstance(_innermost(optimizer)._learning_rate, keras.Variable)


def weight_decays(optimizer: Any, variables: Sequence[tf.Variable]) -> list[float]:
    """What part of each variable is taken off in a step, over the learning rate: decoupled weight decay."""
    optimizer = _innermost(optimizer)
    of_keras = {id(variable.value): variable for variable in optimizer._trainable_variables}
    decays = [optimizer._use_weight_decay(of_keras[id(variable)]) for variable in variables]
    return [float(optimizer.weight_decay or 0.0) if has_decay else 0.0 for has_decay in decays]


def decays(optimizer: Any, variables: Sequence[tf.Variable]) -> list[bool]:
    """Whether the optimizer's weight decay, where it has one, applies to each variable."""
    optimizer, of_keras = _innermost(optimizer), _keras_variables(optimizer)
    return [bool(optimizer._use_weight_decay(of_keras[id(variable)])) for variable in variables]


def constrain(optimizer: Any, variables: Sequence[tf.Variable]) -> bool:
    """Assigns what the variables' constraints make of them, as the optimizer does after each update; False: none."""
    of_keras = _keras_variables(optimizer)
    constraints = [(variable, of_keras[id(variable)].constraint) for variable in variables]
    constraints = [(variable, constraint) for variable, constraint in constraints if constraint is not None]
    for variable, constraint in constraints:
        variable.assign(constraint(variable.read_value()))
    return bool(constraints)


def finalize(optimizer: Any) -> None:
    """Gives an optimizer's variables the values with which `fit` ends: their averages, where it keeps these."""
    inner = _innermost(optimizer)
    inner.finalize_variable_values(inner._trainable_variables)


def paths(optimizer: Any, variables: Sequence[tf.Variable]) -> list[str]:
    """Where each variable is in its model, for instance "sequential/dense/kernel"."""
    of_keras = _keras_variables(optimizer)
    return [of_keras[id(variable)].path for variable in variables]


def _keras_variables(optimizer: Any) -> dict[int, keras.Variable]:
    return {id(variable.value): variable for variable in _innermost(optimizer)._trainable_variables}


def serialized_for_server(optimizer: Any) -> str:
    """The optimizer, in JSON, without what is done to gradients before they are pushed, and without a schedule."""
    description = keras.optimizers.serialize(_innermost(optimizer))
    config = description["config"]
    config.pop("name", None)  # Keras numbers optimizers that are not named.
    config.update({name: None for name in _DONE_BY_WORKERS if name in config}, learning_rate=0.0)
    return json.dumps(description)


def optimizer_class(optimizer: Any) -> type:
    """The class of the optimizer that updates variables."""
    return type(_innermost(optimizer))


def num_updates(optimizer: Any) -> int:
    """How many updates the optimizer has made."""
    return int(_innermost(optimizer).iterations)


def set_num_updates(optimizer: Any, number: int) -> None:
    """Lets the optimizer's schedules go on where so many updates were made, if it has made fewer."""
    iterations = iterations_variable(optimizer)
    iterations.assign(tf.maximum(iterations, number * gradient_accumulation_steps(optimizer)))


def slots_of(optimizer: Any, variables: Sequence[tf.Variable]) -> dict[tuple[str, int | None], tf.Variable]:
    """What a built optimizer remembers from one update to the next, apart from its count of updates.

    Args:
      optimizer: The optimizer.
      variables: Some of those that it updates.

    Returns:
      By attribute and index in `variables` (None for what belongs to all of them): the variables.
    """
    optimizer = _innermost(optimizer)
    indices = {id(variable.value): index for index, variable in enumerate(optimizer._trainable_variables)}
    slots = {}
    for name, value in vars(optimizer).items():
        if name in _NO_SLOTS:
            continue
        if isinstance(value, keras.Variable):
            slots[name, None] = value.value
        elif isinstance(value, list) and len(value) == len(indices):
            chosen = [value[indices[id(variable)]] for variable in variables]
            slots.update({(name, i): v.value for i, v in enumerate(chosen) if isinstance(v, keras.Variable)})
    return slots


@dataclasses.dataclass(frozen=True)
class Descent:
    """How SGD with momentum m updates: v = m v - lr g; w += v, or, as Nesterov's, w += m v - lr g.

    Attributes:
      momentum: m.
      nesterov: Which of the two.
      velocities: v of each variable; empty where m is 0.
    """

    momentum: float
    nesterov: bool
    velocities: Sequence[tf.Variable]


def descent_of(optimizer: Any, variables: Sequence[tf.Variable]) -> Descent | None:
    """How Keras's own SGD updates these variables; None for any other optimizer."""
    optimizer = _innermost(optimizer)
    if type(optimizer) is not keras.optimizers.SGD:
        return None
    if not optimizer.momentum:
        return Descent(0.0, False, ())
    indices = {id(variable.value): index for index, variable in enumerate(optimizer._trainable_variables)}
    velocities = [optimizer.momentums[indices[id(variable)]].value for variable in variables]
    return Descent(float(optimizer.momentum), bool(optimizer.nesterov), velocities)


def check_loss_scaling(optimizer: Any) -> None:
    """Raises ValueError where a `LossScaleOptimizer` hides what becomes of the gradients that it is given."""
    inner = _innermost(optimizer)
    if inner is optimizer:
        return
    clips = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(inner, name)]
    accumulates = ["gradient_accumulation_steps"] if inner.gradient_accumulation_steps else []
    decays = ["weight_decay"] if inner.weight_decay and type(inner) is not keras.optimizers.SGD else []
    for name in (*clips, *accumulates, *decays):
        raise ValueError(
            f"`{name}` must not be set in an optimizer within a LossScaleOptimizer (which Keras adds under the policy "
            f"'mixed_float16') here. Leave it out, or train with 'mixed_bfloat16'. "
            f"Received: {name}={getattr(inner, name)!r} in {type(inner).__name__}."
        )


def scaled(optimizer: Any, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gradients with the loss scale of `optimizer`, as it expects them."""
    scale = loss_scale(optimizer)
    return list(gradients) if scale is None else [each * tf.cast(scale, each.dtype) for each in gradients]


def unscaled(optimizer: Any, gradients: Sequence) -> list[tf.Tensor]:
    """Dense gradients without the loss scale of `optimizer`."""
    gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    scale = loss_scale(optimizer)
    return gradients if scale is None else [gradient / tf.cast(scale, gradient.dtype) for gradient in gradients]


def clipped(optimizer: Any, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gradients as the optimizer clips them."""
    return list(_innermost(optimizer)._clip_gradients(list(gradients)))


class _OwnUpdates(threading.local):
    """Whether `update` or `prepare_update` calls an optimizer in this thread: hooks have nothing to do with that.

    Attributes:
      runs: Whether the optimizer's update is ours.
      is_left_out: Whether the update itself is left out, but for what comes before it.
    """

    runs = False
    is_left_out = False


_own_updates = _OwnUpdates()


def update(
    optimizer: Any,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    rate: tf.Tensor | None = None,
) -> None:
    """Emits one update of some variables, with all that belongs to it: what `optimizer.apply` does of itself.

    Decay, step, moving averages, constraints, and the count of steps. Gradients are used as they are, not scaled or
    accumulated; within a `LossScaleOptimizer`, where they come here before they are clipped, they are clipped, and an
    update with gradients that are not finite is left out. No strategy's hooks see it.

    Args:
      optimizer: The optimizer, built.
      gradients: One dense gradient a variable.
      variables: Some of those that it updates.
      rate: The learning rate, in the place of a constant one. Default: the optimizer's.
    """
    inner = _innermost(optimizer)
    if inner is optimizer:
        _update(inner, gradients, variables, rate)
        return
    are_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
    tf.cond(are_finite, lambda: _update(inner, clipped(inner, gradients), variables, rate), lambda: None)


def _update(
    inner: Any, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable], rate: tf.Tensor | None
) -> None:
    own_rate = learning_rate(inner)
    if rate is not None:
        assign_learning_rate(inner, rate)
    _begin_update(inner, gradients, variables)
    if inner.use_ema:
        inner._update_model_variables_moving_average(inner._trainable_variables)
        if inner.ema_overwrite_frequency:
            is_due = tf.equal((inner.iterations + 1) % inner.ema_overwrite_frequency, 0)
            tf.cond(is_due, lambda: _overwrite_with_averages(inner), lambda: None)
    constrain(inner, variables)
    inner._iterations.assign_add(gradient_accumulation_steps(inner))
    if rate is not None:
        assign_learning_rate(inner, own_rate)


def prepare_update(optimizer: Any, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]) -> None:
    """Emits what `optimizer.apply` has done when it comes to the hooks: decay, and what Nadam does before its steps.

    Nothing within a `LossScaleOptimizer`, where all of that comes behind the hooks.
    """
    if _innermost(optimizer) is not optimizer:
        return
    _own_updates.is_left_out = True
    try:
        _begin_update(_innermost(optimizer), gradients, variables)
    finally:
        _own_updates.is_left_out = False


def _begin_update(optimizer: Any, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]) -> None:
    of_keras = _keras_variables(optimizer)
    of_keras = [of_keras[id(variable)] for variable in variables]
    _own_updates.runs = True
    try:
        with _in_replica():
            optimizer._apply_weight_decay(of_keras)
            optimizer._backend_update_step(list(gradients), of_keras, optimizer.learning_rate)
    finally:
        _own_updates.runs = False


@contextlib.contextmanager
def _out_of_place(optimizer: Any) -> Iterator[None]:
    """Makes the optimizer's `assign_add` and `assign_sub` write to new memory.

    Strategies keep what variables were before an update. A variable shares its memory with what is kept of it, so that
    an update in place would first copy that.
    """

    def assign_add(variable, value):
        if isinstance(value, tf.IndexedSlices):
            return type(optimizer).assign_add(optimizer, variable, value)
        return optimizer.assign(variable, variable + tf.cast(value, variable.dtype))

    def assign_sub(variable, value):
        if isinstance(value, tf.IndexedSlices):
            return type(optimizer).assign_sub(optimizer, variable, value)
        return optimizer.assign(variable, variable - tf.cast(value, variable.dtype))

    optimizer.assign_add, optimizer.assign_sub = assign_add, assign_sub
    try:
        yield
    finally:
        del optimizer.assign_add, optimizer.assign_sub


def _in_replica() -> contextlib.AbstractContextManager:
    """A replica context, which optimizers ask for, also between two steps."""
    if tf.distribute.get_replica_context() is not None:
        return contextlib.nullcontext()
    return one_device_strategy._OneDeviceReplicaContext(tf.distribute.get_strategy())


def _overwrite_with_averages(optimizer: Any) -> None:
    for variable, average in zip(
        optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True
    ):
        variable.assign(average)


def _innermost(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def refuse_xla() -> None:
    """Raises ValueError where the step is to be compiled."""
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "`jit_compile` must be False or 'auto' under hop_tf: queue operations cannot be compiled by XLA. "
            "Received: jit_compile=True in model.compile or in the tf.function around strategy.run."
        )


class _ReplicaContext(one_device_strategy._OneDeviceReplicaContext):
    """The replica context of a training step: sees the optimizer's update."""

    def __init__(self, hooks: tf.distribute.Strategy, trace: StepTrace):
        super().__init__(hooks)
        self._hooks = hooks
        self._trace = trace

    def all_reduce(self, reduce_op, value, options=None):
        """Returns `value`: there is one replica in this process.

        TensorFlow's own joins all gradients in one operation, so that none could leave before the last is there.
        """
        del reduce_op, options
        return value

    def merge_call(self, merge_fn, args=(), kwargs=None):
        name = getattr(merge_fn, "__qualname__", "")
        if name.endswith(_LOSS_SCALED_UPDATE):
            return self._loss_scaled_update(merge_fn, args, kwargs)
        if not name.endswith(_UPDATE):
            return super().merge_call(merge_fn, args, kwargs)
        if _own_updates.is_left_out:
            return None
        if self._trace.inside_loss_scaling or _own_updates.runs:
            return self._update(merge_fn, args, kwargs)
        (grads_and_vars, *rest) = args
        grads_and_vars = list(grads_and_vars)
        variables = [variable for _, variable in grads_and_vars]
        gradients = self._hooks.exchange(
            merge_fn.__self__, self._trace, [gradient for gradient, _ in grads_and_vars], variables
        )
        if rest:  # The exchange may have changed the learning rate.
            rest = [learning_rate(merge_fn.__self__)]
        result = self._update(merge_fn, (list(zip(gradients, variables, strict=True)), *rest), kwargs)
        self._hooks.after_update(merge_fn.__self__, self._trace, variables)
        return result

    def _update(self, merge_fn, args, kwargs):
        with _out_of_place(merge_fn.__self__):
            return super().merge_call(merge_fn, args, kwargs)

    def _loss_scaled_update(self, merge_fn, args, kwargs):
        """Exchanges before the optimizer asks whether all gradients are finite.

        The update comes in a branch of that condition. A rank whose gradients overflow does not run it; were the
        exchange in there, others would wait for that rank.
        """
        grads, trainable_variables = args
        optimizer = inspect.getclosurevars(merge_fn).nonlocals["self"]
        given = list(grads)
        used = [index for index, gradient in enumerate(given) if gradient is not None]
        variables = tf_variables(trainable_variables or optimizer._trainable_variables)
        variables = [variables[index] for index in used]
        gradients = self._hooks.exchange(optimizer, self._trace, [given[index] for index in used], variables)
        for index, gradient in zip(used, gradients, strict=True):
            given[index] = gradient
        self._trace.inside_loss_scaling = True
        try:
            result = super().merge_call(merge_fn, (given, trainable_variables), kwargs)
        finally:
            self._trace.inside_loss_scaling = False
        self._hooks.after_update(optimizer, self._trace, variables)
        return result


class Extended(one_device_strategy.OneDeviceExtended):
    """One replica on one device, with hooks around training steps and training data."""

    # The trace of the step that is being traced: Keras re-enters the replica context within a step.
    _trace: StepTrace | None = None

    def _call_for_each_replica(self, fn, args, kwargs):
        strategy = self._container_strategy()
        if self._trace is not None:
            with tf.device(self._device), _ReplicaContext(strategy, self._trace):
                return fn(*args, **kwargs)
        step = functools.partial(self._run_step, fn, args, kwargs)
        model = trained_model(fn)
        return step() if model is None else strategy.around_step(step, (args, kwargs), model)

    def _run_step(self, fn, args, kwargs):
        strategy = self._container_strategy()
        self._trace = StepTrace(fn, (args, kwargs))
        try:
            strategy.enter_step(self._trace)
            with tf.device(self._device), _ReplicaContext(strategy, self._trace):
                result = fn(*args, **kwargs)
            strategy.leave_step(self._trace)
            return result
        finally:
            self._trace = None

    # Datasets stay plain `tf.data.Dataset`s, as without a strategy. TensorFlow's distributed ones iterate through a
    # MultiDeviceIterator, whose background thread was seen to use an iterator that had been deleted, and crash.

    def _experimental_distribute_dataset(self, dataset, options):
        del options
        return self._container_strategy().shard(dataset)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        del options
        return dataset_fn(self._container_strategy().input_context)


def shard_by_policy(dataset: tf.data.Dataset, rank: int, world_size: int) -> tf.data.Dataset:
    """Takes a rank's part of a dataset by its `AutoShardPolicy`, as `MultiWorkerMirroredStrategy` does."""
    batch_size = int(distribute.compute_batch_size(dataset))
    if batch_size < 0:
        raise ValueError(
            "A dataset with an AutoShardPolicy must be batched with `Dataset.batch`, so that its global batch can be "
            f"divided. Received: element_spec={dataset.element_spec}."
        )
    dataset = dataset.rebatch(distribute.batch_sizes_for_worker(batch_size, world_size, 1, rank))
    return input_ops.auto_shard_dataset(dataset, world_size, rank, world_size)


@functools.cache
def wrap_trainer() -> None:
    """Wraps Keras's `fit`, `evaluate` and `predict` once; they change only for models under an `Extended`."""
    for name in ("fit", "evaluate", "predict"):
        setattr(TensorFlowTrainer, name, _wrapped(getattr(TensorFlowTrainer, name), is_fit=name == "fit"))
    BaseOptimizer.finalize_variable_values = _wrapped_finalize(BaseOptimizer.finalize_variable_values)


# Strategies of several ranks that have not been shut down.
_clusters: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()


def note_cluster(strategy: tf.distribute.Strategy) -> None:
    """From now on `fit` refuses models that were made under no strategy: their scope was forgotten."""
    _clusters.add(strategy)


def forget_cluster(strategy: tf.distribute.Strategy) -> None:
    """Ends what `note_cluster` began."""
    _clusters.discard(strategy)


def _refuse_forgotten_scope(strategy: tf.distribute.Strategy) -> None:
    is_default = strategy is tf.distribute.get_strategy() and not tf.distribute.has_strategy()
    if is_default and (cluster := next(iter(_clusters), None)) is not None:
        raise ValueError(
            f"`fit` was called on a model that was made outside of the scope of the {type(cluster).__name__} in use: "
            "it would train on this rank alone. Make it, or load it, within `strategy.scope()`; to compile it there is "
            "not enough. A model that is to be trained on this rank alone belongs in the scope of another strategy, "
            "such as tf.distribute.OneDeviceStrategy('/cpu:0')."
        )


class _Fits(threading.local):
    """The strategies under which this thread runs a `fit`, the innermost last."""

    def __init__(self):
        self.strategies: list[tf.distribute.Strategy] = []


_fits = _Fits()


def _wrapped(method: Callable, is_fit: bool) -> Callable:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        strategy = self.distribute_strategy
        if not isinstance(strategy.extended, Extended):
            if is_fit:
                _refuse_forgotten_scope(strategy)
            return method(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        if not is_fit:
            if strategy in _fits.strategies:  # Validation.
                strategy.end_epoch()
            with strategy.keras_call():
                return method(self, *args, **kwargs)
        callbacks = given.get("callbacks")
        with (
            strategy.keras_call(),
            _fit(strategy, given.get("x"), callbacks),
            _between(callbacks, strategy) as extended,
        ):
            given["callbacks"] = extended
            return method(*bound.args, **bound.kwargs)

    return call


class _First(keras.callbacks.Callback):
    """Tells a strategy that an epoch's steps are made, before the callbacks behind this one see the model."""

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__()
        self._strategy = strategy

    def on_epoch_end(self, epoch, logs=None):
        self._strategy.end_epoch()


class _Last(keras.callbacks.Callback):
    """Tells a strategy that the callbacks before this one have begun."""

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__()
        self._strategy = strategy

    def on_train_begin(self, logs=None):
        self._strategy.begin_training()

    def on_epoch_begin(self, epoch, logs=None):
        self._strategy.begin_epoch()


@contextlib.contextmanager
def _between(callbacks: Any, strategy: tf.distribute.Strategy) -> Iterator[Any]:
    """The user's callbacks between `_First` and `_Last`."""
    first, last = _First(strategy), _Last(strategy)
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        yield [first, *(tf.nest.flatten(callbacks) if callbacks is not None else ()), last]
        return
    callbacks.callbacks[:] = [first, *callbacks.callbacks, last]
    try:
        yield callbacks
    finally:
        callbacks.callbacks[:] = [each for each in callbacks.callbacks if each not in (first, last)]


@contextlib.contextmanager
def _fit(strategy: tf.distribute.Strategy, x: Any, callbacks: Any) -> Iterator[None]:
    with strategy.fit_session(x, callbacks):
        _fits.strategies.append(strategy)
        try:
            yield
        finally:
            _fits.strategies.pop()


def _wrapped_finalize(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if _fits.strategies:
            _fits.strategies[-1].finish_training()
        return method(self, *args, **kwargs)

    return call
