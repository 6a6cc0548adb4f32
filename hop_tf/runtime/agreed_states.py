"""`AgreedStates`: states that ranks agree on at certain moments: sums, maxima, and rank 0's values."""

from __future__ import annotations

import json
import struct
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.errors import MismatchError
from hop_tf.keras_hook.ownership import Owner, State
from hop_tf.keras_hook.updates import as_own_updates
from hop_tf.runtime.sums import Sum, missing, told_versions

_AGREED = (Owner.SUM, Owner.MAX, Owner.FIRST)
_LENGTH = struct.Struct("<I")  # Of a message's head.


class AgreedStates:
    """Knows the role of each state of a program, and makes the agreed states equal on all ranks.

    Args:
      rank: This rank.
    """

    def __init__(self, rank: int):
        self._rank = rank
        # A process that replaces a lost one is another contributor to sums.
        self._name = f"{rank:06}-{uuid.uuid4().hex}"
        # By the identity of the variable.
        self._sums: dict[int, Sum] = {}
        self._own: dict[int, weakref.ref[tf.Variable]] = {}
        self._trained: dict[int, weakref.ref[tf.Variable]] = {}

    def begin(self, states: Iterable[State], *, trained: Iterable[tf.Variable] = (), joins: bool = False) -> None:
        """Begins new sums, whose present values are equal on all ranks. Called outside of graphs.

        Args:
          states: All states of a model.
          trained: The variables that an optimizer trains from now on. They belong to the strategy, even if marked.
          joins: True if this process was started again and joins the others; see `begin_here`.
        """
        self._note_trained(trained)
        for state in states:
            known = self._sums.get(id(state.variable))
            is_sum = state.owner is Owner.SUM and not self._is_trained(state)
            if is_sum and (known is None or not known.is_of(state.variable)):
                self._sums[id(state.variable)] = Sum(
                    state.variable, self._name, rank=self._rank, path=state.path, joins=joins
                )

    def begin_here(self) -> None:
        """Called when this process has taken over the sums of another one, and has added nothing to them yet."""
        for each in self._sums.values():
            each.begin_here()

    def count_own(self) -> None:
        """Adds the changes that steps have made to the sums. Called after steps, before callbacks change anything."""
        for each in self._sums.values():
            each.count_own()

    def begin_anew(self) -> None:
        """Starts changed sums again from their present values. Called if no step has run since the last `count_own`."""
        for each in self._sums.values():
            each.begin_anew()

    def note_assigned(self, states: Iterable[State]) -> None:
        """Records states that a training step assigns. Warns once of each state whose owner the program has not set."""
        own = [state for state in states if state.owner is Owner.OWN]
        new = [state for state in own if not _holds(self._own.get(id(state.variable)), state.variable)]
        self._own.update({id(state.variable): weakref.ref(state.variable) for state in new})
        untold = [state.path for state in new if not state.is_told]
        if untold:
            logging.warning(
                "rank %d: a training step assigns %s. Each rank keeps its own value, which depends on its part of the "
                "data. To confirm this, call hop_tf.state(variable, 'own'). Or let all ranks take the mean ('mean'), "
                "the sum ('sum'), the maximum ('max'), or the value of rank 0 ('first').",
                *(self._rank, ", ".join(map(repr, untold))),
            )

    def averaged(
        self, states: Sequence[State], share: Callable[[bytes], Sequence[bytes]]
    ) -> Iterator[list[tf.Variable]]:
        """Yields the variables that `synchronize` averages. A collective.

        The first list has the variables that every rank knows to average: an optimizer may train them, or ranks always
        average them. The second list has the other variables that an optimizer of any rank has trained. They are frozen
        now, or marked.

        Args:
          states: All states of a model, the same on all ranks.
          share: See `agree`. Needed because a restarted rank does not know which variables were trained before.
        """
        floats = [state for state in states if state.variable.dtype.is_floating]
        yield [state.variable for state in floats if _may_be_averaged(state)]
        others = [state for state in floats if not _may_be_averaged(state)]
        received = share(bytes(map(self._is_trained, others)))
        trained = [
            state.variable for state, ranks in zip(others, zip(*received, strict=True), strict=True) if any(ranks)
        ]
        self._note_trained(trained)
        if trained:
            yield trained

    def _note_trained(self, variables: Iterable[tf.Variable]) -> None:
        for variable in variables:
            self._trained[id(variable)] = weakref.ref(variable)
            self._sums.pop(id(variable), None)

    def _is_trained(self, state: State) -> bool:
        return _holds(self._trained.get(id(state.variable)), state.variable)

    def agree(self, states: Iterable[State], share: Callable[[bytes], Sequence[bytes]]) -> None:
        """Makes sums, maxima and rank 0's states equal on all ranks that take part, to the bit. A collective.

        Args:
          states: All states of a model, the same on all ranks.
          share: A function of this rank's bytes, which returns each rank's bytes, in the order of ranks. It is not
            called without agreed states. It is called twice if ranks know different contributions of a rank that does
            not take part.

        Raises:
          MismatchError: If another rank has other states.
        """
        agreed = [state for state in states if state.owner in _AGREED and not self._is_trained(state)]
        if agreed:
            self.begin(agreed)
            sums = [self._sums[id(state.variable)] for state in agreed if state.owner is Owner.SUM]
            self._assign(agreed, sums, self._share_values(agreed, sums, share))

    def _share_values(self, agreed: Sequence[State], sums: Sequence[Sum], share) -> list[list[np.ndarray]]:
        """Returns each rank's values of the agreed states. Takes over the ranks' contributions to sums."""
        own = [
            self._sums[id(state.variable)].count_own() if state.owner is Owner.SUM else state.variable.numpy()
            for state in agreed
        ]
        heads, values = _share_arrays([self._name, [each.versions for each in sums]], own, share)
        _check_sizes(own, values)
        parts = [_split(each, own) for each in values]
        names = [name for name, _ in heads]
        of_sums = [index for index, state in enumerate(agreed) if state.owner is Owner.SUM]
        known = [versions for _, versions in heads]
        for each, index, versions in zip(sums, of_sums, zip(*known, strict=True), strict=True):
            for name, version, of_rank in zip(names, told_versions(versions, names), parts, strict=True):
                each.take(name, version, of_rank[index])
        self._share_missing(sums, names, known, share)
        return parts

    def _share_missing(self, sums: Sequence[Sum], names: Sequence[str], versions: Sequence[list], share) -> None:
        """Shares the contributions that only some ranks know: those of lost ranks, and of ranks in a longer epoch."""
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


