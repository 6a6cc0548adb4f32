"""Reads the variables that Slurm's `srun` sets, to find the address of every task of a step. Runs no program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from hop_tf.errors import ClusterConfigError
from hop_tf.tools.launchers.hosts import check_count, expand_hosts, expand_ranges
from hop_tf.tools.launchers.variables import Place, describe, read_number
from hop_tf.transport.addresses import LARGEST_PORT

_LAUNCHER = "srun (Slurm)"
_RANK = "SLURM_PROCID"
_HOSTS = "SLURM_STEP_NODELIST"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE"
_SIZE = "SLURM_STEP_NUM_TASKS"
_PORTS = "SLURM_STEP_RESV_PORTS"
_DISTRIBUTION = "SLURM_DISTRIBUTION"
_NODE, _LOCAL, _NODE_NAME = "SLURM_NODEID", "SLURM_LOCALID", "SLURMD_NODENAME"
_NUM_COMPONENTS = "SLURM_HET_SIZE"
_HOSTS_OF_COMPONENTS = ("SLURM_JOB_NODELIST_HET_GROUP_", "SLURM_JOB_NODELIST_PACK_GROUP_")
_FIRST_PORT = "HOP_TF_FIRST_PORT"

# Ports for steps without reserved ports. Each step has a slot of ports, below those that systems give to outgoing
# connections.
_LOWEST_PORT, _PORTS_OF_A_SLOT, _NUM_SLOTS = 10240, 256, 88
# The distance in slots from one job, step, or restart to the next. Jobs with close numbers, such as those of an array,
# may share nodes. So the first steps and restarts of nine such jobs have different slots.
_STRIDES = {"SLURM_JOB_ID": 1, "SLURM_STEP_ID": 9, "SLURM_RESTART_COUNT": 27}

# Known orders of tasks. "pack" and "nopack" are options of "block".
_BLOCK, _CYCLIC = ("", "block", "pack", "nopack", "*"), ("cyclic",)

_COUNT = re.compile(r"(\d{1,18})(?:\(x(\d{1,18})\))?", re.ASCII)


def read_slurm(environ: Mapping[str, str]) -> Place | None:
    """The place that `srun` has assigned to this process, or None if `srun` has not started it.

    Task i of a node has the i-th of the step's reserved ports (`srun --resv-ports`). Without reserved ports, the first
    port is HOP_TF_FIRST_PORT. If this is not set, the first port follows from the numbers of the job, the step and the
    job's restarts.

    In a job of several components, and with `--distribution=plane`, Slurm's variables do not tell which node a task
    runs on. The place then has no addresses, but a `master`: the first of these ports on the node of task 0.

    Raises:
      ClusterConfigError: If variables are missing, malformed, or contradict each other.
    """
    if _RANK not in environ or _HOSTS not in environ:
        return None
    if _COUNTS not in environ:
        raise ClusterConfigError(
            f"{_RANK}, {_HOSTS} and {_COUNTS} go together. "
            f"Received: {describe(environ, (_RANK, _HOSTS, _COUNTS))}. Start the script with srun."
        )
    hosts, counts = expand_hosts(environ[_HOSTS]), expand_counts(environ[_COUNTS])
    if len(hosts) != len(counts):
        raise _contradiction(environ, (_HOSTS, _COUNTS), f"{len(hosts)} nodes, but tasks of {len(counts)}")
    number, num_tasks = read_number(environ, _RANK), sum(counts)
    if number >= num_tasks:
        raise _contradiction(environ, (_RANK, _COUNTS), f"task {number} of {num_tasks} tasks")
    if _SIZE in environ and read_number(environ, _SIZE) != num_tasks:
        raise _contradiction(environ, (_SIZE, _COUNTS), f"{environ[_SIZE]} tasks, and {num_tasks} on the nodes")
    ports = _ports(environ, max(counts))
    master = _host_of_task_0(environ, hosts)
    if master is not None:
        return _unknown_layout(environ, hosts, counts, (master, ports[0]))
    tasks = lay_out(counts, environ.get(_DISTRIBUTION, "block"))
    _check_own(environ, tasks[number])
    return Place(
        launcher=_LAUNCHER,
        number=number,
        num_processes=len(tasks),
        local_number=tasks[number][1],
        num_local=counts[tasks[number][0]],
        addresses=tuple(f"{hosts[node]}:{ports[local]}" for node, local in tasks),
    )


def expand_counts(text: str) -> list[int]:
    """The number of tasks of each node: "2(x3),1" gives 2, 2, 2 and 1.

    Raises:
      ClusterConfigError: If the text is not such a list, or has more tasks than any job.
    """
    found = [_COUNT.fullmatch(part) for part in text.strip().split(",")]
    if not all(found):
        raise ClusterConfigError(f"{_COUNTS} must be like '2(x3),1'. Received: {_COUNTS}={text!r}.")
    repeats = [(int(each[1]), int(each[2] or 1)) for each in found]
    check_count(sum(max(count, 1) * times for count, times in repeats), text)
    return [count for count, times in repeats for _ in range(times)]


def lay_out(counts: Sequence[int], distribution: str) -> list[tuple[int, int]]:
    """The place of each task, in order: the index of its node, and its number there.

    Args:
      counts: The number of tasks of each node.
      distribution: The value of `srun --distribution`. With "cyclic", tasks go to the nodes in turn. Otherwise they
        fill one node after another.
    """
    tasks = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if _order(distribution) in _CYCLIC:
        tasks.sort(key=lambda task: (task[1], task[0]))
    return tasks


def _order(distribution: str) -> str:
    """The order of tasks over nodes, from a distribution. The rest of the text is about sockets and cores."""
    return re.split("[:,]", distribution.strip().lower())[0]


def _host_of_task_0(environ: Mapping[str, str], hosts: Sequence[str]) -> str | None:
    """The host of task 0, if the hosts of other tasks are not known. Otherwise None.

    A job of several components names its nodes in another order. Task 0 is on the first node of the first component
    that takes part in the step.
    """
    components = read_number(environ, _NUM_COMPONENTS) if environ.get(_NUM_COMPONENTS) else 1
    if components > 1:
        for component, name in itertools.product(range(components), _HOSTS_OF_COMPONENTS):
            first = expand_hosts(environ[f"{name}{component}"])[0] if environ.get(f"{name}{component}") else None
            if first in hosts:
                return first
        raise ClusterConfigError(
            f"With {_NUM_COMPONENTS}, {_HOSTS_OF_COMPONENTS[0]}0 and so on must name nodes that are in {_HOSTS}. "
            f"Received: {describe(environ, (_NUM_COMPONENTS, f'{_HOSTS_OF_COMPONENTS[0]}0', _HOSTS))}. "
            "Start the script with srun, and pass these variables on."
        )
    order = _order(environ.get(_DISTRIBUTION, ""))
    if order in (*_BLOCK, *_CYCLIC) or len(hosts) == 1:
        return None
    if order == "plane":
        return hosts[0]
    raise ClusterConfigError(
        "Tasks must be distributed over the nodes by block, cyclic or plane: other orders do not say where task 0 "
        f"runs. Received: {describe(environ, (_DISTRIBUTION,))}. Start the step with `srun --distribution=block`."
    )


def _unknown_layout(
    environ: Mapping[str, str], hosts: Sequence[str], counts: Sequence[int], master: tuple[str, int]
) -> Place:
    own = environ.get(_NODE_NAME)
    return Place(
        launcher=_LAUNCHER,
        number=read_number(environ, _RANK),
        num_processes=sum(counts),
        local_number=read_number(environ, _LOCAL) if own in hosts and _LOCAL in environ else None,
        num_local=counts[hosts.index(own)] if own in hosts else None,
        master=master,
    )


def _check_own(environ: Mapping[str, str], task: tuple[int, int]) -> None:
    """Raises ClusterConfigError if the computed place of this task is wrong: addresses would belong to other tasks."""
    names = (_NODE, _LOCAL)
    if all(name in environ for name in names) and task != tuple(read_number(environ, name) for name in names):
        raise ClusterConfigError(
            f"Task {environ[_RANK]} should be task {task[1]} of node {task[0]} by {_COUNTS}. "
            f"Received: {describe(environ, (*names, _COUNTS, _DISTRIBUTION))}. "
            "Start the step with `srun --distribution=block`."
        )


def _ports(environ: Mapping[str, str], count: int) -> list[int]:
    """The ports for the tasks of a node."""
    if environ.get(_PORTS):
        ports = [int(port) for port in expand_ranges(environ[_PORTS].strip("[]"))]
        if len(ports) < count:
            raise ClusterConfigError(
                f"{_PORTS} must have a port for each task of a node, {count}. "
                f"Received: {describe(environ, (_PORTS,))}. Reserve as many: `srun --resv-ports={count}`."
            )
        return ports[:count]
    if environ.get(_FIRST_PORT):
        first = read_number(environ, _FIRST_PORT, LARGEST_PORT)
    else:
        slot = sum(stride * read_number(environ, name) for name, stride in _STRIDES.items() if name in environ)
        slot %= _NUM_SLOTS
        first = _LOWEST_PORT + slot * _PORTS_OF_A_SLOT
    if not 0 < first <= LARGEST_PORT + 1 - count:
        raise ClusterConfigError(
            f"{count} ports, one for each task of a node, must lie from {_FIRST_PORT} to {LARGEST_PORT}. "
            f"Received: {describe(environ, (_FIRST_PORT,))}."
        )
    return list(range(first, first + count))


def _contradiction(environ: Mapping[str, str], names: tuple[str, ...], what: str) -> ClusterConfigError:
    return ClusterConfigError(
        f"{' and '.join(names)} contradict each other: {what}. Received: {describe(environ, names)}. "
        "Start the script with srun, and set none of these variables yourself."
    )
