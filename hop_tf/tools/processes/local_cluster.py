"""A cluster on one machine: its tasks, their ports and `TF_CONFIG`, and their shares of cores and GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence

from hop_tf.errors import HopError
from hop_tf.options import DEVICES_VARIABLE, devices_per_worker

_HOST = "127.0.0.1"
_LOWEST_PORT = 10240
_EPHEMERAL_PORTS = (32768, 60999)


class ProcessError(HopError):
    """Raised if a process could not be started or supervised."""


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One process of a job, named as in `TF_CONFIG`.

    Attributes:
      type: "worker" or "ps".
      index: The number among the tasks of that type. A worker's index is its rank.
    """

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type} {self.index}"

    @property
    def file_stem(self) -> str:
        """The name for the task's files, for instance "worker_2"."""
        return f"{self.type}_{self.index}"


def make_tasks(*, num_workers: int, num_ps: int = 0) -> tuple[Task, ...]:
    """Lists the tasks of a job, workers first.

    Raises:
      ValueError: If there is no worker or `num_ps` is negative.
    """
    if num_workers < 1:
        raise ValueError(f"`num_workers` must be at least 1. Received: num_workers={num_workers}.")
    if num_ps < 0:
        raise ValueError(f"`num_ps` must not be negative. Received: num_ps={num_ps}.")
    return (*(Task("worker", index) for index in range(num_workers)), *(Task("ps", index) for index in range(num_ps)))


