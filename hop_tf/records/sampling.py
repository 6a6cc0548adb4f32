"""Chooses the steps to record: all at first, then ever fewer, so that a long job's files stay small.

The rule depends only on the step's number, so that all ranks record the same steps without communication. Steps are
recorded in blocks, because consecutive steps show the effects of each step on the next.
"""

from __future__ import annotations

# Steps of a session that are recorded one by one, before blocks are left out.
FULL_STEPS = 1024
BLOCK_STEPS = 32
# Sessions are thinned out in the same way: a program may call `fit` thousands of times.
FULL_SESSIONS = 8


def is_recorded(number: int, full: int = FULL_STEPS, block: int = BLOCK_STEPS) -> bool:
    """True if a step is recorded: all below `full`, then every 2nd block, from 2 `full` on every 4th, and so on.

    With F = `full`, B = `block` and j = 0 below F, otherwise floor(log2(number / F)) + 1, that is

        floor(number / B) mod 2^j = 0

    so that at most F + F/2 ceil(log2(n / F)) of n > F numbers are recorded.

    Args:
      number: The step, from 0. Negative before the first step. Negative numbers are recorded.
      full: F, a multiple of 2 B.
      block: B.
    """
    return number < full or number // block % (1 << (number // full).bit_length()) == 0


def is_recorded_session(session: int) -> bool:
    """True if steps of a session are recorded. Sessions count from 1."""
    return is_recorded(session - 1, FULL_SESSIONS, 1)
