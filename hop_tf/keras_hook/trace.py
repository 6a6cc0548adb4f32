"""`StepTrace`: facts about a training step, collected while it is traced."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops import control_flow_v2_func_graphs

from hop_tf.keras_hook.data import count_rows
from hop_tf.keras_hook.ownership import Owner, State, states_of

_CONTROL_FLOW_GRAPHS = (
    control_flow_v2_func_graphs.CondBranchFuncGraph,
    control_flow_v2_func_graphs.WhileBodyFuncGraph,
    control_flow_v2_func_graphs.WhileCondFuncGraph,
)
# Operations that only read a variable.
_READ_ONLY_OPS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"}
)
# The functions that Keras runs on a batch: methods of models, and a nested function under `predict`.
_KERAS_STEPS = ("train_step", "test_step")
_PREDICT_STEP = "TensorFlowTrainer.make_predict_function.<locals>.one_step_on_data"


def when_here(arguments: Any) -> contextlib.AbstractContextManager:
    """A context whose operations run only when the tensors in `arguments` are available.

    At the end of data of unknown length, Keras begins a step whose batch never comes. No part of that step may run.
    """
    leaves = tf.nest.flatten(arguments, expand_composites=True)
    tensors = [leaf for leaf in leaves if tf.is_symbolic_tensor(leaf) and leaf.dtype not in (tf.resource, tf.variant)]
    return tf.control_dependencies([tf.identity(tensor) for tensor in tensors])


def trained_model(fn: Callable) -> keras.Model | None:
    """The model whose `train_step` is `fn`; None for any other function."""
    method = inspect.unwrap(fn)  # `Strategy.run` wraps it for AutoGraph.
    owner = getattr(method, "__self__", None) if getattr(method, "__name__", "") == "train_step" else None
    return owner if isinstance(owner, keras.Model) else None


def is_keras_step(fn: Callable) -> bool:
    """True if `fn` is the function that Keras's `fit`, `evaluate` or `predict` runs on a batch."""
    method = inspect.unwrap(fn)
    is_of_model = isinstance(getattr(method, "__self__", None), keras.Model)
    return (is_of_model and getattr(method, "__name__", "") in _KERAS_STEPS) or is_predict_step(fn)


def is_predict_step(fn: Callable) -> bool:
    """True if `fn` is the function that Keras's `predict` runs on a batch."""
    return getattr(inspect.unwrap(fn), "__qualname__", "") == _PREDICT_STEP


def has_no_call(model: keras.Model) -> bool:
    """True if `model` has no `call`: its `train_step` combines its parts, as in many GANs and autoencoders."""
    return type(model).call is keras.Model.call


def is_built(model: keras.Model) -> bool:
    """True if `model` has its weights. A model without `call` is never built, and has the weights of its parts."""
    return model.built or (has_no_call(model) and bool(model.weights))


@dataclasses.dataclass(frozen=True)
class Assigned:
    """A trained variable that a step has assigned, or may have assigned, before the update.

    Attributes:
      variable: The variable.
      at_start: Its value at the start of the step.
      before_update: Its value right before the optimizer's update.
    """

    variable: tf.Variable
    at_start: tf.Tensor
    before_update: tf.Tensor


