"""Tests of the warnings and stacks of a rank that waits for a long time."""

import os
import tempfile
from unittest import mock

from absl.testing import absltest

from hop_tf.options import STACKS_VARIABLE, CommunicationOptions
from hop_tf.runtime.stalls import StallReport


class StallReportTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.dict(os.environ))
        os.environ.pop(STACKS_VARIABLE, None)
        self.directory = self.enter_context(tempfile.TemporaryDirectory())

    def _tell(self, options, *texts):
        """Reports each text; returns the logged warnings."""
        report = StallReport(options, rank=2)
        with self.assertLogs("absl", "WARNING") as logs:
            for text in texts:
                report(text)
        return [record.getMessage() for record in logs.records]

    def test_each_stall_is_in_the_file_with_its_stacks(self):
        options = CommunicationOptions(log_dir=self.directory)
        path = os.path.join(self.directory, "rank_2", "stacks.txt")
        first, second = self._tell(options, "It waits for 1.", "It waits for 3.")
        self.assertEqual(first, f"It waits for 1. The stacks of its threads are in {path}")
        with open(path) as file:
            text = file.read()
        self.assertEqual(text.count("It waits for"), 2)
        self.assertEqual(text.count(" in _tell\n"), 2)  # This thread's.
        self.assertIn("It waits for 3.", second)

    def test_the_launchers_file_comes_first(self):
        path = os.path.join(self.directory, "worker_2.stacks")
        with mock.patch.dict(os.environ, {STACKS_VARIABLE: path}):
            (message,) = self._tell(CommunicationOptions(log_dir=self.directory), "It waits.")
        self.assertIn(path, message)
        self.assertEqual(os.listdir(self.directory), ["worker_2.stacks"])

    def test_without_a_place_there_are_no_stacks(self):
        self.assertEqual(self._tell(CommunicationOptions(), "It waits."), ["It waits."])

    def test_a_disk_that_cannot_be_written_to_is_named(self):
        with open(os.path.join(self.directory, "rank_2"), "w"):  # No folder.
            (message,) = self._tell(CommunicationOptions(log_dir=self.directory), "It waits.")
        self.assertRegex(message, r"It waits\. The stacks of its threads cannot be written to .*stacks.txt: .*rank_2")


if __name__ == "__main__":
    absltest.main()
