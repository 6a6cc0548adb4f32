"""The rows and pictures of the report, made of what the experiments measure. See `report.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from report_experiments import HOOKS, LINKS, SLOW_LINKS, UNEVEN_RANKS


class Measured(Protocol):
    """The values that experiments have noted. See `report_page.Measurements`."""

    def __call__(self, experiment: str, quantity: str, case: str) -> np.ndarray: ...

    def all(self, experiment: str, quantity: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the page.

    Attributes:
      name: Name of the row, which the next report finds it by.
      section: The experiment's section.
      text: The quantity, in words.
      value: Called with what was measured. Returns the values of all rounds.
      at_least: Required value of a quantity that should be large.
      at_most: Required value of a quantity that should be small.
      paper: The paper's value, or the published one.
      why: A sentence for the page if the required value is missed.
      spread_of_one: Spread of a value that was measured once; 0 for exact ones. None: a tenth of it.
    """

    name: str
    section: str
    text: str
    value: Callable[[Measured], np.ndarray]
    at_least: float | None = None
    at_most: float | None = None
    paper: str = ""
    why: str = ""
    spread_of_one: float | None = None

    @property
    def is_better_high(self) -> bool:
        return self.at_most is None


@dataclasses.dataclass(frozen=True)
class Picture:
    """Bars, in groups.

    Attributes:
      name: Name of the file, without its ending.
      section: The section that shows it.
      title: The title, with the unit.
      groups: For each group, by its name, the bars: a label, experiment, quantity and case.
    """

    name: str
    section: str
    title: str
    groups: Mapping[str, Sequence[tuple[str, str, str, str]]]


def _ratio(experiment: str, quantity: str, above: str, below: str) -> Callable[[Measured], np.ndarray]:
    return lambda at: at(experiment, quantity, above) / at(experiment, quantity, below)


def _added(at: Measured, case: str, alone: str, quantity: str = "processor_ms") -> np.ndarray:
    """Returns what a step costs above that of the same library in one process."""
    return at("step", quantity, f"perceptron {case} 2") - at("step", quantity, f"perceptron {alone} 1")


def _best(at: Measured, experiment: str, quantity: str, cases: Sequence[str]) -> np.ndarray:
    return min((at(experiment, quantity, case) for case in cases), key=np.median)


_FAST_LINK = (
    "Communication takes little time on this link, and a step of PyTorch is shorter than one of Keras: see [when not "
    "to use hop_tf](when_not.md)."
)
_POWER_SGD = (
    "The layers of this network are wide: PowerSGD sends 2 % of the bytes of their gradients. Without arguments, "
    "hop_tf chooses codecs of 8 or 16 bits."
)
_TO_TARGET, _SECONDS = "seconds to target", "seconds"
_ACCURACY = "Seconds to 98 % of synchronous accuracy"
_OWN = {"auto": "`PipeSGDStrategy()`", "dts_auto": "`DTSStrategy()`"}
_KERNELS = "10000000 gaussian"

