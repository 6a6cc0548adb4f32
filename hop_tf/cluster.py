"""The cluster that a process belongs to: the addresses of all processes, and this process's rank."""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import json
import numbers
import os
from collections.abc import Callable

import tensorflow as tf

from hop_tf.errors import ClusterConfigError
from hop_tf.transport.addresses import LARGEST_PORT, is_address
from hop_tf.transport.base import Transport

_TASK_TYPES = ("chief", "worker", "ps")
# `localhost` resolves to 127.0.0.1, to ::1, or to both.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Addresses of all processes of a job, and this process's place among them.

    Each training process has a rank. The `chief`, if there is one, is rank 0. The `worker` tasks follow in order, as
    under `tf.distribute.MultiWorkerMirroredStrategy`.

    Attributes:
      addresses: "host:port" of every rank.
      rank: This process's rank; None on a `ps` task.
      ps_addresses: "host:port" of every parameter server.
      task_type: "chief", "worker" or "ps".
      task_id: Index among the tasks of this type.
      make_transport: Function that makes the transport. It takes the arguments of `TcpTransport`. None for
        `TcpTransport` itself. A resolver may have a method of this name, as the resolvers of
        `hop_tf.testing.InProcessCluster` do.
    """

    addresses: tuple[str, ...]
    rank: int | None
    ps_addresses: tuple[str, ...] = ()
    task_type: str = "worker"
    task_id: int = 0
    make_transport: Callable[..., Transport] | None = dataclasses.field(default=None, compare=False)

    @property
    def world_size(self) -> int:
        """Number of ranks that train."""
        return len(self.addresses)

    @property
    def all_addresses(self) -> tuple[str, ...]:
        """The addresses of all processes: first those of the ranks, then those of the parameter servers."""
        return self.addresses + self.ps_addresses

    @property
    def number(self) -> int:
        """This process's index in `all_addresses`."""
        return self.world_size + self.task_id if self.rank is None else self.rank

    @property
    def servers(self) -> range:
        """Indices of the parameter servers in `all_addresses`."""
        return range(self.world_size, len(self.all_addresses))

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
          ClusterConfigError: If tasks are missing, of an unknown type, or listed twice, or if `TF_CONFIG` is not valid.
          TypeError: If `resolver` is no `ClusterResolver`.
        """
        if resolver is None:
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if not isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
            raise TypeError(
                "`cluster_resolver` must be a tf.distribute.cluster_resolver.ClusterResolver or None. "
                f"Received: cluster_resolver={resolver!r}."
            )
        if isinstance(resolver, tf.distribute.cluster_resolver.TFConfigClusterResolver):
            _check_tf_config(os.environ.get("TF_CONFIG", "{}"))
        # Resolvers that ask a scheduler (Slurm) know their task only after `cluster_spec()` has returned.
        spec = resolver.cluster_spec().as_dict()
        task_type, task_id = resolver.task_type, resolver.task_id
        if not spec:
            if task_type or _index(task_id) is not None:
                raise ClusterConfigError(
                    f"A task must be in a cluster. Received: task type={task_type!r}, index={task_id!r}, "
                    "and no cluster. Check the `cluster` entry of TF_CONFIG. Without TF_CONFIG a process trains alone."
                )
            return cls(addresses=("localhost:0",), rank=0)
        cluster = cls._from_tasks(spec, task_type, task_id)
        return dataclasses.replace(cluster, make_transport=getattr(resolver, "make_transport", None))

    @classmethod
    def _from_tasks(cls, spec: dict, task_type: str | None, task_id: int | None) -> Cluster:
        unknown = sorted(set(spec) - set(_TASK_TYPES))
        if unknown:
            raise ClusterConfigError(
                f"Task types must be among {_TASK_TYPES}. There is no evaluator task: evaluate on a rank. Received: "
                f"{unknown}."
            )
        tasks = {name: _addresses(spec.get(name, ()), name) for name in _TASK_TYPES}
        if len(tasks["chief"]) > 1:
            raise ClusterConfigError(f"There must be at most one `chief`. Received: chief={tasks['chief']}.")
        addresses = tasks["chief"] + tasks["worker"]
        if not addresses:
            raise ClusterConfigError(f"The cluster must have a `worker` or `chief` task. Received: cluster={spec}.")
        _check_distinct(addresses + tasks["ps"])
        if len(addresses) == 1 and not tasks["ps"] and task_type is None:
            return cls(addresses=addresses, rank=0)
        index = _index(task_id)
        if task_type not in _TASK_TYPES or index is None or index >= len(tasks[task_type]):
            raise ClusterConfigError(
                f"The task must be one of the cluster's. Received: task type={task_type!r}, index={task_id!r}, "
                f"cluster={spec}. Check the `task` entry of TF_CONFIG. There is no evaluator task: evaluate on a rank."
            )
        rank = {"chief": 0, "worker": len(tasks["chief"]) + index, "ps": None}[task_type]
        return cls(addresses=addresses, rank=rank, ps_addresses=tasks["ps"], task_type=task_type, task_id=index)


def _check_tf_config(text: str) -> None:
    """Refuses a TF_CONFIG on which TensorFlow's resolver would fail, or whose task index the resolver would round."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterConfigError(f"TF_CONFIG must be valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ClusterConfigError(f"TF_CONFIG must be a JSON object. Received: TF_CONFIG={config!r}.")
    for name in difflib.get_close_matches("cluster", config.keys() - {"cluster"}):
        raise ClusterConfigError(f"The entry of TF_CONFIG for the cluster must be named 'cluster'. Received: {name!r}.")
    cluster, task = config.get("cluster", {}), config.get("task", {})
    if not isinstance(cluster, dict) or not all(_is_task_list(tasks) for tasks in cluster.values()):
        raise ClusterConfigError(
            "The `cluster` entry of TF_CONFIG must map task types to lists of 'host:port', as in "
            f'{{"worker": ["a:1", "b:1"]}}. Received: cluster={cluster!r}.'
        )
    if not isinstance(task, dict) or ("index" in task and _index(task["index"]) is None):
        raise ClusterConfigError(
            "The `task` entry of TF_CONFIG must hold a type and an integer index, as in "
            f'{{"type": "worker", "index": 0}}. Received: task={task!r}.'
        )


