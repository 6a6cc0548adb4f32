"""Names of transports and of their processes, and a process's memory of the transports that it has created."""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
from collections.abc import Sequence

_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()


def new_incarnation() -> str:
    """A name that no other transport has. Up to the dot, the names of all transports of one process are the same."""
    return f"{_PROCESS}-{os.getpid()}.{next(_numbers)}"


def process_of(incarnation: str) -> str:
    """The name of a transport's process."""
    return incarnation.partition(".")[0]


@dataclasses.dataclass
class Past:
    """A process's memory of the transports that it has created for one rank of one cluster.

    Attributes:
      generation: Generation of the last transport; see `Hello.generation`.
      processes: By rank: the process of that rank that was met last.
    """

    generation: int = -1
    processes: dict[int, str] = dataclasses.field(default_factory=dict)


# By process (in tests, one process stands for several), rank and cluster.
_pasts: dict[tuple[str, int, tuple[str, ...]], Past] = {}


def past_of(incarnation: str, rank: int, addresses: Sequence[str]) -> Past:
    """The memory of a transport's process for this rank of this cluster."""
    return _pasts.setdefault((process_of(incarnation), rank, tuple(addresses)), Past())
