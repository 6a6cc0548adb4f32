"""Reads a process's place from the environment variables of launchers. Pure functions, without TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hop_tf.errors import ClusterConfigError
from hop_tf.tools.launchers.hosts import expand_hosts
from hop_tf.transport.addresses import LARGEST_PORT, is_address

# The secret that the processes of a job share, if there is one.
TOKEN_VARIABLE = "HOP_TF_CLUSTER_TOKEN"
# The port on which rank 0 waits for the others if MASTER_PORT is not set: PyTorch's default.
_DEFAULT_MASTER_PORT = 29500
_MASTER_ADDR = "MASTER_ADDR"
_MASTER_PORT = "MASTER_PORT"
_RENDEZVOUS_PORT = "HOP_TF_RENDEZVOUS_PORT"
# "True" if torchrun itself listens on MASTER_PORT.
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_ADDRESSES = "HOP_TF_ADDRESSES"
# Variables with this process's index in the list. The second one is set in the pods of an Indexed Job of Kubernetes.
_NUMBERS = ("HOP_TF_NUMBER", "JOB_COMPLETION_INDEX")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A process's place among those that a launcher has started.

    Attributes:
      launcher: The name of the launcher, for texts.
      number: The number of the process among all, from 0.
      num_processes: The number of processes.
      local_number: The number of the process among those of its machine, or None if the launcher does not tell it.
      num_local: The number of processes on its machine, or None if the launcher does not tell it.
      addresses: "host:port" of all processes, in order, or None if the launcher does not tell the hosts of the others.
      master: Host and port at which process 0 waits for the others, if there are no addresses and several processes.
    """

    launcher: str
    number: int
    num_processes: int
    local_number: int | None = None
    num_local: int | None = None
    addresses: tuple[str, ...] | None = None
    master: tuple[str, int] | None = None


def read_addresses(environ: Mapping[str, str]) -> Place | None:
    """The place in HOP_TF_ADDRESSES, which lists "host:port" of all processes. None if it is not set.

    HOP_TF_NUMBER tells the number of this process, or otherwise the JOB_COMPLETION_INDEX of Kubernetes.

    Raises:
      ClusterConfigError: If variables are missing, malformed or contradict each other.
    """
    if not _has(environ, _ADDRESSES):
        return None
    addresses = tuple(expand_hosts(environ[_ADDRESSES]))
    if not all(map(is_address, addresses)) or len(set(addresses)) < len(addresses):
        raise ClusterConfigError(
            f"{_ADDRESSES} must list each host:port once, like 'train-[0-3].train:7400' or '[fd00::1]:7400', ports "
            f"from 1 to {LARGEST_PORT}. Received: {describe(environ, (_ADDRESSES,))}."
        )
    name = next((name for name in _NUMBERS if _has(environ, name)), None)
    if name is None or read_number(environ, name) >= len(addresses):
        raise ClusterConfigError(
            f"With {_ADDRESSES}, {_NUMBERS[0]} must tell which of them this process is, below {len(addresses)}; the "
            f"pods of an Indexed Job have {_NUMBERS[1]} by themselves. "
            f"Received: {describe(environ, (_ADDRESSES, *_NUMBERS))}."
        )
    return Place(
        launcher=f"a launcher that sets {_ADDRESSES}",
        number=read_number(environ, name),
        num_processes=len(addresses),
        addresses=addresses,
    )


