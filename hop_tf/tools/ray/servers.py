"""SHAT's parameter servers as Ray actors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from absl import logging
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hop_tf.errors import DeadlineExceededError
from hop_tf.options import CommunicationOptions
from hop_tf.tools.launchers.variables import TOKEN_VARIABLE
from hop_tf.tools.ray.worker import keep_port, reserve_address

# Ray's own setting for the time that the placement of workers may take.
_START_VARIABLE = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
_START_SECONDS = 60.0
# The number of times that Ray starts the process of a server again, on the same node and port.
_MAX_RESTARTS = 3


@ray.remote
class _ParameterServer:
    """The actor: a process that serves as one task of type `ps`."""

    def reserve_address(self) -> str:
        return reserve_address()

    def serve(self, environment: dict[str, str], options: CommunicationOptions, snapshots: Any) -> None:
        """Serves until the workers are done. Ray calls it again after a restart of the process."""
        keep_port(environment)
        os.environ.update(environment)
        from hop_tf.cluster import Cluster  # TensorFlow must see the variables.
        from hop_tf.strategies.shat.server.service import serve

        logging.set_verbosity(logging.INFO)
        options = dataclasses.replace(options, cluster_token=environment[TOKEN_VARIABLE])
        serve(Cluster.from_resolver(), options=options, snapshots=snapshots)


class Servers:
    """The servers of one attempt. The caller must close them.

    Args:
      count: The number of servers.
      resources: The resources of each server, such as {"CPU": 1}.

    Attributes:
      addresses: "host:port" of each server.

    Raises:
      DeadlineExceededError: If the cluster has no room for the servers in time.

    Blocks: until the servers' processes run.
    """

    def __init__(self, count: int, resources: Mapping[str, float]):
        self._tasks: list[ray.ObjectRef] = []
        self._actors: list[ray.actor.ActorHandle] = []
        self._group = placement_group([dict(resources)] * count, strategy="SPREAD")
        try:
            self.addresses = self._start(count, resources)
        except BaseException:
            self.close()
            raise

    def _start(self, count: int, resources: Mapping[str, float]) -> list[str]:
        seconds = float(os.environ.get(_START_VARIABLE, _START_SECONDS))
        others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        if not self._group.wait(seconds):
            raise DeadlineExceededError(
                f"waited {seconds:g} s for room for {count} parameter servers in the Ray cluster, each with "
                f"{dict(resources)}, beside the workers. Free resources: {ray.available_resources()}. Ask for less by "
                f"`server_resources`, or set {_START_VARIABLE} if nodes take longer to start."
            )
        for index in range(count):
            actor = _ParameterServer.options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                resources=others,
                max_restarts=_MAX_RESTARTS,
                max_task_retries=_MAX_RESTARTS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            ).remote()
            self._actors.append(actor)
        return ray.get([actor.reserve_address.remote() for actor in self._actors], timeout=seconds)

    def serve(self, environments: Sequence[dict[str, str]], options: CommunicationOptions, snapshots: Any) -> None:
        """Lets each server serve with its variables. Does not block."""
        for actor, environment in zip(self._actors, environments, strict=True):
            self._tasks.append(actor.serve.remote(environment, options, snapshots))

    def close(self) -> None:
        """Ends all servers. Logs those that have failed."""
        ended, _ = ray.wait(self._tasks, num_returns=len(self._tasks), timeout=0) if self._tasks else ([], [])
        for task in ended:
            try:
                ray.get(task)
            except ray.exceptions.RayError as error:
                logging.error("ps %d at %s has failed: %s", *self._place_of(task), error)
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)

    def _place_of(self, task: ray.ObjectRef) -> tuple[int, str]:
        index = self._tasks.index(task)
        return index, self.addresses[index]
