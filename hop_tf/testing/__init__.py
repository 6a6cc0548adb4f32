"""Help for tests of training programs: clusters in one process and in several."""

from hop_tf.simulate import VirtualCluster
from hop_tf.testing.in_process_cluster import InProcessCluster
from hop_tf.testing.multi_process import (
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
