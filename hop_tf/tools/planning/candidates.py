"""The settings of the five strategies that are compared. `outcomes` has the costs of each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hop_tf.strategies.hop.settings import SkipIterations
from hop_tf.tools.diagnosis.calls import tell_call
from hop_tf.tools.planning.accuracy import CHANGES, Change
from hop_tf.tools.planning.outcomes import Outcome, degree, predict_step
from hop_tf.tools.timing import Measurement
from hop_tf.tools.timing.costs import ALGORITHMS, RESOLUTION

_PIPE_CODECS = (None, "truncate16", "int8")
_SEGMENTS = (1, 2, 4)
_DTS_SETTINGS = tuple(itertools.product(((4, 4), (20, 12)), (None, "int8", "top_k")))
_BOTH = {"num_backup_workers": 1, "max_staleness": 5}
_HOP_SETTINGS = {
    "hop": {},
    "hop:backup": {"num_backup_workers": 1},
    "hop:staleness": {"max_staleness": 5},
    "hop:both": _BOTH,
    "hop:skip": {**_BOTH, "skip": SkipIterations()},
}
# The strategies by the names of their classes, with the names that people use.
_STRATEGIES = {
    "PipeSGDStrategy": "Pipe-SGD",
    "DTSStrategy": "DTS",
    "HopStrategy": "Hop",
    "CanaryStrategy": "Canary",
    "SHATParameterServerStrategy": "SHAT",
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings of a strategy, on the links of a measurement.

    Attributes:
      name: A short name.
      maker: Name of the strategy's class.
      settings: The arguments of the strategy.
      measurement: The links and sizes, and the step of a rank like most others.
      num_servers: The number of parameter servers that the strategy needs in addition to the ranks.
    """

    name: str
    maker: str
    settings: Mapping[str, object]
    measurement: Measurement
    num_servers: int = 0

    def outcome(self, durations: np.ndarray | None = None) -> Outcome:
        """The costs with steps of these durations, an array [n, T]. See `predict_step`."""
        return predict_step(self.maker, self.settings, self.measurement, durations, self.num_servers)

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return _STRATEGIES[self.maker]

    @property
    def is_simulated(self) -> bool:
        """True if `outcome` simulates the strategy's protocol. Otherwise it is a model."""
        return self.maker == "HopStrategy"

    @property
    def call(self) -> str:
        """The call that makes the strategy."""
        call = tell_call(self.maker, self.settings).removeprefix("hop_tf.")
        return f"{call} with {self._servers}" if self.num_servers else call

    @property
    def needs(self) -> str:
        """The machines that the strategy needs in addition to the ranks. Empty if none."""
        place = "machines of their" if self.num_servers > 1 else "a machine of its"
        return f"{self._servers} on {place} own" if self.num_servers else ""

    @property
    def _servers(self) -> str:
        return f"{self.num_servers} parameter server{'s' if self.num_servers > 1 else ''}"

    @property
    def changes(self) -> tuple[Change, ...] | None:
        """The measured changes of accuracy, or None if not measured. Empty for synchronous training, the reference."""
        return () if self.name == "pipe:1" else CHANGES.get(self.name)


def candidates(measurement: Measurement) -> list[Candidate]:
    """All candidates, those that change training least first."""
    makers = (_pipe_sgd, _canary_synchronous, _hop, _canary, _shat, _dts)
    return [candidate for make in makers for candidate in make(measurement.typical)]


def _pipe_sgd(measurement: Measurement) -> Iterator[Candidate]:
    for width, codec in itertools.product((1, 2), _PIPE_CODECS):
        settings = {"pipeline_width": width, "codec": codec}  # Also if None: ranks choose a codec that is omitted.
        segments = [{"num_segments": number} if number > 1 else {} for number in (_SEGMENTS if width == 1 else (1,))]
        yield _shortest(_name("pipe", width, codec), "PipeSGDStrategy", settings, measurement, segments)


def _canary_synchronous(measurement: Measurement) -> Iterator[Candidate]:
    yield _shortest("canary:bsp", "CanaryStrategy", {"consistency": "bsp"}, measurement)


def _dts(measurement: Measurement) -> Iterator[Candidate]:
    for (delay, interval), codec in _DTS_SETTINGS:
        settings = {"delay": delay, "interval": interval, "codec": codec}
        yield _shortest(_name("dts", delay, interval, codec), "DTSStrategy", settings, measurement)


def _shortest(
    name: str, maker: str, settings: Mapping, measurement: Measurement, more: Sequence[Mapping] = ({},)
) -> Candidate:
    """The first candidate whose step, with ranks that are alike, is within 2 % of the shortest one."""
    found = [
        Candidate(name, maker, {**settings, **each, "algorithm": algorithm}, measurement)
        for each, algorithm in itertools.product(more, ALGORITHMS)
    ]
    seconds = [each.outcome().step_seconds for each in found]
    return next(
        each for each, of_each in zip(found, seconds, strict=True) if of_each <= min(seconds) * (1 + RESOLUTION)
    )


def _hop(measurement: Measurement) -> Iterator[Candidate]:
    for name, settings in _HOP_SETTINGS.items():
        yield Candidate(name, "HopStrategy", settings, measurement)
    if degree("ring", measurement.world_size) < degree("ring_based", measurement.world_size):
        yield Candidate("hop:ring", "HopStrategy", {"topology": "ring"}, measurement)


def _canary(measurement: Measurement) -> Iterator[Candidate]:
    for name, settings in (("canary", {}), ("canary:float32", {"codec": None})):
        yield Candidate(name, "CanaryStrategy", settings, measurement)


def _shat(measurement: Measurement) -> Iterator[Candidate]:
    for num_servers in sorted({1, max(1, measurement.world_size // 2)}):
        yield Candidate("shat", "SHATParameterServerStrategy", {}, measurement, num_servers)


def _name(*parts) -> str:
    return ":".join(str(part) for part in parts if part is not None)
