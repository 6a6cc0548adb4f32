"""Measures the speedup of Hop's mechanisms on the virtual clock of `hop_tf.simulate`: the paper's Figures 12 to 19.

    python benchmarks/benchmark_hop.py --topologies=ring_based,double_ring --cases=random:serial,straggler:parallel

random     Every rank is 6 times slower with probability 1/n in each step (Figures 12 and 14 to 17): one backup worker,
           staleness 5, both, and both with jumps; also in the paper's serial order.
straggler  One rank is always 4 times slower (Figures 18 and 19): one backup worker, and jumps of up to 2 and 10.

A case is a slowdown and the order of a step, "parallel" or "serial". Shown are iterations a second, mean over ranks,
divided by those of the standard form, for each seed of the slowdowns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import results
from absl import app, flags, logging

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation, Slowdown

_TOPOLOGIES = flags.DEFINE_list("topologies", ["ring_based"], "Graphs.")
_CASES = flags.DEFINE_list("cases", ["random:parallel", "random:serial", "straggler:parallel"], "Slowdown:order.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 120, "Iterations of each rank.", lower_bound=1)
_NUM_SEEDS = flags.DEFINE_integer("num_seeds", 3, "Seeds of the slowdowns.", lower_bound=1)

_NUM_WORKERS = 16
_STANDARD = "standard"
_BACKUP, _STALENESS = {"num_backup_workers": 1}, {"max_staleness": 5}
_MECHANISMS = {
    _STANDARD: {},
    "backup 1": _BACKUP,
    "staleness 5": _STALENESS,
    "hybrid": _BACKUP | _STALENESS,
    "hybrid, skip": _BACKUP | _STALENESS | {"skip": hop_tf.SkipIterations()},
}
_WITH_A_STRAGGLER = {
    _STANDARD: {},
    "backup 1": _BACKUP,
    **{f"backup 1, skip {most}": _BACKUP | {"skip": hop_tf.SkipIterations(max_jump=most)} for most in (2, 10)},
}
_SLOWDOWNS = {
    "random": (Slowdown(None, 6.0), _MECHANISMS),
    "straggler": (Slowdown(_NUM_WORKERS // 3, 4.0), _WITH_A_STRAGGLER),
}


def _speeds(topology: str, slowdowns: Sequence[Slowdown], **settings) -> np.ndarray:
    """Returns the iterations per second of each seed, mean over ranks, for steps of a second."""
    about = {"topology": topology, "world_size": _NUM_WORKERS, "num_steps": _NUM_STEPS.value, **settings}
    computes = [ComputeEmulation(step_seconds=1.0, slowdowns=slowdowns, seed=seed) for seed in range(_NUM_SEEDS.value)]
    return np.array([hop_tf.simulate.hop(compute=each, **about).iterations_per_second.mean() for each in computes])


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # Otherwise simulated ranks would log that they leave.
    for topology, case in itertools.product(_TOPOLOGIES.value, _CASES.value):
        name, order = case.split(":")
        slowdown, mechanisms = _SLOWDOWNS[name]
        speeds = {"homogeneous": _speeds(topology, (), update_order=order)}
        for label, settings in mechanisms.items():
            speeds[label] = _speeds(topology, (slowdown,), update_order=order, **settings)
        for label, of_seeds in speeds.items():
            results.show(f"{topology}, {name}, {order}, {label}", {"speedup": of_seeds / speeds[_STANDARD]})


if __name__ == "__main__":
    app.run(main)
