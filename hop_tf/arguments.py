"""Checks and conversions of arguments that several strategies share."""

from __future__ import annotations

import dataclasses
import fractions
import hashlib
import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np


def is_integer(value: object) -> bool:
    """True if `value` is an integer of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_integer(name: str, value: object, *, at_least: float = -math.inf, at_most: float = math.inf) -> None:
    """Raises ValueError unless `value` is an integer from `at_least` to `at_most`."""
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
    """Raises ValueError unless `value` is a reaction to a lost rank. None stands for the strategy's default."""
    check_choice("on_peer_loss", value, (None, "raise", "continue"))


def check_share(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a number from 0 to 1."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be a number from 0 to 1. Received: {name}={value!r}.")


# Upper limit of the sum of the shares as whole numbers: a share times a number of rows must fit in an int64.
_MAX_TOTAL = 1 << 31


def checked_batch_shares(value: object, world_size: int) -> tuple[int, ...] | str | None:
    """Returns the shares of the ranks in a batch as whole numbers. Returns "auto" and None unchanged.

    Args:
      value: The strategy's argument: one positive number for each rank, "auto", or None for equal shares. In a world
        of one, a list may have any length.
      world_size: Number of ranks.

    Raises:
      ValueError: If `value` is anything else.
    """
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    of_ranks = list(value) if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) else []
    if not of_ranks or not all(_is_positive(each) for each in of_ranks):
        raise ValueError(
            "`batch_shares` must be a list with a positive, finite number for each rank, such as [3, 1], or 'auto', or "
            f"None for equal shares. Received: batch_shares={value!r}."
        )
    if world_size > 1 and len(of_ranks) != world_size:
        raise ValueError(
            f"`batch_shares` must have one number for each of the {world_size} ranks. Received: batch_shares={value!r}."
        )
    return _in_whole_numbers(of_ranks if world_size > 1 else [1])


def describe_batch_shares(shares: tuple[int, ...] | str | None) -> str:
    """The result of `checked_batch_shares` as text, for ranks to compare. A text of over 100 characters is hashed."""
    text = str(shares)
    return text if len(text) <= 100 else f"of {len(shares)} ranks, {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _in_whole_numbers(shares: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the same proportions. Decimals are taken as written: 0.7 is 7 / 10."""
    exact = [fractions.Fraction(repr(float(share))) for share in shares]
    denominator = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * denominator) for share in exact]
    divisor = math.gcd(*whole)
    whole = [each // divisor for each in whole]
    total = sum(whole)
    if total > _MAX_TOTAL:
        whole = [max(1, each * (_MAX_TOTAL - len(whole)) // total) for each in whole]
    return tuple(whole)


def check_seconds(name: str, value: float, where: str = "") -> None:
    """Raises ValueError unless `value` is a finite number of at least 0. The error text ends with `where`."""
    if not 0 <= value < math.inf:
        raise ValueError(f"`{name}` must be a finite number of seconds, at least 0. Received: {name}={value!r}{where}.")


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(str, choices))}. Received: {name}={value!r}.")


def identity_of(settings: Any) -> dict[str, str]:
    """The strategy's settings (a dataclass), each field as text. Ranks compare these texts before they train."""
    return {field.name: str(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
