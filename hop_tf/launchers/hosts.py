"""Lists of hosts with ranges in brackets, as Slurm writes them."""

from __future__ import annotations

import itertools
import re

from hop_tf.errors import ClusterConfigError

_OUTER_COMMA = re.compile(r",(?![^\[]*\])")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


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
