"""Measures the speedup of Hop's mechanisms on the virtual clock of `hop_tf.simulate`: the paper's Figures 12 to 19.

    python benchmarks/benchmark_hop.py --topologies=ring_based,double_ring

random     Every rank is 6 times slower with probability 1/n in each step (Figures 12 and 14 to 17): one backup worker,
           staleness 5, both, and both with jumps; also in the paper's serial order.
straggler  One rank is always 4 times slower (Figures 18 and 19): one backup worker, and jumps of up to 2 and 10.

Shown are iterations per second over those of the standard form: means over ranks, for the seeds of the slowdowns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import results
from absl import app, flags, logging

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation, Slowdown

_TOPOLOGIES = flags.DEFINE_list("topologies", ["ring_based"], "Graphs.")
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
_FOR_A_STRAGGLER = {
    _STANDARD: {},
    "backup 1": _BACKUP,
    **{f"backup 1, skip {most}": _BACKUP | {"skip": hop_tf.SkipIterations(max_jump=most)} for most in (2, 10)},
}


def _speeds(topology: str, slowdowns: Sequence[Slowdown], **settings) -> np.ndarray:
    """Returns the iterations per second of each seed, mean over ranks, for steps of a second."""
    about = {"topology": topology, "world_size": _NUM_WORKERS, "num_steps": _NUM_STEPS.value, **settings}
    computes = [ComputeEmulation(step_seconds=1.0, slowdowns=slowdowns, seed=seed) for seed in range(_NUM_SEEDS.value)]
    return np.array([hop_tf.simulate.hop(compute=each, **about).iterations_per_second.mean() for each in computes])


def _measure(name: str, topology: str, order: str, slowdown: Slowdown, mechanisms: Mapping[str, Mapping]) -> None:
    """Prints and keeps the speeds of all mechanisms."""
    speeds = {"homogeneous": _speeds(topology, (), update_order=order)}
    for label, settings in mechanisms.items():
        speeds[label] = _speeds(topology, (slowdown,), update_order=order, **settings)
    for label, of_seeds in speeds.items():
        results.show(f"{topology}, {name}, {order}, {label}", {"speedup": of_seeds / speeds[_STANDARD]})


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.ERROR)  # Otherwise simulated ranks would log that they leave.
    for topology in _TOPOLOGIES.value:
        for order in ("parallel", "serial"):
            _measure("random", topology, order, Slowdown(None, 6.0), _MECHANISMS)
        _measure("straggler", topology, "parallel", Slowdown(_NUM_WORKERS // 3, 4.0), _FOR_A_STRAGGLER)


if __name__ == "__main__":
    app.run(main)