class StepTrace:
    """Facts about one call of `run(fn)`, collected while it is traced (or run eagerly).

    Attributes:
      model: The model whose `train_step` is `fn`; None for any other function.
      draws_apart: True if each replica draws random numbers of its own: in a training step, and in a custom loop.
      comes_first: Operations that run before the rest of the step.
      started_at: `tf.timestamp()` at the start of the step; None if nothing needs it.
      num_updates: Optimizer updates seen so far.
      updated: The algorithms whose variables were updated so far.
      states_of_model: The model's states, and marked variables outside of it; see `read_states`.
      has_ended: True after the trace of the step has ended or failed.
      reads_before_decay: True if `before_decay` is needed for all weights, not only for assigned ones.

    Args:
      fn: The step.
      arguments: Its arguments, among them the batch.
    """

    def __init__(self, fn: Callable, arguments: Any = ()):
        self.model = trained_model(fn)
        self.draws_apart = self.model is not None or not is_keras_step(fn)
        self.has_ended = self.reads_before_decay = False
        self.comes_first: list[tf.Tensor] = []
        self.started_at: tf.Tensor | None = None
        self.num_updates = 0
        self.updated: set[object] = set()
        self.inside_loss_scaling = False
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._arguments = tf.nest.flatten(arguments)
        self._tensors = tf.nest.flatten(arguments, expand_composites=True)
        self.states_of_model: list[State] = []
        self._at_start: dict[int, tf.Tensor] = {}
        self._claimed: set[int] = set()
        # For weights that the step assigns before the update: their values at the start, and right before decay.
        self._before_assignment: dict[int, tf.Tensor] = {}
        self._before_decay: dict[int, tf.Tensor] = {}
        self._is_updating = False
        self._assigned_after: dict[int, tf.Variable] = {}  # Only in eager execution. A graph shows its assignments.
        self._assigned_between: dict[int, tf.Variable] = {}  # After their update, before an update of others.
        # The updated variables, each with the number of its assignments in the graph at the time of the update.
        self._updated: dict[int, tuple[tf.Variable, int]] = {}
        self._alike: dict[int, int] = {}  # Number of assignments to each handle when copies were last equal.

    def when_data_is_here(self) -> contextlib.AbstractContextManager:
        """A context whose operations run only when the step's batch is available: see `when_here`."""
        return when_here(self._tensors)

    def num_rows(self) -> int | tf.Tensor | None:
        """The number of rows of the step's batch, as `count_rows` returns it."""
        first = next(iter(self._arguments), None)
        if isinstance(first, tf.distribute.DistributedValues):  # A user runs a model's step on several devices.
            return sum(count_rows(part) for part in first.values)
        return count_rows(self._arguments)

    def refuse_nested_function(self) -> None:
        """Raises ValueError within a tf.function in the step, which is traced more than once and cached separately."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph and isinstance(graph, _CONTROL_FLOW_GRAPHS):
            graph = graph.outer_graph
        if graph is not self._graph:
            raise ValueError(
                "a step under hop_tf must not update variables within a tf.function of its own. Decorate the function "
                "that calls strategy.run, not the function that strategy.run runs. A model's train_step needs no "
                f"decorator, because `fit` compiles it. Received: an update within {graph.name!r}."
            )

    def read_states(self) -> None:
        """Reads the states that ranks may average together with the weights, before the step assigns them."""
        self.states_of_model = states_of(self.model)
        for state in self.states_of_model:
            if state.owner is Owner.MEAN:
                self._at_start[id(state.variable)] = state.variable.read_value()

    def value_at_start(self, variable: tf.Variable) -> tf.Tensor:
        """The value of an averaged state at the start of the step; the present value of any other variable."""
        known = self._at_start.get(id(variable))
        return variable.read_value() if known is None else known

    def claim(self, variables: Sequence[tf.Variable]) -> None:
        """Records that these variables are exchanged. With several optimizers, only one exchanges a given variable."""
        self._claimed.update(id(variable) for variable in variables)

    def unclaimed_means(self, trained: Sequence[tf.Variable]) -> list[tf.Variable]:
        """The states that ranks average together with the weights, and that no optimizer's exchange has claimed.

        A statistic of Keras's layers counts if the step, as far as it is traced, assigns it. The statistics of a frozen
        layer do not change. In eager execution there is no graph to inspect, so the statistics of all trainable layers
        count.

        Args:
          trained: The variables that the optimizer updates.
        """
        known = self._claimed.union(map(id, trained))
        means = [each for each in self.states_of_model if each.owner is Owner.MEAN and id(each.variable) not in known]
        counts = {} if self._graph is None else _num_assignments(self._graph)

        def changes(state: State) -> bool:
            if not state.is_statistic:
                return True
            return state.layer.trainable if self._graph is None else counts.get(_handle_id(state.variable), 0) > 0

        return [state.variable for state in means if changes(state)]

    def assigned_states(self) -> list[State]:
        """The states that the step assigns and no optimizer updates; none in eager execution."""
        counts = {} if self._graph is None else _num_assignments(self._graph)
        return [
            state
            for state in self.states_of_model
            if id(state.variable) not in self._claimed and counts.get(_handle_id(state.variable), 0) > 0
        ]

    def note_assignment(self, variable: tf.Variable) -> None:
        """Records that the step is about to assign a trained weight. The weight's `Watch` calls this."""
        if self._is_updating or id(variable) in self._before_assignment:
            return
        if id(variable) in self._updated:
            self._assigned_after[id(variable)] = variable
            return
        with contextlib.nullcontext() if self._graph is None else self._graph.as_default():
            self._before_assignment[id(variable)] = variable.read_value()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """A context in which assignments count as an optimizer's or a strategy's, not as the program's."""
        before, self._is_updating = self._is_updating, True
        try:
            yield
        finally:
            self._is_updating = before

    def note_decay(self, variables: Sequence[tf.Variable]) -> None:
        """Records that the optimizer is about to decay these weights, which is a part of its update."""
        noted = [v for v in variables if self.reads_before_decay or id(v) in self._before_assignment]
        self._before_decay.update({id(variable): variable.read_value() for variable in noted})

    def before_decay(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """The weights as they were before the optimizer decayed them in this step; see `reads_before_decay`."""
        return [self._before_decay[id(v)] if id(v) in self._before_decay else v.read_value() for v in variables]

    def assigned_before_update(self, variables: Sequence[tf.Variable]) -> list[Assigned]:
        """The weights, among `variables`, that the step has assigned before the optimizer's update."""
        noted = [variable for variable in variables if id(variable) in self._before_assignment]
        now = self.before_decay(noted)
        return [Assigned(v, self._before_assignment.pop(id(v)), value) for v, value in zip(noted, now, strict=True)]

    def assigned_on_devices(self) -> list[tf.Variable]:
        """Untrained float variables, copied on each device, that the step has assigned since `note_alike`."""
        if self._graph is None:
            return [state.variable for state in self.states_of_model if _is_copied_state(state.variable)]
        counts = _num_assignments(self._graph)
        containers = [getattr(handle, "_distributed_container", lambda: None)() for handle, _ in self._graph.captures]
        return [
            variable
            for variable in {id(each): each for each in containers if each is not None}.values()
            if counts.get(_handle_id(variable), 0) > self._alike.get(_handle_id(variable), 0)
            and _is_copied_state(variable)
        ]

    def is_averaged(self, variable: tf.Variable) -> bool:
        """True if the copies of a state on several devices become their mean, and not the first device's copy."""
        return all(state.owner is Owner.MEAN for state in self.states_of_model if state.variable is variable)

    def note_alike(self) -> None:
        """Records that all copies of variables are equal at this point of the trace."""
        if self._graph is not None:
            self._alike = _num_assignments(self._graph)

    def note_update(self, variables: Sequence[tf.Variable] = ()) -> None:
        """Records that an optimizer has updated `variables`, and is done with all variables that it updated before."""
        if not variables and not self._updated:
            return
        if variables:
            now = set(map(id, variables))
            self._assigned_between.update({id(v): v for v in self.assigned_after_update() if id(v) not in now})
        updated = [*(variable for variable, _ in self._updated.values()), *variables]
        counts = {} if self._graph is None else _num_assignments(self._graph)
        self._updated = {id(variable): (variable, counts.get(_handle_id(variable), 0)) for variable in updated}
        self._assigned_after.clear()

    def assigned_after_update(self) -> list[tf.Variable]:
        """Variables that the step, as far as it is traced, has assigned since an optimizer updated them."""
        return list({**self._assigned_between, **self._assigned_since_update()}.values())

    def _assigned_since_update(self) -> dict[int, tf.Variable]:
        """The updated variables that were assigned since the latest update of any variables."""
        if self._graph is None:
            return self._assigned_after
        counts = _num_assignments(self._graph) if self._updated else {}
        return {key: v for key, (v, before) in self._updated.items() if counts.get(_handle_id(v), 0) > before}


def _is_copied_state(variable: tf.Variable) -> bool:
    """True for an untrained float variable whose copies a step may have made different."""
    is_copied = hasattr(variable, "values") and variable.aggregation is tf.VariableAggregation.NONE
    return is_copied and variable.dtype.is_floating and not variable.trainable


def _handle_id(variable: tf.Variable) -> int:
    """The `id` of a variable's handle; of the first copy's handle if each device has a copy."""
    return id(getattr(variable, "values", (variable,))[0].handle)


def _num_assignments(graph: tf.Graph) -> dict[int, int]:
    """For each variable, by the `id` of its handle, the number of operations of `graph` that do more than read it."""
    return {
        id(handle): sum(_assigns(op, placeholder) for op in placeholder.consumers())
        for handle, placeholder in graph.captures
        if handle.dtype == tf.resource
    }


def _assigns(op: tf.Operation, handle: tf.Tensor) -> bool:
    """True if an operation does more than read a variable. TensorFlow knows this for conditions, loops and calls."""
    if op.type in _READ_ONLY_OPS:
        return False
    reads, _ = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return all(each is not handle for each in reads)
