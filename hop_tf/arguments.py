"""What the constructors of several strategies do with their arguments."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np


def is_integer(value: object) -> bool:
    """Whether `value` is an integer of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_integer(name: str, value: object, *, at_least: float = -math.inf, at_most: float = math.inf) -> None:
    """Raises ValueError unless `value` is an integer within these bounds."""
    if not is_integer(value) or not at_least <= value <= at_most:
        bounds = [f"at least {at_least}"] if at_least > -math.inf else []
        if at_most < math.inf:
            bounds.append(f"at most {at_most}")
        rule = f" of {' and '.join(bounds)}" if bounds else ""
        raise ValueError(f"`{name}` must be an integer{rule}. Received: {name}={value!r}.")


def check_boolean(name: str, value: object) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False. Received: {name}={value!r}.")


def check_on_peer_loss(value: object) -> None:
    """Raises ValueError unless `value` says what is done when a rank is lost; None: what is the strategy's default."""
    check_choice("on_peer_loss", value, (None, "raise", "continue"))


def check_share(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a number from 0 to 1."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be a number from 0 to 1. Received: {name}={value!r}.")


def check_seconds(name: str, value: float, where: str = "") -> None:
    """Raises ValueError, which says where, unless `value` is a finite number of at least 0."""
    if not 0 <= value < math.inf:
        raise ValueError(f"`{name}` must be a finite number of seconds, at least 0. Received: {name}={value!r}{where}.")


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(str, choices))}. Received: {name}={value!r}.")


def identity_of(settings: Any) -> dict[str, str]:
    """What ranks compare of a strategy's settings (a dataclass) before they train: each field as text."""
    return {field.name: str(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
