"""`AgreedStates`: the states that ranks agree on now and then: sums, maxima, and rank 0's."""

from __future__ import annotations

import json
import struct
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.errors import MismatchError
from hop_tf.keras_hook.ownership import Owner, State
from hop_tf.keras_hook.updates import as_own_updates
from hop_tf.runtime.sums import Sum, missing

_AGREED = (Owner.SUM, Owner.MAX, Owner.FIRST)
_LENGTH = struct.Struct("<I")  # Of a message's head.


class AgreedStates:
    """Knows what each state of a program is on several ranks, and makes the agreed ones equal on all.

    Args:
      rank: This rank.
    """

    def __init__(self, rank: int):
        self._rank = rank
        # A process that takes the place of a lost one is another contributor to sums.
        self._name = f"{rank:06}-{uuid.uuid4().hex}"
        # Both by the identity of the variable.
        self._sums: dict[int, Sum] = {}
        self._own: dict[int, weakref.ref[tf.Variable]] = {}

    def begin(self, states: Iterable[State], *, joins: bool = False) -> None:
        """Notes the sums that are equal on all ranks now, unless they are known. Called outside of graphs.

        Args:
          states: All states of a model.
          joins: True if this process was started again and joins the others; see `begin_here`.
        """
        for state in states:
            known = self._sums.get(id(state.variable))
            if state.owner is Owner.SUM and (known is None or not known.is_of(state.variable)):
                self._sums[id(state.variable)] = Sum(state.variable, self._name, joins=joins)

    def begin_here(self) -> None:
        """This process has taken over the sums of another one: it has added nothing to them yet."""
        for each in self._sums.values():
            each.begin_here()

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
          share: Takes this rank's bytes, and returns each rank's, in their order. Not called if nothing is agreed, and
            called twice if ranks know different contributions to a sum of a rank that does not take part.

        Raises:
          MismatchError: If another rank has other states.
        """
        agreed = [state for state in states if state.owner in _AGREED]
        if agreed:
            self.begin(agreed)
            sums = [self._sums[id(state.variable)] for state in agreed if state.owner is Owner.SUM]
            self._assign(agreed, sums, self._share_values(agreed, sums, share))

    def _share_values(self, agreed: Sequence[State], sums: Sequence[Sum], share) -> list[list[np.ndarray]]:
        """Each rank's values of the agreed states; takes over what the ranks know of sums."""
        own = [
            self._sums[id(state.variable)].count_own() if state.owner is Owner.SUM else state.variable.numpy()
            for state in agreed
        ]
        heads, values = _share_arrays([self._name, [each.versions for each in sums]], own, share)
        _check_sizes(own, values)
        parts = [_split(each, own) for each in values]
        names = [name for name, _ in heads]
        of_sums = [index for index, state in enumerate(agreed) if state.owner is Owner.SUM]
        for (name, versions), of_rank in zip(heads, parts, strict=True):
            for each, known, index in zip(sums, versions, of_sums, strict=True):
                each.take(name, known[name], of_rank[index])
        self._share_missing(sums, names, [versions for _, versions in heads], share)
        return parts

    def _share_missing(self, sums: Sequence[Sum], names: Sequence[str], versions: Sequence[list], share) -> None:
        """Shares the contributions that not all ranks know: of lost ranks, and of ranks in a longer epoch."""
        lacking = [missing([of_rank[i] for of_rank in versions], names) for i in range(len(sums))]
        if not any(lacking):
            return
        me = names.index(self._name)
        given = [(i, name) for i, found in enumerate(lacking) for holder, name in found if holder == me]
        head = [(i, name, sums[i].versions[name]) for i, name in given]
        heads, values = _share_arrays(head, [sums[i].part_of(name) for i, name in given], share)
        for taken, data in zip(heads, values, strict=True):
            arrays = _split(data, [sums[i].part_of(self._name) for i, *_ in taken])
            for (i, name, version), part in zip(taken, arrays, strict=True):
                sums[i].take(name, version, part)

    def _assign(self, agreed: Sequence[State], sums: Sequence[Sum], parts: Sequence[Sequence[np.ndarray]]) -> None:
        totals = iter(sums)
        for index, state in enumerate(agreed):
            if state.owner is Owner.SUM:
                value = next(totals).total()
            elif state.owner is Owner.MAX:
                value = np.maximum.reduce([of_rank[index] for of_rank in parts])
            else:
                value = parts[0][index]
            with as_own_updates():
                state.variable.assign(value.reshape(state.variable.shape))
        for each in sums:
            each.begin_here()


def _share_arrays(head: object, arrays: Iterable[np.ndarray], share) -> tuple[list, list[memoryview]]:
    """Shares a head, as JSON, and arrays; returns each rank's head, and its arrays as bytes."""
    text = json.dumps(head).encode()
    received = share(_LENGTH.pack(len(text)) + text + b"".join(np.asarray(each).tobytes() for each in arrays))
    ends = [_LENGTH.size + _LENGTH.unpack_from(data)[0] for data in received]
    heads = [json.loads(bytes(data[_LENGTH.size : end])) for data, end in zip(received, ends, strict=True)]
    return heads, [memoryview(data)[end:] for data, end in zip(received, ends, strict=True)]


def _split(data: memoryview, like: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Flat arrays of these sizes and dtypes, of their bytes one after the other."""
    parts, start = [], 0
    for each in like:
        parts.append(np.frombuffer(data, each.dtype, each.size, start))
        start += each.nbytes
    return parts


def _check_sizes(own: Sequence[np.ndarray], values: Sequence[memoryview]) -> None:
    if {len(each) for each in values} != {sum(each.nbytes for each in own)}:
        raise MismatchError(
            "ranks agree on states of other sizes than each other. All ranks must build the same model. "
            f"Received: {[len(each) for each in values]} bytes."
        )


def _holds(reference: weakref.ref | None, variable: tf.Variable) -> bool:
    return reference is not None and reference() is variable
