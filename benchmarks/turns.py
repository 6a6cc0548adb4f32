"""Trains with one strategy after the other, in every rank of a cluster, and times the steps.

A turn has the call that makes the strategy, such as "HopStrategy(topology='ring')", and all else that is to be known of
it. `run(measure, turns, ...)` makes the strategy of each turn in each rank, and calls `measure(turn, strategy)` there.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import peers
import ranks
import tensorflow as tf

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation

_TIMEOUT_SECONDS = 900.0  # Many ranks on few processors take minutes to start. Servers wait for earlier turns.


def num_servers(call: str) -> int:
    """Returns the number of further processes that a strategy needs: the parameter server of SHAT."""
    return int(call.startswith("SHATParameterServerStrategy"))


def join(
    call: str,
    rank: int,
    addresses: Sequence[str],
    num_workers: int,
    *,
    options: Mapping[str, Any] | None = None,
    interfaces: Sequence[str] | None = None,
) -> hop_tf.ExchangeStrategy | None:
    """Makes the strategy of a rank.

    Args:
      call: The call that makes the strategy. It may use `interfaces`.
      rank: The rank.
      addresses: The "host:port" of each rank. Those behind the workers are for parameter servers.
      num_workers: Number of workers.
      options: Arguments of `CommunicationOptions`.
      interfaces: The addresses of the rank's interfaces.

    Returns:
      The strategy. None for a parameter server when the workers have ended, and for a rank that the strategy does not
      need.
    """
    call, *_ = call.split(" with ")  # `hop_tf plan` writes the number of servers behind that.
    if rank >= num_workers + num_servers(call):
        return None
    peers.set_cluster(rank, addresses[:num_workers], addresses[num_workers:] if num_servers(call) else ())
    options = hop_tf.CommunicationOptions(**{"timeout_seconds": _TIMEOUT_SECONDS, **(options or {})})
    names = {
        name: functools.partial(getattr(hop_tf, name), communication_options=options)
        for name in hop_tf.__all__
        if name.endswith("Strategy")
    }
    try:
        return eval(call, {"hop_tf": hop_tf, "numpy": np, "interfaces": interfaces, **names})
    except SystemExit:  # A server, when the workers are done.
        return None


def _measure_all(measure: Callable, case: Mapping, rank: int) -> list:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    interfaces, found = case["interfaces"] and case["interfaces"][rank], []
    # Each turn has new addresses: no strategy meets an earlier one of another rank.
    for turn, addresses in zip(case["turns"], case["addresses"], strict=True):
        arguments = (turn["call"], rank, addresses, case["num_workers"])
        strategy = join(*arguments, options=case["options"], interfaces=interfaces)
        found.append(None if strategy is None else measure(turn, strategy))
        if strategy is not None:
            strategy.shutdown()
    return found


def run(
    measure: Callable[[Mapping, hop_tf.ExchangeStrategy], Any],
    turns: Iterable[Mapping],
    num_workers: int,
    link: str = ranks.LOOPBACK,
    *,
    compute: ComputeEmulation | None = None,
    options: Mapping[str, Any] | None = None,
    **about,
) -> list[list]:
    """Runs the turns. If any of them is SHAT's, a further process is the parameter server.

    Args:
      measure: Called with a turn and its strategy in each worker's process.
      turns: Mappings with the `call` that makes the strategy. It may use `interfaces`, those of its rank.
      num_workers: Number of workers.
      link: See `ranks.run`.
      compute: Emulated computation, or None.
      options: Arguments of `CommunicationOptions`.
      **about: Further arguments of `ranks.run`.

    Returns:
      The values that `measure` returned at all workers, for each turn.
    """
    turns = list(turns)
    of_ranks = ranks.run(
        functools.partial(_measure_all, measure),
        {"turns": turns, "num_workers": num_workers, "options": options},
        num_workers + max(num_servers(turn["call"]) for turn in turns),
        link,
        num_ports=len(turns),
        environment=compute.to_environment() if compute else None,
        **{"timeout_seconds": 4 * 3600.0, **about},
    )
    return [list(of_turn) for of_turn in zip(*of_ranks[:num_workers], strict=True)]


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a `fit` that count.

    Attributes:
      times: The end of the step before, and of each of these steps.
      before: The strategy's report at the first of these times.
      after: Its report at the last one.
      flush_seconds: Time from the last step to the end of `fit`.
    """

    times: np.ndarray
    before: Mapping[str, float]
    after: Mapping[str, float]
    flush_seconds: float

    @property
    def seconds(self) -> np.ndarray:
        return np.diff(self.times)

    def per_step(self, name: str) -> float:
        """Returns by how much an entry of the report grows in a step that this rank has made."""
        return (self.after[name] - self.before[name]) / (self.after["steps"] - self.before["steps"])

    @property
    def per_second(self) -> float:
        """Number of steps that this rank has made in a second."""
        return (self.after["steps"] - self.before["steps"]) / (self.times[-1] - self.times[0])


def fit(
    strategy: hop_tf.ExchangeStrategy, model: keras.Model, num_steps: int, *, warmup: int, batch_size: int = 1
) -> Steps:
    """Trains a compiled model on the same batch again and again.

    Args:
      strategy: The strategy.
      model: The model.
      num_steps: Number of steps that count.
      warmup: Number of steps before these, which contain tracing and the first messages. A slow rank that skips
        steps may make fewer.
      batch_size: Rows of a rank.
    """
    times, reports = [], []

    def note(batch, logs):
        times.append(time.monotonic())
        reports.append(strategy.report())

    num_rows = batch_size * strategy.world_size
    x = np.random.default_rng(0).normal(size=(num_rows, *model.input_shape[1:])).astype(np.float32)
    y = np.zeros((num_rows, *model.output_shape[1:]), np.float32)
    data = tf.data.Dataset.from_tensors((x, y)).repeat(warmup + num_steps)
    model.fit(data, shuffle=False, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=note)])
    flush_seconds = time.monotonic() - times[-1]
    first = max(0, min(warmup - 1, len(times) - 2))
    return Steps(np.array(times[first:]), reports[first], reports[-1], flush_seconds)


class _Vector(keras.layers.Layer):
    """Parameters in four parts, whose gradient costs next to nothing."""

    def __init__(self, num_values: int):
        super().__init__()
        self.num_values = num_values

    def build(self, input_shape):
        size = self.num_values // 4
        self.parts = [self.add_weight(shape=(size,), initializer="zeros", name=f"part{i}") for i in range(4)]

    def call(self, x):
        return x + tf.add_n([tf.reduce_sum(part) for part in self.parts])


def fit_vector(turn: Mapping, strategy: hop_tf.ExchangeStrategy) -> Steps:
    """Trains a model that computes next to nothing. The turn has `num_values`, `num_steps`, and `warmup`."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), _Vector(turn["num_values"])])
        model.compile(keras.optimizers.SGD(0.0, momentum=turn.get("momentum", 0.0)), "mse")
    return fit(strategy, model, turn["num_steps"], warmup=turn["warmup"])
