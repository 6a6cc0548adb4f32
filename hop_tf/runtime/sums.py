"""`Sum`: a variable to which several processes add, and what each of them has added.

Each process tells its whole contribution, with a version. A newer version replaces an older one. So ranks that know the
same versions hold the same sum, to the bit. An agreement that a rank has missed loses nothing and counts nothing twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

START = ""  # The contribution that all ranks begin with. It is added first.


class Sum:
    """The contributions to one variable, as far as this process knows them.

    Args:
      variable: The variable.
      own: This process among the contributors. Names are added in their order.
      joins: True if this process joins others. It then hears from them which value they began with.
    """

    def __init__(self, variable: tf.Variable, own: str, *, joins: bool):
        self._variable = weakref.ref(variable)
        self._own = own
        self.begin_here()
        # By contributor: the version, and the contribution, flat.
        self._parts: dict[str, tuple[int, np.ndarray]] = {own: (0, np.zeros_like(self._counted))}
        if not joins:
            self._parts[START] = 1, self._counted

    def is_of(self, variable: tf.Variable) -> bool:
        """True if the variable still is the one with this sum: identities are used again."""
        return self._variable() is variable

    def begin_here(self) -> None:
        """What the variable holds now is no contribution of this process."""
        if (variable := self._variable()) is not None:
            self._counted = np.array(variable.numpy()).reshape(-1)

    def count_own(self) -> np.ndarray:
        """Counts what this process has added by now; returns its whole contribution."""
        version, part = self._parts[self._own]
        counted = self._counted
        self.begin_here()
        self._parts[self._own] = version + 1, part + (self._counted - counted)
        return self._parts[self._own][1]

    @property
    def versions(self) -> dict[str, int]:
        """By contributor, the version that this process knows."""
        return {name: version for name, (version, _) in self._parts.items()}

    def part_of(self, name: str) -> np.ndarray:
        """The contribution that this process knows of another one."""
        return self._parts[name][1]

    def take(self, name: str, version: int, part: np.ndarray) -> None:
        """Takes over a contribution, unless a newer one is known."""
        if version > self.versions.get(name, 0):
            self._parts[name] = version, part.copy()

    def total(self) -> np.ndarray:
        """The sum of all known contributions, in the shape of the variable."""
        total = np.zeros_like(self._counted)
        for _, (_, part) in sorted(self._parts.items()):
            total = total + part
        return total.reshape(self._variable().shape)


def missing(versions: Sequence[dict[str, int]], told: Sequence[str]) -> list[tuple[int, str]]:
    """The contributions that some processes know in a newer version than others.

    Args:
      versions: What each process knows of one sum.
      told: Their own names: they have all told their contributions.

    Returns:
      For each such contribution, the first process that knows the newest version, and the contributor.
    """
    found = []
    for name in sorted(set().union(*versions) - set(told)):
        known = [each.get(name, 0) for each in versions]
        if min(known) < max(known):
            found.append((known.index(max(known)), name))
    return found
