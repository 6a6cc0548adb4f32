"""`choose`: the rule for choosing settings that make a step shorter, but may change training.

Ranks apply it to measured times (`hop_tf.runtime.autotuning`), and `hop_tf plan` and `diagnose` to predicted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# The value of an argument that ranks choose.
AUTO = "auto"
# The share of a step that a codec or a wider pipe has to save, and the share that another algorithm has to save.
WORTHWHILE = 0.15
RESOLUTION = 0.05


def algorithms_to_try(algorithm: str, world_size: int) -> list[str]:
    """The all-reduce algorithms that an argument stands for. Ranks begin with the first.

    Args:
      algorithm: `AUTO`, or the name of an algorithm.
      world_size: Number of ranks.
    """
    if algorithm != AUTO:
        return [algorithm]
    return ["mesh", "ring"] if world_size > 2 else ["mesh"]  # With two ranks, a ring only takes longer.


def choose(
    candidates: Sequence,
    seconds: Callable[[object], float],
    change: Callable[[object], object],
    least_seconds: Callable[[object], float] | None = None,
) -> object:
    """The candidate whose speed is worth its change of training.

    Args:
      candidates: The candidates. Those that change training least come first.
      seconds: The duration of a candidate's step.
      change: Returns a value that stands for a candidate's change of training. If two candidates have equal values, the
        later one has to be faster by `RESOLUTION`, otherwise by `WORTHWHILE`.
      least_seconds: The least duration of a candidate's step, if durations vary. Later candidates have to be faster
        than this duration. Default: `seconds`.
    """
    least_seconds = least_seconds or seconds
    best = candidates[0]
    for candidate in candidates[1:]:
        share = RESOLUTION if change(candidate) == change(best) else WORTHWHILE
        if seconds(candidate) <= (1 - share) * least_seconds(best):
            best = candidate
    return best
