"""Deterministic simulation of the algorithms: their own code, on a virtual clock, in one process.

Every rank runs the algorithm's real `Exchange` and `Membership`. Only the layer below is replaced: the monitor's clock
is virtual, and the transport delivers messages after a given link time. One rank runs at a time, and the virtual time
determines the order. So a run depends only on its arguments, and a deadlock shows at once, because no event is left.

`hop_tf.simulate.hop` simulates `HopStrategy`, to compare topologies and the mechanisms against stragglers.
`hop_tf.simulate.training` finds the duration of steps under Hop, Pipe-SGD and DTS, for `plan` and `diagnose`.
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

# These need TensorFlow, for its queues. The others do not, so that importing them is fast.
_WITH_TENSORFLOW = {name: name for name in ("Fault", "HopSimulation", "Problem")} | {"hop": "simulate_hop"}


def __getattr__(name):
    if name not in _WITH_TENSORFLOW:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module("hop_tf.tools.simulate.hop_training"), _WITH_TENSORFLOW[name])
