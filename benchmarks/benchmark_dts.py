"""DTS beside synchronous training: the paper's Figures 1 and 4, its Table 2, and its four sites, in the small.

    python benchmarks/benchmark_dts.py --experiments=scaling,sites --output=results
    python benchmarks/benchmark_dts.py --experiments=accuracy --cifar10=cifar10.npz --output=results
    python benchmarks/benchmark_dts.py --quick --dataset=fashion_mnist

scaling    Scaling efficiency, which is the speed of n ranks over n times that of one rank, against the round-trip time.
           Ranks are hosts of an emulated network (`network`, which needs root); computation is emulated, asleep. The
           one rank is timed beside each row, before and after it: the shorter of its steps counts. Required of `both`
           at 100 Mbit/s, and of `both top_k` at 10 Mbit/s: 0.9 at 277 ms and 0.85 at 1000 ms.
sites      The same between Tokyo, Oregon, London and Ohio (`network.site_delays`).
latencies  Only when asked for: scaling efficiency of synchronous training and of each of --settings by `hop_tf.timing`,
           for each of --round_trips. Nothing is run: `tests/strategies/dts/plan_test.py` holds the exchange to it.
accuracy   A small residual network, trained with the same global batches, on the test data. Ranks are simulated.

The timed members: `synchronous` and `ring` are `PipeSGDStrategy(pipeline_width=1)` over a mesh and over a ring;
others are compared with the fastest synchronous one, whatever its codec. `delay`, `interval` and `both` are
`DTSStrategy` with --delay and interval 1, with delay 0 and --interval, and with both. What follows is a codec; that of
top_k sends the largest 1 %. Their optimizers have momentum 0.9.

A schedule repeats itself after floor(D / p) + 1 windows of p steps. The first two of these cycles are left out. Of
the --num_cycles that follow the mean counts, at the slowest rank; their median is lower where some windows are late.
`flush` is what `fit` takes to apply what is in flight after its last step. `predicted` is what `hop_tf.timing` says
of the links that were asked for.

Members that would take longer than --max_seconds, by the model, are left out, but not synchronous ones: `delay` at 10
Mbit/s, by default. The rest of `scaling` and `sites` takes an hour and a half, by the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import dts_accuracy
import keras
import numpy as np
import ranks
import results
import tensorflow as tf
from absl import app, flags, logging

import hop_tf
from hop_tf.tools import timing
from hop_tf.tools.emulation import ComputeEmulation
from hop_tf.tools.testing import network

_EXPERIMENTS = flags.DEFINE_list("experiments", ["scaling", "sites", "accuracy"], "What to run.")
_QUICK = flags.DEFINE_bool("quick", False, "Small sizes for all that is not given: whether it works, in a minute.")
_WORLD_SIZE = flags.DEFINE_integer("world_size", 4, "Ranks; the sites are four.", lower_bound=2)
_DELAY = flags.DEFINE_integer("delay", 20, "D of the timed members.", lower_bound=1)
_INTERVAL = flags.DEFINE_integer("interval", 12, "p of the timed members.", lower_bound=2)

_MEMBERS = flags.DEFINE_list(
    "members", ["synchronous", "ring", "synchronous int8", "delay", "interval", "both", "both top_k"], "What is timed."
)
_LINKS = flags.DEFINE_list("links", ["100e6", "10e6"], "Rates of the links, in bits per second.")
_ROUND_TRIPS = flags.DEFINE_list("round_trips", ["0", "0.277", "1"], "Round-trip times of `scaling`, in seconds.")
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.3, "Emulated computation of a step.", lower_bound=0.001)
_NUM_VALUES = flags.DEFINE_integer("num_values", 2_500_000, "Parameters of the timed model.", lower_bound=1000)
_NUM_CYCLES = flags.DEFINE_integer("num_cycles", 3, "Timed cycles.", lower_bound=1)
_MAX_SECONDS = flags.DEFINE_float("max_seconds", 900.0, "Longest time that the steps of a member may take.")

_SMALL = {
    "experiments": ["scaling", "accuracy"],
    "world_size": 2,
    "members": ["synchronous", "ring", "both", "both top_k"],
    "delay": 3,
    "interval": 2,
    "links": ["100e6"],
    "round_trips": ["0.1"],
    "step_seconds": 0.05,
    "num_values": 50_000,
    "num_cycles": 2,
    "num_rows": 512,
    "settings": ["3:2"],
    "epochs": 2,
    "seeds": ["0"],
}
_MOMENTUM = 0.9
_NUM_INPUTS, _NUM_OUTPUTS = 500, 11
_MIN_CYCLE_STEPS = 4
_SKIPPED_CYCLES = 2
_CYCLES_ALONE = 10
_TIMEOUT_SECONDS = 4 * 3600.0
_SYNCHRONOUS, _RING = "synchronous", "ring"


@dataclasses.dataclass(frozen=True)
class Member:
    """A way to train.

    Attributes:
      label: Name of the member.
      delay: D; None for synchronous training.
      interval: p.
      codec: Name of the codec.
      algorithm: Algorithm of the all-reduce.
    """

    label: str
    delay: int | None = None
    interval: int = 1
    codec: str = "identity"
    algorithm: str = "mesh"

    @classmethod
    def named(cls, label: str) -> Member:
        """Returns the member with that label in --members."""
        kind, _, codec = label.partition(" ")
        settings = {
            _SYNCHRONOUS: (None, 1),
            _RING: (None, 1),
            "delay": (_DELAY.value, 1),
            "interval": (0, _INTERVAL.value),
            "both": (_DELAY.value, _INTERVAL.value),
        }
        if kind not in settings:
            raise app.UsageError(f"--members must be among {', '.join(settings)}, and a codec. Received: {label!r}.")
        return cls(label, *settings[kind], codec or "identity", "ring" if kind == _RING else "mesh")

    @property
    def num_cycle_steps(self) -> int:
        """Number of steps after which the schedule repeats itself, or enough steps to be timed."""
        return max(((self.delay or 0) // self.interval + 1) * self.interval, _MIN_CYCLE_STEPS)

    def strategy(self, options: hop_tf.CommunicationOptions) -> tf.distribute.Strategy:
        """Makes the member's strategy, on the cluster of TF_CONFIG."""
        common = {"codec": self.codec, "algorithm": self.algorithm, "communication_options": options}
        if self.delay is None:
            return hop_tf.PipeSGDStrategy(pipeline_width=1, **common)
        return hop_tf.DTSStrategy(delay=self.delay, interval=self.interval, **common)

    def predict(self, links: timing.NetworkCosts, step: timing.Step, **arguments) -> tuple[float, float]:
        """Returns the scaling efficiency, and the bytes that a rank sends per step, by the models."""
        arguments["algorithm"] = self.algorithm
        if self.delay is None:
            plan = timing.predict(links, step, pipeline_width=1, codec=self.codec, **arguments)
            as_window = timing.predict_dts(links, step, delay=0, interval=1, codec=self.codec, **arguments)
            return plan.scaling_efficiency, as_window.bytes_per_step
        plan = timing.predict_dts(links, step, delay=self.delay, interval=self.interval, codec=self.codec, **arguments)
        return plan.scaling_efficiency, plan.bytes_per_step


