"""The rules of `diagnose`, on records of a closed form, whose causes are known."""

import contextlib
import dataclasses
import io
import pathlib
import re
import shutil
import tempfile

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from hop_tf.records import make_recorder
from hop_tf.records.log import read_job
from hop_tf.tools import timing
from hop_tf.tools.commands import diagnose as command
from hop_tf.tools.diagnosis import diagnose
from synthetic_jobs import SyntheticJob

_NUM_SEEDS = 20


def _usual(seed):
    """A job without a fault: what is drawn of it."""
    generator = np.random.default_rng([seed, 1])
    compute = generator.uniform(0.03, 0.1)
    return {
        "seed": seed,
        "num_ranks": int(generator.integers(3, 6)),
        "usual_compute": compute,
        "usual_latency": generator.uniform(1e-4, 1.5e-3),
        "usual_rate": 1_000_000 / (compute * generator.uniform(0.01, 0.06)),
    }


def _fault(kind, usual):
    """The same with a fault: the arguments of the job, and what is to be named."""
    generator = np.random.default_rng([usual["seed"], 2])
    rank = int(generator.integers(usual["num_ranks"]))
    link = frozenset(map(int, generator.choice(usual["num_ranks"], 2, replace=False)))
    name, way = f"rank {rank}", " - ".join(f"rank {end}" for end in sorted(link))
    compute = usual["usual_compute"]
    return {
        "slow": ({"compute": {rank: 3 * compute}}, ("compute", name, True)),
        "now and then": ({"now_and_then": {rank: (0.15, 5.0)}}, ("compute", name, False)),
        "bandwidth": ({"rate": {link: usual["usual_rate"] / 10}}, ("bandwidth", way, True)),
        "latency": ({"latency": {link: 10 * usual["usual_latency"]}}, ("latency", way, True)),
        "input": ({"input": {rank: generator.uniform(0.5, 2) * compute}}, ("input", name, True)),
        "callbacks": ({"callbacks": {rank: generator.uniform(0.5, 2) * compute}}, ("callbacks", name, True)),
    }[kind]


