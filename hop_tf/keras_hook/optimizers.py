"""What Keras's optimizers know: their variables, slots, and settings."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

# Arguments of optimizers about gradients that are not reduced, or not complete, yet.
_DONE_BY_WORKERS = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps", "loss_scale_factor")
# Attributes of optimizers that hold variables, but none that tell of former updates.
_NO_SLOTS = ("_variables", "_trainable_variables", "_accumulated_gradients", "_iterations", "_learning_rate")


def tf_variables(*lists: Iterable) -> list[tf.Variable]:
    """The TensorFlow variables behind Keras variables; those that hold numbers or truth values."""
    variables = (getattr(variable, "value", variable) for variable in itertools.chain(*lists))
    return [v for v in variables if isinstance(v, tf.Variable) and _holds_numbers(v.dtype)]


def _holds_numbers(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_bool


def iterations_variable(optimizer: Any) -> tf.Variable:
    """What counts an optimizer's steps, each of an accumulated gradient too."""
    return innermost(optimizer)._iterations.value


def use_ema(optimizer: Any) -> bool:
    """Whether the optimizer keeps averages of the weights."""
    return bool(innermost(optimizer).use_ema)


def gradient_accumulation_steps(optimizer: Any) -> int:
    """How many training steps make one update."""
    return innermost(optimizer).gradient_accumulation_steps or 1


def loss_scale(optimizer: Any) -> tf.Variable | None:
    """What the gradients that `optimizer` gets are multiplied with; None where they are not."""
    scale = getattr(optimizer, "dynamic_scale", None)
    return None if scale is None else scale.value


def ema_overwrite_frequency(optimizer: Any) -> int | None:
    """In how many updates weights become their moving average once; None: never during training."""
    inner = innermost(optimizer)
    return inner.ema_overwrite_frequency if inner.use_ema else None


def averages_of(optimizer: Any, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """The moving averages that a built optimizer keeps of some of its variables (`use_ema`)."""
    slots = slots_of(optimizer, variables)
    return [slots["_model_variables_moving_average", index] for index in range(len(variables))]


def learning_rate(optimizer: Any) -> tf.Tensor:
    """The learning rate of the step that is to be made."""
    return tf.convert_to_tensor(innermost(optimizer).learning_rate)


def assign_learning_rate(optimizer: Any, rate: tf.Tensor) -> None:
    """Gives the optimizer another learning rate, unless it has a schedule: that goes by the count of steps."""
    if not has_schedule(optimizer):
        innermost(optimizer)._learning_rate.assign(rate)


def has_schedule(optimizer: Any) -> bool:
    """Whether the learning rate is a schedule's, and cannot be assigned."""
    return not isinstance(innermost(optimizer)._learning_rate, keras.Variable)


def weight_decays(optimizer: Any, variables: Sequence[tf.Variable]) -> list[float]:
    """What part of each variable is taken off in a step, over the learning rate: decoupled weight decay."""
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
    """Whether the optimizer's weight decay, where it has one, applies to each variable."""
    optimizer, of_keras = innermost(optimizer), keras_variables(optimizer)
    return [bool(optimizer._use_weight_decay(of_keras[id(variable)])) for variable in variables]


def constrain(optimizer: Any, variables: Sequence[tf.Variable]) -> bool:
    """Assigns what the variables' constraints make of them, as the optimizer does after each update; False: none."""
    of_keras = keras_variables(optimizer)
    constraints = [(variable, of_keras[id(variable)].constraint) for variable in variables]
    constraints = [(variable, constraint) for variable, constraint in constraints if constraint is not None]
    for variable, constraint in constraints:
        variable.assign(constraint(variable.read_value()))
    return bool(constraints)


def finalize(optimizer: Any) -> None:
    """Gives an optimizer's variables the values with which `fit` ends: their averages, where it keeps these."""
    inner = innermost(optimizer)
    inner.finalize_variable_values(inner._trainable_variables)


def paths(optimizer: Any, variables: Sequence[tf.Variable]) -> list[str]:
    """Where each variable is in its model, for instance "sequential/dense/kernel"."""
    of_keras = keras_variables(optimizer)
    return [of_keras[id(variable)].path for variable in variables]


def keras_variables(optimizer: Any) -> dict[int, keras.Variable]:
    """Keras's variables that the optimizer updates, by the identities of TensorFlow's."""
    return {id(variable.value): variable for variable in innermost(optimizer)._trainable_variables}


def serialized_for_server(optimizer: Any) -> str:
    """The optimizer, in JSON, without what is done to gradients before they are pushed, and without a schedule."""
    description = keras.optimizers.serialize(innermost(optimizer))
    config = description["config"]
    config.pop("name", None)  # Keras numbers optimizers that are not named.
    config.update({name: None for name in _DONE_BY_WORKERS if name in config}, learning_rate=0.0)
    return json.dumps(description)


def optimizer_class(optimizer: Any) -> type:
    """The class of the optimizer that updates variables."""
    return type(innermost(optimizer))


def num_updates(optimizer: Any) -> int:
    """How many updates the optimizer has made."""
    return int(innermost(optimizer).iterations)


def set_num_updates(optimizer: Any, number: int) -> None:
    """Lets the optimizer's schedules go on where so many updates were made, if it has made fewer."""
    iterations = iterations_variable(optimizer)
    iterations.assign(tf.maximum(iterations, number * gradient_accumulation_steps(optimizer)))


def shift_schedule(optimizer: Any, number: int) -> None:
    """Lets a schedule go on where so many updates were made, if it has made fewer, and not the count of updates.

    For an optimizer whose slots begin anew: with a larger count, Adam would take them for complete, and make steps that
    are several times too long.
    """
    inner = innermost(optimizer)
    schedule = inner._learning_rate
    missing = number * gradient_accumulation_steps(optimizer) - int(iterations_variable(optimizer))
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule) and missing > 0:
        inner._learning_rate = LaterSchedule(schedule, missing)