# In each timed rank.


def _run_rank(case: Mapping, rank: int) -> list:
    """Times all members in a rank; returns the results."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    return [_time(case, rank, turn, Member(**each)) for turn, each in enumerate(case["members"])]


def _time(case: Mapping, rank: int, turn: int, member: Member) -> dict:
    workers = case["addresses"][turn]  # New ones for each turn: no strategy meets an earlier one of another rank.
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    strategy = member.strategy(hop_tf.CommunicationOptions(**case["options"]))
    with strategy.scope():
        model = _perceptron(case["num_values"])
        model.compile(keras.optimizers.SGD(1e-4, momentum=_MOMENTUM), "mse")
    cycle, num_cycles = member.num_cycle_steps, _SKIPPED_CYCLES + case["num_cycles"]
    recorder = _Recorder(strategy, cycle)
    generator = np.random.default_rng(rank)
    x, y = (generator.normal(size=(num_cycles * cycle * len(workers), size)) for size in (_NUM_INPUTS, _NUM_OUTPUTS))
    model.fit(x, y, batch_size=len(workers), verbose=0, callbacks=[recorder])
    strategy.shutdown()
    times, num_bytes = (np.array(values[_SKIPPED_CYCLES - 1 :]) for values in (recorder.times, recorder.num_bytes))
    return {
        "step": statistics.mean(np.diff(times) / cycle),
        "median": statistics.median(np.diff(times) / cycle),
        "bytes": statistics.mean(np.diff(num_bytes) / cycle),
        "flush": recorder.flushed - times[-1],
    }


class _Recorder(keras.callbacks.Callback):
    """Notes the end of each cycle of steps with the bytes sent until then, and the end of `fit`."""

    def __init__(self, strategy: hop_tf.DTSStrategy | hop_tf.PipeSGDStrategy, num_cycle_steps: int):
        super().__init__()
        self.times: list[float] = []
        self.num_bytes: list[float] = []
        self.flushed = 0.0
        self._strategy = strategy
        self._num_cycle_steps = num_cycle_steps

    def on_train_batch_end(self, batch, logs=None):
        if (batch + 1) % self._num_cycle_steps == 0:
            self.times.append(time.monotonic())
            self.num_bytes.append(self._strategy.report().get("bytes_sent", 0.0))

    def on_train_end(self, logs=None):
        self.flushed = time.monotonic()


def _perceptron(num_values: int) -> keras.Model:
    """Returns a model with about `num_values` parameters, whose gradients cost little and are not zero."""
    layers = keras.layers
    hidden = layers.Dense(round(num_values / (_NUM_INPUTS + 1 + _NUM_OUTPUTS)), activation="tanh")
    return keras.Sequential([keras.Input((_NUM_INPUTS,)), hidden, layers.Dense(_NUM_OUTPUTS)])


# In the parent.


@dataclasses.dataclass(frozen=True)
class Timed:
    """The times of a member.

    Attributes:
      link: Rate of the links, in bits per second.
      round_trip: Round-trip time, in seconds; the longest, between the sites.
      alone: Duration of a step of one rank alone, in seconds.
      label: Name of the member.
      step: Mean duration of a step, in seconds.
      median: Median over the cycles, in seconds.
      efficiency: Scaling efficiency, by the mean.
      predicted: Scaling efficiency by the model.
      bytes: Bytes that a rank sends per step.
      predicted_bytes: Bytes that a rank sends per step, by the model.
      flush: Time from the last step to the end of `fit`, in seconds.
    """

    link: str
    round_trip: float
    alone: float
    label: str
    step: float
    median: float
    efficiency: float
    predicted: float
    bytes: float
    predicted_bytes: float
    flush: float


def _run(members: Sequence[Member], world_size: int, link: str, num_cycles: int, **emulation) -> list[dict]:
    """Measures each member; returns for each measure the largest value of all ranks."""
    case = {
        "members": [dataclasses.asdict(member) for member in members],
        "num_values": _NUM_VALUES.value,
        "num_cycles": num_cycles,
        "options": {} if link == ranks.LOOPBACK else {"bandwidth_bits_per_second": float(link)},
    }
    of_all = ranks.run(
        __file__,
        case,
        world_size,
        link,
        num_ports=len(members),
        environment=ComputeEmulation(step_seconds=_STEP_SECONDS.value).to_environment(),
        timeout_seconds=_TIMEOUT_SECONDS,
        **emulation,
    )
    return [
        {name: max(each[name] for each in of_ranks) for name in of_ranks[0]} for of_ranks in zip(*of_all, strict=True)
    ]


def _alone() -> float:
    """Returns the duration of a step of one rank alone, in seconds."""
    (alone,) = _run([Member(_SYNCHRONOUS)], 1, ranks.LOOPBACK, _CYCLES_ALONE)
    return alone["step"]


def _time_members(world_size: int, link: str, round_trip: float, **emulation) -> list[Timed]:
    """Times the members on the same links, one after the other."""
    alone = _alone()
    links = timing.NetworkCosts(latency_seconds=round_trip / 2, seconds_per_byte=8 / float(link))
    num_bytes = 4 * _perceptron(_NUM_VALUES.value).count_params()
    predicted = {}
    for member in map(Member.named, _MEMBERS.value):
        efficiency, bytes_per_step = member.predict(
            links, timing.Step(forward_seconds=alone), world_size=world_size, num_bytes=num_bytes
        )
        seconds = (_SKIPPED_CYCLES + _NUM_CYCLES.value) * member.num_cycle_steps * alone / efficiency
        if seconds <= _MAX_SECONDS.value or member.delay is None:
            predicted[member] = efficiency, bytes_per_step
        else:
            print(f"\n{member.label} is left out: it would take {seconds:.0f} s.", flush=True)
    measured = _run([*predicted], world_size, link, _NUM_CYCLES.value, **emulation)
    before, after = alone, _alone()
    print(f"\none rank alone: {before * 1e3:.1f} and {after * 1e3:.1f} ms a step", flush=True)
    alone = min(before, after)
    return [
        Timed(
            link=link,
            round_trip=round_trip,
            alone=alone,
            label=member.label,
            step=found["step"],
            median=found["median"],
            efficiency=alone / found["step"],
            predicted=efficiency,
            bytes=found["bytes"],
            predicted_bytes=bytes_per_step,
            flush=found["flush"],
        )
        for (member, (efficiency, bytes_per_step)), found in zip(predicted.items(), measured, strict=True)
    ]


def _print_timed(title: str, timed: Sequence[Timed]) -> None:
    synchronous = min((each.step for each in timed if Member.named(each.label).delay is None), default=None)
    print(f"\n{title}" + "".join(f"; a step alone takes {each.alone:.4f} s" for each in timed[:1]))
    print(
        f"  {'':18} {'step ms':>9} {'median':>9} {'efficiency':>11} {'predicted':>10} {'/ synchronous':>14} "
        f"{'MB a step':>10} {'predicted':>10} {'flush s':>8}"
    )
    for each in timed:
        ratio = f"{synchronous / each.step:14.2f}" if synchronous else f"{'':14}"
        print(
            f"  {each.label:18} {each.step * 1e3:9.1f} {each.median * 1e3:9.1f} {each.efficiency:11.3f} "
            f"{each.predicted:10.3f} {ratio} {each.bytes / 1e6:10.3f} {each.predicted_bytes / 1e6:10.3f} "
            f"{each.flush:8.2f}",
            flush=True,
        )


def _scaling() -> Iterator[Timed]:
    for link, round_trip in itertools.product(_LINKS.value, map(float, _ROUND_TRIPS.value)):
        timed = _time_members(_WORLD_SIZE.value, link, round_trip, round_trip_seconds=round_trip)
        _print_timed(f"{float(link) / 1e6:g} Mbit/s, round trips {round_trip * 1e3:.0f} ms", timed)
        yield from timed


def _sites() -> Iterator[Timed]:
    delays = network.site_delays()
    longest = 2 * max(map(max, delays))
    for link in _LINKS.value:
        timed = _time_members(len(network.SITES), link, longest, one_way_seconds=delays)
        _print_timed(f"{float(link) / 1e6:g} Mbit/s, {', '.join(network.SITES)}", timed)
        yield from timed


def _latencies() -> None:
    settings = [tuple(map(int, each.split(":"))) for each in dts_accuracy.SETTINGS.value]
    members = [
        Member(_SYNCHRONOUS),
        *(Member(f"D={delay} p={interval}", delay, interval) for delay, interval in settings),
    ]
    round_trips = list(map(float, _ROUND_TRIPS.value))
    for link in map(float, _LINKS.value):
        print(f"\n{link / 1e6:g} Mbit/s, {_NUM_VALUES.value} values, a step of {_STEP_SECONDS.value:g} s; efficiency")
        print(f"  {'':18}" + "".join(f"{1e3 * each:8g} ms" for each in round_trips))
        for member in members:
            efficiencies = [
                member.predict(
                    timing.NetworkCosts(latency_seconds=round_trip / 2, seconds_per_byte=8 / link),
                    timing.Step(forward_seconds=_STEP_SECONDS.value),
                    world_size=_WORLD_SIZE.value,
                    num_bytes=4 * _NUM_VALUES.value,
                )[0]
                for round_trip in round_trips
            ]
            print(f"  {member.label:18}" + "".join(f"{each:11.2f}" for each in efficiencies))


def main(argv) -> None:
    del argv
    tf.config.threading.set_intra_op_parallelism_threads(1)
    logging.set_verbosity(logging.WARNING)  # Otherwise ranks would log that they leave.
    for name, value in _SMALL.items() if _QUICK.value else ():
        if not flags.FLAGS[name].present:
            flags.FLAGS[name].value = value
    timed: dict[str, Callable[[], Iterator[Timed]]] = {"scaling": _scaling, "sites": _sites}
    for name in (name for name in timed if name in _EXPERIMENTS.value):
        for each in timed[name]():
            case = f"{each.label}, {each.link}, {each.round_trip:g}"
            results.note(f"{name}: step seconds", case, each.step)
            results.note(f"{name}: efficiency", case, each.efficiency)
    if "latencies" in _EXPERIMENTS.value:
        _latencies()
    if "accuracy" in _EXPERIMENTS.value:
        dts_accuracy.run(_WORLD_SIZE.value)


if __name__ == "__main__":
    ranks.serve(_run_rank)
    app.run(main)
