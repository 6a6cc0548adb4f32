"""The report's experiments, each a run of a benchmark. See `report.py`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

QUICK, SMALL, FULL = "quick", "small", "full"
SIZES = (QUICK, SMALL, FULL)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run of a benchmark.

    Attributes:
      name: Name of the experiment.
      title: Title of its section on the page.
      script: The benchmark's file.
      arguments: Its arguments in the small report.
      full: Further arguments in the full report. A flag that comes twice counts as it comes last.
      quick: Further arguments in the quick report, or None if the experiment is not in it.
      sizes: The reports that contain it, "quick" aside.
      data: Name of the data in `keras.datasets`' folder, or None if it needs none.
      minutes: About how long it takes in the small report, on two cores.
    """

    name: str
    title: str
    script: str
    arguments: Sequence[str]
    full: Sequence[str] = ()
    quick: Sequence[str] | None = None
    sizes: Sequence[str] = (SMALL, FULL)
    data: str | None = None
    minutes: float = 2.0

    def command(self, size: str) -> list[str] | None:
        """Returns script and arguments in a report of that size, or None if the experiment is not in it."""
        if size == QUICK:
            return None if self.quick is None else [self.script, *self.arguments, *self.quick]
        if size not in self.sizes:
            return None
        return [self.script, *self.arguments, *(self.full if size == FULL else ())]

    @property
    def missing_data(self) -> pathlib.Path | None:
        """The folder of data that is missing, or None."""
        if self.data is None:
            return None
        home = os.environ.get("KERAS_HOME") or pathlib.Path.home() / ".keras"
        folder = pathlib.Path(home, "datasets", self.data)
        return None if folder.exists() else folder


LINKS = {"loopback": "loopback", "1e10": "10 Gbit/s", "1e9": "1 Gbit/s", "1e8": "100 Mbit/s", "1e7": "10 Mbit/s"}
SLOW_LINKS = ("1e8", "1e7")
HOOKS = ("ddp", "ddp:fp16", "ddp:powersgd")  # DDP alone, and with its hooks.
_HOOKS = ",".join(HOOKS)
# For each value of --ranks: the title, the link, and kinds of training.
UNEVEN_RANKS = {
    "slow": ("One of three ranks ten times slower", "loopback", "canary,shat,ddp"),
    "slow:4": ("One of three ranks four times slower", "loopback", "canary,shat,ddp"),
    "random": ("Every rank six times slower in one of three steps", "loopback", "canary,shat,ddp"),
    "link:10": ("One of three links with 100 Mbit/s, the others with 1 Gbit/s", "1e9", f"auto,dts_auto,{_HOOKS}"),
}
_TRAINING = ("--experiments=time", "--tasks=digits", "--seeds=0", "--schedule=cosine")
_STEP = ("--models=perceptron", "--worlds=1,2", "--rounds=3", "--steps=100")
_STEP_KINDS = "keras,pipe_sgd_k1,dts_4_4,hop,canary,shat,torch,ddp,tf_keras,mirrored"
_MEMBERS = "--members=mesh/identity,ring/identity,mesh/int8,ring/int8,gloo"
_SITES = ("--world_size=2", "--batch_size=96", "--round_trip=0.277", "--step_seconds=0.05", "--link=1e8")

