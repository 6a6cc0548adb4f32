"""TensorFlow's op determinism, which forbids a training graph to read the clock."""

from __future__ import annotations

from tensorflow.python.framework import config


def is_deterministic() -> bool:
    """True if the program has called `tf.config.experimental.enable_op_determinism()`."""
    return config.is_op_determinism_enabled()


def refuse_times(*, emulates: bool, measures: bool) -> None:
    """Refuses settings that make a step depend on time, under op determinism.

    Args:
      emulates: True if the launcher asks for emulated compute.
      measures: True if batch shares follow from measured times.

    Raises:
      ValueError: If a setting depends on time, and TensorFlow's operations must be deterministic.
    """
    if not is_deterministic():
        return
    if measures:
        raise ValueError(
            "`batch_shares` must be None or a list with tf.config.experimental.enable_op_determinism(): measured times "
            "differ from run to run. `strategy.batch_shares` of an earlier run is such a list. "
            "Received: batch_shares='auto'."
        )
    if emulates:
        raise ValueError(
            "emulated compute (`--step_seconds` and `--slowdown` of `hop_tf launch`) must be off with "
            "tf.config.experimental.enable_op_determinism(): a training graph may not read the clock. "
            "Leave out these arguments. Received: both."
        )
