"""Parses lists of hosts with ranges in brackets, as Slurm writes them."""

from __future__ import annotations

import itertools
import math
import re

from hop_tf.errors import ClusterConfigError

# More hosts than any job has. With this limit, a typo in a range raises an error, and does not fill the memory.
MAX_HOSTS = 65_536

_OUTER_COMMA = re.compile(r",(?![^\[]*\])")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list as Slurm writes it: "node[01-03,07],other5" are node01, node02, node03, node07 and other5.

    An IPv6 address keeps its brackets: "[fd00::1]:7400" is one host.

    Raises:
      ClusterConfigError: If the text is not such a list, or has more than `MAX_HOSTS` hosts.
    """
    hosts: list[str] = []
    for part in _OUTER_COMMA.split(text.strip()):
        pieces = _BRACKETS.split(part)  # Literal text and the contents of brackets, in turn.
        if not part or any("[" in piece or "]" in piece for piece in pieces):
            raise ClusterConfigError(
                "A list of nodes must be like 'node[01-03,07],other5', with brackets in pairs and no empty part. "
                f"Received: {text!r}."
            )
        choices = [_expand_brackets(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        check_count(len(hosts) + math.prod(map(len, choices)), text)
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def expand_ranges(text: str) -> list[str]:
    """The numbers of ranges: "01-03,7" are 01, 02, 03 and 7. Leading zeros are kept.

    Raises:
      ClusterConfigError: If the text is not a list of ranges, or has more than `MAX_HOSTS` numbers.
    """
    numbers: list[str] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if int(first) > int(last):
            raise ClusterConfigError(f"Ranges must be like '01-03,07', upwards. Received: {text!r}.")
        check_count(len(numbers) + int(last) - int(first) + 1, text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def check_count(count: int, text: str) -> None:
    """Refuses more hosts, or processes, than any job has.

    Args:
      count: The number of hosts or processes.
      text: The text that gives the number, for the error.

    Raises:
      ClusterConfigError: If `count` is more than `MAX_HOSTS`.
    """
    if count > MAX_HOSTS:
        raise ClusterConfigError(
            f"There must be at most {MAX_HOSTS} hosts or processes. Received: {count}, by {text!r}."
        )


def _expand_brackets(text: str) -> list[str]:
    return [f"[{text}]"] if ":" in text else expand_ranges(text)
