"""Deterministic simulation of the schemes: their own code, on a virtual clock, in one process.

Every rank runs the scheme's real `Exchange` and `Membership`. Only what they stand on is replaced: the monitor's clock
is virtual, and the transport delivers after a given link time. One rank runs at a time, and the order is fixed by the
virtual time, so a run depends on nothing but its arguments, and a deadlock is seen at once: no event is left.

`hop_tf.simulate.hop` simulates `HopStrategy`: what a topology and the mechanisms against stragglers are worth.
`hop_tf.simulate.training` finds how long steps take under Hop, Pipe-SGD and DTS: for `plan` and `diagnose`.
The loops of its ranks are in `rank_loops`.
"""

import importlib as _importlib

from hop_tf.tools.simulate.scheduler import DeadlockError, Scheduler
from hop_tf.tools.simulate.virtual import VirtualCluster, VirtualMonitor, VirtualTransport

__all__ = [
    "DeadlockError",
    "Fault",
    "HopSimulation",
    "Problem",
    "Scheduler",
    "VirtualCluster",
    "VirtualMonitor",
    "VirtualTransport",
    "hop",
]

# They need TensorFlow, for its queues; the others do not, and are used where it would be slow to import.
_WITH_TENSORFLOW = {name: name for name in ("Fault", "HopSimulation", "Problem")} | {"hop": "simulate_hop"}


def __getattr__(name):
    if name not in _WITH_TENSORFLOW:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module("hop_tf.tools.simulate.hop_training"), _WITH_TENSORFLOW[name])
