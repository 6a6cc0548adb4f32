"""Help for tests of training programs: clusters in one process and in several."""

import importlib as _importlib

from hop_tf.tools.simulate import VirtualCluster
from hop_tf.tools.testing.multi_process import (
    MultiProcessError,
    MultiProcessRunner,
    ProcessResult,
    Results,
    start_fork_server,
    stop_fork_server,
)

__all__ = [
    "InProcessCluster",
    "MultiProcessError",
    "MultiProcessRunner",
    "ProcessResult",
    "Results",
    "VirtualCluster",
    "start_fork_server",
    "stop_fork_server",
]


def __getattr__(name):
    # Imported at first use: the runner's processes need neither TensorFlow nor Keras.
    if name != "InProcessCluster":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _importlib.import_module("hop_tf.tools.testing.in_process_cluster").InProcessCluster
