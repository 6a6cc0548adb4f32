"""Tests of pulling states under Canary: the order in which a rank asks others, and the states that it takes."""

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.membership.session import Membership
from hop_tf.membership.silence import Silence
from hop_tf.strategies.canary.messages import Channel
from hop_tf.strategies.canary.peers import Peers
from hop_tf.strategies.canary.pull import Pulling
from hop_tf.strategies.canary.replica import Replica

_STATE, _NONE_TO_GIVE = np.ones(4, np.uint8), np.empty(0, np.uint8)


class PullTest(tf.test.TestCase, parameterized.TestCase):
    def _pull(self, ranks, answers, takes, falls_silent=(), is_complete=True, roots=(), **arguments):
        """Lets rank 0 pull.

        Args:
          ranks: The other ranks, the fastest one first.
          answers: By rank, its answer: a state or `_NONE_TO_GIVE`. A rank without an answer leaves when it is asked.
          takes: The pairs `(giver, may_drop)` with which the replica adopts a state.
          falls_silent: Ranks that become silent when they are asked. They answer only if rank 0 waits for them.
          is_complete: False if rank 0 has just joined.
          roots: The roots that have merged contributions that rank 0 lacks.
          **arguments: Further arguments of `Pulling.pull`.

        Returns:
          The ranks that were asked, the pairs `(giver, may_drop)` that were tried, and the numbers of pulls and of
          rejected pulls.
        """
        membership, replica, peers, channel, silence = (
            mock.create_autospec(kind, instance=True) for kind in (Membership, Replica, Peers, Channel, Silence)
        )
        silence.ranks, replica.is_complete = frozenset(), is_complete
        membership.monitor = mock.MagicMock()
        peers.roots_that_take_part.return_value = roots
        peers.fastest.side_effect = lambda without, among=ranks: next(
            (rank for rank in ranks if rank in among and rank not in without), None
        )
        peers.present_key.return_value = key_now = b"\1" * 5
        left, asked, tried = set(), [], []
        peers.key_of.side_effect = lambda rank: 0 if rank in left else key_now[rank]

        def send(rank, *_):
            asked.append(rank)
            if rank in falls_silent:
                silence.ranks |= {rank}
            if rank in answers and not (is_complete and rank in falls_silent and not arguments):
                pulling.receive(rank, answers[rank])
            elif rank not in falls_silent:
                left.add(rank)
                ranks.remove(rank)

        def adopt(state, giver, key, *, may_drop):
            self.assertIs(state, _STATE)
            self.assertEqual(key, key_now)
            tried.append((giver, may_drop))
            return (giver, may_drop) in takes

        channel.send.side_effect, replica.adopt.side_effect = send, adopt
        silence.wait.side_effect = lambda missing, **_: self.assertEmpty(missing())
        pulling = Pulling(membership, replica, peers, channel, silence)
        pulling.pull(7, **arguments)
        return asked, tried, (pulling.num_pulls, pulling.num_rejected)

    @parameterized.named_parameters(
        ("the_fastest", [1, 2], {(1, False)}, [(1, False)], (1, 0)),
        ("the_next_as_the_fastest_lacks_something", [1, 2], {(2, False)}, [(1, False), (2, False)], (1, 0)),
        (
            "the_fastest_as_all_lack_something",
            [1, 2],
            {(1, True), (2, True)},
            [(1, False), (2, False), (1, True)],
            (1, 0),
        ),
        ("one_is_asked_again", [1], {(1, True)}, [(1, False), (1, True)], (1, 0)),
        (
            "of_many_not_all_are_asked",
            [1, 2, 3, 4],
            {(1, True), (3, False)},
            [(1, False), (2, False), (1, True)],
            (1, 0),
        ),
        ("none_as_more_comes_everywhere", [1, 2, 3], set(), [(1, False), (2, False), (1, True)], (0, 1)),
        ("none_as_there_is_no_other", [], set(), [], (0, 1)),
    )
    def test_takes(self, ranks, takes, tried, counts):
        answers = dict.fromkeys(ranks, _STATE)
        self.assertEqual(self._pull(ranks, answers, takes), ([giver for giver, _ in tried], tried, counts))

    def test_passes_over_who_has_none_to_give(self):
        """Asking a rank without a state is no attempt: rank 0 goes on to a rank that has one."""
        answers = {1: _NONE_TO_GIVE, 2: _NONE_TO_GIVE, 3: _NONE_TO_GIVE, 4: _STATE}
        self.assertEqual(self._pull([1, 2, 3, 4], answers, {(4, False)}), ([1, 2, 3, 4], [(4, False)], (1, 0)))

    def test_passes_over_who_leaves(self):
        """Asking a rank that leaves is no attempt, either."""
        answers = {4: _STATE}
        self.assertEqual(self._pull([1, 2, 3, 4], answers, {(4, False)}), ([1, 2, 3, 4], [(4, False)], (1, 0)))

    def test_passes_over_who_is_silent(self):
        answers, takes = {1: _STATE, 3: _STATE}, {(1, False), (3, False)}
        result = self._pull([1, 2, 3], answers, takes, falls_silent=(1, 2))
        self.assertEqual(result, ([1, 2, 3], [(3, False)], (1, 0)))
        # A rank that has just joined waits.
        result = self._pull([1, 2, 3], answers, takes, falls_silent=(1, 2), is_complete=False)
        self.assertEqual(result, ([1], [(1, False)], (1, 0)))

    def test_asks_roots_of_what_is_missing_first(self):
        """Rank 0 asks these roots, the fastest one first, and then the fastest other rank."""
        answers, tried = dict.fromkeys([1, 2, 3, 4], _STATE), [(3, False), (4, False), (3, True)]
        result = self._pull([1, 2, 3, 4], answers, {(3, True)}, roots={3, 4})
        self.assertEqual(result, ([giver for giver, _ in tried], tried, (1, 0)))
        result = self._pull([1, 2, 3, 4], answers, {(1, False)}, roots={4})
        self.assertEqual(result, ([4, 1], [(4, False), (1, False)], (1, 0)))

    def test_waits_for_a_silent_rank_if_it_is_told_to(self):
        result = self._pull([1, 2], {1: _STATE}, {(1, False)}, falls_silent=(1,), waits_for_silent=True)
        self.assertEqual(result, ([1], [(1, False)], (1, 0)))

    def test_a_state_that_was_asked_for_earlier_is_not_taken(self):
        pulling = Pulling(
            *(mock.create_autospec(kind, instance=True) for kind in (Membership, Replica, Peers, Channel, Silence))
        )
        pulling.receive(1, _STATE)
        self.assertIsNone(pulling._state)


if __name__ == "__main__":
    tf.test.main()
