"""Emulated compute: the least duration of each step on each rank, and the times of steps.

The launcher checks `--step_seconds` and `--slowdown` here, and passes both on in environment variables. The training
process reads the variables here.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import re
import struct
import time
from collections.abc import Iterable, Iterator, Mapping

from hop_tf.options import STEP_SECONDS_VARIABLE

_SLOWDOWN = "HOP_TF_SLOWDOWN"
_SEED = "HOP_TF_SEED"
STEP_TIMES_PATH = "HOP_TF_STEP_TIMES_PATH"

_SLOWDOWN_TEXT = re.compile(r"(random|\d+):(\d+(?:\.\d+)?(?:e[+-]?\d+)?)x")
_TIMES = struct.Struct("<dd")


@dataclasses.dataclass(frozen=True)
class Slowdown:
    """A slower rank, or random slower steps.

    Attributes:
      rank: The rank whose every step is slower; None for every rank's steps, each with probability 1 / world_size.
      factor: Factor on the duration of a slower step; at least 1.

    Raises:
      ValueError: If the factor is below 1 or not finite, or the rank is negative.
    """

    rank: int | None
    factor: float

    def __post_init__(self):
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"`factor` must be a finite number of at least 1. Received: factor={self.factor}.")
        if self.rank is not None and self.rank < 0:
            raise ValueError(f"`rank` must not be negative. Received: rank={self.rank}.")

    @classmethod
    def parse(cls, text: str) -> Slowdown:
        """Reads "3:4x" (rank 3 takes 4 times as long) or "random:6x".

        Raises:
          ValueError: If `text` is neither.
        """
        match = _SLOWDOWN_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"`slowdown` must be '<rank>:<factor>x' or 'random:<factor>x'. Received: slowdown={text!r}."
            )
        who, factor = match.groups()
        return cls(rank=None if who == "random" else int(who), factor=float(factor))

    def __str__(self) -> str:
        return f"{'random' if self.rank is None else self.rank}:{self.factor!r}".removesuffix(".0") + "x"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeEmulation:
    """The least durations of each rank's steps.

    A step of rank r takes `step_seconds`, times the factor of a slowdown of rank r. With probability 1 / world_size,
    drawn for each step, the step takes longer by the factor of the random slowdown too.

    Attributes:
      step_seconds: Duration of a step that is not slowed down. Positive.
      slowdowns: At most one per rank and one random.
      seed: Seed of the random slowdown. A rank's draws depend on the seed and the rank only.

    Raises:
      ValueError: If a value is out of range or a slowdown is given twice.
    """

    step_seconds: float
    slowdowns: tuple[Slowdown, ...] = ()
    seed: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.step_seconds) and self.step_seconds > 0):
            raise ValueError(f"`step_seconds` must be a positive number. Received: step_seconds={self.step_seconds}.")
        who = [slowdown.rank for slowdown in self.slowdowns]
        if len(set(who)) < len(who):
            raise ValueError(
                "`slowdown` must be given once per rank and once for 'random'. "
                f"Received: slowdown={','.join(map(str, self.slowdowns))}."
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ComputeEmulation | None:
        """Reads the variables that `to_environment` wrote; None if compute is not emulated.

        Raises:
          ValueError: If a variable cannot be read.
        """
        if not environment.get(STEP_SECONDS_VARIABLE):
            return None
        texts = environment.get(_SLOWDOWN) or None
        return cls(
            step_seconds=float(environment[STEP_SECONDS_VARIABLE]),
            slowdowns=tuple(map(Slowdown.parse, texts.split(","))) if texts else (),
            seed=int(environment.get(_SEED) or 0),
        )

    def to_environment(self) -> dict[str, str]:
        """Returns the environment variables that carry this emulation to a training process."""
        return {
            STEP_SECONDS_VARIABLE: repr(self.step_seconds),
            _SLOWDOWN: ",".join(map(str, self.slowdowns)),
            _SEED: str(self.seed),
        }

    def check_world_size(self, world_size: int) -> None:
        """Raises ValueError if a slowdown names a rank that a world of `world_size` ranks does not have."""
        for slowdown in self.slowdowns:
            if slowdown.rank is not None and slowdown.rank >= world_size:
                raise ValueError(
                    f"`slowdown` must name a rank below the number of workers, {world_size}. "
                    f"Received: slowdown={slowdown}."
                )

    def step_durations(self, rank: int, world_size: int) -> Iterator[float]:
        """Yields the least duration of each step, in seconds, without end.

        Args:
          rank: The rank that takes the steps.
          world_size: Number of ranks.

        Raises:
          ValueError: If `rank`, or the rank that a slowdown names, is not in the world.
        """
        self.check_world_size(world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"`rank` must be in [0, {world_size}). Received: rank={rank}.")
        factors = {slowdown.rank: slowdown.factor for slowdown in self.slowdowns}
        return self._draw(self.step_seconds * factors.get(rank, 1.0), factors.get(None, 1.0), rank, world_size)

    def _draw(self, base_seconds: float, random_factor: float, rank: int, world_size: int) -> Iterator[float]:
        generator = random.Random(f"{self.seed}/{rank}")
        while True:
            slow = generator.random() < 1 / world_size
            yield base_seconds * random_factor if slow else base_seconds


class StepTimes:
    """Tells the launcher the times of this process's first and latest steps.

    Args:
      path: A file that the launcher reads when the process has ended.
    """

    def __init__(self, path: str | os.PathLike):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._first: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> StepTimes | None:
        """Returns the record that the launcher asks for; None if the launcher asks for none."""
        path = environment.get(STEP_TIMES_PATH)
        return cls(path) if path else None

    def mark(self) -> None:
        """Records the time of a step. Called in every step; costs a few microseconds."""
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        os.pwrite(self._file, _TIMES.pack(self._first, now), 0)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def read_step_times(paths: Iterable[str | os.PathLike]) -> tuple[float, float] | None:
    """Returns the times of the first and the last step over all processes of this machine.

    Args:
      paths: The files that `StepTimes` wrote. Missing and empty files are skipped.

    Returns:
      Two readings of `time.monotonic`, or None if no process recorded a step.
    """
    times = []
    for path in paths:
        if os.path.exists(path) and os.path.getsize(path) == _TIMES.size:
            with open(path, "rb") as file:
                times.append(_TIMES.unpack(file.read()))
    return (min(first for first, _ in times), max(last for _, last in times)) if times else None
