"""Variables, slots, and settings of Keras's optimizers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

# Arguments of optimizers that take effect before gradients are complete and averaged over ranks.
_DONE_BY_WORKERS = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps", "loss_scale_factor")
# Optimizers that divide gradients by their usual size, or take their signs only.
_ADAPTIVE = ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "Lamb", "Lion", "Muon", "Nadam", "RMSprop")
# Attributes of optimizers that hold variables, but no state of former updates.
_NO_SLOTS = ("_variables", "_trainable_variables", "_accumulated_gradients", "_iterations", "_learning_rate")


def tf_variables(*lists: Iterable) -> list[tf.Variable]:
    """The TensorFlow variables behind Keras variables. Only variables of numbers or truth values are included."""
    variables = (getattr(variable, "value", variable) for variable in itertools.chain(*lists))
    return [v for v in variables if isinstance(v, tf.Variable) and _holds_numbers(v.dtype)]


def _holds_numbers(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_bool


def iterations_variable(optimizer: Any) -> tf.Variable:
    """The counter of an optimizer's steps. With gradient accumulation, each training step counts."""
    return innermost(optimizer)._iterations.value


def use_ema(optimizer: Any) -> bool:
    """True if the optimizer keeps averages of the weights."""
    return bool(innermost(optimizer).use_ema)


def gradient_accumulation_steps(optimizer: Any) -> int:
    """The number of training steps per update."""
    return innermost(optimizer).gradient_accumulation_steps or 1


def loss_scale(optimizer: Any) -> tf.Variable | None:
    """The factor on the gradients that `optimizer` gets; None if they are not scaled."""
    scale = getattr(optimizer, "dynamic_scale", None)
    return None if scale is None else scale.value


def ema_overwrite_frequency(optimizer: Any) -> int | None:
    """The number of updates after which weights become their moving average; None if never during training."""
    inner = innermost(optimizer)
    return inner.ema_overwrite_frequency if inner.use_ema else None


def averages_of(optimizer: Any, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """The moving averages that a built optimizer keeps of some of its variables (`use_ema`)."""
    slots = slots_of(optimizer, variables)
    return [slots["_model_variables_moving_average", index] for index in range(len(variables))]


def learning_rate(optimizer: Any) -> tf.Tensor:
    """The learning rate of the next step."""
    return tf.convert_to_tensor(innermost(optimizer).learning_rate)


def assign_learning_rate(optimizer: Any, rate: tf.Tensor) -> None:
    """Sets the learning rate, unless the optimizer has a schedule, which follows the count of steps."""
    if not has_schedule(optimizer):
        innermost(optimizer)._learning_rate.assign(rate)


def has_schedule(optimizer: Any) -> bool:
    """True if the learning rate comes from a schedule, and cannot be assigned."""
    return not isinstance(innermost(optimizer)._learning_rate, keras.Variable)


def weight_decays(optimizer: Any, variables: Sequence[tf.Variable]) -> list[float]:
    """The decoupled weight decay of each variable: the fraction that a step subtracts, divided by the learning rate."""
    of_keras = keras_variables(optimizer)
    optimizer = innermost(optimizer)
    return [_weight_decay(optimizer, of_keras[id(variable)]) for variable in variables]


def _weight_decay(optimizer: Any, variable: Any) -> float:
    if not optimizer._use_weight_decay(variable):
        return 0.0
    # Muon updates some variables as AdamW does, with a decay of their own.
    as_adamw = hasattr(optimizer, "_should_use_adamw") and optimizer._should_use_adamw(variable)
    return float((optimizer.adam_weight_decay if as_adamw else optimizer.weight_decay) or 0.0)


def decays(optimizer: Any, variables: Sequence[tf.Variable]) -> list[bool]:
    """For each variable, True if the optimizer's weight decay, if any, applies to it."""
    optimizer, of_keras = innermost(optimizer), keras_variables(optimizer)
    return [bool(optimizer._use_weight_decay(of_keras[id(variable)])) for variable in variables]


def constrain(optimizer: Any, variables: Sequence[tf.Variable]) -> bool:
    """Applies the variables' constraints, as the optimizer does after each update. Returns False if there are none."""
    of_keras = keras_variables(optimizer)
    constraints = [(variable, of_keras[id(variable)].constraint) for variable in variables]
    constraints = [(variable, constraint) for variable, constraint in constraints if constraint is not None]
    for variable, constraint in constraints:
        variable.assign(constraint(variable.read_value()))
    return bool(constraints)


def finalize(optimizer: Any) -> None:
    """Gives an optimizer's variables the values with which `fit` ends: their averages, if the optimizer keeps these."""
    inner = innermost(optimizer)
    inner.finalize_variable_values(inner._trainable_variables)


def paths(optimizer: Any, variables: Sequence[tf.Variable]) -> list[str]:
    """The path of each variable in its model, for instance "sequential/dense/kernel"."""
    of_keras = keras_variables(optimizer)
    return [of_keras[id(variable)].path for variable in variables]


def keras_variables(optimizer: Any) -> dict[int, keras.Variable]:
    """Keras's variables that the optimizer updates, by the `id` of the TensorFlow variables behind them."""
    return {id(variable.value): variable for variable in innermost(optimizer)._trainable_variables}


def serialized_for_server(optimizer: Any) -> str:
    """The optimizer in JSON, without a schedule and without the settings that apply before gradients are pushed."""
    description = keras.optimizers.serialize(innermost(optimizer))
    config = description["config"]
    config.pop("name", None)  # Keras numbers optimizers that are not named.
    config.update({name: None for name in _DONE_BY_WORKERS if name in config}, learning_rate=0.0)
    return json.dumps(description)


def optimizer_class(optimizer: Any) -> type:
    """The class of the optimizer that updates variables."""
    return type(innermost(optimizer))


def num_updates(optimizer: Any) -> int:
    """The number of updates that the optimizer has made."""
    return int(innermost(optimizer).iterations)


def set_num_updates(optimizer: Any, number: int) -> None:
    """Sets the optimizer's count, which schedules follow, to `number` updates, if it has made fewer."""
    iterations = iterations_variable(optimizer)
    iterations.assign(tf.maximum(iterations, number * gradient_accumulation_steps(optimizer)))


def shift_schedule(optimizer: Any, number: int) -> None:
    """Advances a schedule to `number` updates, if the optimizer has made fewer. The optimizer's count stays unchanged.

    This is for an optimizer whose slots begin anew. With a larger count, Adam would not correct the bias of its new
    slots, and would make steps that are several times too large.
    """
    inner = innermost(optimizer)
    schedule = inner._learning_rate
    missing = number * gradient_accumulation_steps(optimizer) - int(iterations_variable(optimizer))
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule) and missing > 0:
        inner._learning_rate = LaterSchedule(schedule, missing)