@keras.saving.register_keras_serializable(package="hop_tf")
class LaterSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that is further than the optimizer's count.

    Args:
      schedule: The schedule.
      num_steps: By so many steps.
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
    """What a built optimizer remembers from one update to the next, apart from its count of updates.

    Args:
      optimizer: The optimizer.
      variables: Some of those that it updates.

    Returns:
      By attribute and index in `variables` (None for what belongs to all of them): the variables.
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
    optimizer = innermost(optimizer)
    if type(optimizer) is not keras.optimizers.SGD:
        return None
    if not optimizer.momentum:
        return Descent(0.0, False, ())
    indices = {id(variable.value): index for index, variable in enumerate(optimizer._trainable_variables)}
    velocities = [optimizer.momentums[indices[id(variable)]].value for variable in variables]
    return Descent(float(optimizer.momentum), bool(optimizer.nesterov), velocities)


def check_loss_scaling(optimizer: Any) -> None:
    """Raises ValueError where a `LossScaleOptimizer` accumulates gradients: it does so behind the exchange."""
    inner = innermost(optimizer)
    if inner is not optimizer and inner.gradient_accumulation_steps:
        raise ValueError(
            "`gradient_accumulation_steps` must not be set in an optimizer within a LossScaleOptimizer (which Keras "
            "adds under the policy 'mixed_float16') here. Leave it out, or train with 'mixed_bfloat16'. Received: "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps!r} in {type(inner).__name__}."
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
    return list(innermost(optimizer)._clip_gradients(list(gradients)))


def overwritten_by(optimizer: Any, variables: Sequence | None) -> list[int]:
    """The indices of variables that become what is given as their gradient, such as scales of float8.

    Args:
      optimizer: The optimizer.
      variables: What it updates; None for all.
    """
    variables = getattr(optimizer, "_trainable_variables", ()) if variables is None else variables
    return [index for index, each in enumerate(variables) if getattr(each, "overwrite_with_gradient", False)]


def innermost(optimizer: Any) -> Any:
    """The optimizer within a `LossScaleOptimizer`; any other one itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)
