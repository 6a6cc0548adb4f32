"""Runs a function in one process for each rank, on this machine's loopback or on hosts of an emulated network.

The processes are forked from the calling one, which saves them the seconds of imports. It must not have run anything of
TensorFlow or PyTorch before, because their threads would be missing in the forks.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from typing import Any

from absl import logging

from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.tools.testing import network

LOOPBACK = "loopback"

_FIRST_PORT = 23000  # On hosts of their own.
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
    gc.freeze()  # Otherwise the ranks' collectors would copy the pages of what has been imported.
    with _hosts(world_size, num_ports, link, emulation) as (hosts, inside), contextlib.ExitStack() as stack:

        def work(rank: int) -> Any:
            os.environ.update(environment or {})
            with inside(rank):
                return function({**case, **hosts}, rank)

        processes = {stack.enter_context(_started(work, rank)): rank for rank in range(world_size)}
        return _results(processes, timeout_seconds)


@contextlib.contextmanager
def _started(work: Callable[[int], Any], rank: int) -> Iterator[connection.Connection]:
    """Yields a connection to a new process, which sends `work(rank)` and ends."""
    receiver, sender = _FORK.Pipe(duplex=False)

    def serve() -> None:
        logging.set_verbosity(logging.WARNING)
        try:
            result = work(rank)
            sys.stdout.flush()
            sender.send(result)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)  # Other libraries' collectives leave threads behind that would wait for each other.

    process = _FORK.Process(target=serve)
    process.start()
    sender.close()  # So that the receiver sees when the process ends.
    try:
        yield receiver
    finally:
        receiver.close()
        process.kill()
        process.join()


def _results(connections: Mapping[connection.Connection, int], timeout_seconds: float) -> list:
    """Waits for the results of all ranks. Raises as soon as any one has failed."""
    deadline = time.monotonic() + timeout_seconds
    results, waiting = {}, dict(connections)
    while waiting:
        ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(waiting.values())} take too long.")
        for each in ready:
            rank = waiting.pop(each)
            try:
                results[rank] = each.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} has ended without a result.") from None
    return [results[rank] for rank in sorted(results)]


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