@keras.saving.register_keras_serializable(package="hop_tf")
class LaterSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that is ahead of the optimizer's count.

    Args:
      schedule: The schedule.
      num_steps: The number of steps by which it is ahead.
    """

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule, num_steps: int):
        self._schedule, self._num_steps = schedule, num_steps

    def __call__(self, step):
        return self._schedule(step + self._num_steps)

    def get_config(self) -> dict:
        schedule = keras.saving.serialize_keras_object(self._schedule)
        return {"schedule": schedule, "num_steps": self._num_steps}

    @classmethod
    def from_config(cls, config: dict) -> LaterSchedule:
        return cls(keras.saving.deserialize_keras_object(config["schedule"]), config["num_steps"])


def slots_of(optimizer: Any, variables: Sequence[tf.Variable]) -> dict[tuple[str, int | None], tf.Variable]:
    """The state that a built optimizer keeps from one update to the next, apart from its count of updates.

    Args:
      optimizer: The optimizer.
      variables: Some of the variables that it updates.

    Returns:
      The state's variables, by attribute name and index in `variables`. The index is None for a state of all variables.
    """
    optimizer = innermost(optimizer)
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
    """The update rule of SGD with momentum m: v = m v - lr g; w += v, or, with Nesterov's, w += m v - lr g.

    Attributes:
      momentum: m.
      nesterov: True for Nesterov's rule.
      velocities: v of each variable; empty if m is 0.
    """

    momentum: float
    nesterov: bool
    velocities: Sequence[tf.Variable]


def descent_of(optimizer: Any, variables: Sequence[tf.Variable]) -> Descent | None:
    """The rule by which Keras's own SGD updates these variables; None for any other optimizer."""
    optimizer = innermost(optimizer)
    if type(optimizer) is not keras.optimizers.SGD:
        return None
    if not optimizer.momentum:
        return Descent(0.0, False, ())
    indices = {id(variable.value): index for index, variable in enumerate(optimizer._trainable_variables)}
    velocities = [optimizer.momentums[indices[id(variable)]].value for variable in variables]
    return Descent(float(optimizer.momentum), bool(optimizer.nesterov), velocities)


def is_adaptive(optimizer: Any) -> bool:
    """True if the optimizer is, or derives from, a Keras optimizer whose steps hardly depend on gradient sizes."""
    classes = (getattr(keras.optimizers, name, None) for name in _ADAPTIVE)
    return isinstance(innermost(optimizer), tuple(each for each in classes if each is not None))


def is_sgd(optimizer: Any) -> bool:
    """True if the optimizer is Keras's SGD, or derived from it."""
    return isinstance(innermost(optimizer), keras.optimizers.SGD)


def check_loss_scaling(optimizer: Any) -> None:
    """Raises ValueError if a `LossScaleOptimizer` accumulates gradients: it would do so after the exchange."""
    inner = innermost(optimizer)
    if inner is not optimizer and inner.gradient_accumulation_steps:
        raise ValueError(
            "`gradient_accumulation_steps` must not be set in an optimizer within a LossScaleOptimizer (which Keras "
            "adds under the policy 'mixed_float16') here. Leave it out, or train with 'mixed_bfloat16'. Received: "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps!r} in {type(inner).__name__}."
        )


def scaled(optimizer: Any, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gradients multiplied by the loss scale of `optimizer`, as the optimizer expects them."""
    scale = loss_scale(optimizer)
    return list(gradients) if scale is None else [each * tf.cast(scale, each.dtype) for each in gradients]


def unscaled(optimizer: Any, gradients: Sequence) -> list[tf.Tensor]:
    """Dense gradients, divided by the loss scale of `optimizer`."""
    gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    scale = loss_scale(optimizer)
    return gradients if scale is None else [gradient / tf.cast(scale, gradient.dtype) for gradient in gradients]


def clipped(optimizer: Any, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gradients as the optimizer clips them."""
    return list(innermost(optimizer)._clip_gradients(list(gradients)))


def overwritten_by(optimizer: Any, variables: Sequence | None) -> list[int]:
    """The indices of variables whose "gradient" is their new value, such as scales of float8.

    Args:
      optimizer: The optimizer.
      variables: The variables that it updates; None for all.
    """
    variables = getattr(optimizer, "_trainable_variables", ()) if variables is None else variables
    return [index for index, each in enumerate(variables) if getattr(each, "overwrite_with_gradient", False)]


def innermost(optimizer: Any) -> Any:
    """The optimizer within a `LossScaleOptimizer`; any other optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)
