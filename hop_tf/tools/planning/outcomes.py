"""`predict_step`: the costs of a step under each strategy, for given steps of the ranks, links, sizes and settings.

    Pipe-SGD   schedule of steps and all-reduces (`hop_tf.timing.predict`)
    DTS        the same schedule, with windows (`hop_tf.timing.predict_dts`)
    Hop        simulation of the strategy's own protocol on a virtual clock (`hop_tf.simulate.training`)
    Canary     synchronous as Pipe-SGD with width 1; asynchronous by `free_running_seconds`
    SHAT       `server_seconds`

Memory is counted, not measured, in copies of the trained variables that a rank has in addition to those of training
without a strategy: state that a strategy keeps between steps, messages in flight, and messages that have come and are
not used yet. An optimizer is assumed to have one slot, such as momentum.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

import numpy as np

from hop_tf import codecs
from hop_tf.strategies.dts.windows import Schedule
from hop_tf.tools.simulate.rank_loops import OwnSeconds
from hop_tf.tools.simulate.training import Links, simulate_training
from hop_tf.tools.timing import Measurement, free_running_seconds, server_seconds
from hop_tf.tools.timing.costs import FLOAT32_BYTES
from hop_tf.topology import resolve

_NUM_SLOTS = 1
# Defaults of `CanaryStrategy`.
_NUM_COLAYERS, _MAX_IN_FLIGHT, _CANARY_CODEC = 10, 4, "sketch"
# A simulation of many ranks takes longer, so it makes fewer steps.
_SIMULATED_STEPS, _MIN_STEPS, _MAX_STEPS = 480, 40, 96
_FEW_RANKS = 8


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The costs of settings with steps of given durations.

    Attributes:
      step_seconds: Duration of a step of `fit`.
      bytes_per_step: The bytes that a rank sends in a step.
      memory: Copies of the trained variables.
      trained_share: The share of all batches that are trained on. The others are skipped.
    """

    step_seconds: float
    bytes_per_step: float
    memory: float
    trained_share: float = 1.0


def predict_step(
    strategy: str,
    settings: Mapping[str, object],
    measurement: Measurement,
    durations: np.ndarray | None = None,
    num_servers: int = 0,
) -> Outcome:
    """Predicts the costs of a step.

    Args:
      strategy: Name of the strategy's class.
      settings: Its arguments.
      measurement: The links and sizes, and the step of a rank like most others.
      durations: Array [n, T], the seconds for which each rank computes in each step. Default: all steps of all ranks
        are the measurement's, and the costs are those in the long run. This default is possible only for strategies
        whose ranks average together.
      num_servers: The number of parameter servers, for SHAT.

    Raises:
      ValueError: If an argument is out of range.
    """
    if strategy == "SHATParameterServerStrategy":
        return _shat(num_servers, measurement, durations)
    return _MODELS[strategy](settings, measurement, durations)


def _pipe_sgd(settings: Mapping, measurement: Measurement, durations: np.ndarray | None) -> Outcome:
    plan = measurement.predict(**settings, durations=durations)
    # Without a delay: the gradients that are sent, and a mean. With a delay: gradients in flight, a mean, and the
    # weights and slots from before the local look-ahead, in which own gradients replace the mean.
    delay = plan.pipeline_width - 1
    return Outcome(plan.step_seconds, plan.bytes_per_step, delay + (1 + _NUM_SLOTS) + 1 if delay else 2)


def _dts(settings: Mapping, measurement: Measurement, durations: np.ndarray | None) -> Outcome:
    plan = measurement.predict_dts(**settings, durations=durations)
    # Merged weights, weights at the last window's end, and, if merging is gentle, weights that follow the merged ones.
    # For each window in flight, its change and its message.
    num_kept = 2 + Schedule(plan.delay, plan.interval).merges_gently
    return Outcome(plan.step_seconds, plan.bytes_per_step, num_kept + 2 * math.ceil(plan.delay / plan.interval))


def _hop(settings: Mapping, measurement: Measurement, durations: np.ndarray) -> Outcome:
    num_ranks = _num_simulated_ranks(durations)
    found = simulate_training(
        "HopStrategy",
        settings,
        world_size=num_ranks,
        num_steps=max(_MIN_STEPS, min(_SIMULATED_STEPS // len(durations), _MAX_STEPS)),
        own=lambda rank: map(OwnSeconds, itertools.cycle(durations[rank].tolist())),
        links=Links.alike(num_ranks, measurement.network.latency_seconds, measurement.network.seconds_per_byte),
        num_values=round(measurement.num_bytes / FLOAT32_BYTES),
    )
    num_bytes = degree(settings.get("topology", "ring_based"), measurement.world_size) * measurement.num_bytes
    # Other ranks may run ahead for a while, but in the long run all are as slow as the slowest rank.
    # Memory: parameters that a rank sends, the change that it gets, and updates that have come.
    return Outcome(float(found.rank_seconds.max()), num_bytes, 2 + found.most_updates, found.made_share)


def _num_simulated_ranks(durations: np.ndarray) -> int:
    """The number of ranks to simulate: all, or only a few if they are alike, because such ranks do the same in rings.

    In a ring with chords, the number of neighbors is the same in all even worlds of more than 5 ranks, and the same in
    all odd ones.
    """
    n = len(durations)
    return _FEW_RANKS + n % 2 if n > _FEW_RANKS + 1 and np.ptp(durations) == 0 else n


def degree(topology: str, world_size: int) -> int:
    """The number of ranks to which a rank of Hop sends."""
    return len(resolve(topology, world_size).out_neighbors(0))


def _canary(settings: Mapping, measurement: Measurement, durations: np.ndarray | None) -> Outcome:
    codec, algorithm = settings.get("codec", _CANARY_CODEC), settings.get("algorithm", "mesh")
    if settings.get("consistency") == "bsp":
        arguments = {"pipeline_width": 1, "num_segments": _NUM_COLAYERS, "codec": codec, "algorithm": algorithm}
        return _pipe_sgd(arguments, measurement, durations)
    network, num_bytes = measurement.network, measurement.predict(codec=codec, algorithm=algorithm).bytes_per_step
    # Half of the bytes of an all-reduce go to the ranks that sum pieces up, and half come back.
    sending = num_bytes * network.seconds_per_byte * network.mesh_slowdown / 2
    # Sketching takes place in the step itself.
    sketching = measurement.codec_seconds_per_byte[codecs.get(codec).name] * measurement.num_float32_bytes
    seconds, share = free_running_seconds(
        durations + sketching,
        pushing_seconds=sending,
        sum_seconds=sending,
        latency_seconds=network.latency_seconds,
        max_in_flight=_MAX_IN_FLIGHT,
    )
    in_flight = min(math.ceil(2 * (sending + network.latency_seconds) / seconds), _MAX_IN_FLIGHT)
    return Outcome(seconds, num_bytes, 3 + max(1, in_flight), share)


def _shat(num_servers: int, measurement: Measurement, durations: np.ndarray) -> Outcome:
    network = measurement.network
    seconds = measurement.num_bytes * network.seconds_per_byte
    step_seconds = server_seconds(
        durations,
        num_servers=num_servers,
        pushing_seconds=seconds,
        answering_seconds=seconds,
        round_trip_seconds=2 * network.latency_seconds,
    )
    return Outcome(step_seconds, measurement.num_bytes, 2)  # A worker's push, and the answer.


_MODELS = {"PipeSGDStrategy": _pipe_sgd, "DTSStrategy": _dts, "HopStrategy": _hop, "CanaryStrategy": _canary}
