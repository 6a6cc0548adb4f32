"""Reads the variables that Slurm's `srun` sets: where every task of a step is. Asks no program, and is pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from hop_tf.errors import ClusterConfigError
from hop_tf.launchers.variables import Place, describe, read_number

_RANK = "SLURM_PROCID"
_HOSTS = "SLURM_STEP_NODELIST"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE"
_SIZE = "SLURM_STEP_NUM_TASKS"
_PORTS = "SLURM_STEP_RESV_PORTS"
_DISTRIBUTION = "SLURM_DISTRIBUTION"
_NODE, _LOCAL = "SLURM_NODEID", "SLURM_LOCALID"
_FIRST_PORT = "HOP_TF_FIRST_PORT"

# Ports of steps without reserved ones: each step has a slot, below the ports that systems give to outgoing connections.
_LOWEST_PORT, _PORTS_OF_A_SLOT, _NUM_SLOTS = 10240, 256, 88
_LARGEST_PORT = 65535

_OUTER_COMMA = re.compile(r",(?![^\[]*\])")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def read_slurm(environ: Mapping[str, str]) -> Place | None:
    """The place that `srun` has given; None where it has not started this process.

    Task i of a node has the i-th of the step's reserved ports (`srun --resv-ports`). Without these, ports follow from
    the numbers of the job and the step, or count from HOP_TF_FIRST_PORT.

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
    tasks = lay_out(counts, environ.get(_DISTRIBUTION, "block"))
    number = read_number(environ, _RANK)
    if number >= len(tasks):
        raise _contradiction(environ, (_RANK, _COUNTS), f"task {number} of {len(tasks)} tasks")
    if _SIZE in environ and read_number(environ, _SIZE) != len(tasks):
        raise _contradiction(environ, (_SIZE, _COUNTS), f"{environ[_SIZE]} tasks, and {len(tasks)} on the nodes")
    _check_own(environ, tasks[number])
    ports = _ports(environ, max(counts))
    return Place(
        launcher="srun (Slurm)",
        number=number,
        num_processes=len(tasks),
        local_number=tasks[number][1],
        num_local=counts[tasks[number][0]],
        addresses=tuple(f"{hosts[node]}:{ports[local]}" for node, local in tasks),
    )


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list as Slurm writes it: "node[01-03,07],other5" are node01, node02, node03, node07 and other5.

    Raises:
      ClusterConfigError: If it is none.
    """
    hosts: list[str] = []
    for part in _OUTER_COMMA.split(text.strip()):
        pieces = _BRACKETS.split(part)  # Literal text, and in between what was in brackets.
        if not part or any("[" in piece or "]" in piece for piece in pieces):
            raise ClusterConfigError(
                "A list of nodes must be like 'node[01-03,07],other5', with brackets in pairs and no empty part. "
                f"Received: {text!r}."
            )
        choices = [expand_ranges(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def expand_ranges(text: str) -> list[str]:
    """The numbers of ranges: "01-03,7" are 01, 02, 03 and 7, as wide as they are written.

    Raises:
      ClusterConfigError: If these are none.
    """
    numbers: list[str] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if int(first) > int(last):
            raise ClusterConfigError(f"Ranges must be like '01-03,07', upwards. Received: {text!r}.")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """The tasks of each node: "2(x3),1" are 2, 2, 2 and 1.

    Raises:
      ClusterConfigError: If these are none.
    """
    found = [_COUNT.fullmatch(part) for part in text.strip().split(",")]
    if not all(found):
        raise ClusterConfigError(f"{_COUNTS} must be like '2(x3),1'. Received: {_COUNTS}={text!r}.")
    return [count for each in found for count in [int(each[1])] * int(each[2] or 1)]


def lay_out(counts: Sequence[int], distribution: str) -> list[tuple[int, int]]:
    """Where each task is, in their order: the index of its node, and its number there.

    Args:
      counts: Tasks of each node.
      distribution: As `srun --distribution` takes it. With "cyclic" tasks go to the nodes in turn; else they fill one
        node after another.
    """
    tasks = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if re.split("[:,]", distribution)[0] == "cyclic":
        tasks.sort(key=lambda task: (task[1], task[0]))
    return tasks


def _check_own(environ: Mapping[str, str], task: tuple[int, int]) -> None:
    """Refuses an order of tasks that is not known here: addresses would belong to others."""
    names = (_NODE, _LOCAL)
    if all(name in environ for name in names) and task != tuple(read_number(environ, name) for name in names):
        raise ClusterConfigError(
            f"Task {environ[_RANK]} should be task {task[1]} of node {task[0]} by {_COUNTS}. "
            f"Received: {describe(environ, (*names, _COUNTS, _DISTRIBUTION))}. "
            "Start the step with `srun --distribution=block`, or `cyclic`: other orders are not known here."
        )


def _ports(environ: Mapping[str, str], count: int) -> list[int]:
    """Ports for the tasks of a node."""
    if environ.get(_PORTS):
        ports = [int(port) for port in expand_ranges(environ[_PORTS].strip("[]"))]
        if len(ports) < count:
            raise ClusterConfigError(
                f"{_PORTS} must have a port for each task of a node, {count}. "
                f"Received: {describe(environ, (_PORTS,))}. Reserve as many: `srun --resv-ports={count}`."
            )
        return ports[:count]
    if environ.get(_FIRST_PORT):
        first = read_number(environ, _FIRST_PORT, _LARGEST_PORT)
    else:
        names = [name for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in environ]
        slot = sum(read_number(environ, name) for name in names) % _NUM_SLOTS
        first = _LOWEST_PORT + slot * _PORTS_OF_A_SLOT
    if not 0 < first <= _LARGEST_PORT + 1 - count:
        raise ClusterConfigError(
            f"{count} ports, one for each task of a node, must lie from {_FIRST_PORT} to {_LARGEST_PORT}. "
            f"Received: {describe(environ, (_FIRST_PORT,))}."
        )
    return list(range(first, first + count))


def _contradiction(environ: Mapping[str, str], names: tuple[str, ...], what: str) -> ClusterConfigError:
    return ClusterConfigError(
        f"{' and '.join(names)} contradict each other: {what}. Received: {describe(environ, names)}. "
        "Start the script with srun, and set none of these variables yourself."
    )
