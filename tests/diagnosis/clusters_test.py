"""What `diagnose` says of emulated clusters with a known fault, and whether what it expects of changes comes."""

import dataclasses
import re
import tempfile

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from emulated_clusters import EmulatedCluster, draw
from hop_tf.diagnosis import diagnose
from hop_tf.records import Kind
from hop_tf.records.log import read_job
from hop_tf.strategies.hop.settings import SkipIterations

_KINDS = ("slow", "now and then", "bandwidth", "latency", "input", "callbacks", "nothing")
# The first one is of four ranks: it is quick.
_SEEDS = (10, *(seed for seed in range(20) if seed != 10))
# How far what a change brings may be from what is expected of it.
_TOLERANCE = 0.15


class ClustersTest(parameterized.TestCase):
    def diagnose(self, cluster):
        """What is found, and how long a step takes."""
        with tempfile.TemporaryDirectory() as directory:
            seconds = cluster.run(directory)
            return diagnose(read_job(directory)), seconds

    @parameterized.parameters(*((kind, seed) for seed in _SEEDS for kind in _KINDS))
    @pytest.mark.stress(after=len(_KINDS))
    def test_names_the_fault(self, kind, seed):
        cluster, expected, well = draw(kind, seed)
        diagnosis, seconds = self.diagnose(cluster)
        self.assertAlmostEqual(diagnosis.step_seconds / seconds, 1.0, delta=0.02, msg=diagnosis.lines)
        if expected is None:
            self.assertEmpty(diagnosis.findings, diagnosis.lines)
            self.assertStartsWith(diagnosis.lines[-1], "There is nothing to gain")
            return
        finding = diagnosis.findings[0]
        self.assertEqual((finding.kind, finding.where, finding.is_always), expected, diagnosis.lines)
        self.assertAlmostEqual(finding.step_seconds / well.run(), 1.0, delta=_TOLERANCE, msg=diagnosis.lines)
        for change in diagnosis.changes:
            with self.subTest(change.text):
                self.assertAlmostEqual(change.step_seconds / cluster.run(change=change), 1.0, delta=_TOLERANCE)
        if kind not in ("input", "callbacks"):  # These are mended where they are.
            self.assertNotEmpty(diagnosis.changes, diagnosis.lines)
            self.assertIn(diagnosis.changes[0].text, diagnosis.lines[-len(diagnosis.changes)])

    def test_a_rank_that_nobody_waits_for(self):
        """It is three times slower, and jumps over iterations."""
        cluster, (_, where, _), _ = draw("slow", _SEEDS[0])
        skip = {"num_backup_workers": 1, "skip": SkipIterations()}
        cluster.strategy, cluster.settings = "HopStrategy", {"topology": "complete", **skip}
        with tempfile.TemporaryDirectory() as directory:
            cluster.run(directory)
            job = read_job(directory)
        diagnosis = diagnose(job)
        text = "\n".join(diagnosis.facts)
        self.assertRegex(
            text, rf"{where} takes [23]\.\d times as long .* Without that, a step would hardly be shorter\."
        )
        self.assertStartsWith(diagnosis.lines[-1], "There is nothing to gain")
        steps = [process.of_kind(Kind.COMPUTE)["step"].astype(int) for process in job.ranks]
        num_skipped = sum(int(np.sum(np.diff(each) - 1)) for each in steps)
        told = int(re.search(r"(\d+) steps were skipped", text)[1])
        # One may have jumped when the records ended.
        self.assertBetween(told, num_skipped, num_skipped + skip["skip"].max_jump)


def _with_about(job, **about):
    """The same records, which say something else of their processes."""
    processes = [dataclasses.replace(each, about={**each.about, **about}) for each in job.processes]
    return dataclasses.replace(job, processes=processes)


class SimulationTest(parameterized.TestCase):
    """Of a job with a slow rank, whose communication takes twice as long as the others compute."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cluster = EmulatedCluster.draw(_SEEDS[0], hides=False, wire_share=(2.0, 2.0))
        cluster.strategy, cluster.settings = "HopStrategy", {"topology": "ring", "update_order": "serial"}
        cluster.compute[0] *= 3
        with tempfile.TemporaryDirectory() as directory:
            cluster.run(directory)
            cls.job = read_job(directory)

    def test_what_changes_bring_is_told(self):
        diagnosis = diagnose(self.job)
        self.assertEqual(diagnosis.findings[0].where, "rank 0")
        self.assertStartsWith(diagnosis.lines[-1], "By simulation")

    @parameterized.parameters(
        ("settings", {"topology": "mixing matrix 0123"}, "`topology` must be one of"),
        ("strategy", "CanaryStrategy", "CanaryStrategy is not simulated"),
        ("num_servers", 1, "steps of 4 processes are recorded, in a job of 5"),
        ("settings", None, "the records do not tell the strategy's settings"),
        # Two steps are one of the slow rank, 3, and one of a neighbor, 1, and two messages, 4. These would be hidden.
        ("settings", {"topology": "ring"}, "a simulated step takes 7\\d% of its time"),
    )
    def test_what_cannot_be_simulated(self, name, value, problem):
        diagnosis = diagnose(_with_about(self.job, **{name: value}))
        self.assertEqual(diagnosis.findings[0].where, "rank 0")
        self.assertEmpty(diagnosis.changes)
        self.assertRegex(diagnosis.lines[-1], f"What changes would bring is not simulated: .*{problem}")


if __name__ == "__main__":
    absltest.main()