class FindingsTest(parameterized.TestCase):
    def diagnose(self, **arguments):
        """Returns the diagnosis of a synthetic job, and the seconds of a step."""
        with tempfile.TemporaryDirectory() as directory:
            seconds = SyntheticJob(**arguments).write(directory)
            return diagnose(read_job(directory)), seconds

    @parameterized.product(
        seed=list(range(_NUM_SEEDS)), kind=["slow", "now and then", "bandwidth", "latency", "input", "callbacks"]
    )
    @pytest.mark.stress(after=5)
    def test_names_the_cause(self, seed, kind):
        usual = _usual(seed)
        if kind == "latency":
            usual["usual_latency"] = np.random.default_rng(seed).uniform(1e-3, 2e-3)  # Ten times that is worth a word.
        fault, expected = _fault(kind, usual)
        diagnosis, seconds = self.diagnose(**{**usual, **fault})
        finding = diagnosis.findings[0]
        self.assertEqual((finding.kind, finding.where, finding.is_always), expected, diagnosis.lines)
        self.assertIn(finding.where, finding.text)
        self.assertAlmostEqual(diagnosis.step_seconds, seconds, delta=0.05 * seconds)
        _, mended = self.diagnose(**usual)
        self.assertAlmostEqual(finding.step_seconds, mended, delta=0.15 * mended)

    @parameterized.parameters(*range(_NUM_SEEDS))
    @pytest.mark.stress(after=2)
    def test_nothing_to_gain(self, seed):
        diagnosis, _ = self.diagnose(**_usual(seed))
        self.assertEmpty(diagnosis.findings)
        self.assertStartsWith(diagnosis.lines[-1], "There is nothing to gain: 9")

    def test_communication_that_is_alike_everywhere(self):
        usual = _usual(0)
        diagnosis, seconds = self.diagnose(**{**usual, "usual_rate": 1_000_000 / usual["usual_compute"]})
        (finding,) = diagnosis.findings
        self.assertEqual(finding.kind, "communication")
        self.assertAlmostEqual(finding.share, usual["usual_compute"] / seconds, delta=0.1)

    @parameterized.parameters(3, 5)
    def test_a_rank_whose_links_are_all_slow(self, num_ranks):
        links = [frozenset((1, other)) for other in range(num_ranks) if other != 1]
        diagnosis, _ = self.diagnose(seed=0, num_ranks=num_ranks, rate=dict.fromkeys(links, 20e6))
        (finding,) = diagnosis.findings
        self.assertEqual((finding.kind, finding.where), ("bandwidth", "all links of rank 1"))
        _, mended = self.diagnose(seed=0, num_ranks=num_ranks)
        self.assertAlmostEqual(finding.step_seconds, mended, delta=0.15 * mended)

    def test_a_slow_link_to_a_parameter_server(self):
        """Process 2 makes no steps that could be simulated."""
        with tempfile.TemporaryDirectory() as directory:
            SyntheticJob(seed=0, num_ranks=3, rate={frozenset((0, 2)): 5e6}).write(directory)
            job = read_job(directory)
        about = {"num_ranks": 2, "num_servers": 1}
        processes = [dataclasses.replace(each, about={**each.about, **about}) for each in job.processes]
        (finding,) = diagnose(dataclasses.replace(job, processes=processes)).findings
        self.assertEqual((finding.kind, finding.where), ("bandwidth", "rank 0 - ps 0"))

    def test_a_rank_that_was_started_again(self):
        """All its steps count but for the first ones of each process; and it is named once."""
        fault = {"seed": 0, "num_ranks": 3, "compute": {1: 0.15}}
        whole, _ = self.diagnose(**fault)
        restarted, seconds = self.diagnose(**fault, restarts={1: 20})
        name = "rank 1 (restarted)"
        self.assertEqual([each.where for each in restarted.findings], [name])
        self.assertAlmostEqual(restarted.findings[0].step_seconds, whole.findings[0].step_seconds, delta=1e-3)
        self.assertEqual(list(restarted.shares), ["rank 0", name, "rank 2"])
        self.assertAlmostEqual(restarted.step_seconds, seconds, delta=0.05 * seconds)
        # Of 80 steps the first 3 and the last one; of 20 and 60 the same.
        self.assertIn(f"the mean of {76 + 72 + 76} recorded steps", restarted.facts[0])
        self.assertStartsWith(restarted.facts[2], f"{name}: 9")
        self.assertRegex(restarted.facts[1], r"\(6\d% for rank 1 \(restarted\)")

    @parameterized.parameters(({1, 2, 3}, "rank 1, rank 2, rank 3: "), ({2}, "rank 2: "), ({0, 1}, "rank 0, rank 1: "))
    def test_ranks_whose_records_are_elsewhere(self, missing, told):
        """Without the records of rank 2, the slow one, the diagnosis speaks of the recorded ranks only."""
        with tempfile.TemporaryDirectory() as directory:
            SyntheticJob(seed=0, num_ranks=4, compute={2: 0.15}).write(directory)
            for rank in missing:
                shutil.rmtree(pathlib.Path(directory) / f"rank_{rank}")
            diagnosis = diagnose(read_job(directory))
        self.assertIn(f"are recorded of {told}", diagnosis.facts[1])
        if 2 in missing:
            self.assertStartsWith(diagnosis.lines[-1], "On the ranks whose steps are recorded, nothing is found: 3")
        else:
            self.assertEqual(diagnosis.findings[0].where, "rank 2")

    def test_what_the_model_predicts(self):
        """A rank sends 1 MB to each of three others at the same time; 60 MB/s in all. Gradients are 4 MB."""
        costs = timing.NetworkCosts(latency_seconds=1e-3, seconds_per_byte=1 / 60e6)
        step = timing.Step(update_seconds=0.8e-3, forward_seconds=0.05 / 3, backward_seconds=0.05 * 2 / 3)
        plan = timing.recommend(costs, step, world_size=4, num_bytes=4e6)
        diagnosis, _ = self.diagnose(seed=0, usual_rate=20e6, num_values=1_000_000)
        settings = r"hop_tf\.PipeSGDStrategy\(pipeline_width=(\d), codec='(\w+)'.* would take ([\d.]+) ms"
        found = re.search(settings, diagnosis.lines[-1])
        self.assertEqual((int(found[1]), found[2]), (plan.pipeline_width, plan.codec))
        self.assertAlmostEqual(float(found[3]) / 1e3, plan.step_seconds, delta=0.15 * plan.step_seconds)

    def test_sentences(self):
        """Rank 2 computes 150 ms, the others 50; links carry 1 MB in 5 ms, 1 ms late."""
        with tempfile.TemporaryDirectory() as directory:
            SyntheticJob(seed=0, compute={2: 0.15}).write(directory)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                self.assertEqual(command.main([directory]), 0)
        text = out.getvalue()
        # 150 ms, a half for the slowest of the others' last 2.5 %, 6 ms on the way, 0.8 ms between steps.
        self.assertRegex(text, r"A step takes 15\d ms, the mean of \d+ recorded steps\.")
        self.assertRegex(text, r"rank 0: 3\d% computing, 6\d% waiting for others \(6\d% for rank 2")
        self.assertRegex(text, r"rank 2: 9\d% computing")
        self.assertRegex(text, r"The slowest link is rank \d - rank \d, 1\.6 Gbit/s\.")
        self.assertRegex(text, r"The longest round trip is rank \d - rank \d, 2 ms\.")
        self.assertRegex(
            text, r"rank 2 takes [23]\.\d times as long as the others for its own part of a step, in every"
        )
        self.assertRegex(text, r"As fast as the others, a step would take 5\d\.\d ms\.")

    def test_too_few_steps(self):
        with tempfile.TemporaryDirectory() as directory:
            make_recorder(pathlib.Path(directory) / "rank_0", number=0, num_ranks=1, num_servers=0).close()
            with self.assertRaisesRegex(ValueError, "too few steps are recorded.*Received: records of rank 0"):
                diagnose(read_job(directory))
            self.assertEqual(command.main([directory]), 1)


if __name__ == "__main__":
    absltest.main()
