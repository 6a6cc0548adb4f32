"""The text of calls that make a strategy. Users can paste these calls, which keep the job's settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping

import hop_tf
from hop_tf import codecs
from hop_tf.runtime.choosing import AUTO


def kept_settings(strategy: str, settings: Mapping[str, object], other: str) -> dict[str, object]:
    """The settings of a strategy that differ from its defaults, and that another strategy has, too.

    Args:
      strategy: Name of the strategy.
      settings: The settings of the strategy, as `read_settings` returns them.
      other: Name of the other strategy, or the same one.
    """
    if not hasattr(hop_tf, strategy):  # A strategy of the user.
        return {}
    own, others = _defaults(strategy), _defaults(other)
    if strategy != other:
        others.pop("interval", None)  # Hop's interval does not suit DTS, which hides windows for longer.
    return {name: value for name, value in settings.items() if name in others and value != own.get(name)}


def tell_call(strategy: str, settings: Mapping[str, object]) -> str:
    """The text of a call, after `import hop_tf`. `...` stands for a value of which only a description is known."""
    order = list(_defaults(strategy))
    told = [f"{name}={_tell(settings[name])}" for name in sorted(settings, key=order.index)]
    return f"hop_tf.{strategy}({', '.join(told)})"


def _defaults(strategy: str) -> dict[str, object]:
    """The values that are recorded for omitted arguments, by name."""
    parameters = inspect.signature(getattr(hop_tf, strategy)).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    if defaults.get("codec", AUTO) != AUTO:
        defaults["codec"] = codecs.get_for_means(defaults["codec"])
    if strategy != "HopStrategy":  # In HopStrategy the default depends on the other settings.
        defaults["on_peer_loss"] = "raise"
    return defaults


def _tell(value: object) -> str:
    if isinstance(value, codecs.Codec | codecs.LowRank):
        is_usual = value == codecs.get_for_means(value.name)
        return repr(value.name) if is_usual else f"hop_tf.codecs.{_tell_fields(value)}"
    if isinstance(value, hop_tf.SkipIterations):
        return f"hop_tf.{_tell_fields(value)}"
    if isinstance(value, tuple):
        return repr(list(value))
    is_description = isinstance(value, str) and not value.isidentifier()
    return "..." if is_description else repr(value)


def _tell_fields(value: object) -> str:
    fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    given = [f"{field.name}={_tell(of_field)}" for field, of_field in fields if of_field != field.default]
    return f"{type(value).__name__}({', '.join(given)})"
