"""Runs a function in one process for each rank, on this machine's loopback or on hosts of an emulated network.

A benchmark calls `run(__file__, case, world_size, link)` in its parent process. Each rank is the same file started
again, where `serve(function)` calls `function(case, rank)`; what that returns goes back to the parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.tools.testing import network

LOOPBACK = "loopback"

_CASE, _RANK = "HOP_TF_BENCHMARK_CASE", "HOP_TF_BENCHMARK_RANK"
_FIRST_PORT = 23000  # On hosts of their own.
_POLL_SECONDS = 0.2


def serve(function: Callable[[Mapping, int], Any]) -> None:
    """In the process of a rank calls `function(case, rank)`, and ends the process; elsewhere does nothing."""
    if _CASE not in os.environ:
        return
    path, rank = pathlib.Path(os.environ[_CASE]), int(os.environ[_RANK])
    result = function(json.loads(path.read_text()), rank)
    path.with_name(f"result.{rank}").write_bytes(pickle.dumps(result))
    os._exit(0)  # Other libraries' collectives leave threads behind that would wait for each other.


def run(
    script: str,
    case: Mapping,
    world_size: int,
    link: str,
    *,
    num_ports: int,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 900.0,
    killed: Collection[int] = (),
    **emulation,
) -> list:
    """Runs the ranks of a case.

    Args:
      script: The benchmark's file.
      case: What JSON can hold. Each rank gets it with `addresses` added: `num_ports` lists of "host:port" of all ranks;
        and `interfaces`, the addresses of each rank's interfaces, None on loopback.
      world_size: Number of ranks.
      link: "loopback", or the rate of each host's link in bits per second, such as "1e9".
      num_ports: How many ports each rank gets.
      environment: Variables for the ranks' environment.
      timeout_seconds: How long all of it may take.
      killed: Ranks that kill themselves (SIGKILL).
      **emulation: Further arguments of `network.EmulatedNetwork`, such as `round_trip_seconds`. One that is given here
        counts instead of `link`.

    Returns:
      What each rank has returned; None of those that were killed.

    Raises:
      RuntimeError: If a rank fails, takes too long, or lives where it should not. The others are ended.
    """
    with tempfile.TemporaryDirectory() as folder, _hosts(world_size, num_ports, link, emulation) as (hosts, start):
        path = pathlib.Path(folder) / "case.json"
        path.write_text(json.dumps({**case, **hosts}))
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **(environment or {}), _CASE: str(path)}
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(world_size):
                command = [sys.executable, script]
                processes.append(start(rank, command, env={**environment, _RANK: str(rank)}))
            _await(processes, timeout_seconds, killed)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            None if rank in killed else pickle.loads(path.with_name(f"result.{rank}").read_bytes())
            for rank in range(world_size)
        ]


def _await(processes: Sequence[subprocess.Popen], timeout_seconds: float, killed: Collection[int]) -> None:
    """Waits until all have ended; raises as soon as one has failed, whichever that is."""
    deadline = time.monotonic() + timeout_seconds
    running = dict(enumerate(processes))
    while running:
        for rank in [rank for rank, process in running.items() if process.poll() is not None]:
            exit_code = running.pop(rank).returncode
            if exit_code != (-signal.SIGKILL if rank in killed else 0):
                raise RuntimeError(f"rank {rank} ended with exit code {exit_code}.")
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(running)} take too long.")
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _hosts(world_size: int, num_ports: int, link: str, emulation: Mapping) -> Iterator[tuple[Mapping, Callable]]:
    """What ranks get to know of the hosts, and what starts a process on one."""
    if link != LOOPBACK:
        with network.EmulatedNetwork(world_size, **{"bandwidth_bits_per_second": float(link), **emulation}) as net:
            ports = range(_FIRST_PORT, _FIRST_PORT + num_ports)
            addresses = [[f"{host}:{port}" for host in net.addresses] for port in ports]
            yield {"addresses": addresses, "interfaces": net.interfaces}, net.popen
        return
    reservation = PortReservation(world_size * num_ports)
    try:
        reservation.release()
        ports = iter(reservation.ports)
        addresses = [[f"127.0.0.1:{next(ports)}" for _ in range(world_size)] for _ in range(num_ports)]
        hosts = {"addresses": addresses, "interfaces": None}
        yield hosts, lambda rank, command, env: subprocess.Popen(command, env=env)
    finally:
        reservation.close()
