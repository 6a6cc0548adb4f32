"""Runs a function in one process for each rank, on this machine's loopback or on hosts of an emulated network.

A benchmark calls `run(__file__, case, world_size, link)` in its parent process. Each rank starts the same file again.
There `serve(function)` calls `function(case, rank)`, and sends the result to the parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.tools.testing import network

LOOPBACK = "loopback"

_CASE, _RANK = "HOP_TF_BENCHMARK_CASE", "HOP_TF_BENCHMARK_RANK"
_FIRST_PORT = 23000  # On hosts of their own.
_POLL_SECONDS = 0.2


def serve(function: Callable[[Mapping, int], Any]) -> None:
    """In the process of a rank, calls `function(case, rank)` and ends the process. Does nothing in the parent."""
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
    **emulation,
) -> list:
    """Runs the ranks of a case.

    Args:
      script: The benchmark's file.
      case: Values for JSON. Each rank gets the case with `addresses` added: `num_ports` lists of "host:port" of all
        ranks; and `interfaces`, the addresses of each rank's interfaces, None on loopback.
      world_size: Number of ranks.
      link: "loopback", or the rate of each host's link in bits per second, such as "1e9".
      num_ports: Number of ports of each rank.
      environment: Variables for the ranks' environment.
      timeout_seconds: Limit for the whole run.
      **emulation: Further arguments of `network.EmulatedNetwork`, such as `round_trip_seconds`. One that is given here
        counts instead of `link`.

    Returns:
      The result of each rank.

    Raises:
      RuntimeError: If a rank fails, or takes too long. The others are ended.
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
            _await(processes, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [pickle.loads(path.with_name(f"result.{rank}").read_bytes()) for rank in range(world_size)]


def _await(processes: Sequence[subprocess.Popen], timeout_seconds: float) -> None:
    """Waits until all processes have ended. Raises as soon as any one has failed."""
    deadline = time.monotonic() + timeout_seconds
    running = dict(enumerate(processes))
    while running:
        for rank in [rank for rank, process in running.items() if process.poll() is not None]:
            exit_code = running.pop(rank).returncode
            if exit_code:
                raise RuntimeError(f"rank {rank} ended with exit code {exit_code}.")
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(running)} take too long.")
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _hosts(world_size: int, num_ports: int, link: str, emulation: Mapping) -> Iterator[tuple[Mapping, Callable]]:
    """Yields the addresses and interfaces of the hosts, and a function that starts a process on one."""
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
