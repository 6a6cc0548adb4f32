"""The cluster a process belongs to: who is there, and which rank this is."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import tensorflow as tf

from hop_tf.errors import ClusterConfigError

_TASK_TYPES = ("chief", "worker", "ps")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Addresses of all processes of a job, and this process's place among them.

    Ranks count the training processes: the `chief`, where there is one, is rank 0 and the `worker` tasks follow in
    order, as under `tf.distribute.MultiWorkerMirroredStrategy`.

    Attributes:
      addresses: "host:port" of every rank.
      rank: This process's rank; None on a `ps` task.
      ps_addresses: "host:port" of every parameter server.
      task_type: "chief", "worker" or "ps".
      task_id: Index among the tasks of that type.
    """

    addresses: tuple[str, ...]
    rank: int | None
    ps_addresses: tuple[str, ...] = ()
    task_type: str = "worker"
    task_id: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks that train."""
        return len(self.addresses)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host part of every rank's address, for topologies that follow machines."""
        return tuple(address.rpartition(":")[0] for address in self.addresses)

    @classmethod
    def from_resolver(cls, resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None) -> Cluster:
        """Reads the cluster from a resolver; from `TF_CONFIG` by default.

        Args:
          resolver: Any `ClusterResolver`. Default: `TFConfigClusterResolver`. An empty cluster, as without
            `TF_CONFIG`, is a world of one.

        Returns:
          The cluster.

        Raises:
          ClusterConfigError: If tasks are missing, of an unknown type, listed twice, or `TF_CONFIG` is not valid.
        """
        if resolver is None:
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        try:
            # Resolvers that ask a scheduler (Slurm) know their task only after the cluster was resolved.
            spec = resolver.cluster_spec().as_dict()
            task_type, task_id = resolver.task_type, resolver.task_id
        except json.JSONDecodeError as error:
            raise ClusterConfigError(f"TF_CONFIG must be valid JSON: {error}.") from error
        if not spec:
            return cls(addresses=("localhost:0",), rank=0)
        return cls._from_tasks(spec, task_type, task_id)

    @classmethod
    def _from_tasks(cls, spec: dict, task_type: str | None, task_id: int | None) -> Cluster:
        unknown = sorted(set(spec) - set(_TASK_TYPES))
        if unknown:
            raise ClusterConfigError(f"Task types must be among {_TASK_TYPES}. Received: {unknown}.")
        tasks = {name: _addresses(spec.get(name, ()), name) for name in _TASK_TYPES}
        if len(tasks["chief"]) > 1:
            raise ClusterConfigError(f"There must be at most one `chief`. Received: chief={tasks['chief']}.")
        addresses = tasks["chief"] + tasks["worker"]
        if not addresses:
            raise ClusterConfigError(f"The cluster must have a `worker` or `chief` task. Received: cluster={spec}.")
        _check_distinct(addresses + tasks["ps"])
        if len(addresses) == 1 and not tasks["ps"] and task_type is None:
            return cls(addresses=addresses, rank=0)
        if task_type not in _TASK_TYPES or task_id is None or not 0 <= int(task_id) < len(tasks[task_type]):
            raise ClusterConfigError(
                f"The task must be one of the cluster's. Received: task type={task_type!r}, index={task_id}, "
                f"cluster={spec}. Check the `task` entry of TF_CONFIG."
            )
        task_id = int(task_id)
        rank = {"chief": 0, "worker": len(tasks["chief"]) + task_id, "ps": None}[task_type]
        return cls(addresses=addresses, rank=rank, ps_addresses=tasks["ps"], task_type=task_type, task_id=task_id)


def _addresses(tasks, task_type: str) -> tuple[str, ...]:
    """Addresses in task order; a sparse job (a dict with gaps) has no rank order and is refused."""
    if isinstance(tasks, dict):
        if sorted(tasks) != list(range(len(tasks))):
            raise ClusterConfigError(f"Tasks of type {task_type!r} must be numbered from 0. Received: {tasks}.")
        tasks = [tasks[index] for index in range(len(tasks))]
    for address in tasks:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ClusterConfigError(f"Addresses must be 'host:port'. Received: {task_type}={address!r}.")
    return tuple(tasks)


def _check_distinct(addresses: tuple[str, ...]) -> None:
    repeated = [address for address, count in Counter(addresses).items() if count > 1]
    if repeated:
        raise ClusterConfigError(f"Every task must have an address of its own. Received twice: {repeated}.")
