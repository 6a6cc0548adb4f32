"""Checks that every rank makes the same trials in a search for hyperparameters by KerasTuner."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import keras

from hop_tf.errors import HopError, MismatchError
from hop_tf.keras_hook.shared_paths import flat_callbacks, place_of

_CLAIM = "a trial of KerasTuner"
_PLACE = "the directory of KerasTuner: "


class Trial:
    """The trial that a `fit` belongs to, if KerasTuner called that `fit`.

    Args:
      callbacks: The `callbacks` argument of `fit`. KerasTuner adds a callback of its own.

    Attributes:
      claims: The claims for the session. If any rank makes them, all ranks have to compare.
    """

    def __init__(self, callbacks: object):
        self._callback = _callback_of_tuner(callbacks)
        self.claims = [] if self._callback is None else [_CLAIM, self._place]

    @property
    def _place(self) -> str:
        return _PLACE + place_of(os.fspath(self._callback.tuner.project_dir))

    def is_needed(self, owners: Collection[str]) -> bool:
        """True if any rank makes a trial. `owners` are the claims of all ranks."""
        return _CLAIM in owners

    def compare(self, owners: Mapping[str, int], share: Callable[[bytes], Sequence[bytes]]) -> None:
        """Compares the hyperparameters with rank 0's. A collective.

        Args:
          owners: The rank that each claim belongs to.
          share: Sends this rank's bytes to all ranks, and returns the bytes of every rank.

        Raises:
          MismatchError: On all ranks, if a rank tries other hyperparameters, or writes to another rank's directory.
        """
        own = None
        if self._callback is not None:
            own = [self._callback.trial.hyperparameters.values, owners[self._place], self._callback.tuner.project_dir]
        first, *others = (json.loads(data) for data in share(json.dumps(own, default=str).encode()))
        for number, theirs in enumerate(others, start=1):
            if first is None or theirs is None or first[0] != theirs[0]:
                raise MismatchError(_of_values(number, first and first[0], theirs and theirs[0]))
            if theirs[1] != number:
                raise MismatchError(_of_directories(number, *theirs[1:]))


def _of_values(rank: int, first: object, theirs: object) -> str:
    return (
        f"rank {rank} tries other hyperparameters than rank 0. Rank 0 tries {first}, rank {rank} tries {theirs}. All "
        "ranks train one model together, so give the tuner the same `seed` on all ranks, as in "
        "`keras_tuner.RandomSearch(build_model, seed=1, ...)`. A tuner that learns from earlier trials also needs the "
        "same metrics on all ranks: pass hop_tf.callbacks.MetricAverage() to `search`. Do not resume a search that "
        "some ranks have not made: pass overwrite=True to start over."
    )


def _of_directories(rank: int, owner: int, directory: str) -> str:
    return (
        "`directory` of a tuner must be different on each rank, as in "
        'keras_tuner.RandomSearch(build_model, directory=f"search/rank_{strategy.rank}", ...). Otherwise ranks '
        "overwrite each other's trials and weights. "
        f"Received: {directory} on rank {rank}, which rank {owner} uses, too."
    )


def _callback_of_tuner(callbacks: object) -> keras.callbacks.Callback | None:
    if "keras_tuner" not in sys.modules:
        return None
    found = [each for each in flat_callbacks(callbacks) if hasattr(each, "trial") and hasattr(each, "tuner")]
    return found[0] if found else None


@contextlib.contextmanager
def ending_search(callbacks: object) -> Iterator[None]:
    """Makes errors of hop_tf end a search. KerasTuner only records other errors with the trial, and continues."""
    try:
        yield
    except HopError as error:
        if _callback_of_tuner(callbacks) is None:
            raise
        raise _fatal(type(error))(str(error)) from error


@functools.cache
def _fatal(kind: type[HopError]) -> type[HopError]:
    """A subclass of an error class. KerasTuner raises its instances instead of recording them."""
    return type(kind.__name__, (kind, sys.modules["keras_tuner"].errors.FatalError), {"__doc__": kind.__doc__})
