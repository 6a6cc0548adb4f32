"""The part of `benchmark_delay.py` in each rank: kinds of training by their labels, and a training under hop_tf.

A case has the arguments of a training, all of which JSON can hold: `task`, `cifar10`, `num_rows`, `test_rows`,
`epochs`, `batch_size`, `shards`, `optimizer`, `learning_rate`, `schedule`, `kind`, `seed`; `world_size` (without
servers); `evaluate_every` (steps between two evaluations, or None); and the entries that `ranks.run` adds.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import delay_tasks
import images
import keras
import numpy as np
import peers
import tensorflow as tf

import hop_tf

SYNCHRONOUS = "synchronous"
_PLAIN = {"codec": None, "algorithm": "mesh"}
OPTIMIZERS = ("sgd", "adamw", "muon")
SCHEDULES = CONSTANT, COSINE = "constant", "cosine"
FACTORS = {"alike": 1, "slow": 10, "random": 6, "link": 10}  # By the names of --ranks, the default factors.
KERAS_RATE, MOMENTUM = 0.001, 0.9
TIMEOUT_SECONDS = 900.0  # Many ranks on few processors take minutes to start.


@dataclasses.dataclass(frozen=True)
class Kind:
    """A strategy and its settings.

    Attributes:
      make_strategy: Class of the strategy.
      settings: Arguments of the constructor.
      num_servers: Number of parameter servers, each a process of its own.
    """

    make_strategy: Callable[..., tf.distribute.Strategy]
    settings: Mapping[str, Any]
    num_servers: int = 0


# For each name that begins a label: the strategy, its settings, and the arguments that need no name.
_STRATEGIES: Mapping[str, tuple[Callable, Mapping[str, Any], Sequence[str]]] = {
    SYNCHRONOUS: (hop_tf.PipeSGDStrategy, {"pipeline_width": 1, **_PLAIN}, ()),
    "auto": (hop_tf.PipeSGDStrategy, {}, ()),
    "hop": (hop_tf.HopStrategy, {}, ("topology",)),
    "pipe": (hop_tf.PipeSGDStrategy, {"pipeline_width": 2, **_PLAIN}, ("pipeline_width",)),
    "dts": (hop_tf.DTSStrategy, {"delay": 4, "interval": 4, **_PLAIN}, ("delay", "interval")),
    "dts_auto": (hop_tf.DTSStrategy, {}, ()),
    "canary": (hop_tf.CanaryStrategy, {}, ("consistency",)),
    "shat": (hop_tf.SHATParameterServerStrategy, {}, ("mixing",)),
}


def parse_kind(label: str) -> Kind:
    """Returns the kind of a label such as "hop", "pipe:3", "dts:20:12" or "canary:max_in_flight=2".

    Args:
      label: A name, and arguments of the strategy's constructor, as JSON or plain text. Other arguments have their
        defaults.

    Raises:
      ValueError: If there is no such name or argument.
    """
    name, *texts = label.split(":")
    if name not in _STRATEGIES:
        raise ValueError(f"a kind must begin with one of {', '.join(_STRATEGIES)}. Received: {label!r}.")
    make_strategy, settings, unnamed = _STRATEGIES[name]
    settings, unnamed = dict(settings), iter(unnamed)
    for text in texts:
        argument, _, value = text.rpartition("=")
        argument = argument or next(unnamed, "")
        if argument not in inspect.signature(make_strategy).parameters:
            raise ValueError(f"{make_strategy.__name__} has no such argument: {text!r}. Received: {label!r}.")
        settings[argument] = _value(value)
    return Kind(make_strategy, settings, num_servers=int(name == "shat"))


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
      accuracy: Final accuracy on held-out data, or None if it was not evaluated.
      loss: Mean training loss of this rank in the last epoch, or None if it was not noted.
      seconds: Time from the end of the first step, which traces, to the end of the last.
      steps: Number of steps that the rank has made, without skipped ones.
      reached: Pairs of the seconds since the end of the first step, without the time for notes, and the accuracy then.
    """

    accuracy: float | None = None
    loss: float | None = None
    seconds: float = 0.0
    steps: int = 0
    reached: Sequence[tuple[float, float]] = ()


