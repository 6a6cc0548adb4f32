"""Tests that `diagnose` finds the known fault of emulated clusters, and predicts the gain of changes."""

import dataclasses
import re
import tempfile
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from emulated_clusters import EmulatedCluster, draw
from hop_tf.records import Kind
from hop_tf.records.log import read_job
from hop_tf.strategies.hop.settings import SkipIterations
from hop_tf.tools.diagnosis import Change, diagnose
from hop_tf.tools.diagnosis.links import measure_links
from hop_tf.tools.diagnosis.steps import steps_of
from hop_tf.tools.diagnosis.what_if import WhatIf
from hop_tf.tools.simulate import DeadlockError, training

_KINDS = ("slow", "now and then", "bandwidth", "latency", "input", "callbacks", "nothing")
# The first one is of four ranks: it is quick.
_SEEDS = (10, *(seed for seed in range(20) if seed != 10))
# How far what a change brings may be from what is expected of it.
_TOLERANCE = 0.15


class ClustersTest(parameterized.TestCase):
    def diagnose(self, cluster):
        """Returns the diagnosis of a job on the cluster, and the seconds of a step."""
        with tempfile.TemporaryDirectory() as directory:
            seconds = cluster.run(directory)
            return diagnose(read_job(directory)), seconds

    @parameterized.parameters(*((kind, seed) for seed in _SEEDS for kind in _KINDS))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
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
    """Returns the same records with other facts about their processes."""
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

    def test_a_simulation_that_fails_ends_no_diagnosis(self):
        simulate, simulated = training.simulate_training, []

        def fail(strategy, *arguments, **keywords):
            simulated.append(strategy)
            if len(simulated) in failing:
                raise DeadlockError("all wait")
            return simulate(strategy, *arguments, **keywords)

        with mock.patch.object(training, "simulate_training", fail):
            failing = range(2, 1000)  # The first one is of the job as it is.
            diagnosis = diagnose(self.job)
            self.assertGreater(len(simulated), 2)
            self.assertEqual(diagnosis.findings[0].where, "rank 0")
            self.assertEmpty(diagnosis.changes)
            simulated.clear()
            failing = [1]
            diagnosis = diagnose(self.job)
            self.assertRegex(diagnosis.lines[-1], "not simulated: the simulation of HopStrategy fails: all wait")


class WhatIfTest(parameterized.TestCase):
    """Of a job that takes a tenth longer than its simulation, for whatever reason."""

    def setUp(self):
        super().setUp()
        cluster = EmulatedCluster.draw(_SEEDS[0], hides=False)
        with tempfile.TemporaryDirectory() as directory:
            self.seconds = cluster.run(directory)
            self.job = read_job(directory)
        self.change = Change("", "PipeSGDStrategy", {"pipeline_width": 2})

    def what_if(self, times):
        steps = {index: steps_of(process) for index, process in enumerate(self.job.processes)}
        return WhatIf(self.job, steps, measure_links(self.job), times * self.seconds)

    def test_what_the_simulation_misses_it_misses_of_changes_too(self):
        exact, longer = self.what_if(1.0), self.what_if(1.1)
        self.assertEqual((exact.expect(), longer.expect()), (self.seconds, 1.1 * self.seconds))
        expected = [each.expect(self.change.strategy, self.change.settings) for each in (exact, longer)]
        self.assertAlmostEqual(expected[1] / expected[0], 1.1)

    def test_windows_are_as_many_as_steps_must_be(self):
        """25 at least, and whole rounds of the recorded steps."""
        what_if = self.what_if(1.0)
        what_if._num_steps = 30  # As of many ranks.
        for interval, num_steps in ((1, 30), (8, 7 * 30)):
            with mock.patch.object(training, "simulate_training") as simulate:
                what_if._simulate("DTSStrategy", {"delay": 16, "interval": interval})
            self.assertEqual(simulate.call_args.kwargs["num_steps"], num_steps)

    def test_nothing_is_simulated_where_nothing_is_found(self):
        with mock.patch("hop_tf.tools.simulate.training.simulate_training") as simulate:
            self.assertEmpty(self.what_if(1.0).changes([]))
        simulate.assert_not_called()


