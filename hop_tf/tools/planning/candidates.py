"""The settings of the five strategies that are compared, and the model or simulation of each.

    Pipe-SGD   model: a schedule of steps and all-reduces (`lock_step_seconds`), Equation 6 for segments
    DTS        model: the same schedule, with windows
    Hop        simulation of the strategy's own protocol on a virtual clock
    Canary     model: synchronous as Pipe-SGD with width 1; asynchronous by `free_running_seconds`
    SHAT       model: `server_seconds`

Memory is counted, not measured, in copies of the trained variables that a rank has in addition to those of training
alone: state that a strategy keeps between steps, messages in flight, and messages that have come and are not used yet.
An optimizer is assumed to have one slot, such as momentum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hop_tf import codecs
from hop_tf.strategies.hop.settings import SkipIterations
from hop_tf.tools.planning.accuracy import CHANGES, Change
from hop_tf.tools.simulate.rank_loops import OwnSeconds
from hop_tf.tools.simulate.training import Links, simulate_training
from hop_tf.tools.timing import (
    DTSPlan,
    Measurement,
    NetworkCosts,
    Plan,
    free_running_seconds,
    lock_step_seconds,
    sent_bytes,
    server_seconds,
    way_of,
)
from hop_tf.tools.timing.costs import ALGORITHMS, FLOAT32_BYTES, RESOLUTION
from hop_tf.topology import resolve

_PIPE_CODECS = (None, "truncate16", "int8")
_SEGMENTS = (1, 2, 4)
_DTS_SETTINGS = tuple(itertools.product(((4, 4), (20, 12)), (None, "int8", "top_k")))
_NUM_SLOTS = 1
# Defaults of `CanaryStrategy`.
_NUM_COLAYERS, _MAX_IN_FLIGHT = 10, 4
# A simulation of many ranks takes longer, so it makes fewer steps.
_SIMULATED_STEPS, _MIN_STEPS, _MAX_STEPS = 480, 40, 96
_FEW_RANKS = 8
_BOTH = {"num_backup_workers": 1, "max_staleness": 5}
_SKIP = "skip=hop_tf.SkipIterations()"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The costs of settings with steps of given durations.

    Attributes:
      step_seconds: Duration of a step of `fit`.
      memory: Copies of the trained variables.
      trained_share: The share of all batches that are trained on. The others are skipped.
    """

    step_seconds: float
    memory: float
    trained_share: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings of a strategy, on the links of a measurement.

    Attributes:
      name: A short name.
      strategy: Name of the strategy.
      call: The call that makes the strategy.
      bytes_per_step: The bytes that a rank sends in a step.
      outcome: `outcome(durations)` returns the costs with steps of these durations, an array [n, T].
      is_simulated: True if `outcome` simulates the strategy's protocol. Otherwise it is a model.
      needs: The machines that the strategy needs in addition to the ranks. Empty: none.
    """

    name: str
    strategy: str
    call: str
    bytes_per_step: float
    outcome: Callable[[np.ndarray], Outcome]
    is_simulated: bool = False
    needs: str = ""

    @property
    def changes(self) -> tuple[Change, ...] | None:
        """The measured changes of accuracy, or None if not measured. Empty for synchronous training, the reference."""
        return () if self.name == "pipe:1" else CHANGES.get(self.name)


def candidates(measurement: Measurement) -> list[Candidate]:
    """All candidates, those that change training least first."""
    makers = (_pipe_sgd, _canary_synchronous, _hop, _canary, _shat, _dts)
    return [candidate for make in makers for candidate in make(measurement.typical)]


# Pipe-SGD, and synchronous Canary.


def _pipe_sgd(measurement: Measurement) -> Iterator[Candidate]:
    for width, codec in itertools.product((1, 2), _PIPE_CODECS):
        segments = _SEGMENTS if width == 1 else (1,)
        plan = _shortest(
            [
                measurement.predict(pipeline_width=width, codec=codec, num_segments=number, algorithm=algorithm)
                for number, algorithm in itertools.product(segments, ALGORITHMS)
            ]
        )
        yield Candidate(
            name=_name("pipe", width, codec),
            strategy="Pipe-SGD",
            call=_call(
                "PipeSGDStrategy",
                f"codec={codec!r}",  # Given also if None: otherwise ranks would choose it.
                pipeline_width=width,
                num_segments=number if (number := plan.num_segments) > 1 else None,
                algorithm=plan.algorithm,
            ),
            bytes_per_step=_all_reduce_bytes(measurement, codec, plan.algorithm),
            outcome=functools.partial(_in_lock_step, measurement, plan),
        )


def _shortest(plans: Sequence[Plan | DTSPlan]) -> Plan | DTSPlan:
    """The first plan whose step is within 2 % of the shortest one."""
    shortest = min(plan.step_seconds for plan in plans)
    return next(plan for plan in plans if plan.step_seconds <= shortest * (1 + RESOLUTION))


def _in_lock_step(measurement: Measurement, plan: Plan, durations: np.ndarray) -> Outcome:
    if plan.pipeline_width > 1:
        seconds = lock_step_seconds(
            durations, delay=plan.pipeline_width - 1, sending_seconds=plan.communication_seconds
        )
        # Gradients in flight; weights and slots from before the own gradients that stand in; a mean.
        return Outcome(seconds, plan.pipeline_width - 1 + (1 + _NUM_SLOTS) + 1)
    exposed = plan.step_seconds - measurement.step.seconds
    # In a mesh the last rank's pieces go to all others, one after the other, and the mean of the last piece comes back.
    n = measurement.world_size
    own_share = n / (2 * n - 2) if plan.algorithm == "mesh" else 1.0
    seconds = lock_step_seconds(durations, sending_seconds=exposed, own_share=own_share)
    return Outcome(seconds, 2)  # The gradients that are sent, and the mean.


def _canary_synchronous(measurement: Measurement) -> Iterator[Candidate]:
    plan = _shortest(
        [
            measurement.predict(pipeline_width=1, codec="sketch", num_segments=_NUM_COLAYERS, algorithm=algorithm)
            for algorithm in ALGORITHMS
        ]
    )
    yield Candidate(
        name="canary:bsp",
        strategy="Canary",
        call=_call("CanaryStrategy", consistency="bsp", algorithm=plan.algorithm),
        bytes_per_step=_all_reduce_bytes(measurement, "sketch", plan.algorithm),
        outcome=functools.partial(_in_lock_step, measurement, plan),
    )


# DTS.


def _dts(measurement: Measurement) -> Iterator[Candidate]:
    for (delay, interval), codec in _DTS_SETTINGS:
        plan = _shortest(
            [
                measurement.predict_dts(delay=delay, interval=interval, codec=codec, algorithm=algorithm)
                for algorithm in ALGORITHMS
            ]
        )
        selecting = plan.compute_seconds - measurement.step.seconds
        yield Candidate(
            name=_name("dts", delay, interval, codec),
            strategy="DTS",
            call=_call(  # The codec is given also if None: otherwise ranks would choose it.
                "DTSStrategy", f"codec={codec!r}", delay=delay, interval=interval, algorithm=plan.algorithm
            ),
            bytes_per_step=plan.bytes_per_step,
            outcome=functools.partial(_in_windows, plan, selecting),
        )


def _in_windows(plan: DTSPlan, selecting_seconds: float, durations: np.ndarray) -> Outcome:
    seconds = lock_step_seconds(
        durations + selecting_seconds,
        delay=plan.delay,
        interval=plan.interval,
        sending_seconds=plan.sending_seconds,
        latency_seconds=plan.window_seconds - plan.sending_seconds,
    )
    # Merged weights and weights at the last window's end, and for each window in flight its change and its message.
    return Outcome(seconds, 2 + 2 * math.ceil(plan.delay / plan.interval))


# Hop.


def _hop(measurement: Measurement) -> Iterator[Candidate]:
    settings = {
        "hop": ({}, {}),
        "hop:backup": ({"num_backup_workers": 1}, {}),
        "hop:staleness": ({"max_staleness": 5}, {}),
        "hop:both": (_BOTH, {}),
        "hop:skip": (_BOTH, {"skip": SkipIterations()}),
    }
    for name, (arguments, skip) in settings.items():
        more = [_SKIP] if skip else []
        yield _hop_candidate(measurement, name, "ring_based", {**arguments, **skip}, arguments, more)
    if _degree("ring", measurement.world_size) < _degree("ring_based", measurement.world_size):
        yield _hop_candidate(measurement, "hop:ring", "ring", {}, {"topology": "ring"}, [])


def _degree(topology: str, world_size: int) -> int:
    return len(resolve(topology, world_size).out_neighbors(0))


def _hop_candidate(
    measurement: Measurement, name: str, topology: str, settings: dict, shown: dict, more: list
) -> Candidate:
    def outcome(durations: np.ndarray) -> Outcome:
        num_ranks = _num_simulated_ranks(durations)
        found = simulate_training(
            "HopStrategy",
            {"topology": topology, **settings},
            world_size=num_ranks,
            num_steps=_num_simulated_steps(durations),
            own=lambda rank: map(OwnSeconds, itertools.cycle(durations[rank].tolist())),
            links=_links(measurement.network, num_ranks),
            num_values=round(measurement.num_bytes / FLOAT32_BYTES),
        )
        # Others may run ahead for a while, but in the long run all are as slow as the slowest rank.
        # Memory: parameters that a rank sends, the change that it gets, and updates that have come.
        return Outcome(float(found.rank_seconds.max()), 2 + found.most_updates, found.made_share)

    return Candidate(
        name=name,
        strategy="Hop",
        call=_call("HopStrategy", *more, **shown),
        bytes_per_step=_degree(topology, measurement.world_size) * measurement.num_bytes,
        outcome=outcome,
        is_simulated=True,
    )


# Asynchronous Canary.


def _canary(measurement: Measurement) -> Iterator[Candidate]:
    for name, codec, shown in (("canary", "sketch", {}), ("canary:float32", None, {"codec": "None"})):
        yield Candidate(
            name=name,
            strategy="Canary",
            call=_call("CanaryStrategy", *(f"{key}={value}" for key, value in shown.items())),
            bytes_per_step=_all_reduce_bytes(measurement, codec, "mesh"),
            outcome=functools.partial(_free_running, measurement, codec),
        )


def _free_running(measurement: Measurement, codec: str | None, durations: np.ndarray) -> Outcome:
    network, member = measurement.network, codecs.get(codec)
    # Half of the bytes of an all-reduce go to the ranks that sum pieces up, and half come back.
    sending = _all_reduce_bytes(measurement, codec, "mesh") * network.seconds_per_byte * network.mesh_slowdown / 2
    # Sketching takes place in the step itself.
    sketching = measurement.codec_seconds_per_byte[member.name] * _float32_bytes(measurement)
    seconds, share = free_running_seconds(
        durations + sketching,
        pushing_seconds=sending,
        sum_seconds=sending,
        latency_seconds=network.latency_seconds,
        max_in_flight=_MAX_IN_FLIGHT,
    )
    under_way = min(math.ceil(2 * (sending + network.latency_seconds) / seconds), _MAX_IN_FLIGHT)
    return Outcome(seconds, 3 + max(1, under_way), share)


# SHAT.


def _shat(measurement: Measurement) -> Iterator[Candidate]:
    half = max(1, measurement.world_size // 2)
    for num_servers in sorted({1, half}):
        servers = f"{num_servers} parameter server{'s' if num_servers > 1 else ''}"
        yield Candidate(
            name="shat",
            strategy="SHAT",
            call=f"SHATParameterServerStrategy() with {servers}",
            bytes_per_step=measurement.num_bytes,
            outcome=functools.partial(_served, measurement, num_servers),
            needs=f"{servers} on {'machines of their' if num_servers > 1 else 'a machine of its'} own",
        )


def _served(measurement: Measurement, num_servers: int, durations: np.ndarray) -> Outcome:
    network = measurement.network
    seconds = measurement.num_bytes * network.seconds_per_byte
    step_seconds = server_seconds(
        durations,
        num_servers=num_servers,
        pushing_seconds=seconds,
        answering_seconds=seconds,
        round_trip_seconds=2 * network.latency_seconds,
    )
    return Outcome(step_seconds, 2)  # A worker's push, and the answer.


# Names and sizes.


def _num_simulated_steps(durations: np.ndarray) -> int:
    return max(_MIN_STEPS, min(_SIMULATED_STEPS // len(durations), _MAX_STEPS))


def _num_simulated_ranks(durations: np.ndarray) -> int:
    """The number of ranks to simulate: all, or only a few if they are alike, because in rings all do the same.

    In a ring with chords, the number of neighbors is equal in all even worlds, and in all odd worlds, of more than 5.
    """
    n = len(durations)
    return _FEW_RANKS + n % 2 if n > _FEW_RANKS + 1 and np.ptp(durations) == 0 else n


def _links(network: NetworkCosts, n: int) -> Links:
    """The links of n ranks. Messages of a rank to several others at the same time share its card."""
    with np.errstate(divide="ignore"):
        rates = 1 / np.full(n, network.seconds_per_byte)
    return Links(np.full((n, n), network.latency_seconds), np.full((n, n), math.inf), rates)


def _name(*parts) -> str:
    return ":".join(str(part) for part in parts if part is not None)


def _call(strategy: str, *more: str, **arguments) -> str:
    given = [f"{name}={value!r}" for name, value in arguments.items() if value is not None]
    return f"{strategy}({', '.join([*given, *more])})"


def _float32_bytes(measurement: Measurement) -> float:
    return FLOAT32_BYTES * measurement.num_bytes / measurement.bytes_per_value


def _all_reduce_bytes(measurement: Measurement, codec: str | None, algorithm: str) -> float:
    way, bytes_per_byte = way_of(codecs.get(codec), algorithm, measurement.world_size, measurement.bytes_per_value)
    return sent_bytes(
        _float32_bytes(measurement), world_size=measurement.world_size, algorithm=way, bytes_per_byte=bytes_per_byte
    )
