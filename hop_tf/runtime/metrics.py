"""`EpochMetrics`: the metrics of an epoch on one rank, and their means and sums over ranks."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Prefixes of the parts of a message. The name of a metric, or the index of a state, follows.
_WEIGHT, _LOG, _STATE, _SUMMED = "weight", "log ", "state ", "summed "


@dataclasses.dataclass(frozen=True)
class EpochMetrics:
    """The metrics of an epoch, as one rank knows them.

    Attributes:
      weight: The rank's weight in means over ranks; positive.
      logs: The metrics by name, without metrics that are not numbers.
      states: The states of metrics that are sums, in the same order on all ranks.
      summed: The names in `logs` that follow from the states.
    """

    weight: float
    logs: Mapping[str, np.ndarray]
    states: Sequence[np.ndarray] = ()
    summed: frozenset[str] = frozenset()

    def pack(self) -> bytes:
        """Returns the metrics as bytes; see `unpack`."""
        arrays = {_WEIGHT: np.float64(self.weight)}
        arrays |= {_LOG + name: value for name, value in self.logs.items()}
        arrays |= {f"{_STATE}{index:08d}": value for index, value in enumerate(self.states)}
        arrays |= {_SUMMED + name: np.True_ for name in self.summed}
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        return buffer.getvalue()

    @classmethod
    def unpack(cls, data: bytes) -> EpochMetrics:
        """Returns the metrics that `pack` was called on."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            parts = {name: arrays[name] for name in arrays.files}

        def of_kind(kind: str) -> dict[str, np.ndarray]:
            return {name.removeprefix(kind): parts[name] for name in sorted(parts) if name.startswith(kind)}

        states = list(of_kind(_STATE).values())
        return cls(float(parts[_WEIGHT]), of_kind(_LOG), states, frozenset(of_kind(_SUMMED)))


def numeric(metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The metrics that are numbers, or arrays of numbers, as float64."""
    return {name: np.asarray(value, np.float64) for name, value in metrics.items() if _is_numeric(value)}


def _is_numeric(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # Parts with different shapes.
        return False


def means_of(ranks: Sequence[EpochMetrics], names: Iterable[str]) -> dict[str, Any]:
    """The means of metrics over the ranks that have them.

    Args:
      ranks: The metrics of each rank, in the same order on all ranks, so that the means are equal to the bit.
      names: The names of wanted metrics. A metric whose shape differs between ranks is left out.
    """
    means = {}
    for name in names:
        known = [(each.logs[name], each.weight) for each in ranks if name in each.logs]
        values, weights = [value for value, _ in known], [weight for _, weight in known]
        if known and all(value.shape == values[0].shape for value in values):
            mean = np.average(values, axis=0, weights=weights) if np.ptp(weights) else np.mean(values, axis=0)
            means[name] = as_log(mean)
    return means


def sums_of(ranks: Sequence[EpochMetrics]) -> tuple[list[np.ndarray], frozenset[str]]:
    """The sums of states over ranks, and the names of metrics that follow from these states on all of these ranks.

    Returns:
      The sums, and the names. Both are empty if ranks have different states.
    """
    known = [each for each in ranks if each.states]
    shapes = {tuple(state.shape for state in each.states) for each in known}
    if len(shapes) != 1:
        return [], frozenset()
    return [sum(parts) for parts in zip(*(each.states for each in known), strict=True)], frozenset.intersection(
        *(each.summed for each in known)
    )


def as_log(value: np.ndarray) -> Any:
    """A value in the form in which Keras logs it: a scalar is a float."""
    return value if np.ndim(value) else float(value)
