"""`Sum`: a variable to which several processes add, and the contribution of each of them.

Each process sends its whole contribution, with a version. A newer version replaces an older one. So ranks that know the
same versions hold the same sum, to the bit. If a rank misses an agreement, nothing is lost, and nothing counts twice.

Only the changes that steps make add up. If a program assigns the variable while no step runs, for instance to count
from 0 again, a new *generation* begins. All ranks begin with that value, and the contributions of older generations no
longer count.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import logging

START = ""  # Name of the contribution that all ranks begin with. It is added first.
_NUM_VERSIONS = 1 << 32  # Number of versions in a generation. Later generations have larger versions.


class Sum:
    """The contributions to one variable, as far as this process knows them.

    Args:
      variable: The variable.
      own: This process's name as a contributor. Contributions are added in the order of names.
      rank: This rank. If two ranks begin a generation with different values, the lower rank's value counts.
      path: The variable's name for users.
      joins: True if this process joins others. The others then send this process their first value.
    """

    def __init__(self, variable: tf.Variable, own: str, *, rank: int, path: str, joins: bool):
        self._variable = weakref.ref(variable)
        self._own, self._rank, self._path = own, rank, path
        self.begin_here()
        # By contributor: the version, and the contribution, flat.
        self._parts: dict[str, tuple[int, np.ndarray]] = {own: (0, np.zeros_like(self._counted))}
        if not joins:
            self._parts[START] = 1, self._counted

    def is_of(self, variable: tf.Variable) -> bool:
        """True if `variable` still is the variable with this sum: ids of variables are reused."""
        return self._variable() is variable

    def begin_here(self) -> None:
        """Counts changes of the variable from its present value on. That value is no contribution of this process."""
        if (variable := self._variable()) is not None:
            self._counted = np.array(variable.numpy()).reshape(-1)

    def begin_anew(self) -> None:
        """Begins a generation if the variable has changed since the last count, although no step has run."""
        counted = self._counted
        self.begin_here()
        if self._counted.tobytes() == counted.tobytes():  # Works for nan, too.
            return
        nothing = np.zeros_like(counted)
        if START in self._parts:
            first = (self._generation + 1) * _NUM_VERSIONS
            self._parts = {self._own: (first, nothing), START: (first + _NUM_VERSIONS - 1 - self._rank, self._counted)}
        else:
            self._parts[self._own] = self._parts[self._own][0] + 1, nothing

    @property
    def _generation(self) -> int:
        return self._parts[START][0] // _NUM_VERSIONS if START in self._parts else 0

    def count_own(self) -> np.ndarray:
        """Counts the changes by this process up to now. Returns its whole contribution."""
        version, part = self._parts[self._own]
        counted = self._counted
        self.begin_here()
        self._parts[self._own] = version + 1, part + (self._counted - counted)
        return self._parts[self._own][1]

    @property
    def versions(self) -> dict[str, int]:
        """The version that this process knows, by contributor."""
        return {name: version for name, (version, _) in self._parts.items()}

    def part_of(self, name: str) -> np.ndarray:
        """The contribution of a process, as far as this process knows it."""
        return self._parts[name][1]

    def take(self, name: str, version: int, part: np.ndarray) -> None:
        """Takes over a contribution, unless this process knows the same or a newer version, or a newer generation."""
        if version <= self.versions.get(name, 0) or version // _NUM_VERSIONS < self._generation:
            return
        before = self._parts.get(name)
        self._parts[name] = version, part.copy()
        if name == START and before is not None:
            self._follow(before[1].tobytes() == part.tobytes())

    def _follow(self, is_same_value: bool) -> None:
        """Called when another rank has begun this generation, or a newer one."""
        own = self._parts[self._own]
        is_late = own[0] // _NUM_VERSIONS < self._generation
        self._parts = {n: p for n, p in self._parts.items() if p[0] // _NUM_VERSIONS >= self._generation}
        if is_late:
            self._parts[self._own] = self._generation * _NUM_VERSIONS, np.zeros_like(own[1])
        if is_late or not is_same_value:
            logging.warning(
                "rank %d: ranks have assigned different values to %r between two steps. The latest assignment counts. "
                "If several ranks were the latest, the lowest rank counts. Assign the same value on all ranks, before "
                "the same step.",
                *(self._rank, self._path),
            )

    def total(self) -> np.ndarray:
        """The sum of all known contributions, in the shape of the variable."""
        total = np.zeros_like(self._counted)
        for _, (version, part) in sorted(self._parts.items()):
            if version // _NUM_VERSIONS == self._generation:
                total = total + part
        return total.reshape(self._variable().shape)


def told_versions(versions: Sequence[dict[str, int]], told: Sequence[str]) -> list[int]:
    """The versions of the contributions that the processes have sent for one sum.

    A process that has joined does not know the generation yet. Its contribution belongs to the newest generation.

    Args:
      versions: The versions of the sum that each process knows.
      told: The processes' own names.
    """
    newest = max(each.get(START, 0) for each in versions) // _NUM_VERSIONS * _NUM_VERSIONS
    return [each[name] + (0 if START in each else newest) for each, name in zip(versions, told, strict=True)]


def missing(versions: Sequence[dict[str, int]], told: Sequence[str]) -> list[tuple[int, str]]:
    """The contributions that some processes know in a newer version than others.

    Args:
      versions: The versions of one sum that each process knows.
      told: The processes' own names. They have all sent their contributions.

    Returns:
      For each such contribution, the first process that knows the newest version, and the contributor.
    """
    found = []
    for name in sorted(set().union(*versions) - set(told)):
        known = [each.get(name, 0) for each in versions]
        if min(known) < max(known):
            found.append((known.index(max(known)), name))
    return found