def _may_be_averaged(state: State) -> bool:
    """True if ranks average the state in any case, or if an optimizer may train it and it is not marked."""
    return state.owner is Owner.MEAN or (state.owner is Owner.OWN and state.is_trainable and not state.is_marked)


def _share_arrays(head: object, arrays: Iterable[np.ndarray], share) -> tuple[list, list[memoryview]]:
    """Shares a head, as JSON, and arrays. Returns each rank's head, and each rank's arrays as bytes."""
    text = json.dumps(head).encode()
    received = share(_LENGTH.pack(len(text)) + text + b"".join(np.asarray(each).tobytes() for each in arrays))
    ends = [_LENGTH.size + _LENGTH.unpack_from(data)[0] for data in received]
    heads = [json.loads(bytes(data[_LENGTH.size : end])) for data, end in zip(received, ends, strict=True)]
    return heads, [memoryview(data)[end:] for data, end in zip(received, ends, strict=True)]


def _split(data: memoryview, like: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Splits bytes into flat arrays with the sizes and dtypes of `like`."""
    parts, start = [], 0
    for each in like:
        parts.append(np.frombuffer(data, each.dtype, each.size, start))
        start += each.nbytes
    return parts


def _check_sizes(own: Sequence[np.ndarray], values: Sequence[memoryview]) -> None:
    if {len(each) for each in values} != {sum(each.nbytes for each in own)}:
        raise MismatchError(
            "states have different sizes on the ranks. All ranks must build the same model. Received: "
            f"{[len(each) for each in values]} bytes."
        )


def _holds(reference: weakref.ref | None, variable: tf.Variable) -> bool:
    return reference is not None and reference() is variable
