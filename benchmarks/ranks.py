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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import network

LOOPBACK = "loopback"

_CASE, _RANK = "HOP_TF_BENCHMARK_CASE", "HOP_TF_BENCHMARK_RANK"


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
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 900.0,
    **emulation,
) -> list:
    """Runs the ranks of a case.

    Args:
      script: The benchmark's file.
      case: What JSON can hold; each rank gets it, with `hosts`, the address of each rank's host, added.
      world_size: Number of ranks.
      link: "loopback", or the rate of each host's link in bits per second, such as "1e9".
      environment: Variables for the ranks' environment.
      timeout_seconds: How long it may take.
      **emulation: Further arguments of `network.Network`, such as `round_trip_seconds`.

    Returns:
      What each rank has returned.

    Raises:
      RuntimeError: If a rank fails, or takes too long. The others are ended.
    """
    with tempfile.TemporaryDirectory() as folder, _hosts(world_size, link, emulation) as (hosts, start):
        path = pathlib.Path(folder) / "case.json"
        path.write_text(json.dumps({**case, "hosts": hosts}))
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **(environment or {}), _CASE: str(path)}
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(world_size):
                command = [sys.executable, script]
                processes.append(start(rank, command, env={**environment, _RANK: str(rank)}))
            for rank, process in enumerate(processes):
                if process.wait(timeout_seconds):
                    raise RuntimeError(f"rank {rank} ended with exit code {process.returncode}.")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [pickle.loads(path.with_name(f"result.{rank}").read_bytes()) for rank in range(world_size)]


@contextlib.contextmanager
def _hosts(world_size: int, link: str, emulation: Mapping) -> Iterator[tuple[list[str], Callable]]:
    """Addresses of the hosts, and what starts a process on one."""
    if link == LOOPBACK:
        yield ["127.0.0.1"] * world_size, lambda rank, command, env: subprocess.Popen(command, env=env)
        return
    with network.Network(world_size, bandwidth_bits_per_second=float(link), **emulation) as net:
        yield list(net.addresses), net.popen
