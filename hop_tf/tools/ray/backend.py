"""`ClusterConfig`: turns the workers of a Ray Train job into ranks of hop_tf. Without TensorFlow."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from hop_tf.arguments import check_choice, check_integer
from hop_tf.errors import HopError
from hop_tf.options import CommunicationOptions, checked_options
from hop_tf.tools.launchers.variables import TOKEN_VARIABLE
from hop_tf.tools.processes.local_cluster import make_tasks, make_tf_configs
from hop_tf.tools.ray import worker
from hop_tf.tools.ray.servers import Servers
from hop_tf.transport.addresses import host_of


class ClusterConfig(BackendConfig):
    """Turns the workers of a Ray Train job into ranks.

        trainer = TensorflowTrainer(train_loop, tensorflow_config=ClusterConfig(), scaling_config=scaling_config)

    It replaces Ray's `TensorflowConfig`. Before `train_loop` runs, each worker has

    - `TF_CONFIG`, with a free port of its node, which is reserved for the worker;
    - HOP_TF_CLUSTER_TOKEN, a secret of this job, for `CommunicationOptions(cluster_token=...)`;
    - limits of TensorFlow's threads, so that the workers of a node share its cores;
    - no GPU if the trainer's `ScalingConfig` asks for none.

    Variables that are already set stay. Unlike Ray's `TensorflowConfig`, it does not set TF_USE_LEGACY_KERAS. Ray sets
    OMP_NUM_THREADS to the CPUs that a worker asks for, which also limits hop_tf's kernels.

    Args:
      restart: The workers that Ray starts again when one fails, as often as `ray.train.FailureConfig` allows. "group":
        all workers; training goes on from the last checkpoint. "worker": only the failed worker, on its node. Under a
        fault-tolerant strategy, it joins the others, which train on. If the node is gone, an error ends the job.
        Default "group".
      num_ps: The number of parameter servers, for `SHATParameterServerStrategy`. Each is an actor. If one dies, Ray
        starts it again on its node, up to three times. Default 0.
      server_resources: The resources of each server, in addition to those of workers. Default None: {"CPU": 1}.
      server_options: The communication options of servers, a `hop_tf.CommunicationOptions`. The token is that of the
        job. Default None: `CommunicationOptions()`.
      snapshots: The directory and the times of the servers' snapshots, a `hop_tf.SnapshotOptions`. All nodes must see
        its directory. Default None: no snapshots.

    Raises:
      ValueError: If an argument is out of range, or this Ray cannot start a single worker again.
      TypeError: If an argument has another type.
    """

    def __init__(
        self,
        *,
        restart: str = "group",
        num_ps: int = 0,
        server_resources: Mapping[str, float] | None = None,
        server_options: CommunicationOptions | None = None,
        snapshots: Any = None,
    ):
        check_choice("restart", restart, ("group", "worker"))
        check_integer("num_ps", num_ps, at_least=0)
        if restart == "worker" and not hasattr(Backend, "has_replica_groups"):
            raise ValueError(f"`restart` must be 'group' with Ray {ray.__version__}: 'worker' needs a newer one.")
        _check_snapshots(snapshots)
        self.restart = restart
        self.num_ps = num_ps
        self.server_resources = dict(server_resources or {"CPU": 1})
        self.server_options = checked_options(server_options, "server_options")
        self.snapshots = snapshots

    @property
    def backend_cls(self):
        """The class of the backend, which Ray Train calls when it has started workers."""
        return _SingleRestartBackend if self.restart == "worker" else _Backend

    def to_dict(self) -> dict[str, Any]:
        """The settings that Ray shows."""
        return {"restart": self.restart, "num_ps": self.num_ps}


def _check_snapshots(snapshots: Any) -> None:
    if snapshots is None:
        return
    # This imports TensorFlow, which the caller has already done to make the options.
    from hop_tf.strategies.shat.server.snapshots import SnapshotOptions

    if not isinstance(snapshots, SnapshotOptions):
        raise TypeError(f"`snapshots` must be a hop_tf.SnapshotOptions or None. Received: snapshots={snapshots!r}.")


class _Job:
    """One start of all workers, and their servers.

    Args:
      addresses: The addresses of the workers, in the order of their ranks.
      servers: The parameter servers, or None.
    """

    def __init__(self, addresses: list[str], servers: Servers | None):
        self.servers = servers
        self._token = secrets.token_urlsafe(32)
        self._name = secrets.token_hex(8)
        self._hosts = [host_of(address) for address in addresses]
        all_addresses = [*addresses, *(servers.addresses if servers else ())]
        tasks = make_tasks(num_workers=len(addresses), num_ps=len(all_addresses) - len(addresses))
        configs = make_tf_configs(tasks, all_addresses)
        environments = [{"TF_CONFIG": configs[task], TOKEN_VARIABLE: self._token} for task in tasks]
        self._of_workers, self._of_servers = environments[: len(addresses)], environments[len(addresses) :]

    @property
    def num_workers(self) -> int:
        return len(self._of_workers)

    def start_servers(self, config: ClusterConfig) -> None:
        """Lets the servers serve, if there are any."""
        if self.servers is not None:
            environments = [{**each, "CUDA_VISIBLE_DEVICES": "-1"} for each in self._of_servers]
            self.servers.serve(environments, config.server_options, config.snapshots)

    def set_up(self, worker_group, index: int, rank: int, *, is_rejoining: bool = False) -> ray.ObjectRef:
        """Turns the worker with this index in a group into a rank. Returns a reference to the call."""
        return worker_group.execute_single_async(
            index,
            worker.set_up,
            self._of_workers[rank],
            num_local=self._hosts.count(self._hosts[rank]),
            num_gpus=worker_group.get_resources_per_worker().get("GPU", 0),
            attempt=worker.Attempt(self._name, is_rejoining),
        )

    def set_up_again(self, worker_group) -> None:
        """Gives a restarted worker the rank and address of the worker that it replaces.

        Raises:
          HopError: If the new worker runs on another host, because the others look for it at the old address.
        """
        rank = worker_group.execute_single(0, worker.own_rank)
        host = worker_group.execute_single(0, worker.own_host)
        if host != self._hosts[rank]:
            raise HopError(
                f"rank {rank} was restarted on {host}, because its node {self._hosts[rank]} is gone: the others do not "
                "look for it there. With ClusterConfig(restart='group'), Ray restarts all workers, and they resume "
                "from the last checkpoint."
            )
        ray.get(self.set_up(worker_group, 0, rank, is_rejoining=True))


class _Backend(Backend):
    """The backend, which Ray calls in the process that watches the workers."""

    has_replica_groups = False  # All workers are started again together.

    def __init__(self):
        self._job: _Job | None = None

    def on_start(self, worker_group, backend_config: ClusterConfig) -> None:
        if self._is_part(worker_group):
            self._job.set_up_again(worker_group)
            return
        self._end_job()
        addresses = worker_group.execute(worker.reserve_address)
        servers = Servers(backend_config.num_ps, backend_config.server_resources) if backend_config.num_ps else None
        self._job = _Job(addresses, servers)
        self._job.start_servers(backend_config)
        ray.get([self._job.set_up(worker_group, rank, rank) for rank in range(len(addresses))])

    def on_shutdown(self, worker_group, backend_config: ClusterConfig) -> None:
        if not self._is_part(worker_group):
            self._end_job()

    def _is_part(self, worker_group) -> bool:
        """True if the group is a single restarted worker, not all workers."""
        return self.has_replica_groups and self._job is not None and len(worker_group) < self._job.num_workers

    def _end_job(self) -> None:
        job, self._job = self._job, None
        if job is not None and job.servers is not None:
            job.servers.close()


class _SingleRestartBackend(_Backend):
    has_replica_groups = True  # Each worker is a group, which Ray replaces when it fails.