EXPERIMENTS = [
    Experiment(
        "step",
        "A step",
        "benchmark_step.py",
        [*_STEP, f"--kinds={_STEP_KINDS}"],
        full=["--models=perceptron,deep", "--worlds=1,2,4", "--rounds=5"],
        quick=["--rounds=2", "--steps=60", "--kinds=keras,pipe_sgd_k1,torch,ddp"],
        minutes=6,
    ),
    *(
        Experiment(
            f"all-reduce {link}",
            f"All-reduce, {LINKS[link]}",
            "benchmark_allreduce.py",
            [f"--links={link}", "--world_sizes=4", "--megabytes=25", "--rounds=5", _MEMBERS],
            full=["--world_sizes=2,4", "--megabytes=1,25,100", "--rounds=9"],
            quick=["--rounds=3"] if link == "loopback" else None,
            minutes=1,
        )
        for link in ("loopback", "1e9")
    ),
    *(
        Experiment(
            f"training {link}",
            f"Whole training without arguments, {LINKS[link]}",
            "benchmark_delay.py",
            [*_TRAINING, f"--link={link}", f"--kinds=auto,dts_auto,{_HOOKS if link in SLOW_LINKS else 'ddp'}"],
            full=["--tasks=digits,perceptron,cnn", "--seeds=0,1,2", f"--kinds=auto,dts_auto,{_HOOKS},mirrored"],
            sizes=(FULL,) if link in ("1e7", "1e10") else (SMALL, FULL),
            minutes=3 if link in SLOW_LINKS else 1,
        )
        for link in LINKS
    ),
    Experiment(
        "sites",
        "Two sites, 277 ms and 100 Mbit/s",
        "benchmark_delay.py",
        [*_TRAINING, *_SITES, "--kinds=synchronous,dts_auto,diloco:20:9:2,hivemind:20"],
        full=["--tasks=digits,perceptron", "--seeds=0,1,2"],
        minutes=3,
    ),
    *(
        Experiment(
            f"ranks {ranks}",
            title,
            "benchmark_delay.py",
            [*_TRAINING, f"--link={link}", f"--ranks={ranks}", f"--kinds={kinds}"],
            full=["--seeds=0,1,2", f"--kinds=hop,auto,dts_auto,canary,shat,{kinds},mirrored"],
            sizes=(SMALL, FULL) if ranks.startswith("slow") else (FULL,),
            minutes=2 if ranks == "slow:4" else 3,
        )
        for ranks, (title, link, kinds) in UNEVEN_RANKS.items()
    ),
    Experiment(
        "hop",
        "Hop's mechanisms, 16 ranks on a virtual clock",
        "benchmark_hop.py",
        ["--num_steps=100", "--num_seeds=3", "--topologies=ring_based,double_ring"],
        full=["--num_steps=200", "--num_seeds=5"],
        quick=["--topologies=ring_based", "--num_seeds=1"],
        minutes=1,
    ),
    Experiment(
        "pipe_sgd",
        "Pipe-SGD, steps of 0.2 s at 100 Mbit/s",
        "benchmark_pipe_sgd.py",
        [
            *("--experiments=timing", "--links=100e6", "--num_values=2000000", "--algorithm=ring"),
            *("--num_steps=8", "--step_seconds=0.2", "--codecs=int8"),
        ],
        full=["--step_seconds=0.1,0.2,0.4", "--num_steps=12", "--codecs=truncate16,int8"],
        minutes=4,
    ),
    Experiment(
        "dts",
        "DTS, steps of 0.3 s at 100 Mbit/s",
        "benchmark_dts.py",
        ["--links=100e6", "--round_trips=0.277"],
        full=["--links=100e6,10e6", "--round_trips=0,0.277,1"],
        minutes=2,
    ),
    Experiment(
        "canary",
        "Canary, traffic and a slow rank",
        "benchmark_canary.py",
        ["--experiments=traffic,straggler", "--num_steps=30"],
        full=["--experiments=traffic,straggler,interfaces"],
        minutes=4,
    ),
    Experiment(
        "canary training",
        "Canary, time to accuracy",
        "benchmark_canary.py",
        ["--experiments=accuracy", "--link=50e6", "--accuracy_rows=6000", "--epochs=3", "--target=0.75"],
        full=["--accuracy_rows=60000", "--epochs=5", "--target=0.85", "--seeds=3"],
        data="fashion-mnist",
        minutes=5,
    ),
    Experiment(
        "shat",
        "SHAT, accuracy",
        "benchmark_shat.py",
        ["--world_sizes=16", "--learning_rates=0.025,0.05", "--seeds=1", "--num_samples=30000", "--epochs=5"],
        full=["--num_samples=60000", "--epochs=5", "--seeds=3", "--learning_rates=0.025,0.05,0.1"],
        data="fashion-mnist",
        minutes=4,
    ),
    Experiment(
        "storm",
        "Ranks that are killed and stopped",
        "benchmark_storm.py",
        ["--strategies=pipe_sgd,canary,torchft", "--steps=120"],
        full=["--strategies=pipe_sgd,dts,hop,canary,shat,torchft", "--steps=180"],
        minutes=4,
    ),
    Experiment(
        "kernels",
        "Kernels on processors",
        "benchmark_ops.py",
        ["--sizes=10000000", "--rounds=5"],
        full=["--sizes=1000000,10000000,100000000", "--rounds=9"],
        quick=[],
        minutes=1,
    ),
    Experiment(
        "scale",
        "Many ranks, on a virtual clock",
        "benchmark_scale.py",
        ["--series=hop:ring_based,pipe_sgd:mesh,shat", "--smallest=16", "--largest=64"],
        quick=[],
        full=["--series=hop:ring_based,hop:exponential,pipe_sgd:mesh,pipe_sgd:ring,dts:mesh,shat", "--largest=1024"],
        minutes=1,
    ),
    Experiment("plan", "Predicted steps", "benchmark_plan.py", ["--num_steps=20"], sizes=(FULL,)),
    Experiment("memory", "Memory of a rank", "benchmark_memory.py", [], sizes=(FULL,)),
    *(
        Experiment(name, title, "benchmark_pipe_sgd.py", [f"--experiments={name}", "--links=1e9"], sizes=(FULL,))
        for name, title in {"replay": "Pipe-SGD's own steps that stand in", "segments": "Pipe-SGD in segments"}.items()
    ),
    Experiment("records", "Recording", "benchmark_records.py", [], sizes=(FULL,)),
    Experiment("transport", "The transport", "benchmark_transport.py", [], sizes=(FULL,)),
    Experiment("long links", "Long links", "benchmark_long_links.py", [], sizes=(FULL,)),
]
