"""The file descriptors that connections to many peers take, and the limit on them."""

from __future__ import annotations

import contextlib
import math
import resource

from absl import logging

# Measured for one peer: sockets of three lanes in both directions, and gRPC's own. Further lanes take more.
_OF_A_PEER = 10
# The descriptors of a process without peers, open files included.
_OTHERS = 200


def limit() -> float:
    """The limit on the descriptors of this process; infinity if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def num_needed(num_peers: int) -> int:
    """The number of descriptors that a process with this number of peers needs."""
    return _OTHERS + _OF_A_PEER * num_peers


def raise_limit(num_peers: int) -> None:
    """Raises the limit on this process's descriptors to the need of its peers, or as far as the system allows."""
    needed = num_needed(num_peers)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if limit() < wanted:
        with contextlib.suppress(OSError, ValueError):  # Some systems allow less than they say.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def warn_of_limit(name: str, num_peers: int, num_most: int) -> bool:
    """Logs a warning if the limit is too low. Returns True if it is.

    Args:
      name: The process, in words.
      num_peers: Number of peers so far.
      num_most: Number of other processes, all of which may become peers.
    """
    if limit() >= num_needed(num_peers):
        return False
    logging.warning(
        "%s may run out of file descriptors: connections to %d processes take about %d, and its limit is %d. "
        "Connections then fail, as if a firewall dropped them. Raise the limit before the job starts: `ulimit -n %d`, "
        "or LimitNOFILE of a systemd unit.",
        name,
        num_peers,
        num_needed(num_peers),
        limit(),
        num_needed(num_most),
    )
    return True
