"""Tests of `Patience`: a process that was stopped does not take the others for silent."""

import functools
import math

from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.membership.patience import Patience
from hop_tf.transport.base import PeerStatus


class _Questions:
    """Questions that each rank was asked `seconds` ago, without an answer."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.ranks = []
        self.num_forgotten = 0

    def forget(self):
        self.num_forgotten += 1

    def seconds_unanswered(self, rank, silent_seconds):
        self.ranks.append(rank)
        return self.seconds


class PatienceTest(parameterized.TestCase):
    def _silence(self, looks, silent_seconds=math.inf, incarnation="known", unanswered=math.inf, asks=True):
        """The silence that counts at the last of these looks, at a peer that was silent for longer."""
        times = iter([0.0, *looks])
        self.questions = _Questions(unanswered)
        self.patience = Patience(3.0, lambda: next(times), self.questions)
        for _ in looks:
            status = PeerStatus("virtual:1", True, silent_seconds, incarnation)
            status = self.patience.discount(1, status, asks=asks)
        return status.silent_seconds

    def test_silence_counts_while_this_process_looks(self):
        self.assertEqual(self._silence([0.25 * i for i in range(17)]), 4.0)
        self.assertEqual(self._silence([0.25 * i for i in range(17)], silent_seconds=1.5), 1.5)

    def test_silence_counts_from_when_this_process_was_stopped(self):
        self.assertEqual(self._silence([0.25, 0.5, 9.5]), 0.0)
        self.assertEqual(self._silence([0.25, 0.5, 9.5, 9.75, 10.0]), 0.5)

    def test_a_peer_that_was_never_met_is_silent_as_long_as_it_is(self):
        self.assertEqual(self._silence([0.25, 9.5], silent_seconds=9.5, incarnation=None), 9.5)

    def test_a_rank_that_was_not_asked_is_asked_first(self):
        """After a quarter of the patience; then the rest of it has to go by."""
        looks = [0.25 * i for i in range(17)]
        self.assertEqual(self._silence(looks[:4], unanswered=0.0), 0.75)
        self.assertEmpty(self.questions.ranks)
        self.assertEqual(self._silence(looks, unanswered=0.0), 0.75)
        self.assertEqual({*self.questions.ranks}, {1})
        self.assertEqual(self._silence(looks, unanswered=2.25), 3.0)

    def test_a_rank_that_must_not_be_asked(self):
        self.assertEqual(self._silence([0.25 * i for i in range(17)], unanswered=0.0, asks=False), 4.0)
        self.assertEmpty(self.questions.ranks)

    def test_questions_from_before_a_standstill_do_not_count(self):
        self._silence([0.25, 0.5, 9.5])
        self.assertEqual(self.questions.num_forgotten, 1)


class OptionTest(parameterized.TestCase):
    @parameterized.parameters(
        hop_tf.PipeSGDStrategy, hop_tf.DTSStrategy, functools.partial(hop_tf.CanaryStrategy, consistency="bsp")
    )
    def test_what_is_refused(self, make):
        for settings, text in (
            ({"patience_seconds": 5}, "`patience_seconds` must be None unless on_peer_loss='continue'"),
            ({"patience_seconds": 5, "on_peer_loss": "raise"}, "all ranks raise if one is lost. Received: pat.*=5."),
            ({"patience_seconds": 60, "on_peer_loss": "continue"}, "less than the `timeout_seconds` .*, 60, or None"),
            ({"patience_seconds": 0.4, "on_peer_loss": "continue"}, "at least 0.5, .* Received: patience_seconds=0.4"),
            ({"patience_seconds": "5", "on_peer_loss": "continue"}, "must be a number of seconds"),
            ({"patience_seconds": math.nan, "on_peer_loss": "continue"}, "must be a number of seconds"),
            ({"patience_seconds": True, "on_peer_loss": "continue"}, "must be a number of seconds"),
        ):
            with self.subTest(settings=settings), self.assertRaisesRegex(ValueError, text):
                make(**settings)

    def test_a_pipe_that_lets_nobody_join(self):
        with self.assertRaisesRegex(ValueError, "`patience_seconds` must be None with compensation='none'"):
            hop_tf.PipeSGDStrategy(pipeline_width=2, compensation="none", on_peer_loss="continue", patience_seconds=5)

    def test_where_no_rank_waits_for_a_silent_one(self):
        with self.assertRaisesRegex(ValueError, "`patience_seconds` must be None unless consistency='bsp'"):
            hop_tf.CanaryStrategy(patience_seconds=5)


if __name__ == "__main__":
    absltest.main()
