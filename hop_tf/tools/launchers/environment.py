"""`cluster_from_environment`: the cluster that a process belongs to, with any known launcher."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import tensorflow as tf
from absl import logging

from hop_tf.arguments import check_integer, check_seconds
from hop_tf.cluster import Cluster
from hop_tf.errors import ClusterConfigError
from hop_tf.tools.launchers import variables
from hop_tf.tools.launchers.rendezvous import meet
from hop_tf.tools.launchers.slurm import read_slurm
from hop_tf.tools.launchers.variables import Place
from hop_tf.tools.processes.local_cluster import PortReservation, gpu_assignments
from hop_tf.transport.own_name import check_own_name

# The result of a rendezvous, in which a process takes part only once. It keeps the process's port reserved.
_met: dict[tuple[Place, int], tuple[list[str], PortReservation]] = {}


def cluster_from_environment(
    *, num_ps: int = 0, cluster_token: str | None = None, timeout_seconds: float = 60.0
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Finds the launcher that has started this process, and the addresses of the job's other processes.

    The known sources are, in this order:

    - `TF_CONFIG`, also as `hop_tf launch` sets it;
    - HOP_TF_ADDRESSES, for an Indexed Job of Kubernetes, or set by hand;
    - torchrun, or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
    - Open MPI's `mpirun`;
    - Slurm's `srun`;
    - launchers with PMI or PMIx, such as MPICH's `mpirun`.

    If there is none, this process is alone. A log line names the launcher.

    `mpirun` and torchrun do not tell the addresses of the other processes, so the processes meet. Process 0 listens at
    MASTER_ADDR and MASTER_PORT. Under `mpirun` the port is 29500 by default. Under torchrun it is MASTER_PORT + 1 if
    torchrun itself listens at MASTER_PORT. HOP_TF_RENDEZVOUS_PORT overrides both. Each other process tells process 0
    its host and a free port. The host is that in HOP_TF_HOST, or the address from which the process connects. Processes
    meet only once: a second call in a process returns the same addresses. Under Slurm, processes meet only in jobs of
    several components and with `--distribution=plane`, on the node of task 0.

    If processes do not meet, this process waits until its own name resolves on its machine. The name must not resolve
    to a loopback address if another process's name does not, unless it is numeric or "localhost".

    If the machine has several GPUs, and the launcher tells the process's number on its machine, the process gets one of
    them. Processes take GPUs in turn (CUDA_VISIBLE_DEVICES is set). So call this before TensorFlow uses a GPU.

    Args:
      num_ps: The number of processes that are parameter servers: the last ones. With TF_CONFIG, which lists them, it
        must be 0 or their number. A process that is alone has none. Default 0.
      cluster_token: A secret that all processes share. When processes meet, they prove with it that they belong to the
        same job. For the training itself, give it to `CommunicationOptions`. Default None: the value of the environment
        variable HOP_TF_CLUSTER_TOKEN, if it is set.
      timeout_seconds: The time to wait for the other processes, or for the name. Default 60.

    Returns:
      A resolver, for the argument `cluster_resolver` of strategies.

    Raises:
      ClusterConfigError: If variables are missing, malformed or contradict each other, or processes contradict each
        other.
      DeadlineExceededError: If other processes do not arrive in time (the error lists them), or this process's own name
        does not become known.
      HopError: If a port is not available, or others use another token.
      ValueError: If an argument is out of range.

    Blocks: if processes meet, until all have called this; otherwise until this process's own name is known. At most
      `timeout_seconds`.
    """
    check_integer("num_ps", num_ps, at_least=0)
    check_seconds("timeout_seconds", timeout_seconds)
    if os.environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        return _from_tf_config(num_ps, timeout_seconds)
    place = find_place(os.environ)
    if place is None or place.num_processes == 1:
        launcher = "no known launcher" if place is None else f"{place.launcher}, for one process"
        logging.warning("hop_tf: started by %s: this process trains alone.%s", launcher, _note_on_slurm(place))
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    if num_ps >= place.num_processes:
        raise ClusterConfigError(
            f"`num_ps` must be less than the number of processes, {place.num_processes} by {place.launcher}. "
            f"Received: num_ps={num_ps}."
        )
    if place.addresses is None:
        place = dataclasses.replace(place, addresses=tuple(_meet(place, num_ps, cluster_token, timeout_seconds)))
    else:
        check_own_name(place.addresses, place.number, timeout_seconds)
    return _resolver(place, num_ps)


