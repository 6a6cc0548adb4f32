"""Common parts of strategies whose ranks choose settings by times: see `hop_tf.runtime.autotuning`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol, TypeVar

from hop_tf import codecs
from hop_tf.keras_hook.determinism import is_deterministic
from hop_tf.records import Recorder
from hop_tf.runtime.ways import Way

# The reason for choosing nothing, for `tell_choice`.
NO_TIMES = "operations are deterministic, so ranks choose nothing by measured times"


class Choosable(Protocol):
    """Settings, some of which ranks may choose."""

    def without_times(self) -> Choosable:
        """These settings, fixed to those that ranks begin with."""


_Settings = TypeVar("_Settings", bound=Choosable)


def settings_to_use(given: _Settings) -> _Settings:
    """Returns the settings of a new strategy. Under op determinism, these are fixed to those that ranks begin with."""
    return given.without_times() if is_deterministic() else given


def refuse_late_determinism(settings: Choosable, *, chooses: bool) -> None:
    """Refuses settings that ranks choose, if operations have become deterministic since the strategy was made.

    Args:
      settings: The settings of the strategy.
      chooses: True if ranks choose some of them.

    Raises:
      ValueError: If ranks choose settings, and TensorFlow's operations must be deterministic.
    """
    if chooses and is_deterministic():
        raise ValueError(
            "settings must not be 'auto' with tf.config.experimental.enable_op_determinism(), because times differ "
            "from run to run. Call it before you create the strategy: then hop_tf uses fixed settings. Received: "
            f"{settings}."
        )


def _written(value: object) -> object:
    """An argument as a program gives it: a codec by its name, if it has the codec's usual settings."""
    if value == codecs.Identity():
        return None
    name = getattr(value, "name", None)
    return name if name is not None and value == codecs.get_for_means(name) else value


def tell_choice(
    recorder: Recorder | None, way: Way, text: str, *, arguments: Mapping[str, object], is_chief: bool, **others: int
) -> None:
    """Records the settings that ranks have chosen. The chief also prints them to stderr.

    Args:
      recorder: This rank's recorder, if it has one.
      way: The way in which ranks average.
      text: The duration of its step, or the reason for the choice.
      arguments: The arguments of the strategy that keep these settings, in addition to those that the program gives.
      is_chief: True if this rank is the chief.
      **others: Other settings that were chosen.
    """
    if recorder is not None:
        recorder.add_line("chosen", codec=str(way.codec), algorithm=way.algorithm, **others)
    if is_chief:
        to_pass = ", ".join(f"{name}={_written(value)!r}" for name, value in arguments.items())
        print(f"hop_tf: {text}. To keep these settings, pass {to_pass}.", file=sys.stderr, flush=True)