def make_tf_configs(tasks: Sequence[Task], addresses: Sequence[str]) -> dict[Task, str]:
    """Returns each task's value of `TF_CONFIG`, for a cluster with one "host:port" per task."""
    cluster: dict[str, list[str]] = {}
    for task, address in zip(tasks, addresses, strict=True):
        cluster.setdefault(task.type, []).append(address)
    return {task: json.dumps({"cluster": cluster, "task": {"type": task.type, "index": task.index}}) for task in tasks}


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_limits(num_workers: int) -> dict[str, str]:
    """Returns environment variables that let `num_workers` TensorFlow processes share this machine's cores.

    Every worker gets cores / num_workers threads per pool, at least one. TensorFlow's pool for whole operations
    (inter-op) keeps at least two: with one thread, an operation that waits for a peer would stop other computation.
    """
    share = max(1, available_cores() // num_workers)
    return {
        "OMP_NUM_THREADS": str(share),
        "TF_NUM_INTRAOP_THREADS": str(share),
        "TF_NUM_INTEROP_THREADS": str(max(2, share)),
    }


class PortReservation:
    """Distinct free TCP ports, by default on the loopback interface, held until the processes that use them start.

    The ports lie below the system's range for outgoing connections. So no connection takes a port by chance between
    `release` and the moment at which the new owner binds the port. Other reservations cannot get the port until this
    one is closed, because each port's name is also held, as an abstract Unix socket.

    Args:
      count: Number of ports.
      host: Name or address of this machine on which the ports are to be free.

    Attributes:
      ports: The port numbers.

    Raises:
      ProcessError: If there are fewer than `count` free ports.
    """

    def __init__(self, count: int, host: str = _HOST):
        self._host = host
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._names = contextlib.ExitStack()
        self._sockets = contextlib.ExitStack()
        candidates = _candidate_ports()
        try:
            self.ports = tuple(self._reserve_next(candidates, count) for _ in range(count))
        except ProcessError:
            self.close()
            raise

    def release(self) -> None:
        """Frees the ports for the processes that will use them. The names stay taken until `close`."""
        self._sockets.close()

    def close(self) -> None:
        """Frees the ports and their names."""
        self._sockets.close()
        self._names.close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _reserve_next(self, candidates, count: int) -> int:
        for port in candidates:
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                name = stack.enter_context(_hold_name(port))
                bound = stack.enter_context(socket.socket(self._family, socket.SOCK_STREAM))
                bound.bind((self._host, port))
                stack.pop_all()
                self._names.enter_context(name)
                self._sockets.enter_context(bound)
                return port
        raise ProcessError(f"This machine has fewer than {count} free TCP ports for a job.")


def _candidate_ports():
    """Ports below the ephemeral range in random order. The order does not depend on seeds that a program sets."""
    first_ephemeral = _EPHEMERAL_PORTS[0]
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first_ephemeral = int(file.read().split()[0])
    ports = list(range(_LOWEST_PORT, first_ephemeral if first_ephemeral > 2 * _LOWEST_PORT else 65536))
    random.SystemRandom().shuffle(ports)
    return iter(ports)


def hold_port(port: int) -> contextlib.AbstractContextManager:
    """Prevents other jobs from reserving a port, even if the port is in use. The caller must close the result.

    Raises:
      ProcessError: If another job has reserved the port.
    """
    try:
        return _hold_name(port)
    except OSError as error:
        raise ProcessError(
            f"Port {port} of this machine is reserved for another job. End that job, or start this one again."
        ) from error


def _hold_name(port: int):
    if not sys.platform.startswith("linux"):
        return contextlib.nullcontext()
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0hop_tf/port/{port}")
    except OSError:
        held.close()
        raise
    return held


def task_environments(
    tasks: Sequence[Task], ports: Sequence[int], base: Mapping[str, str]
) -> dict[Task, dict[str, str]]:
    """Returns all environment variables of each task.

    Args:
      tasks: The tasks of the job.
      ports: One port per task.
      base: Variables to start from. The user's values for threads and GPUs stay.

    Returns:
      For each task, the variables of `share_of_machine`, and `TF_CONFIG`.
    """
    configs = make_tf_configs(tasks, [f"{_HOST}:{port}" for port in ports])
    num_workers = sum(task.type == "worker" for task in tasks)
    indices = {task: task.index if task.type == "worker" else None for task in tasks}
    return {
        task: {**share_of_machine(base, num_workers=num_workers, index=indices[task]), "TF_CONFIG": configs[task]}
        for task in tasks
    }


def share_of_machine(base: Mapping[str, str], *, num_workers: int, index: int | None) -> dict[str, str]:
    """Returns `base` with the limits of `thread_limits`, and the GPUs that `gpu_assignments` has for a worker.

    Args:
      base: Variables to start from. Values for threads and GPUs stay.
      num_workers: Number of workers on this machine.
      index: The worker's number among these, or None for a parameter server, which gets no GPU.
    """
    if index is not None:
        gpu = gpu_assignments(num_workers, base)[index]
    else:
        gpu = {"CUDA_VISIBLE_DEVICES": "-1"} if _visible_gpus(base) else {}
    return {**thread_limits(num_workers), **base, **gpu}


def gpu_assignments(num_workers: int, base: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the environment variables that share this machine's NVIDIA GPUs among the workers.

    Each worker sees its part of the GPUs, or as many as `DEVICES_VARIABLE` says, at least one. If there are too few,
    workers take them in turn. `CUDA_VISIBLE_DEVICES` lists the GPUs to share. Default: all. Workers that share a GPU
    take its memory as they need it, not all of it at their start, unless `TF_FORCE_GPU_ALLOW_GROWTH` says otherwise.

    Raises:
      ProcessError: If a worker is to have more GPUs than there are.
    """
    visible = _visible_gpus(base)
    number = devices_per_worker(base) or max(1, len(visible) // num_workers)
    if visible and number > len(visible):
        raise ProcessError(
            f"a worker cannot have more GPUs than this machine. Received: {DEVICES_VARIABLE}={number} "
            f"(--devices_per_worker), and {len(visible)} GPUs."
        )
    environments: list[dict[str, str]] = [{} for _ in range(num_workers)]
    for rank, environment in enumerate(environments):
        if len(visible) > number:
            own = [visible[(rank * number + index) % len(visible)] for index in range(number)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        if 0 < len(visible) < num_workers * number:
            environment["TF_FORCE_GPU_ALLOW_GROWTH"] = base.get("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    return environments


def _visible_gpus(base: Mapping[str, str]) -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in base:
        return [device for device in base["CUDA_VISIBLE_DEVICES"].split(",") if device not in ("", "-1")]
    return [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]