def find_place(environ: Mapping[str, str]) -> Place | None:
    """This process's place among those that a launcher has started, or None if no launcher is known.

    Raises:
      ClusterConfigError: If variables are missing, malformed or contradict each other.
    """
    place = variables.read_addresses(environ) or variables.read_torchrun(environ) or variables.read_open_mpi(environ)
    if place is not None:
        return place
    slurm = read_slurm(environ)
    # In a Slurm allocation, `mpirun` starts its daemons by `srun`. Slurm's variables are then those of the daemon.
    if slurm is not None and environ.get("PMI_SIZE", "").strip() in ("", str(slurm.num_processes)):
        return slurm
    place = variables.read_pmi(environ)
    if place is None:
        variables.check_no_halves(environ)
    return place


def _note_on_slurm(place: Place | None) -> str:
    """A hint for a process that Slurm has started once for all tasks, as it starts a batch script. Otherwise empty."""
    num_tasks = os.environ.get("SLURM_NTASKS", "1")
    return "" if place is not None or num_tasks == "1" else f" This Slurm job has {num_tasks} tasks: use srun."


def _from_tf_config(num_ps: int, timeout_seconds: float) -> tf.distribute.cluster_resolver.ClusterResolver:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = Cluster.from_resolver(resolver)
    if num_ps not in (0, len(cluster.servers)) and len(cluster.all_addresses) > 1:
        raise ClusterConfigError(
            "`num_ps` must be 0 or the number of tasks of type 'ps' in TF_CONFIG. "
            f"Received: num_ps={num_ps}, and {len(cluster.servers)} such tasks."
        )
    if len(cluster.all_addresses) > 1:
        check_own_name(cluster.all_addresses, cluster.number, timeout_seconds)
    _log("a launcher that sets TF_CONFIG", cluster.task_type, cluster.task_id, cluster.all_addresses, cluster.number)
    return resolver


def _meet(place: Place, num_ps: int, token: str | None, timeout_seconds: float) -> list[str]:
    if (place, num_ps) not in _met:
        token = token or os.environ.get(variables.TOKEN_VARIABLE) or None
        _met[place, num_ps] = meet(place, num_ps=num_ps, token=token, timeout_seconds=timeout_seconds)
    return _met[place, num_ps][0]


def _resolver(place: Place, num_ps: int) -> tf.distribute.cluster_resolver.ClusterResolver:
    num_workers = place.num_processes - num_ps
    tasks = {"worker": list(place.addresses[:num_workers]), "ps": list(place.addresses[num_workers:])}
    is_worker = place.number < num_workers
    task_type, task_id = ("worker", place.number) if is_worker else ("ps", place.number - num_workers)
    _log(place.launcher, task_type, task_id, place.addresses, place.number)
    _choose_gpu(place, is_worker)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({name: addresses for name, addresses in tasks.items() if addresses}),
        task_type=task_type,
        task_id=task_id,
    )


def _log(launcher: str, task_type: str, task_id: int, addresses: tuple[str, ...], number: int) -> None:
    logging.info(
        "hop_tf: started by %s: this is %s %d of %d processes, at %s.",
        *(launcher, task_type, task_id, len(addresses), addresses[number]),
    )


def _choose_gpu(place: Place, is_worker: bool) -> None:
    """Chooses a GPU as `hop_tf launch` does: one for each process in turn, and none for parameter servers."""
    if place.local_number is None or place.num_local is None or place.local_number >= place.num_local:
        return
    if is_worker:
        os.environ.update(gpu_assignments(place.num_local, os.environ)[place.local_number])
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
