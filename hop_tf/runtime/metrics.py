"""`MetricMeans`: means of metrics over the ranks, at the ends of epochs.

A rank that has come to the end of its epoch takes no step while it waits for the metrics of others. Where these would
need that step to come to the end of theirs, all would wait for ever. So the ranks tell each other, when training
begins, how many steps they make in an epoch, and average with those that make as many.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from hop_tf.errors import MismatchError
from hop_tf.membership import Membership, SessionQueue
from hop_tf.transport.base import Message

QUEUE = "metrics"


class MetricMeans:
    """Each rank sends its metrics to the others, and takes the mean of those that came from ranks that are there.

    A rank that has left is not waited for; nor is a process that has joined the running session, which takes no part.

    Args:
      membership: Waiting and transport.

    Attributes:
      takes_part: Whether this rank averages in the running session. All ranks or none have to.
      sent_rounds: How many messages this rank has sent to each other one in the running session.
    """

    def __init__(self, membership: Membership):
        self._membership = membership
        self._others = [rank for rank in range(membership.world_size) if rank != membership.rank]
        self._queue = SessionQueue(membership, QUEUE, membership.session)
        # By round and rank: the number of steps in round 0, then metrics.
        self._received: collections.defaultdict[int, dict[int, Any]] = collections.defaultdict(dict)
        self._num_steps = 0
        self._ended: set[int] = set()  # Ranks that average no more.
        self._incarnations: dict[int, int] = {}
        self.takes_part = False
        self.sent_rounds = 0
        self._queue.start(self._on_message)

    def reset(self, session: int, *, takes_part: bool) -> None:
        """Forgets everything, for a session that this rank is about to enter."""
        with self._membership.monitor:
            self._queue.session = session
            self._received.clear()
            self._ended.clear()
            self._incarnations = {rank: self._membership.incarnation_of(rank) for rank in self._others}
            self.takes_part = takes_part
            self.sent_rounds = 0

    def begin(self, num_steps: int) -> None:
        """Tells the others how many steps this rank makes in an epoch. Before the first `mean` of a session."""
        self._num_steps = num_steps
        self._send(0, num_steps, self._others)

    def mean(self, metrics: Mapping[str, Any], weight: float = 1.0) -> dict[str, Any]:
        """The means of some metrics over the ranks.

        Args:
          metrics: This rank's.
          weight: Positive; the weight of this rank's in the means.

        Returns:
          The means; equal to the bit on all ranks that make as many steps in an epoch. What is no number, and no array
          of numbers that has the same shape on all ranks that have it, is left out.

        Blocks: until the metrics of all ranks that take part are there.

        Raises:
          HopError: As `Membership.wait` does.
        """
        number = self.sent_rounds
        own = {name: np.asarray(value, np.float64).tolist() for name, value in metrics.items() if _is_numeric(value)}
        num_steps = self._receive(0, self._others)
        alike = [rank for rank, steps in num_steps.items() if steps == self._num_steps]
        if number == 1 and len(alike) < len(num_steps):
            logging.warning(
                "rank %d: metrics are not averaged over all ranks. This one makes %d steps in an epoch, the others %s.",
                *(self._membership.rank, self._num_steps, num_steps),
            )
        self._send(number, [weight, own], alike)
        received = self._receive(number, alike)
        with self._membership.monitor:
            del self._received[number]
        of_ranks = [of_rank for _, of_rank in sorted([(self._membership.rank, [weight, own]), *received.items()])]
        means = {}
        for name in own:
            known = [(each[name], weight) for weight, each in of_ranks if name in each]
            values, weights = [np.asarray(value) for value, _ in known], [weight for _, weight in known]
            if all(value.shape == values[0].shape for value in values):
                mean = np.average(values, axis=0, weights=weights) if np.ptp(weights) else np.mean(values, axis=0)
                means[name] = mean if np.ndim(mean) else float(mean)
        return means

    def end(self) -> None:
        """This rank averages no more in this session: it may have to wait for others, which must not wait for it."""
        self._send(self.sent_rounds, None, self._others)

    def _send(self, number: int, value: Any, ranks: Sequence[int]) -> None:
        header = json.dumps([number, value]).encode()
        for rank in ranks:
            if self._counts(rank, number):
                self._membership.transport.connect(rank)  # From now on its silence counts.
                self._queue.send(rank, header, step=number)
        with self._membership.monitor:
            self.sent_rounds = number + 1

    def _receive(self, number: int, ranks: Sequence[int]) -> dict[int, Any]:
        received = self._received[number]
        self._membership.wait(
            lambda: [rank for rank in ranks if rank not in received and self._counts(rank, number)],
            operation="average metrics",
            step=number,
        )
        with self._membership.monitor:
            return dict(received)

    def _counts(self, rank: int, number: int) -> bool:
        is_new = self._membership.incarnation_of(rank) != self._incarnations[rank]
        return rank not in self._ended and not is_new and self._membership.delivers(rank, QUEUE, number)

    def _on_message(self, message: Message) -> None:
        if not self.takes_part:
            raise MismatchError(
                f"rank {message.sender} averages its metrics, and rank {self._membership.rank} does not. "
                "Pass hop_tf.callbacks.MetricAverage to `fit` on all ranks, or on none."
            )
        number, value = json.loads(message.header)
        if value is None:
            self._ended.add(message.sender)
        else:
            self._received[number][message.sender] = value


def _is_numeric(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # An array of parts of several shapes.
        return False
