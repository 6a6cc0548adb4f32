"""Tests of the launcher's live table."""

import os
import pty
import re
import subprocess
import sys
import tempfile
import textwrap
import threading

import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf.tools.commands.launch_progress import Progress, WaitWatch
from hop_tf.tools.processes.local_cluster import Task, make_tf_configs
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import TransportTestMixin, wait_until

_BAR = "━━━━━━━━━━━━━━━━━━━━"


class ProgressTest(parameterized.TestCase):
    def test_a_training(self):
        """As Keras prints it, once terminals' sequences are taken out."""
        progress = Progress()
        lines = [
            "Epoch 1/2",
            f"1/9 {_BAR} 26s 3s/step - loss: 0.5000 - mae: 2.0000e-04",
            f"9/9 {_BAR} 4s 40ms/step - loss: 0.2500 - mae: 0.1000 - val_loss: 0.3000",
            "Epoch 2/2",
            f" 5/9 {_BAR} 0s 250us/step - loss: 0.1250",
        ]
        cells = []
        for line in lines:
            self.assertTrue(progress.take(line))
            cells.append(progress.cells[:4])
        self.assertEqual(
            cells,
            [
                ("1/2", "", "", ""),
                ("1/2", "1/9", "0.333", "loss: 0.5000 - mae: 2.0000e-04"),
                ("1/2", "9/9", "25", "loss: 0.2500 - mae: 0.1000 - val_loss: 0.3000"),
                ("2/2", "", "25", "loss: 0.2500 - mae: 0.1000 - val_loss: 0.3000"),
                ("2/2", "5/9", "4e+03", "loss: 0.1250"),
            ],
        )

    def test_one_line_per_epoch(self):
        """With `verbose=2`."""
        progress = Progress()
        self.assertTrue(progress.take("22/22 - 11s - 500ms/step - accuracy: 0.6137 - val_loss: 0.9590"))
        self.assertEqual(progress.cells, ("", "22/22", "2", "accuracy: 0.6137 - val_loss: 0.9590", ""))

    def test_data_of_unknown_length(self):
        progress = Progress()
        self.assertTrue(progress.take("     12/Unknown 3s 16ms/step - loss: 0.1"))
        self.assertEqual(progress.cells, ("", "12/Unknown", "62.5", "loss: 0.1", ""))

    @parameterized.parameters("", "Epoch 3: early stopping", "9/9 files", "rank 0: joins at step 9.", "loss: 0.1")
    def test_other_lines(self, line):
        progress = Progress()
        self.assertFalse(progress.take(line))
        self.assertEqual(progress, Progress())


class WaitWatchTest(TransportTestMixin, tf.test.TestCase):
    member = TcpTransport

    def test_those_that_show_progress_are_asked(self):
        """And not again, if they do not answer."""
        addresses = self.addresses(3)
        asked = threading.Event()

        def report():
            asked.set()
            return {"num_ranks": 2, "waits_for": [1, 2]}

        self.start_at(0, addresses).serve_reports(report)
        self.start_at(2, addresses).serve_reports(report)
        tasks = [Task("worker", rank) for rank in range(3)]
        progress = {str(task): Progress(step=step) for task, step in zip(tasks, ("1/9", "1/9", ""), strict=True)}
        with WaitWatch(make_tf_configs(tasks, addresses), progress) as watch:
            self.assertTrue(asked.wait(60))
            wait_until(lambda: progress["worker 0"].waits_for and "worker 1" not in watch._addresses)
        self.assertEqual([progress[str(task)].cells[-1] for task in tasks], ["rank 1, ps 0", "", ""])


class TableTest(parameterized.TestCase):
    """The launcher on a terminal."""

    def _launch(self, *flags):
        """Returns the text that the launcher shows in a terminal, without escape sequences."""
        pytest.importorskip("rich")
        directory = self.enter_context(tempfile.TemporaryDirectory())
        path = os.path.join(directory, "script.py")
        with open(path, "w") as file:
            file.write(
                textwrap.dedent(f"""
                    import json, os, time
                    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
                    print("Epoch 2/5")
                    print(f"\\x1b[1m{{rank + 3}}/9\\x1b[0m {_BAR} 1s 20ms/step - loss: 0.{{rank}}5", end="", flush=True)
                    while not os.path.exists({path!r} + ".seen"):
                        time.sleep(0.05)
                    print("\\b" * 60 + f"\\r\\x1b[1m9/9\\x1b[0m {_BAR} 1s 20ms/step - loss: 0.{{rank}}1")
                    print(f"[a] rank {{rank}} has ended")
                """)
            )
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        command = [sys.executable, "-m", "hop_tf", "launch", "--num_workers=2", f"--log_dir={directory}", *flags, path]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        process = subprocess.Popen(command, stdout=theirs, env=environment)
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 65536):
                shown += data
                if all(f"{rank + 3}/9".encode() in shown for rank in (0, 1)):
                    open(f"{path}.seen", "w").close()
        except OSError:  # So a terminal ends.
            pass
        self.assertEqual(process.wait(60), 0)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "")

    def test_progress_is_in_the_table_and_other_lines_above(self):
        text = self._launch()
        for rank in (0, 1):
            self.assertRegex(text, rf"worker {rank} +│ 2/5 +│ {rank + 3}/9 +│ 50 +│ loss: 0\.{rank}5 ")
            self.assertEqual(text.count(f"[worker {rank}] [a] rank {rank} has ended\n"), 1)
        self.assertNotIn("] Epoch", text)
        self.assertNotIn(_BAR, text)
        last_table = text[text.rindex("┏") :]
        self.assertRegex(last_table, r"worker 0 +│ 2/5 +│ 9/9 +│ 50 +│ loss: 0\.01 ")
        self.assertRegex(last_table, r"worker 1 +│ 2/5 +│ 9/9 +│ 50 +│ loss: 0\.11 ")
        self.assertIn("exit code 0", text[: text.rindex("┏")])

    def test_all_lines_are_shown_if_that_is_wanted(self):
        text = self._launch("--verbose")
        for rank in (0, 1):
            self.assertIn(f"[worker {rank}] Epoch 2/5\n", text)
            self.assertIn(f"9/9 {_BAR} 1s 20ms/step - loss: 0.{rank}1\n", text)
        self.assertNotIn("┏", text)


if __name__ == "__main__":
    absltest.main()