_NUM_RANKS, _CARD = 8, 125e6  # 1 Gbit/s.
_UPDATE_SECONDS = 0.1  # Of an update that has a card to itself.
_COMPUTE, _LATENCY = 0.02, 1e-4
_RING, _COMPLETE = ("HopStrategy", "ring"), ("HopStrategy", "complete")
_MESH, _RING_OF_PIECES = ("PipeSGDStrategy", "mesh"), ("PipeSGDStrategy", "ring")
# How many updates leave a rank in a step, or what comes to as much.
_UPDATES = {_RING: 2, _COMPLETE: 7, _MESH: 2 * 7 / 8, _RING_OF_PIECES: 2 * 7 / 8}
# To how many others at once.
_AT_ONCE = {_RING: 2, _COMPLETE: 7, _MESH: 7, _RING_OF_PIECES: 1}


def _settings(strategy, graph):
    if strategy == "HopStrategy":
        return {"topology": graph, "update_order": "serial"}
    return {"pipeline_width": 1, "algorithm": graph}


class CardsTest(parameterized.TestCase):
    """Ranks wait for messages in flight most of the time. A change sends to another number of ranks at once."""

    def expect(self, present, changed, **rates):
        """Returns the seconds of a step that are expected of a change, and those that the changed cluster takes."""
        shape = (_NUM_RANKS, _NUM_RANKS)
        cluster = EmulatedCluster(
            seed=0,
            strategy=present[0],
            settings=_settings(*present),
            world_size=_NUM_RANKS,
            num_values=round(_UPDATE_SECONDS * _CARD / 4),
            compute=np.full(_NUM_RANKS, _COMPUTE),
            input=np.zeros(_NUM_RANKS),
            callbacks=np.zeros(_NUM_RANKS),
            latency=np.full(shape, _LATENCY),
            num_steps=30,
            **{name: np.full(shape if name == "rate" else _NUM_RANKS, rate) for name, rate in rates.items()},
        )
        with tempfile.TemporaryDirectory() as directory:
            seconds = cluster.run(directory)
            job = read_job(directory)
        steps = {index: steps_of(process) for index, process in enumerate(job.processes)}
        what_if = WhatIf(job, steps, measure_links(job), seconds)
        self.assertEmpty(what_if.problem)
        change = Change("", changed[0], _settings(*changed))
        return what_if.expect(change.strategy, change.settings), cluster.run(change=change)

    @parameterized.parameters(
        (_RING, _COMPLETE), (_RING, _MESH), (_RING_OF_PIECES, _COMPLETE), (_RING_OF_PIECES, _RING), (_COMPLETE, _MESH)
    )
    @pytest.mark.stress(after=1)
    def test_a_card_that_all_links_share(self, present, changed):
        """The card is seen if a rank sends to several others at once. If not, one link's rate counts as the card's."""
        expected, seconds = self.expect(present, changed, rate=_CARD, card=_CARD)
        closed_form = _COMPUTE + _UPDATES[changed] * _UPDATE_SECONDS
        self.assertAlmostEqual(seconds / closed_form, 1.0, delta=0.03)
        self.assertAlmostEqual(expected / closed_form, 1.0, delta=0.05)

    @parameterized.parameters((_COMPLETE, _RING), (_MESH, _RING_OF_PIECES))
    @pytest.mark.stress(after=1)
    def test_a_link_that_was_never_alone(self, present, changed):
        """The rate of a link alone is unknown: the prediction assumes no more than the rate that was seen."""
        expected, seconds = self.expect(present, changed, rate=_CARD, card=_CARD)
        closed_form = _COMPUTE + _UPDATES[changed] * _UPDATE_SECONDS * _AT_ONCE[present] / _AT_ONCE[changed]
        self.assertAlmostEqual(expected / closed_form, 1.0, delta=0.05)
        self.assertGreater(expected, seconds)

    @parameterized.parameters((_COMPLETE, _RING), (_MESH, _RING_OF_PIECES), (_MESH, _COMPLETE))
    @pytest.mark.stress(after=1)
    def test_links_of_their_own(self, present, changed):
        """The present settings use at least as many links at once as the changed ones, which shows their sum."""
        expected, seconds = self.expect(present, changed, rate=_CARD)
        closed_form = _COMPUTE + _UPDATES[changed] / _AT_ONCE[changed] * _UPDATE_SECONDS
        self.assertAlmostEqual(seconds / closed_form, 1.0, delta=0.03)
        self.assertAlmostEqual(expected / closed_form, 1.0, delta=0.05)


if __name__ == "__main__":
    absltest.main()
