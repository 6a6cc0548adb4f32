"""`compare`: the costs of settings of all strategies, and `best`: the settings to look at first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hop_tf.runtime.choosing import choose
from hop_tf.tools.planning.accuracy import Change
from hop_tf.tools.planning.candidates import Candidate, candidates
from hop_tf.tools.timing import Measurement
from hop_tf.tools.timing.costs import RESOLUTION

_NUM_STEPS = 192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted costs of settings.

    Attributes:
      name, strategy, call, is_simulated, needs, changes: See `Candidate`.
      step_seconds: Duration of a step of `fit`, with the measured steps of the ranks.
      trained_share: The share of all batches that are trained on.
      alike_seconds: Duration of a step if all ranks were like most of them.
      bytes_per_step: The bytes that a rank sends in a step.
      memory_bytes: Memory of a rank in addition to that of training without a strategy. See
        `hop_tf.tools.planning.outcomes`.
    """

    name: str
    strategy: str
    call: str
    step_seconds: float
    trained_share: float
    alike_seconds: float
    bytes_per_step: float
    memory_bytes: float
    changes: tuple[Change, ...] | None
    is_simulated: bool
    needs: str

    @property
    def batch_seconds(self) -> float:
        """The mean time in which the ranks train on one batch each. Predictions are compared by this time."""
        return self.step_seconds / self.trained_share


def compare(measurement: Measurement) -> list[Prediction]:
    """Predicts the costs of all settings, those that change training least first.

    Takes some seconds with many ranks, because Hop is simulated.

    Args:
      measurement: The links and steps, measured (`hop_tf.timing.measure`) or assumed.

    Raises:
      ValueError: If the measurement has less than two ranks, or its steps take no time.
    """
    if measurement.world_size < 2:
        raise ValueError(f"`world_size` must be at least 2. Received: world_size={measurement.world_size}.")
    if not measurement.typical_step.seconds > 0:
        raise ValueError(f"`step` must take some time. Received: step={measurement.step}.")
    return [predict(candidate, measurement) for candidate in candidates(measurement)]


def predict(candidate: Candidate, measurement: Measurement) -> Prediction:
    """Predicts the costs of a candidate. See `compare`."""
    alike = np.full((measurement.world_size, _NUM_STEPS), measurement.typical_step.seconds)
    if_alike = candidate.outcome(alike)
    found = candidate.outcome(measurement.durations(_NUM_STEPS)) if measurement.rank_seconds else if_alike
    about = ("name", "strategy", "call", "changes", "is_simulated", "needs")
    return Prediction(
        **{name: getattr(candidate, name) for name in about},
        step_seconds=found.step_seconds,
        trained_share=found.trained_share,
        alike_seconds=if_alike.step_seconds,
        bytes_per_step=found.bytes_per_step,
        memory_bytes=found.memory * measurement.num_bytes,
    )


def best(predictions: Sequence[Prediction], number: int = 3) -> list[Prediction]:
    """Returns the best settings of each strategy, the fastest first.

    Within a strategy, settings that come later in the order of `compare` change training more. They are chosen only if
    they save enough time, by the rule with which ranks choose by measured times (`hop_tf.runtime.choosing`). Strategies
    within 2 % of the fastest one count as equal, and so do those in each further 2 %. The order of `compare` then
    decides.

    Args:
      predictions: All predictions, as `compare` returns them.
      number: The most settings to return.
    """
    of_strategy: dict[str, list[Prediction]] = {}
    for each in predictions:
        of_strategy.setdefault(each.strategy, []).append(each)
    chosen = [choose(each, _batch_seconds, lambda prediction: prediction.name) for each in of_strategy.values()]
    shortest = min(each.batch_seconds for each in chosen)
    return sorted(chosen, key=lambda each: int((each.batch_seconds / shortest - 1) / RESOLUTION))[:number]


def _batch_seconds(prediction: Prediction) -> float:
    return prediction.batch_seconds