class Clock:
    """Notes weights during the training, and evaluates them afterwards, when no rank waits.

    Args:
      evaluate_every: Steps between two notes; None for no notes.
    """

    def __init__(self, evaluate_every: int | None):
        self.steps = 0
        self.seconds = 0.0
        self._evaluate_every = evaluate_every
        self._start: float | None = None
        self._spent = 0.0
        self._noted: list[tuple[float, Sequence[np.ndarray]]] = []

    def step(self, get_weights: Callable[[], Sequence[np.ndarray]]) -> None:
        """Called when a step has ended."""
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        self.steps += 1
        self.seconds = now - self._start - self._spent
        if self._evaluate_every and self.steps % self._evaluate_every == 0:
            self._noted.append((self.seconds, get_weights()))
            self._spent += time.monotonic() - now

    def evaluate(self, model: keras.Model, part: images.Part) -> Iterator[tuple[float, float]]:
        """Yields the seconds of each note and the accuracy with its weights, which replace those of `model`."""
        for seconds, weights in self._noted:
            model.set_weights(weights)
            yield seconds, images.accuracy(model, part)


def load(case: Mapping) -> tuple[delay_tasks.Task, delay_tasks.Data, np.ndarray]:
    """Returns the task of a case, its data, and the rows of all global batches."""
    task = delay_tasks.TASKS[case["task"]]
    data = task.load(case["num_rows"], case["test_rows"], case["cifar10"])
    sizes = {name: case[name] for name in ("epochs", "batch_size", "world_size", "shards", "seed")}
    return task, data, delay_tasks.order(data, **sizes)


def make_optimizer(library: Any, case: Mapping, num_steps: int) -> Any:
    """Returns an optimizer of Keras, or of tf_keras."""
    rate = case["learning_rate"]
    if case["schedule"] == COSINE:
        rate = library.optimizers.schedules.CosineDecay(rate, num_steps)
    if case["optimizer"] == "sgd":
        return library.optimizers.SGD(rate, momentum=MOMENTUM)
    return (library.optimizers.AdamW if case["optimizer"] == "adamw" else library.optimizers.Muon)(rate)


def train(case: Mapping, rank: int) -> Trained | None:
    """Trains with `fit` under a strategy of hop_tf; None for a server."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    (addresses,) = case["addresses"]
    kind, num_workers = parse_kind(case["kind"]), case["world_size"]
    peers.set_cluster(rank, addresses[:num_workers], addresses[num_workers:])
    options = hop_tf.CommunicationOptions(timeout_seconds=TIMEOUT_SECONDS)
    try:
        strategy = kind.make_strategy(**kind.settings, communication_options=options)
    except SystemExit:  # A server, when the workers are done.
        return None
    task, data, rows = load(case)
    with strategy.scope():
        model = task.make_model(keras, case["seed"])
        model.compile(make_optimizer(keras, case, len(rows)), "sparse_categorical_crossentropy")
    clock = Clock(case["evaluate_every"] if strategy.is_chief else None)
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clock.step(model.get_weights))
    history = model.fit(
        delay_tasks.batches(data, rows, task.augments, case["seed"]),
        epochs=case["epochs"],
        steps_per_epoch=len(rows) // case["epochs"],
        shuffle=False,  # `order` has.
        verbose=0,
        callbacks=[note],
    )
    steps = int(strategy.report()["steps"])
    strategy.synchronize(model)
    trained = Trained(loss=history.history["loss"][-1], seconds=clock.seconds, steps=steps)
    if strategy.is_chief:
        trained.accuracy = images.accuracy(model, data.test)
        trained.reached = list(clock.evaluate(model, data.test))
    strategy.shutdown()
    return trained
