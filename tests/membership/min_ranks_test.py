"""Tests of `min_ranks`: of the sides of a cut, one goes on at most."""

from __future__ import annotations

import itertools

import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import PeerLostError
from hop_tf.options import CommunicationOptions
from hop_tf.tools.simulate.virtual import VirtualCluster
from support import error_of

_CUT_AT, _ENDS_AT = 2.0, 100.0
_OPTIONS = CommunicationOptions(timeout_seconds=10, progress_timeout_seconds=1000)


def _train(sides, min_ranks, leaves=(), one_way=False, lost_at=None, **settings):
    """Returns the error of each rank, or None, when every rank waits for all others.

    Args:
      sides: Groups of ranks, which are cut from each other at `_CUT_AT`.
      min_ranks: The cluster's setting.
      leaves: Ranks that fail by themselves instead of waiting.
      one_way: True if only messages from earlier to later sides are lost.
      lost_at: Gets, by rank, the time at which the rank noticed the first loss.
      **settings: Further settings of the cluster.
    """
    world_size = sum(map(len, sides))
    cluster = VirtualCluster(
        world_size,
        continue_without_lost=True,
        min_ranks=min_ranks,
        options=_OPTIONS,
        limit_seconds=2 * _ENDS_AT,
        **settings,
    )
    pairs = [pair for one, other in itertools.combinations(sides, 2) for pair in itertools.product(one, other)]
    cluster.scheduler.call_at(_CUT_AT, lambda: [cluster.cut(*pair, one_way) for pair in pairs])
    cluster.scheduler.call_at(_ENDS_AT, cluster._wake_all)
    errors = {}

    def train(membership):
        def missing():
            if membership.departed() and lost_at is not None:
                lost_at.setdefault(membership.rank, cluster.scheduler.now)
            others = {*range(world_size)} - {membership.rank} - membership.departed()
            return others if cluster.scheduler.now < _ENDS_AT else ()

        membership.begin_session()
        if membership.rank not in leaves:
            membership.wait(missing, operation="all", step=1)

    def body(rank):
        errors[rank] = error_of(train, cluster.memberships[rank])
        membership, reason = cluster.memberships[rank], str(errors[rank] or "")
        if rank in leaves:
            reason = "ValueError: no data"
        abort = errors[rank] is not None and not membership.is_given_up
        membership.leave(sent_rounds={}, reason=reason, failed=bool(reason), abort=abort)

    cluster.run(body)
    return errors


class MinRanksTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ([(0, 1), (2, 3, 4)], 3, (2, 3, 4)),
        ([(0, 1), (2, 3)], 3, ()),  # None has more than half.
        ([(0, 1), (2, 3)], 2, (0, 1, 2, 3)),  # Asked for.
        ([(0,), (1,), (2,)], 2, ()),
        ([(0,), (1,)], 1, (0, 1)),
    )
    def test_a_side_that_is_too_small_raises(self, sides, min_ranks, expected):
        errors = _train(sides, min_ranks)
        self.assertEqual(tuple(rank for rank, error in sorted(errors.items()) if error is None), expected)
        for error in errors.values():
            if error is not None:
                self.assertIsInstance(error, PeerLostError)
                self.assertRegex(str(error), f"ranks are left, fewer than {min_ranks} \\(see min_ranks\\)|was lost")

    @parameterized.parameters(([(0, 1), (2,)], 2), ([(0, 1, 2), (3, 4)], 3))
    def test_who_hears_too_few_ends_and_nobody_else(self, sides, min_ranks):
        """Though it can tell the others that it has lost them."""
        errors = _train(sides, min_ranks, one_way=True)
        for rank, error in errors.items():
            if rank in sides[0]:
                self.assertIsNone(error)
            else:
                self.assertRegex(
                    str(error), f"ranks .* sent nothing for 10 s.* {len(sides[1])} of .* network of this rank"
                )

    @parameterized.parameters(([(0, 1), (2, 3, 4)], 3), ([(0,), (1, 2)], 2), ([(0, 1), (2, 3)], 3))
    def test_with_a_patience_too_small_a_side_waits_on_until_it_is_cut_off_for_sure(self, sides, min_ranks):
        """The other one goes on earlier."""
        lost_at = {}
        errors = _train(sides, min_ranks, lost_at=lost_at, patience_seconds=2.0)
        for side in sides:
            for rank in side:
                if len(side) >= min_ranks:
                    self.assertIsNone(errors[rank])
                    self.assertBetween(lost_at[rank], _CUT_AT + 2.0, _CUT_AT + 3.0)
                else:
                    self.assertNotIn(rank, lost_at)
                    self.assertRegex(str(errors[rank]), "sent nothing for 10 s")

    def test_who_hears_enough_goes_on_where_one_cannot_speak(self):
        errors = _train([(2,), (0, 1)], 2, one_way=True)
        self.assertEqual([errors[0], errors[1]], [None, None])
        self.assertRegex(str(errors[2]), "the other ranks continued without this rank")

    def test_ranks_that_have_failed_are_missing_too(self):
        errors = _train([(0, 1, 2, 3)], 3, leaves=(1, 2))
        self.assertRegex(
            str(errors[0]), "2 of 4 ranks are left, fewer than 3 .*rank 1: ValueError: no data; rank 2: Val"
        )
        self.assertIsInstance(errors[3], PeerLostError)

    @parameterized.parameters(
        ({"min_ranks": 0, "on_peer_loss": "continue"}, "`min_ranks` must be an integer of at least 1"),
        ({"min_ranks": 2}, "unless on_peer_loss='continue': .* Received: min_ranks=2."),
    )
    def test_what_is_refused(self, settings, text):
        with self.assertRaisesRegex(ValueError, text):
            hop_tf.HopStrategy(**settings)


if __name__ == "__main__":
    tf.test.main()