ROWS = [
    Row(
        "step: processor",
        "step",
        "Processor time that being distributed adds to a step, two ranks: DDP's over that of Pipe-SGD with K = 1",
        lambda at: _added(at, "ddp", "torch") / _added(at, "pipe_sgd_k1", "keras"),
        at_least=1.0,
        why="Most of the difference is the thread that exchanges, and copies between the graph and its buffers.",
    ),
    Row(
        "step: time",
        "step",
        "Time that it adds to a step: DDP's over Pipe-SGD's",
        lambda at: _added(at, "ddp", "torch", "step_ms") / _added(at, "pipe_sgd_k1", "keras", "step_ms"),
        at_least=1.0,
        why="Two ranks share two processors here, so a step takes as long as their processor time.",
    ),
    *(
        Row(
            f"step: {kind}",
            "step",
            f"A step of MultiWorkerMirroredStrategy over one of {name}",
            _ratio("step", "step_ms", "perceptron mirrored 2", f"perceptron {kind} 2"),
            at_least=1.0,
        )
        for kind, name in {"pipe_sgd_k1": "Pipe-SGD", "dts_4_4": "DTS", "hop": "Hop", "canary": "Canary"}.items()
    ),
    *(
        Row(
            f"all-reduce: float32, {link}",
            f"all-reduce {link}",
            f"gloo over the better one of mesh and ring, 25 MiB of float32, four ranks, {LINKS[link]}",
            lambda at, link=link: (
                at(f"all-reduce {link}", "seconds", f"{link} 4 25 gloo")
                / _best(at, f"all-reduce {link}", "seconds", [f"{link} 4 25 {a}/identity" for a in ("mesh", "ring")])
            ),
            at_least=1.0,
        )
        for link in ("loopback", "1e9")
    ),
    Row(
        "all-reduce: int8, 1e9",
        "all-reduce 1e9",
        "gloo's float32 over the better one of mesh and ring with int8",
        lambda at: (
            at("all-reduce 1e9", "seconds", "1e9 4 25 gloo")
            / _best(at, "all-reduce 1e9", "seconds", [f"1e9 4 25 {a}/int8" for a in ("mesh", "ring")])
        ),
        at_least=3.6,
    ),
    *(
        Row(
            f"training: {kind}, {link}",
            f"training {link}",
            f"Whole training of three ranks, {LINKS[link]}: DDP's seconds over those of {call}",
            _ratio(f"training {link}", _SECONDS, "digits, alike, ddp", f"digits, alike, {kind}"),
            at_least=required,
            why=_FAST_LINK if required == 1.0 else "",
        )
        for link, required in {"loopback": 1.0, "1e10": 1.0, "1e9": 1.0, "1e8": 2.0, "1e7": 2.5}.items()
        for kind, call in _OWN.items()
    ),
    Row(
        "training: target",
        "training 1e8",
        f"{_ACCURACY}, 100 Mbit/s: DDP's over the better one's of {' and '.join(_OWN.values())}",
        lambda at: (
            at("training 1e8", _TO_TARGET, "digits, alike, ddp")
            / _best(at, "training 1e8", _TO_TARGET, [f"digits, alike, {kind}" for kind in _OWN])
        ),
        at_least=2.5,
    ),
    *(
        Row(
            f"{section}: hooks, {kind}",
            section,
            f"{_ACCURACY}: those of the best of DDP, DDP with 16 bits and DDP with PowerSGD over those of {call}",
            lambda at, section=section, ranks=ranks, kind=kind: (
                _best(at, section, _TO_TARGET, [f"digits, {ranks}, {hook}" for hook in HOOKS])
                / at(section, _TO_TARGET, f"digits, {ranks}, {kind}")
            ),
            at_least=1.0 if ranks == "alike" else 2.0,
            why=_POWER_SGD,
        )
        for section, ranks in [*((f"training {link}", "alike") for link in SLOW_LINKS), ("ranks link:10", "link:10")]
        for kind, call in _OWN.items()
    ),
    Row(
        "sites: synchronous",
        "sites",
        f"{_ACCURACY}: synchronous training's over those of `DTSStrategy()`",
        _ratio("sites", _TO_TARGET, "digits, alike, synchronous", "digits, alike, dts_auto"),
        at_least=2.0,
        paper="90 times the throughput of synchronous training (0.72 to 0.008), 4 sites",
    ),
    Row(
        "sites: torchft",
        "sites",
        "Seconds in all: those of torchft's DiLoCo (two fragments) over those of `DTSStrategy()`",
        _ratio("sites", _SECONDS, "digits, alike, diloco:20:9:2", "digits, alike, dts_auto"),
        at_least=1.0,
    ),
    Row(
        "sites: hivemind",
        "sites",
        f"{_ACCURACY}: those of local SGD that hivemind averages every 20 steps over those of `DTSStrategy()`",
        _ratio("sites", _TO_TARGET, "digits, alike, hivemind:20", "digits, alike, dts_auto"),
        at_least=1.0,
    ),
    *(
        Row(
            f"ranks {ranks}: {kind}",
            f"ranks {ranks}",
            f"{_ACCURACY}: DDP's over those of {name}",
            _ratio(f"ranks {ranks}", _TO_TARGET, f"digits, {ranks}, ddp", f"digits, {ranks}, {kind}"),
            at_least=1.0 if ranks == "random" else 2.0,
        )
        for ranks, (_, _, kinds) in UNEVEN_RANKS.items()
        for kind, name in {"canary": "Canary", "shat": "SHAT"}.items()
        if kind in kinds
    ),
    Row(
        "hop: backup",
        "hop",
        "One backup worker over the standard form, random slowdowns, serial order, double ring",
        lambda at: at("hop", "speedup", "double_ring, random, serial, backup 1"),
        at_least=1.6,
        paper="1.81",
    ),
    Row(
        "hop: all",
        "hop",
        "All mechanisms over the standard form, the same",
        lambda at: at("hop", "speedup", "double_ring, random, serial, hybrid, skip"),
        at_least=1.81,
    ),
    Row(
        "hop: jumps",
        "hop",
        "Jumps of up to ten iterations over the standard form, one rank four times slower, ring-based graph",
        lambda at: at("hop", "speedup", "ring_based, straggler, parallel, backup 1, skip 10"),
        at_least=2.0,
        paper="more than 2",
    ),
    Row(
        "hop: undisturbed",
        "hop",
        "An iteration there over one without a slow rank",
        _ratio(
            "hop",
            "speedup",
            "ring_based, straggler, parallel, homogeneous",
            "ring_based, straggler, parallel, backup 1, skip 10",
        ),
        at_most=1.1,
        paper="1.1",
    ),
    Row(
        "pipe_sgd: D-Sync",
        "pipe_sgd",
        "A step of D-Sync over one of Pipe-SGD with int8, four hosts",
        _ratio("pipe_sgd", "step seconds", "D-Sync, 100e6, 0.2", "Pipe-SGD int8, 100e6, 0.2"),
        at_least=2.0,
        paper="2.0 to 3.2",
    ),
    Row(
        "pipe_sgd: PS-Sync",
        "pipe_sgd",
        "A step of PS-Sync over it",
        _ratio("pipe_sgd", "step seconds", "PS-Sync, 100e6, 0.2", "Pipe-SGD int8, 100e6, 0.2"),
        at_least=4.0,
        paper="4.0 to 5.4",
    ),
    Row(
        "dts: efficiency",
        "dts",
        "Scaling efficiency of four ranks with D = 20, p = 12, round trips of 277 ms",
        lambda at: at("dts", "scaling: efficiency", "both, 100e6, 0.277"),
        at_least=0.9,
        paper="0.72",
    ),
    Row(
        "dts: speedup",
        "dts",
        "A step of synchronous training with int8 over one of DTS",
        _ratio("dts", "scaling: step seconds", "synchronous int8, 100e6, 0.277", "both, 100e6, 0.277"),
        at_least=2.0,
        paper="90, over synchronous training without a codec",
    ),
    Row(
        "canary: traffic",
        "canary",
        "Bytes that a rank sends in a step, with sketches, over those of float32",
        lambda at: at("canary", "traffic: share of float32", "SSP sketch"),
        at_most=0.27,
        paper="0.44",
    ),
    Row(
        "canary: straggler",
        "canary",
        "Steps a second of the other ranks beside one that is ten times slower, over those without it",
        lambda at: at("canary", "straggler: ratio", "SSP sketch"),
        at_least=0.95,
    ),
    Row(
        "canary: BML",
        "canary training",
        "Seconds to the target: those of BML over those of Canary, 50 Mbit/s",
        lambda at: at("canary training", "accuracy: over SSP sketch", "BML bcube:2,2"),
        at_least=1.6,
        paper="1.61",
    ),
    Row(
        "canary: PS",
        "canary training",
        "The same of a parameter server",
        lambda at: at("canary training", "accuracy: over SSP sketch", "PS"),
        at_least=2.8,
        paper="2.84",
    ),
    Row(
        "shat: accuracy",
        "shat",
        "Points of accuracy above ASP, 16 workers, each with its best learning rate",
        lambda at: (
            100 * (at("shat", "accuracy", "small, 16 workers, shat") - at("shat", "accuracy", "small, 16 workers, asp"))
        ),
        at_least=0.0,
        paper="5.22",
        spread_of_one=1.0,
        why="SHAT begins slowly (as in the paper's Figure 4), and is ahead in longer trainings: see [the measurements]"
        "(measurements.md#shat).",
    ),
    *(
        Row(
            f"storm: {kind}",
            "storm",
            f"Rows a second of {name} in a storm of kills and stops, over those without",
            lambda at, kind=kind: at("storm", "kept", kind),
            at_least=0.95,
        )
        for kind, name in {"pipe_sgd": "Pipe-SGD", "canary": "Canary"}.items()
    ),
    Row(
        "storm: torchft, kept",
        "storm",
        "This part of Pipe-SGD over that of torchft",
        _ratio("storm", "kept", "pipe_sgd", "torchft"),
        at_least=1.0,
    ),
    Row(
        "storm: torchft, recovery",
        "storm",
        "Seconds from a rank's death to the first step of its new process: those of torchft over those of Pipe-SGD",
        _ratio("storm", "recovery", "torchft", "pipe_sgd"),
        at_least=1.0,
        why="A new process of Keras traces its step before it can make one. PyTorch's does not.",
    ),
    Row(
        "storm: problems",
        "storm",
        "Processes that ended with an error in the storms, and storms that left something behind",
        lambda at: np.sum(at.all("storm", "problems"), keepdims=True),
        at_most=0.0,
        spread_of_one=0.0,
    ),
    *(
        Row(
            f"kernels: {kernel}",
            "kernels",
            f"{kernel}, one thread: nanoseconds a value over those of a copy",
            _ratio("kernels", "ns per value", f"{_KERNELS} {kernel}, 1 thread", f"{_KERNELS} copy"),
            at_most=limit,
        )
        for kernel, limit in {"sketch encode": 2.0, "sketch accumulate": 1.5, "int8 encode": 1.5}.items()
    ),
    Row(
        "kernels: peer",
        "kernels",
        "Nanoseconds a value of `numpy.quantile` for 256 quantiles over those of a sketch",
        _ratio("kernels", "ns per value", f"{_KERNELS} numpy.quantile", f"{_KERNELS} sketch encode, 1 thread"),
        at_least=10.0,
    ),
    *(
        Row(
            f"memory: {case}",
            "memory",
            f"Vectors of parameters above a world of one, {case}, the largest of all ranks",
            lambda at, case=case: np.max(at("memory", "vectors", case), keepdims=True),
            at_most=limit,
        )
        for case, limit in {"lock step": 6.0, "directed ring, rank 1 is slow": 9.0}.items()
    ),
    Row(
        "replay",
        "replay",
        "A step with own steps that stand in over one with as many updates, momentum, K = 2",
        lambda at: at("replay", "replay over K updates", "momentum, K = 2"),
        at_most=1.03,
    ),
    Row(
        "segments",
        "segments",
        "A step in one segment over one in four, 1 Gbit/s",
        _ratio("segments", "step seconds", "K = 1, L = 1, 1e9", "K = 1, L = 4, 1e9"),
        at_least=1.1,
    ),
    Row(
        "records",
        "records",
        "Microseconds of a processor that recording adds to a step of 5 ms",
        lambda at: at("records", "microseconds of a processor", "in all"),
        at_most=50.0,
    ),
    Row(
        "transport",
        "transport",
        "Messages of 1 MiB one way: GB/s over those of a bare socket",
        _ratio("transport", "GB/s one way", "1048576 tcp", "1048576 socket"),
        at_least=0.8,
    ),
    Row(
        "long links",
        "long links",
        "Percent of what TCP can carry, 277 ms and 100 Mbit/s, messages over several lanes",
        lambda at: at("long links", "share in percent", "1e8:0.277, tcp, spread"),
        at_least=90.0,
    ),
    *(
        Row(
            f"scale: {series}",
            "scale",
            f"Messages that a rank sends in a step among 64, {name}, over the closed form",
            lambda at, series=series: at("scale", "messages", f"{series}, 64") / at("scale", "law", f"{series}, 64"),
            at_most=1.0,
            spread_of_one=0.0,
        )
        for series, name in {"hop:ring_based": "Hop", "pipe_sgd:mesh": "Pipe-SGD", "shat": "a worker of SHAT"}.items()
    ),
    Row(
        "scale: end",
        "scale",
        "Messages that a rank of Pipe-SGD sends among 64 when `fit` ends",
        lambda at: at("scale", "leave", "pipe_sgd:mesh, 64"),
        at_most=1000.0,
        spread_of_one=0.0,
    ),
    Row(
        "plan",
        "plan",
        "The largest relative error of predicted steps",
        lambda at: np.max(np.abs(at.all("plan", "predicted over measured") - 1), keepdims=True),
        at_most=0.2,
    ),
]

