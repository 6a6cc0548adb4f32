"""The measured changes of accuracy with some settings, from the tables of `docs/measurements.md`.

`tests/tools/planning/accuracy_test.py` compares these numbers with the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Change:
    """A difference in accuracy.

    Attributes:
      task: The training task.
      points: Percentage points above the reference. Negative: below.
      section: The section of `docs/measurements.md` that describes the measurement.
      reference: The training that the accuracy is compared with.
    """

    task: str
    points: float
    section: str
    reference: str = "synchronous training"


_DELAY, _PIPE_SGD, _DTS, _HOP = "What delay costs", "Pipe-SGD: accuracy", "DTS", "Hop's experiments"
_SHORT = "Fashion-MNIST, 780 steps"
_RANDOM, _SLOW = "random slowdowns", "one rank 4 times slower"
# By section and row of a table, the points of its columns.
_TABLES: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    _DELAY: {
        "hop": {"perceptron": -0.10, "resnet": -0.39, "cnn": -0.07, "AdamW": -0.42, "skewed": -1.81},
        "pipe (K = 2)": {
            **{"perceptron": -0.04, "resnet": -0.03, "transformer": -0.90},
            **{"cnn": -0.13, "AdamW": -0.13, "skewed": -0.20},
        },
        "dts (D = 4, p = 4)": {
            **{"perceptron": -0.47, "resnet": -1.14, "transformer": -0.90},
            **{"cnn": -0.61, "AdamW": -0.32, "skewed": -4.05},
        },
        "dts:20:12": {
            **{"perceptron": -1.21, "resnet": -4.05, "transformer": -1.20},
            **{"cnn": -2.14, "AdamW": -0.52, "skewed": -6.64},
        },
        "canary": {
            **{"perceptron": -0.52, "resnet": -0.39, "transformer": -0.03},
            **{"cnn": -0.28, "AdamW": -0.40, "skewed": -2.23},
        },
        "canary:bsp": {"perceptron": -0.04},
        "shat (2026-11-25)": {"perceptron": +0.00, "transformer": +0.25},
    },
    _PIPE_SGD: {
        "D-Sync, int8": {"MNIST": 0.00, "CIFAR-10": +0.62},
        "D-Sync, truncate16": {"MNIST": +0.01, "CIFAR-10": +0.05},
        "Pipe-SGD, int8": {"MNIST": 0.00, "CIFAR-10": +0.17},
        "Pipe-SGD, truncate16": {"MNIST": +0.01, "CIFAR-10": +0.39},
    },
    _DTS: {"D = 4, p = 4": {_SHORT: -0.37}, "D = 20, p = 12": {_SHORT: -0.78}},
    _HOP: {
        "backup 1": {_RANDOM: -0.24, _SLOW: -0.30},
        "staleness 5": {_RANDOM: +0.38},
        "backup 1, staleness 5": {_RANDOM: +0.33},
        "the same, jumps of 10": {_RANDOM: +0.15},
    },
}


def changes(section: str, row: str) -> tuple[Change, ...]:
    """The changes in a row of a table. See `_TABLES`."""
    reference = "HopStrategy without slow ranks" if section == _HOP else Change.reference
    return tuple(Change(task, points, section, reference) for task, points in _TABLES[section][row].items())


# By name of the settings in `hop_tf.planning.candidates`. Other settings were not measured.
CHANGES: Mapping[str, tuple[Change, ...]] = {
    "pipe:1:truncate16": changes(_PIPE_SGD, "D-Sync, truncate16"),
    "pipe:1:int8": changes(_PIPE_SGD, "D-Sync, int8"),
    "pipe:2": changes(_DELAY, "pipe (K = 2)"),
    "pipe:2:truncate16": changes(_PIPE_SGD, "Pipe-SGD, truncate16"),
    "pipe:2:int8": changes(_PIPE_SGD, "Pipe-SGD, int8"),
    "hop": changes(_DELAY, "hop"),
    "hop:backup": changes(_HOP, "backup 1"),
    "hop:staleness": changes(_HOP, "staleness 5"),
    "hop:both": changes(_HOP, "backup 1, staleness 5"),
    "hop:skip": changes(_HOP, "the same, jumps of 10"),
    "canary:bsp": changes(_DELAY, "canary:bsp"),
    "canary": changes(_DELAY, "canary"),
    "shat": changes(_DELAY, "shat (2026-11-25)"),
    "dts:4:4": changes(_DELAY, "dts (D = 4, p = 4)"),
    "dts:4:4:top_k": changes(_DTS, "D = 4, p = 4"),
    "dts:20:12": changes(_DELAY, "dts:20:12"),
    "dts:20:12:top_k": changes(_DTS, "D = 20, p = 12"),
}