def _is_task_list(tasks: object) -> bool:
    """True if `tasks` is a list of strings, or an object that maps indices to strings."""
    if isinstance(tasks, dict):
        if any(_index(index) is None for index in tasks):
            return False
        tasks = list(tasks.values())
    return isinstance(tasks, list) and all(isinstance(address, str) for address in tasks)


def _index(value: object) -> int | None:
    """A task's index, from an integer, or from decimal digits as schedulers write them. None if `value` is neither."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 0:
        return int(value)
    return None


def _addresses(tasks, task_type: str) -> tuple[str, ...]:
    """Addresses in task order. A sparse job (a dict with gaps) has no order of ranks, and is refused."""
    if isinstance(tasks, dict):
        if sorted(tasks) != list(range(len(tasks))):
            raise ClusterConfigError(f"Tasks of type {task_type!r} must be numbered from 0. Received: {tasks}.")
        tasks = [tasks[index] for index in range(len(tasks))]
    for address in tasks:
        if not is_address(address):
            raise ClusterConfigError(
                f"Addresses must be 'host:port', without a scheme, IPv6 in brackets, ports from 1 to {LARGEST_PORT}. "
                f"Received: {task_type}={address!r}."
            )
    return tuple(tasks)


def _check_distinct(addresses: tuple[str, ...]) -> None:
    known: dict[tuple[str, int], str] = {}
    for address in addresses:
        endpoint = _endpoint(address)
        if endpoint in known:
            raise ClusterConfigError(
                f"Each task must have its own address. Received: {known[endpoint]!r} and {address!r}, which are the "
                "same."
            )
        known[endpoint] = address


def _endpoint(address: str) -> tuple[str, int]:
    """Host and port in a normal form, which is equal for all ways to write an address. Names are not looked up."""
    host, _, port = address.lower().rpartition(":")
    try:
        host = str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:  # A name.
        host = host.rstrip(".")
    return "localhost" if host in _LOOPBACK else host, int(port)
