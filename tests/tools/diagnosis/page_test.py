"""The page with pictures: what it needs, what it shows, and how a browser sees it."""

import html
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf.records.log import read_job
from hop_tf.tools.commands import diagnose as command
from hop_tf.tools.diagnosis import diagnose, make_page
from synthetic_jobs import SyntheticJob

_CHROMIUM = shutil.which("chromium")
_DEADLINE_SECONDS = 120
_HOSTILE = "<script>alert(1)</script>"
_NUM_RANKS = 4


def _add_metrics(log_dir, metrics):
    """Adds lines, as `fit` records them, to those of rank 0."""
    (path,) = pathlib.Path(log_dir).glob("rank_0/events.*.jsonl")
    with path.open("a") as file:
        for number, values in enumerate(metrics):
            file.write(json.dumps({"kind": "metrics", "time": 1.7e9 + number, "values": values}) + "\n")


class PageTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())

    def make(self, metrics=(), **arguments):
        fault = {"compute": {2: 0.15}, "rate": {frozenset((0, 1)): 20e6}}
        SyntheticJob(seed=0, num_ranks=_NUM_RANKS, **fault, **arguments).write(self.directory)
        _add_metrics(self.directory, metrics)
        job = read_job(self.directory)
        diagnosis = diagnose(job)
        return make_page(job, diagnosis), diagnosis

    def test_it_needs_nothing_else(self):
        page, _ = self.make()
        self.assertNotRegex(page, r"(?i)https?:|//\w|<script|<link|<img|<iframe|url\(|@import|src=")

    def test_it_says_what_is_found(self):
        page, diagnosis = self.make()
        self.assertNotEmpty(diagnosis.findings)
        text = html.unescape(re.sub(r"</?code>", "`", page))
        for line in diagnosis.lines:
            self.assertIn(f"<p>{line}</p>", text)

    def test_pictures(self):
        page, diagnosis = self.make([{"loss": 1.0, "val_loss": 2.0}, {"loss": 0.5, "val_loss": 1.5}])
        steps, shares, metrics = map(xml.etree.ElementTree.fromstring, re.findall(r"<svg.*?</svg>", page))
        self.assertLen(steps.findall("polyline"), 2 * _NUM_RANKS)
        self.assertLen(metrics.findall("polyline"), 2)
        # Each rank's bars are as long as all of its time.
        bars = [(float(bar.get("y")), float(bar.get("width"))) for bar in shares.findall("rect")]
        rows = {y: sum(width for other, width in bars if other == y) for y, _ in bars}
        self.assertLen(rows, _NUM_RANKS)
        np.testing.assert_allclose(list(rows.values()), max(rows.values()), rtol=0.02)
        titles = [bar.find("title").text for bar in shares.findall("rect")]
        for rank, of_rank in diagnosis.shares.items():
            self.assertIn(f"{rank}: {of_rank['computing']:.1%} computing", titles)
        # Both directions of the slow link are the reddest.
        depths = [float(depth) for depth in re.findall(r"rgba\(var\(--bad\), ([\d.]+)\)", page)]
        self.assertLen(depths, _NUM_RANKS * (_NUM_RANKS - 1))
        *others, one, other = sorted(depths)
        self.assertEqual(one, other)
        self.assertLess(max(others), one)

    def test_a_rank_that_was_started_again(self):
        page, _ = self.make(restarts={2: 30})
        steps, _ = map(xml.etree.ElementTree.fromstring, re.findall(r"<svg.*?</svg>", page))
        self.assertLen(steps.findall("polyline"), 2 * _NUM_RANKS)
        self.assertIn("</i>rank 2 (restarted) on its own</span>", page)

    def test_text_is_escaped(self):
        page, _ = self.make([{_HOSTILE: 1.0}, {_HOSTILE: 2.0}])
        self.assertNotIn(_HOSTILE, page)
        self.assertIn(html.escape(_HOSTILE), page)

    def test_metrics_that_are_no_numbers(self):
        page, _ = self.make([{"loss": float("nan")}, {"loss": 1.0}])
        self.assertNotIn("nan", page)

    def test_the_command_writes_it(self):
        self.make()
        path = pathlib.Path(self.directory, "page.html")
        self.assertEqual(command.main([self.directory, "--html", str(path)]), 0)
        self.assertStartsWith(path.read_text(), "<!DOCTYPE html>")
        self.assertEqual(command.main([self.directory, "--html", "/dev/null/page.html"]), 1)


@unittest.skipIf(_CHROMIUM is None, "needs a browser: apt-get install chromium")
class BrowserTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        SyntheticJob(seed=0, num_ranks=_NUM_RANKS, compute={2: 0.15}).write(self.directory)
        _add_metrics(self.directory, [{"accuracy": 0.5}, {"accuracy": 0.75}, {_HOSTILE: 1.0}])
        self.page = pathlib.Path(self.directory, "page.html")
        job = read_job(self.directory)
        self.page.write_text(make_page(job, diagnose(job)))

    def browse(self, *arguments):
        """Returns the output of a browser that opens the page without a network."""
        command = [
            _CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--proxy-server=127.0.0.1:9",
            f"--user-data-dir={self.directory}/profile",
            "--window-size=900,1800",
            *arguments,
            self.page.as_uri(),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=True).stdout

    def screenshot(self, *arguments):
        path = pathlib.Path(self.directory, "picture.png")
        self.browse(f"--screenshot={path}", *arguments)
        return tf.io.decode_png(path.read_bytes(), channels=3).numpy()

    @pytest.mark.slow
    def test_a_browser_reads_it(self):
        text = self.browse("--dump-dom")
        self.assertEqual(text.count("<polyline"), 2 * _NUM_RANKS + 1)
        self.assertEqual(text.count("<svg"), 4)
        self.assertNotIn("<script", text)
        self.assertIn("rank 2 takes", text)

    @pytest.mark.slow
    def test_light_and_dark(self):
        """The paper is light or dark, and the lines of all ranks are drawn on it, each in its color."""
        pictures = [self.screenshot(), self.screenshot("--blink-settings=preferredColorScheme=0")]
        for picture, is_light in zip(pictures, (True, False), strict=True):
            paper = picture[0, 0]
            self.assertEqual(bool(np.all(paper > 200)), is_light)
            self.assertEqual(bool(np.all(paper < 60)), not is_light)
            colors = set(np.unique(picture @ np.array([1 << 16, 1 << 8, 1])).tolist())
            scheme = self.page.read_text().split("@media")[0 if is_light else 1]
            for name in range(_NUM_RANKS):
                text = re.search(rf"--c{name}: #(\w+);", scheme)[1]
                self.assertIn(int(text, 16), colors)


if __name__ == "__main__":
    absltest.main()
