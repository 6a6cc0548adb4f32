"""Runs a function in one process for each rank, on this machine's loopback or on hosts of an emulated network.

The processes are forked from the calling one, which saves them the seconds of imports. It must not have run anything of
TensorFlow or PyTorch before, because their threads would be missing in the forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.tools.testing import network

LOOPBACK = "loopback"

_FIRST_PORT = 23000  # On hosts of their own.
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1  # Of Linux: the signal for a process whose parent ends.
_FORK = multiprocessing.get_context("fork")


def run(
    function: Callable[[Mapping, int], Any],
    case: Mapping,
    world_size: int,
    link: str,
    *,
    num_ports: int,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 900.0,
    **emulation,
) -> list:
    """Calls `function(case, rank)` in the process of each rank.

    Args:
      function: The function. It gets the case with two entries more: `addresses`, `num_ports` lists of "host:port" of
        all ranks; and `interfaces`, the addresses of each rank's interfaces, None on loopback.
      case: The case.
      world_size: Number of ranks.
      link: "loopback", or the rate of each host's link in bits per second, such as "1e9".
      num_ports: Number of ports of each rank.
      environment: Variables for the ranks' environment.
      timeout_seconds: Limit for the whole run.
      **emulation: Further arguments of `network.EmulatedNetwork`, such as `round_trip_seconds`. One that is given here
        counts instead of `link`.

    Returns:
      The result of each rank, which must be picklable.

    Raises:
      RuntimeError: If a rank fails, or takes too long. The others are ended.
    """
    gc.collect()
    gc.freeze()  # Otherwise the ranks' collectors would copy the pages of what has been imported.
    with tempfile.TemporaryDirectory() as folder, _hosts(world_size, num_ports, link, emulation) as (hosts, inside):
        paths = [pathlib.Path(folder, str(rank)) for rank in range(world_size)]

        def serve(rank: int) -> None:
            os.environ.update(environment or {})
            with inside(rank):
                paths[rank].write_bytes(pickle.dumps(function({**case, **hosts}, rank)))

        processes: list[multiprocessing.Process] = []
        try:
            for rank in range(world_size):
                processes.append(_FORK.Process(target=_serve, args=[functools.partial(serve, rank)]))
                processes[-1].start()
            _await(processes, paths, timeout_seconds)
        finally:
            for process in processes:
                if process.exitcode is None:
                    process.kill()
                    with contextlib.suppress(ProcessLookupError):  # It may have had no session yet.
                        os.killpg(process.pid, signal.SIGKILL)
                process.join()
        return [pickle.loads(path.read_bytes()) for path in paths]


def _serve(run: Callable[[], None]) -> None:
    """Calls `run`, and ends the process and those that it has started. It ends with its parent, too."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.set_verbosity(logging.WARNING)
    try:
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        # Not an orderly end: other libraries' collectives leave threads behind that would wait for each other.
        os.killpg(0, signal.SIGKILL)


def _await(processes: Sequence[multiprocessing.Process], paths: Sequence[pathlib.Path], timeout_seconds: float) -> None:
    """Waits until all processes have ended. Raises as soon as any one has ended without a result."""
    deadline = time.monotonic() + timeout_seconds
    running = dict(enumerate(processes))
    while running:
        for rank in [rank for rank, process in running.items() if process.exitcode is not None]:
            exit_code = running.pop(rank).exitcode
            if not paths[rank].exists():
                raise RuntimeError(f"rank {rank} ended without a result, with exit code {exit_code}.")
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(running)} take too long.")
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _hosts(world_size: int, num_ports: int, link: str, emulation: Mapping) -> Iterator[tuple[Mapping, Callable]]:
    """Yields the addresses and interfaces of the hosts, and a context manager that moves a thread into one."""
    if link != LOOPBACK:
        with network.EmulatedNetwork(world_size, **{"bandwidth_bits_per_second": float(link), **emulation}) as net:
            ports = range(_FIRST_PORT, _FIRST_PORT + num_ports)
            addresses = [[f"{host}:{port}" for host in net.addresses] for port in ports]
            yield {"addresses": addresses, "interfaces": net.interfaces}, net.inside
        return
    with PortReservation(world_size * num_ports) as reservation:
        reservation.release()
        ports = iter(reservation.ports)
        addresses = [[f"127.0.0.1:{next(ports)}" for _ in range(world_size)] for _ in range(num_ports)]
        yield {"addresses": addresses, "interfaces": None}, lambda rank: contextlib.nullcontext()
