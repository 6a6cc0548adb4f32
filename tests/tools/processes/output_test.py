"""Tests of reading what processes print."""

from __future__ import annotations

import io
import os
import queue
import re
import tempfile
import threading
import time
from unittest import mock

from absl.testing import absltest, parameterized

from hop_tf.tools.processes import output as process_output
from hop_tf.tools.processes.output import Console, LineAssembler, OutputReader, TaskOutput


class LineAssemblerTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("lines", "a\nb\n\nc", ["a", "b", ""], "c"),
        ("windows_newline", "a\r\nb\r\n", ["a", "b"], ""),
        ("carriage_return", "1/3\r2/3\r3/3 done\n", ["3/3 done"], ""),
        ("shorter_text_covers_in_part", "abcdef\rxy\n", ["xycdef"], ""),
        ("backspaces", "10%\b\b\b20%\b\b\b30%", [], "30%"),
        ("backspaces_beyond_the_start", "ab\b\b\b\b\bc\n", ["cb"], ""),
        ("colours", "\x1b[1m1/2\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m\x1b[0m\n", ["1/2 ━━"], ""),
        ("erase_to_end", "long text\r\x1b[Kshort\n", ["short"], ""),
        ("other_escapes", "\x1b7a\x1b[2Ab\n", ["ab"], ""),
        ("trailing_spaces", "a   \n", ["a"], ""),
    )
    def test_assembles(self, text, lines, unfinished):
        for size in (len(text), 1):
            with self.subTest(piece=size):
                assembler = LineAssembler()
                pieces = [text[start : start + size] for start in range(0, len(text), size)]
                self.assertEqual([line for piece in pieces for line in assembler.feed(piece)], lines)
                self.assertEqual(assembler.unfinished, unfinished)

    def test_breaks_endless_lines(self):
        assembler = LineAssembler()
        lines = [line for _ in range(100) for line in assembler.feed("x" * 4096)]
        self.assertNotEmpty(lines)
        self.assertEqual("".join(lines) + assembler.unfinished, "x" * 409600)


class TaskOutputTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.log_path = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "worker_0.log")

    def test_log_has_the_lines_and_memory_the_last_ones(self):
        output = self._open(num_kept_lines=2)
        for data in (b"a\nb\rc\n", b"\xe2\x94", b"\x81\nlast", b""):
            output.receive(data)
        self.assertEqual(output.lines(), ["━", "last"])
        self.assertTrue(output.at_end)
        with open(self.log_path, encoding="utf-8") as file:
            self.assertEqual(file.read(), "a\nc\n━\nlast\n")

    def test_waits_for_a_line(self):
        output = self._open()
        feeder = threading.Thread(target=lambda: [output.receive(b"step %d\n" % step) for step in range(5)])
        feeder.start()
        self.assertEqual(output.wait_for(re.compile(r"step (\d)"), 10)[1], "0")
        self.assertEqual(output.wait_for(re.compile("step 4"), 10)[0], "step 4")
        feeder.join()
        output.receive(b"not yet ended")
        self.assertIsNotNone(output.wait_for(re.compile("yet"), 0))

    def test_waiting_ends_with_the_output_and_with_the_time(self):
        output = self._open()
        self.assertIsNone(output.wait_for(re.compile("never"), 0.01))
        output.receive(b"")
        self.assertIsNone(output.wait_for(re.compile("never"), 3600))

    def test_a_full_disk_does_not_stop_the_reading(self):
        for name in "worker 0", "worker 1":  # Each file is named, also when another one was before.
            output = self._open(name=name)
            with mock.patch.object(output, "_log") as log, self.assertLogs("absl", "ERROR") as logs:
                log.writelines.side_effect = OSError("disk full")
                self.assertEqual(output.receive(b"a\n"), ["a"])
                self.assertEqual(output.receive(b"b\n"), ["b"])
            self.assertLen(logs.output, 1)
            self.assertIn("disk full", logs.output[0])

    def _open(self, *, name="worker 0", **kwargs):
        output = TaskOutput(name=name, log_path=self.log_path, **kwargs)
        self.addCleanup(output.close)
        return output