def read_torchrun(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun, or a launcher with the same variables, has given. None if RANK is not set.

    Raises:
      ClusterConfigError: If variables are missing or contradict each other.
    """
    if not _has(environ, "RANK"):
        return None
    names = ("RANK", "WORLD_SIZE", _MASTER_ADDR, _MASTER_PORT)
    return _read(environ, "torchrun", *names[:2], local=("LOCAL_RANK", "LOCAL_WORLD_SIZE"), required=names)


def read_open_mpi(environ: Mapping[str, str]) -> Place | None:
    """The place that Open MPI's mpirun has given. None if OMPI_COMM_WORLD_RANK is not set.

    Raises:
      ClusterConfigError: If variables are missing or contradict each other.
    """
    if not _has(environ, "OMPI_COMM_WORLD_RANK"):
        return None
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _read(environ, "mpirun (Open MPI)", *names, local=local, required=names)


def read_pmi(environ: Mapping[str, str]) -> Place | None:
    """The place that a launcher with PMI (MPICH's or Intel's mpirun) or PMIx has given.

    Returns None if neither PMI_RANK nor PMIX_RANK is set. PMIx sets no variable to the number of processes, so
    OMPI_COMM_WORLD_SIZE or WORLD_SIZE must hold this number.

    Raises:
      ClusterConfigError: If variables are missing or contradict each other.
    """
    if _has(environ, "PMI_RANK"):
        names = ("PMI_RANK", "PMI_SIZE")
        return _read(environ, "mpirun (PMI)", *names, local=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), required=names)
    if _has(environ, "PMIX_RANK"):
        size = "OMPI_COMM_WORLD_SIZE" if _has(environ, "OMPI_COMM_WORLD_SIZE") else "WORLD_SIZE"
        names = ("PMIX_RANK", size)
        return _read(environ, "mpirun (PMIx)", *names, local=("", ""), required=names)
    return None


def check_no_halves(environ: Mapping[str, str]) -> None:
    """Refuses a launcher's variables if the rank is missing. Otherwise this process would train alone by mistake.

    Raises:
      ClusterConfigError: If there are such variables.
    """
    for rank, others in (
        ("RANK", ("WORLD_SIZE", "LOCAL_RANK")),
        ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")),
        ("PMI_RANK", ("PMI_SIZE",)),
    ):
        if any(_has(environ, name) for name in others):
            raise _missing(environ, (rank, *others), [rank])


def read_number(environ: Mapping[str, str], name: str, largest: int | None = None) -> int:
    """Parses a variable that holds a number of at least 0.

    Raises:
      ClusterConfigError: If the variable holds anything else, or more than `largest`.
    """
    text = environ[name].strip()
    bound = "" if largest is None else f" to {largest}"
    if not (text.isascii() and text.isdigit() and (largest is None or int(text) <= largest)):
        raise ClusterConfigError(f"{name} must be a number from 0{bound}. Received: {name}={environ[name]!r}.")
    return int(text)


def describe(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Variables with their values, for errors."""
    return ", ".join(f"{name}={environ[name]!r}" if name in environ else f"no {name}" for name in names)


def _read(
    environ: Mapping[str, str],
    launcher: str,
    rank: str,
    size: str,
    *,
    local: tuple[str, str],
    required: tuple[str, ...],
) -> Place:
    missing = [name for name in required if not _has(environ, name)]
    if missing:
        raise _missing(environ, required, missing)
    number, num_processes = read_number(environ, rank), read_number(environ, size)
    if not number < num_processes:
        raise ClusterConfigError(
            f"{rank} must be below {size}. Received: {describe(environ, (rank, size))}. Ranks count from 0. Check who "
            "sets these variables; unset them to train alone."
        )
    return Place(
        launcher=launcher,
        number=number,
        num_processes=num_processes,
        local_number=_read_if_there(environ, local[0]),
        num_local=_read_if_there(environ, local[1]),
        master=_read_master(environ, launcher) if num_processes > 1 else None,
    )


def _read_master(environ: Mapping[str, str], launcher: str) -> tuple[str, int]:
    if not _has(environ, _MASTER_ADDR):
        raise ClusterConfigError(
            f"{launcher} does not tell where the other processes are, so {_MASTER_ADDR} must name the host of process "
            f"0, where they meet. Received: no {_MASTER_ADDR}. Start them with `mpirun -x {_MASTER_ADDR}=<host> ...` "
            f"(`-genv {_MASTER_ADDR} <host>` of MPICH)."
        )
    if _has(environ, _RENDEZVOUS_PORT):
        port_name, port = _RENDEZVOUS_PORT, read_number(environ, _RENDEZVOUS_PORT, LARGEST_PORT)
    elif _has(environ, _MASTER_PORT):
        port_name, port = _MASTER_PORT, read_number(environ, _MASTER_PORT, LARGEST_PORT)
        port += environ.get(_AGENT_STORE) == "True"
    else:
        port_name, port = _MASTER_PORT, _DEFAULT_MASTER_PORT
    if not 0 < port <= LARGEST_PORT:
        raise ClusterConfigError(
            f"{port_name} must give a port from 1 to {LARGEST_PORT}. Received: {describe(environ, (port_name,))}."
        )
    return environ[_MASTER_ADDR].strip().strip("[]"), port


def _read_if_there(environ: Mapping[str, str], name: str) -> int | None:
    return read_number(environ, name) if _has(environ, name) else None


def _has(environ: Mapping[str, str], name: str) -> bool:
    return bool(environ.get(name, "").strip())


def _missing(environ: Mapping[str, str], names: tuple[str, ...], missing: list[str]) -> ClusterConfigError:
    return ClusterConfigError(
        f"{', '.join(names)} go together: {', '.join(missing)} must be set, too. "
        f"Received: {describe(environ, names)}. Unset all of them to train alone."
    )
