"""`EpochEnds`: ranks agree on metrics, and on stopping, when an epoch of `fit` ends."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

import keras
import numpy as np
from absl import logging

from hop_tf.errors import MismatchError
from hop_tf.keras_hook.metric_states import MetricStates
from hop_tf.keras_hook.ownership import states_of
from hop_tf.membership.rounds import Rounds
from hop_tf.membership.session import Membership
from hop_tf.runtime.agreed_states import AgreedStates
from hop_tf.runtime.metrics import EpochMetrics, as_log, means_of, numeric, sums_of
from hop_tf.runtime.stop_agreement import StopAgreement

# The claim of a rank that agrees with others when an epoch ends.
EPOCH_END = "the end of an epoch"
VALIDATION = "val_"  # The prefix of the names of validation metrics.


class Moment(enum.IntEnum):
    """The subjects that ranks agree on at the end of an epoch, in this order."""

    METRICS = 0
    STATES = 1
    SUMS = 2  # Only if ranks know different contributions to sums.
    STOP = 3


class EpochEnds:
    """Metrics and stop requests in the running `fit` of one rank.

    Args:
      membership: Waiting and transport.
      progress: See `Rounds`.
      has_passed: See `Rounds`.

    Attributes:
      rounds: Rounds of the ranks that have made the same number of steps, one for each `Moment`.
      agrees: True if this rank agrees on metrics with others in the running `fit`. Then all ranks agree, except a rank
        that has joined.
      stops_together: True if all ranks stop after the same step, too.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        progress: Callable[[], Mapping[str, int]] = dict,
        has_passed: Callable[[Mapping[str, int]], bool] = lambda progress: False,
    ):
        self._membership = membership
        self.rounds = Rounds(membership, EPOCH_END, progress=progress, has_passed=has_passed)
        self._stops = StopAgreement(membership)
        self.agrees = self.stops_together = False
        self._begin_fit()

    def reset(self, session: int) -> None:
        """Forgets everything, for a session that this rank is about to enter, or joins.

        Until `begin_fit`, the rank agrees on nothing.
        """
        self.agrees = self.stops_together = False
        self.rounds.reset(session)
        self._stops.reset(session)

    @property
    def sent_rounds(self) -> dict[str, int]:
        """For `Membership.leave`; see `Rounds`."""
        return {each.name: each.sent_rounds for each in (self.rounds, self._stops.rounds)}

    def _begin_fit(self) -> None:
        self._model: keras.Model | None = None
        self._states: tuple[int, MetricStates] | None = None  # With the number of steps begun at that time.
        self._num_before = self._num_made = 0  # Steps made in the `fit`: before the epoch, and by now.
        self._num_begun = 0  # Includes steps for which no data was left.
        self._num_begun_before = 0  # Before the epoch.
        self._agreed_at = -1  # The last position of an agreement.
        self._has_agreed = self._has_warned = False  # In this epoch; in this `fit`.

    def check(self, owners: Mapping[str, int], *, agrees: bool) -> None:
        """Raises MismatchError if other ranks agree when an epoch ends, and this one does not.

        Args:
          owners: The rank that each claim belongs to.
          agrees: True if this rank has claimed `EPOCH_END`.
        """
        if EPOCH_END in owners and not agrees:
            raise MismatchError(
                f"rank {owners[EPOCH_END]} averages its metrics, and rank {self._membership.rank} does not. "
                "Pass hop_tf.callbacks.MetricAverage to `fit` on all ranks, or on none."
            )

    def begin_fit(self, *, agrees: bool, in_lock_step: bool) -> None:
        """Called when a `fit` begins. `agrees` is False for a rank that joins."""
        self._begin_fit()
        self.agrees, self.stops_together = agrees, agrees and in_lock_step

    def begin_training(self, model: keras.Model | None) -> None:
        """Called before the first step. `model` is None in a custom loop."""
        self._model = model

    def end_fit(self) -> None:
        """Called when all steps are made, or the `fit` has failed."""
        self.agrees = self.stops_together = False
        self._model = self._states = None

    def finish_training(self) -> None:
        """Called when this rank makes no further step. The others no longer wait for it."""
        if self.agrees:
            self.rounds.end()

    def _gather(self, moment: Moment, value: bytes) -> Mapping[int, bytes]:
        return self.rounds.gather(self._num_made * len(Moment) + moment, value)

    # Metrics.

    def begin_epoch(self) -> None:
        """Called when an epoch begins."""
        self._num_before, self._num_begun_before = self._num_made, self._num_begun
        self._has_agreed = False

    def note_metrics(self, model: keras.Model) -> None:
        """Keeps the metrics of an epoch after its last step, before they may be reset."""
        if not self.agrees or model is not self._model:
            return
        if self._states is None or self._states[0] != self._num_begun:
            self._states = self._num_begun, MetricStates(model)

    def end_epoch(self, logs: dict, num_steps: int, *, weight: float, has_step: bool) -> None:
        """Puts the metrics over all ranks into `logs`, and checks if training stops. Called before the callbacks.

        Args:
          logs: This rank's metrics.
          num_steps: Number of steps of the epoch, by Keras's count: each execution of several steps counts in full.
          weight: This rank's weight in means.
          has_step: False if all steps were skipped. This rank's training metrics then do not count.
        """
        self._num_made = self._num_before + min(num_steps, self._num_begun - self._num_begun_before)
        self._stops.end_epoch(self._num_made)  # Before the count is compared or sent.
        if self.agrees and self._agreed_at < self._num_made:
            self._average(logs, weight, has_step)
        if self.stops_together and self._stops.is_asked:
            self._model.stop_training = self._stops.is_reached()

    def _average(self, logs: dict, weight: float, has_step: bool) -> None:
        if self._model.stop_training and not self.stops_together:  # The others continue, and do not agree here.
            self.agrees = False
            self.rounds.end()
            return
        self._agreed_at, self._has_agreed = self._num_made, True
        own = self._own_metrics(logs, weight, has_step)
        received = self._gather(Moment.METRICS, own.pack())
        self._warn_of_others(received)
        ranks = [EpochMetrics.unpack(data) for data in received.values()]
        logs.update(means_of(ranks, numeric(logs)))
        sums, names = sums_of(ranks)
        if names and self._states is not None and self._states[1].has_shapes_of(sums):
            results = self._states[1].results_of(sums)
            logs.update({name: as_log(results[name]) for name in names if name in results and name in logs})

    def _own_metrics(self, logs: dict, weight: float, has_step: bool) -> EpochMetrics:
        if not has_step:
            return EpochMetrics(weight, numeric({n: v for n, v in logs.items() if n.startswith(VALIDATION)}))
        if self._states is None:
            return EpochMetrics(weight, numeric(logs))
        states = self._states[1]
        summed = [name for name in states.names if name in logs and _are_alike(logs[name], states.results[name])]
        return EpochMetrics(weight, numeric(logs), states.values, frozenset(summed))

    def _warn_of_others(self, received: dict[int, bytes]) -> None:
        with self._membership.monitor:
            departed = self._membership.departed()
        absent = [r for r in self.rounds.others if r not in received and r not in departed]
        absent = [rank for rank in absent if not self.rounds.has_ended(rank)]
        if absent and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "rank %d: metrics are not averaged over all ranks. This rank has ended an epoch after %d steps of this "
                "`fit`, but ranks %s have made further steps in their epoch.",
                *(self._membership.rank, self._num_made, absent),
            )

    def agree_on_states(self, states: AgreedStates) -> None:
        """Makes sums, maxima and rank 0's states equal on the ranks at the same position, if ranks wait anyway."""
        if self.stops_together and self._has_agreed:
            moments = iter((Moment.STATES, Moment.SUMS))
            states.agree(
                states_of(self._model),
                lambda data: list(self._gather(next(moments), data).values()),
            )

    # Stop requests.

    def begin_steps(self, number: int) -> bool:
        """Called when the next steps are about to begin. Returns False if this rank has to stop before them."""
        if self._model is None:  # Keras takes the first batch, to build the model from it.
            return True
        if self.stops_together and not self._stops.begin_steps(number):
            self._model.stop_training = True
            return False
        self._num_begun += number
        return True

    def ask_to_stop(self) -> None:
        """Called when a callback has stopped training in the middle of an epoch. This rank continues until all stop."""
        if self.stops_together:
            self._model.stop_training = False
            self._stops.ask()

    def agree_to_stop(self) -> None:
        """Called after the callbacks at the end of an epoch. If one has stopped training on any rank, all stop."""
        if not self.agrees:
            return
        wants = self._model.stop_training or self._stops.is_asked
        if self._has_agreed:
            received = self._gather(Moment.STOP, bytes([wants]))
            wants = any(map(any, received.values()))
        if wants and self.stops_together:
            # Ranks in a longer epoch have to hear of the stop.
            self._stops.ask()
            wants = self._stops.is_reached()
        self._model.stop_training = wants


def _are_alike(value: object, result: np.ndarray) -> bool:
    """True if a log equals the metric's result. A `train_step` may return another value by the same name."""
    value = np.asarray(value)
    return value.shape == result.shape and np.allclose(value, result, rtol=1e-5, atol=0.0, equal_nan=True)
