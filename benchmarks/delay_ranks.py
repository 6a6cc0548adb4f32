"""The part of `benchmark_delay.py` in each rank: kinds of training by their labels, and a training under hop_tf.

A case has the arguments of a training: `task`, `num_rows`, `epochs`, `batch_size`, `shards`, `optimizer`, `kind`,
`seed`; `world_size` (without servers); and the entries that `ranks.run` adds.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import delay_tasks
import images
import keras
import numpy as np
import tensorflow as tf
import turns

import hop_tf

SYNCHRONOUS = "synchronous"
FACTORS = {"alike": 1, "slow": 10, "random": 6, "link": 10}  # By the names of --ranks, the default factors.
# By the optimizer: arguments of Keras's class, and the learning rate at the beginning. It falls to 0 like a cosine.
OPTIMIZERS = {"SGD": {"momentum": 0.9}, "AdamW": {}}
RATES = {"SGD": 0.05, "AdamW": 0.001}
_EVALUATE_EVERY, _TEST_ROWS = 5, 2000  # Each training is evaluated dozens of times.
_PLAIN = {"codec": None, "algorithm": "mesh"}
# For each name that begins a label: the strategy, its settings, and the arguments that need no name.
_STRATEGIES: Mapping[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {
    SYNCHRONOUS: ("PipeSGDStrategy", {"pipeline_width": 1, **_PLAIN}, ()),
    "auto": ("PipeSGDStrategy", {}, ()),
    "hop": ("HopStrategy", {}, ("topology",)),
    "pipe": ("PipeSGDStrategy", {"pipeline_width": 2, **_PLAIN}, ("pipeline_width",)),
    "dts": ("DTSStrategy", {"delay": 4, "interval": 4, **_PLAIN}, ("delay", "interval")),
    "dts_auto": ("DTSStrategy", {}, ()),
    "canary": ("CanaryStrategy", {}, ("consistency",)),
    "shat": ("SHATParameterServerStrategy", {}, ("mixing",)),
}


def call_of(label: str) -> str:
    """Returns the call that makes the strategy of a label such as "hop", "pipe:3" or "canary:max_in_flight=2".

    Args:
      label: A name, and arguments of the strategy's constructor, as JSON or plain text. Other arguments have their
        defaults.

    Raises:
      ValueError: If there is no such name or argument.
    """
    name, *texts = label.split(":")
    if name not in _STRATEGIES:
        raise ValueError(f"a kind must begin with one of {', '.join(_STRATEGIES)}. Received: {label!r}.")
    strategy, settings, unnamed = _STRATEGIES[name]
    settings, unnamed = dict(settings), iter(unnamed)
    for text in texts:
        argument, _, value = text.rpartition("=")
        argument = argument or next(unnamed, "")
        if argument not in inspect.signature(getattr(hop_tf, strategy)).parameters:
            raise ValueError(f"{strategy} has no such argument: {text!r}. Received: {label!r}.")
        settings[argument] = _value(value)
    return f"{strategy}({', '.join(f'{argument}={value!r}' for argument, value in settings.items())})"


def parse_ranks(text: str) -> tuple[str, float]:
    """Returns the name and the factor of --ranks such as "slow" or "slow:4"."""
    name, _, factor = text.partition(":")
    return name, float(factor or FACTORS[name])


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclasses.dataclass
class Trained:
    """The results of a rank.

    Attributes:
      seconds: Time from the end of the first step, which traces, to the end of the last.
      steps: Number of steps that the rank has made, without skipped ones.
      accuracy: Final accuracy on held-out data. Only rank 0 is evaluated.
      reached: Pairs of the seconds since the end of the first step, without the time for notes, and the accuracy then.
    """

    seconds: float = np.nan
    steps: int = 0
    accuracy: float = np.nan
    reached: Sequence[tuple[float, float]] = ()

    def seconds_to(self, target: float) -> float:
        """Returns the seconds to an accuracy: infinity if it was not reached, nan if the training has failed."""
        not_reached = np.inf if self.reached else np.nan
        return next((seconds for seconds, accuracy in self.reached if accuracy >= target), not_reached)


def load(case: Mapping, rank: int) -> tuple[delay_tasks.Task, images.Part, images.Part, np.ndarray, images.Clock]:
    """Returns the task of a case, its data to train and to test with, the rows of all global batches, and a clock."""
    task = delay_tasks.TASKS[case["task"]]
    (x, y), (x_test, y_test) = images.load(task.data, case["num_rows"])
    sizes = {name: case[name] for name in ("epochs", "batch_size", "world_size", "shards", "seed")}
    test = x_test[:_TEST_ROWS], y_test[:_TEST_ROWS]
    clock = images.Clock(None if rank else _EVALUATE_EVERY)
    return task, (x, y.astype(np.int32)), test, delay_tasks.order(y, **sizes), clock


def make_optimizer(library: Any, case: Mapping, num_steps: int) -> Any:
    """Returns an optimizer of Keras, or of tf_keras."""
    name = case["optimizer"]
    rate = library.optimizers.schedules.CosineDecay(RATES[name], num_steps)
    return getattr(library.optimizers, name)(rate, **OPTIMIZERS[name])


def evaluated(
    model: keras.Model, weights: Sequence[np.ndarray], clock: images.Clock, test: images.Part, rank: int
) -> Trained:
    """Returns the accuracies of the final `weights` and of those that `clock` noted, of the Keras model `model`."""
    if rank:
        return Trained(clock.seconds, clock.steps)
    model.set_weights(weights)
    return Trained(clock.seconds, clock.steps, images.accuracy(model, test), list(clock.evaluate(model, test)))


def train(case: Mapping, rank: int) -> Trained | None:
    """Trains with `fit` under a strategy of hop_tf; None for a server."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = turns.join(call_of(case["kind"]), rank, case["addresses"][0], case["world_size"])
    if strategy is None:
        return None
    task, data, test, rows, clock = load(case, rank)
    with strategy.scope():
        model = task.make_model(keras, case["seed"])
        model.compile(make_optimizer(keras, case, len(rows)), "sparse_categorical_crossentropy")
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clock.step(model.get_weights))
    model.fit(
        delay_tasks.batches(data, rows),
        epochs=case["epochs"],
        steps_per_epoch=len(rows) // case["epochs"],
        shuffle=False,  # `order` has.
        verbose=0,
        callbacks=[note],
    )
    clock.steps = int(strategy.report()["steps"])
    strategy.synchronize(model)
    trained = evaluated(model, model.get_weights(), clock, test, rank)
    strategy.shutdown()
    return trained
