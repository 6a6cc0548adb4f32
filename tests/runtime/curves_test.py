"""Tests of the points of reports: rates by their closed form, and names and descriptions of all curves."""

from absl.testing import absltest, parameterized

from hop_tf.runtime.curves import CURVES, Curves, find_curve

_TIME = "hop_tf milliseconds of a step"


def _report(steps, **counters):
    return {"rank": 3, "steps": steps, "wait_seconds": 0.0, "compute_seconds": 0.0, **counters}


def _values(points):
    return {point.tag: point.value for point in points}


class CurvesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.curves = Curves()

    def points(self, steps, **counters):
        """Returns the points of the next report."""
        return _values(self.curves.points(_report(steps, **counters)))

    def test_rates_are_increases_per_step(self):
        tag = "hop_tf network/bytes sent per step"
        self.assertEqual(self.points(5, bytes_sent=100)[tag], 20.0)  # The first report is relative to zero.
        self.assertEqual(self.points(9, bytes_sent=300)[tag], 50.0)

    def test_the_parts_of_a_step(self):
        """In the second ten steps: 20 ms of computing, 6 of waiting, 10 of communicating, of which 4 are hidden."""
        self.points(10, compute_seconds=0.5, wait_seconds=1.0, communicate_seconds=2.0, codec_seconds=0.5)
        later = {"compute_seconds": 0.02, "wait_seconds": 1.06, "communicate_seconds": 2.1, "codec_seconds": 0.51}
        values = self.points(20, **later, wait_seconds_for_rank_12=0.05, wait_seconds_for_ps_0=0.02)
        expected = {
            "all": 26.0,
            "computing": 20.0,
            "waiting": 6.0,
            "communicating": 10.0,
            "communicating, hidden": 4.0,
            "communicating, coding": 1.0,
            "communicating, waiting for rank 12": 5.0,
            "communicating, waiting for ps 0": 2.0,
        }
        self.assertCountEqual(values, [f"{_TIME}/{name}" for name in expected])
        for name, milliseconds in expected.items():
            self.assertAlmostEqual(values[f"{_TIME}/{name}"], milliseconds, msg=name)

    def test_hidden_is_not_negative(self):
        values = self.points(1, compute_seconds=1.0, wait_seconds=2.0, communicate_seconds=1.5)
        self.assertEqual(values[f"{_TIME}/communicating, hidden"], 0.0)

    def test_without_times_nothing_is_said_of_the_whole_or_the_hidden(self):
        """As with `run_eagerly`. Otherwise all waiting would count as hidden."""
        values = self.points(1, communicate_seconds=1.5)
        self.assertNotIn(f"{_TIME}/all", values)
        self.assertNotIn(f"{_TIME}/communicating, hidden", values)

    def test_without_a_step_there_are_levels_only(self):
        width, sent = "hop_tf picked settings/pipeline width", "hop_tf network/bytes sent per step"
        self.points(4, bytes_sent=100, pipeline_width=1)
        values = self.points(4, bytes_sent=160, pipeline_width=2)
        self.assertEqual(values[width], 2.0)
        self.assertNotIn(sent, values)
        self.assertEqual(self.points(6, bytes_sent=200, pipeline_width=2)[sent], 50.0)  # Nothing is lost.

    def test_before_the_first_step_there_are_levels_only(self):
        self.assertEqual(self.points(0, bytes_sent=50, ranks_lost=1).get("hop_tf processes/ranks lost"), 1.0)
        self.assertEqual(self.points(1, bytes_sent=80)["hop_tf network/bytes sent per step"], 80.0)

    def test_a_counter_that_appears_later_begins_with_zero(self):
        self.points(4)
        self.assertEqual(self.points(6, shard_3_bytes_sent=10)["hop_tf network/bytes sent to shard 3 per step"], 5.0)

    def test_unknown_counters_are_rates_of_another_group(self):
        self.points(2, my_rounds_7=2)
        self.assertEqual(self.points(4, my_rounds_7=8)["hop_tf other/my_rounds_7"], 3.0)


class TableTest(absltest.TestCase):
    def test_groups_are_sorted_as_people_look(self):
        groups = list(dict.fromkeys(curve.tag.partition("/")[0] for curve in CURVES))
        self.assertEqual(groups, sorted(groups))
        self.assertEqual(groups[0], _TIME)

    def test_each_curve_has_a_place_and_a_description(self):
        for attribute in ("counter", "tag"):
            names = [getattr(curve, attribute) for curve in CURVES]
            self.assertLen(set(names), len(names))
        for curve in CURVES:
            self.assertEqual(curve.tag.count("/"), 1, curve.tag)
            self.assertEndsWith(curve.description, ".")
            self.assertEqual(curve.counter.count("#"), curve.tag.count("#"), curve.tag)

    def test_numbers_are_in_tag_and_description(self):
        curve = find_curve("wait_seconds_for_rank_12")
        self.assertEqual(curve.tag, f"{_TIME}/communicating, waiting for rank 12")
        self.assertStartsWith(curve.description, "Communication waits for rank 12.")
        self.assertIsNone(find_curve("rounds_12"))

    def test_knows_what_few_trainings_report(self):
        """Checks settings that ranks choose, and servers. `contract_test.py` checks all other reports."""
        choices = (
            "pipeline_width",
            "delay",
            "interval",
            "uses_ring",
            "uses_bcube",
            "encoded_bytes_per_value",
            "batch_share",
        )
        for counter in (*choices, "wait_seconds_for_ps_1", "ranks_joined"):
            self.assertIsNotNone(find_curve(counter), counter)


if __name__ == "__main__":
    absltest.main()
