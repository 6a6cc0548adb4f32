"""The set-up in the process of a Ray Train worker, before its training function runs. Without TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping

import ray
import ray.train

from hop_tf.tools.launchers.rendezvous import HOST_VARIABLE, join_address, reserve_port
from hop_tf.tools.processes.local_cluster import hold_port, thread_limits


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of all workers together. Ray makes another attempt when training has failed and is to begin anew.

    Attributes:
      name: The unique name of the attempt.
      is_rejoining: True if this worker takes the place of one that was lost, while the others train.
    """

    name: str
    is_rejoining: bool


# The attempt of this process, which belongs to only one. The port is kept for the strategy until the process ends.
_attempt: Attempt | None = None
_port: contextlib.AbstractContextManager | None = None


def current_attempt() -> Attempt | None:
    """The attempt that this worker belongs to, or None if the trainer has no `ClusterConfig`."""
    return _attempt


def own_host() -> str:
    """The host of this process for others: HOP_TF_HOST, if that is set, or otherwise Ray's address of its node."""
    return os.environ.get(HOST_VARIABLE) or ray.util.get_node_ip_address()


def own_rank() -> int:
    """This worker's rank."""
    return ray.train.get_context().get_world_rank()


def reserve_address() -> str:
    """Keeps a free port for this process.

    Returns:
      "host:port".

    Raises:
      ClusterConfigError: If the process cannot listen there.
    """
    global _port
    host = own_host()
    _port = reservation = reserve_port(host)
    return join_address(host, reservation.ports[0])


def keep_port(environment: Mapping[str, str]) -> None:
    """Keeps the port that TF_CONFIG gives this process, unless the port is kept already. Needed after a restart by Ray.

    Raises:
      ProcessError: If another job has reserved the port since the earlier process has died.
    """
    global _port
    if _port is None:
        config = json.loads(environment["TF_CONFIG"])
        address = config["cluster"][config["task"]["type"]][config["task"]["index"]]
        _port = hold_port(int(address.rpartition(":")[2]))


def set_up(environment: Mapping[str, str], num_local: int, num_gpus: float, attempt: Attempt) -> None:
    """Turns this process into a rank.

    Limits of threads, and TensorFlow's visible GPUs, stay if they are already set.

    Args:
      environment: Variables to set.
      num_local: The number of workers that share this machine's cores.
      num_gpus: The number of GPUs that Ray has reserved for this worker. Below 1, workers share a GPU.
      attempt: The attempt that the worker belongs to.

    Raises:
      ProcessError: If another job has reserved the worker's port, after its earlier process was lost.
    """
    global _attempt
    keep_port(environment)
    _attempt = attempt
    os.environ.update({**thread_limits(num_local), **_gpu_defaults(num_gpus), **os.environ, **environment})


def _gpu_defaults(num_gpus: float) -> dict[str, str]:
    """Variables that limit TensorFlow's GPUs. Without them, TensorFlow takes all GPUs and their memory."""
    if num_gpus == 0:
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    return {"TF_FORCE_GPU_ALLOW_GROWTH": "true"} if num_gpus < 1 else {}