class OutputReaderTest(absltest.TestCase):
    def test_reads_all_outputs_to_the_end(self):
        directory = self.enter_context(tempfile.TemporaryDirectory())
        outputs = [TaskOutput(name=f"worker {i}", log_path=os.path.join(directory, str(i))) for i in range(3)]
        shown = []
        reader = OutputReader(outputs, show=lambda output, line: shown.append((output.name, line)))
        for index, output in enumerate(outputs):
            os.write(output.write_end, f"hello {index}\nend".encode())
            output.close_write_end()
        reader.close()
        expected = [(f"worker {index}", line) for index in range(3) for line in (f"hello {index}", "end")]
        self.assertCountEqual(shown, expected)

    def test_shows_progress_of_a_line_that_is_being_rewritten(self):
        output = TaskOutput(
            name="worker 0", log_path=os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "log")
        )
        shown, was_shown = [], threading.Event()

        def show(_, line):
            shown.append(line)
            was_shown.set()

        with mock.patch.object(process_output, "_PROGRESS_SECONDS", 0.0):
            reader = OutputReader([output], show=show)
            os.write(output.write_end, b"1/3\r2/3")
            self.assertTrue(was_shown.wait(30))
            os.write(output.write_end, b"\r3/3\n")
            output.close_write_end()
            reader.close()
        self.assertIn(shown, (["2/3", "3/3"], ["1/3", "2/3", "3/3"]))
        with open(output.log_path) as file:
            self.assertEqual(file.read(), "3/3\n")

    def test_a_line_that_is_printed_in_parts_is_shown_once(self):
        """As of a `print` of several values, after a while without any."""
        output = TaskOutput(
            name="worker 0", log_path=os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "log")
        )
        shown, now, looks = [], [0.0], queue.SimpleQueue()

        def monotonic():
            looks.put(now[0])
            return now[0]

        with (
            mock.patch.object(process_output, "_POLL_SECONDS", 0.01),
            mock.patch.object(process_output.time, "monotonic", monotonic),
        ):
            reader = OutputReader([output], show=lambda _, line: shown.append(line))
            now[0] = 100.0
            for text, looked_at in (b"accuracy ", 100.0), (b"0.9\n", 101.0):
                while looks.get(timeout=30) < looked_at:
                    pass
                os.write(output.write_end, text)
                now[0] = 101.0
            output.close_write_end()
            reader.close()
        self.assertEqual(shown, ["accuracy 0.9"])


class ConsoleTest(absltest.TestCase):
    def test_prefixes_lines(self):
        stream = io.StringIO()
        console = Console(stream)
        console.write("worker 2", "hello")
        console.close()
        self.assertEqual(stream.getvalue(), "[worker 2] hello\n")

    def test_colours_names_on_a_terminal(self):
        stream = io.StringIO()
        stream.isatty = lambda: True
        with mock.patch.dict(os.environ, clear=False):
            os.environ.pop("NO_COLOR", None)
            console = Console(stream)
        console.write("worker 2", "hello")
        console.close()
        self.assertRegex(stream.getvalue(), r"^\x1b\[\d+m\[worker 2\]\x1b\[0m hello\n$")

    def test_writes_what_the_encoding_has(self):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="ascii")
        console = Console(stream)
        console.write("worker 0", "━")
        console.close()
        self.assertEqual(raw.getvalue(), b"[worker 0] \\u2501\n")

    def test_a_terminal_that_stands_still_blocks_nobody(self):
        stream = _StoppedStream()
        console = Console(stream)
        console.write("worker 0", "first")
        self.assertTrue(stream.reached.wait(30))
        for number in range(12000):
            console.write("worker 0", str(number))
        console.write("launch", "outcome", may_be_left_out=False)
        stream.go_on.set()
        console.close()
        self.assertEqual(
            stream.getvalue().splitlines()[-3:],
            ["[worker 0] 9999", "[launch] outcome", "(2000 lines left out here; the log files have them)"],
        )

    def test_waits_for_a_reader_as_long_as_it_reads(self):
        stream = _SlowStream()
        with mock.patch.object(process_output, "_CLOSE_SECONDS", 0.5):
            console = Console(stream)
            for number in range(20):
                console.write("worker 0", str(number))
            console.close()
        self.assertLen(stream.getvalue().splitlines(), 20)

    def test_a_closed_terminal_is_no_failure(self):
        stream = mock.Mock(encoding="utf-8")
        stream.isatty.return_value = False
        stream.write.side_effect = BrokenPipeError("closed")
        with self.assertLogs("absl", "WARNING"):
            console = Console(stream)
            console.write("worker 0", "one")
            console.write("worker 0", "two")
            console.close()


class _SlowStream(io.StringIO):
    def write(self, text):
        time.sleep(0.05)
        return super().write(text)


class _StoppedStream(io.StringIO):
    """A stream whose first write waits, as at a terminal that was stopped."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def write(self, text):
        self.reached.set()
        if not self.go_on.wait(30):
            raise TimeoutError
        return super().write(text)


if __name__ == "__main__":
    absltest.main()