_CALLS = {
    "DDP (PyTorch, gloo)": "ddp",
    "DDP with PowerSGD": "ddp:powersgd",
    "synchronous": "synchronous",
    "PipeSGDStrategy()": "auto",
    "DTSStrategy()": "dts_auto",
}
PICTURES = [
    Picture(
        "training",
        "training 1e8",
        "Seconds for a training of three ranks, without arguments",
        {
            name: [(label, f"training {link}", _SECONDS, f"digits, alike, {kind}") for label, kind in _CALLS.items()]
            for link, name in LINKS.items()
        },
    ),
    Picture(
        "step",
        "step",
        "Processor time of a rank for a step, two ranks, ms",
        {
            "": [
                (label, "step", "processor_ms", f"perceptron {kind}")
                for label, kind in {
                    "Keras, one process": "keras 1",
                    "Pipe-SGD, K = 1": "pipe_sgd_k1 2",
                    "DTS, D = 4, p = 4": "dts_4_4 2",
                    "Hop": "hop 2",
                    "Canary": "canary 2",
                    "SHAT, a worker": "shat 2",
                    "PyTorch, one process": "torch 1",
                    "DDP (PyTorch, gloo)": "ddp 2",
                    "MultiWorkerMirroredStrategy": "mirrored 2",
                }.items()
            ]
        },
    ),
]
