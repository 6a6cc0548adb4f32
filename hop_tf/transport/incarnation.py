"""Names of transports and of their processes, and what a process keeps of the transports that it has made."""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
from collections.abc import Sequence

_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()


def new_incarnation() -> str:
    """A name that no other transport has. Up to a dot, those of one process are alike."""
    return f"{_PROCESS}-{os.getpid()}.{next(_numbers)}"


def process_of(incarnation: str) -> str:
    """The process that a transport is of."""
    return incarnation.partition(".")[0]


@dataclasses.dataclass
class Past:
    """What a process keeps of the transports that it has made at one place.

    Attributes:
      generation: That of the last one; see `Hello.generation`.
      processes: By rank, the process that was met last.
    """

    generation: int = -1
    processes: dict[int, str] = dataclasses.field(default_factory=dict)


# By process (this one; in tests one passes for several), rank and cluster.
_pasts: dict[tuple[str, int, tuple[str, ...]], Past] = {}


def past_of(incarnation: str, rank: int, addresses: Sequence[str]) -> Past:
    """What the process of a transport keeps of those that it has made for this rank of this cluster."""
    return _pasts.setdefault((process_of(incarnation), rank, tuple(addresses)), Past())
