"""Means of metrics over the ranks."""

import math

import numpy as np
from absl.testing import absltest, parameterized

from hop_tf.errors import MismatchError
from hop_tf.runtime.metrics import QUEUE, MetricMeans
from hop_tf.simulate import VirtualCluster


def _run(world_size, body, *, num_steps=lambda rank: 4, takes_part=lambda rank: True, lost=None):
    """What `body(means, rank)` returns on each rank, in a session. Rank `lost` dies after its first mean."""
    cluster = VirtualCluster(world_size, continue_without_lost=lost is not None, detection_seconds=1.0)
    results = [None] * world_size

    def run(rank):
        membership = cluster.memberships[rank]
        means = MetricMeans(membership)
        means.reset(membership.session + 1, takes_part=takes_part(rank))
        membership.begin_session()
        if takes_part(rank):
            means.begin(num_steps(rank))
        if rank == lost:
            means.mean({"loss": 0.0})
            cluster.scheduler.call_at(cluster.scheduler.now + 1.0, lambda: cluster.kill(rank))
            cluster.scheduler.sleep(10.0)
        try:
            results[rank] = body(means, rank)
        finally:
            membership.leave(sent_rounds={QUEUE: means.sent_rounds}, reason="")

    cluster.run(run)
    return results


class MetricMeansTest(parameterized.TestCase):
    @parameterized.parameters(2, 5)
    def test_mean(self, world_size):
        def body(means, rank):
            return [means.mean({"loss": float(rank), "of classes": np.array([rank, 2.0])}) for _ in range(2)]

        mean = (world_size - 1) / 2
        for of_rank in _run(world_size, body):
            for means in of_rank:
                self.assertEqual(means["loss"], mean)
                np.testing.assert_array_equal(means["of classes"], [mean, 2.0])

    def test_ranks_that_have_left_are_not_waited_for(self):
        def body(means, rank):
            return [means.mean({"loss": 10.0**rank})["loss"] for _ in range(3 - rank)]

        self.assertEqual(_run(3, body), [[37.0, 5.5, 1.0], [37.0, 5.5], [37.0]])

    def test_a_rank_that_has_ended_may_wait_for_the_others(self):
        def body(means, rank):
            means.mean({})
            membership = means._membership
            if rank == 1:
                means.end()
                return membership.wait_until(lambda: False, 5.0)
            return means.mean({"loss": float(rank)}), membership.monitor.now()

        self.assertEqual(_run(3, body), [({"loss": 1.0}, 0.0), False, ({"loss": 1.0}, 0.0)])

    def test_goes_on_without_a_lost_rank(self):
        def body(means, rank):
            return [means.mean({"loss": rank + 1.0})["loss"] for _ in range(3)]

        self.assertEqual(_run(3, body, lost=2), [[1.0, 1.5, 1.5]] * 2 + [None])

    def test_metrics_that_some_have(self):
        def body(means, rank):
            return means.mean({"loss": float(rank)} | ({"val_loss": 3.0} if rank == 0 else {}))

        self.assertEqual(_run(2, body), [{"loss": 0.5, "val_loss": 3.0}, {"loss": 0.5}])

    def test_what_cannot_be_averaged_is_left_out(self):
        def body(means, rank):
            return means.mean({"loss": 1.0, "name": "a", "rows": np.zeros(2 + rank), "parts": [[1.0], [1.0, 2.0]]})

        self.assertEqual(_run(2, body), [{"loss": 1.0}] * 2)

    def test_what_is_no_number_stays_so(self):
        first, second = _run(2, lambda means, rank: means.mean({"loss": (math.nan, 1.0)[rank]}))
        self.assertTrue(math.isnan(first["loss"]) and math.isnan(second["loss"]))

    def test_one_rank_alone(self):
        with self.assertRaisesRegex(MismatchError, "Pass hop_tf.callbacks.MetricAverage to `fit` on all ranks"):
            _run(2, lambda means, rank: None, takes_part=lambda rank: rank == 0)

    def test_ranks_that_make_other_numbers_of_steps_are_not_waited_for(self):
        with self.assertLogs(level="WARNING") as logs:
            results = _run(
                3,
                lambda means, rank: [means.mean({"loss": 10.0**rank})["loss"] for _ in range(2)],
                num_steps=lambda rank: 4 + rank % 2,
            )
        self.assertEqual(results, [[50.5] * 2, [10.0] * 2, [50.5] * 2])
        self.assertIn("rank 1: metrics are not averaged over all ranks. This one makes 5 steps", " ".join(logs.output))
        self.assertLen(logs.records, 3)


if __name__ == "__main__":
    absltest.main()
