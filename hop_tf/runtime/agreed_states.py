"""`AgreedStates`: the states that ranks agree on now and then: sums, maxima, and rank 0's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.errors import MismatchError
from hop_tf.keras_hook.ownership import Owner, State
from hop_tf.keras_hook.updates import as_own_updates

_AGREED = (Owner.SUM, Owner.MAX, Owner.FIRST)


class AgreedStates:
    """Knows what each state of a program is on several ranks, and makes the agreed ones equal on all.

    A sum is what all ranks held when they last agreed, and what each of them has added since.

    Args:
      rank: This rank.
    """

    def __init__(self, rank: int):
        self._rank = rank
        # By the identity of the variable: the variable, and the sum that ranks held alike.
        self._sums: dict[int, tuple[weakref.ref[tf.Variable], np.ndarray]] = {}
        self._own: dict[int, weakref.ref[tf.Variable]] = {}

    def begin(self, states: Iterable[State]) -> None:
        """Notes the sums that are equal on all ranks now, unless they are known. Called outside of graphs."""
        for state in states:
            if state.owner is Owner.SUM and not _holds(self._sums.get(id(state.variable), (None,))[0], state.variable):
                self._note_sum(state.variable)

    def _note_sum(self, variable: tf.Variable) -> None:
        self._sums[id(variable)] = weakref.ref(variable), np.array(variable.numpy())

    def note_assigned(self, states: Iterable[State]) -> None:
        """Notes states that a training step assigns. Warns, once, of those that nobody has said anything about."""
        own = [state for state in states if state.owner is Owner.OWN]
        new = [state for state in own if not _holds(self._own.get(id(state.variable)), state.variable)]
        self._own.update({id(state.variable): weakref.ref(state.variable) for state in new})
        untold = [state.path for state in new if not state.is_told]
        if untold:
            logging.warning(
                "rank %d: a training step assigns %s. Each rank keeps its own, made from its part of the data. Say so "
                "by hop_tf.state(variable, 'own'), or have ranks average it ('mean'), add it up ('sum'), or take the "
                "maximum ('max') or rank 0's ('first').",
                *(self._rank, ", ".join(map(repr, untold))),
            )

    def is_averaged(self, state: State) -> bool:
        """True if `synchronize` averages a variable: a float that an optimizer may train, or that is always averaged.

        All ranks say the same, whatever their steps have assigned.
        """
        is_own = state.owner is Owner.OWN and (state.is_marked or not state.variable.trainable)
        return state.variable.dtype.is_floating and state.owner not in _AGREED and not is_own

    def agree(self, states: Iterable[State], share: Callable[[bytes], Sequence[bytes]]) -> None:
        """Makes sums, maxima and rank 0's states equal on all ranks that take part, to the bit. A collective.

        Args:
          states: All states of a model, the same on all ranks.
          share: Takes this rank's bytes, and returns each rank's, in their order. Not called if nothing is agreed.

        Raises:
          MismatchError: If another rank has other states.
        """
        agreed = [state for state in states if state.owner in _AGREED]
        if agreed:
            self.assign(agreed, share(self.read(agreed)))

    def read(self, states: Iterable[State]) -> bytes:
        """The values of the agreed ones among some states, as bytes."""
        return b"".join(state.variable.numpy().tobytes() for state in states if state.owner in _AGREED)

    def assign(self, states: Iterable[State], of_ranks: Sequence[bytes]) -> None:
        """Assigns what the values of all ranks make; see `agree`."""
        if len({len(values) for values in of_ranks}) > 1:
            raise MismatchError(
                "ranks agree on states of other sizes than each other. All ranks must build the same model. "
                f"Received: {[len(values) for values in of_ranks]} bytes."
            )
        start = 0
        for state in states:
            if state.owner in _AGREED:
                own = state.variable.numpy()
                parts = [np.frombuffer(each, own.dtype, own.size, start).reshape(own.shape) for each in of_ranks]
                self._assign(state, parts)
                start += own.nbytes

    def _assign(self, state: State, parts: Sequence[np.ndarray]) -> None:
        with as_own_updates():
            state.variable.assign(self._combined(state, parts))
        if state.owner is Owner.SUM:
            self._note_sum(state.variable)

    def _combined(self, state: State, parts: Sequence[np.ndarray]) -> np.ndarray:
        if state.owner is Owner.FIRST:
            return parts[0]
        if state.owner is Owner.MAX:
            return np.maximum.reduce(parts)
        self.begin([state])
        _, before = self._sums[id(state.variable)]
        return before + sum(part - before for part in parts)


def _holds(reference: weakref.ref | None, variable: tf.Variable) -> bool:
    return reference is not None and reference() is variable
