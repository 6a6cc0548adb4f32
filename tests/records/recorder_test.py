"""Tests of a recorder's files: their contents, their sizes, and errors of the disk."""

import contextlib
import json
import os
import pathlib
import tempfile
import threading
import time
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from disks import mounted_disk
from hop_tf.records import Kind, make_recorder, recorded, recorder
from hop_tf.records.events import EVENT, NONE, PACKER
from hop_tf.records.log import read_job
from support.transports import wait_until

_DEADLINE_SECONDS = 60.0
_ABOUT = {"number": 0, "rank": 0, "num_ranks": 1, "num_servers": 0, "strategy": "S"}


class RecorderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        self.enter_context(mock.patch.object(recorder, "_PERIOD_SECONDS", 0.5))

    def make(self, **arguments):
        made = make_recorder(pathlib.Path(self.directory) / "rank_0", **arguments, **_ABOUT)
        self.addCleanup(made.close)
        return made

    def files(self, suffix):
        return sorted(pathlib.Path(self.directory).glob(f"rank_0/events.*.{suffix}"))

    def test_a_row_is_what_it_is_packed_as(self):
        self.assertEqual(EVENT.itemsize, PACKER.size)

    def test_none_without_a_directory(self):
        before = threading.active_count()
        self.assertIsNone(make_recorder(None))
        self.assertEqual(threading.active_count(), before)

    def test_what_is_added_can_be_read(self):
        made = self.make()
        made.begin_session(1)
        made.begin_step(3)
        now = time.time()
        made.add(Kind.SEND, now, 0.5, peer=2, lane=1, name=b"updates/7", num_bytes=1 << 40, number=9, queued=0.25)
        made.add(Kind.WAIT, now + 1, 2.0, peer=5, name="receive update 12")
        made.add_line("loss", rank=1, reason="gone")
        made.close()
        (process,) = read_job(self.directory).processes
        session, sent, wait = process.events
        self.assertEqual((Kind(session["kind"]), session["number"], session["step"]), (Kind.SESSION, 1, NONE))
        self.assertEqual(sent["begin"], now)
        fields = ("seconds", "step", "session", "peer", "lane", "num_bytes", "number", "queued")
        self.assertEqual([sent[field] for field in fields], [0.5, 3, 1, 2, 1, 1 << 40, 9, 0.25])
        self.assertEqual(process.text(sent), "updates/#")
        self.assertEqual(process.text(wait), "receive update #")
        self.assertEqual([line["kind"] for line in process.lines if line["kind"] != "name"], ["loss", "end"])
        self.assertEqual(process.about["strategy"], "S")

    def test_is_on_in_the_steps_of_the_rule(self):
        made = self.make()
        made.begin_session(1)
        self.assertTrue(made.is_on)
        for step, expected in ((0, True), (1023, True), (1024, True), (1056, False), (1088, True), (0, True)):
            made.begin_step(step)
            self.assertEqual(made.is_on, expected, step)
        made.begin_session(10)  # A session that is left out.
        self.assertFalse(made.is_on)
        made.begin_step(0)
        self.assertFalse(made.is_on)

    def test_a_full_buffer_drops_events_and_says_how_many(self):
        with mock.patch.object(recorder, "MAX_BUFFERED", 10):
            made = self.make()
            with made._taking:  # Nothing is written meanwhile.
                for _ in range(15):
                    made.add(Kind.STEP, time.time())
            made.close()
        (process,) = read_job(self.directory).processes
        self.assertLen(process.events, 10)
        self.assertEqual([line["events"] for line in process.lines if line["kind"] == "dropped"], [5])

    def test_names_are_few(self):
        made = self.make()
        for number in range(1000):
            made.add(Kind.WAIT, time.time(), name="x" * number)
        made.close()
        (process,) = read_job(self.directory).processes
        self.assertLen(process.names, 257)
        self.assertEqual(process.text(process.events[-1]), "(other)")

    def test_what_comes_now_and_then_comes_more_rarely(self):
        """Two hours of reports every 5 s: one for each 5 s at first, and then 64 at most while the age doubles."""
        now = time.time()
        made = self.make(now=lambda: now)
        for _ in range(0, 7200, 5):
            made.add_now_and_then("report", {})
            now += 5
        made.close()
        number = sum(json.loads(line)["kind"] == "report" for line in self.files("jsonl")[0].read_text().splitlines())
        self.assertBetween(number, 64, 64 + 64 * 5)  # 320 s, and then 22.5 times that.

    def test_sources(self):
        made = self.make()
        asked = []

        def source(is_final):
            asked.append(is_final)
            return made.make_events(int(is_final), Kind.COMPUTE)

        made.add_source(source)
        made.flush()
        made.close()
        (process,) = read_job(self.directory).processes
        self.assertLen(process.events, 1)
        self.assertEqual((asked[0], asked[-1]), (False, True))

    def test_a_source_that_fails_ends_the_records_and_nothing_else(self):
        made = self.make()
        made.add_source(lambda is_final: 1 / 0)
        with self.assertLogs("absl", "ERROR") as logs:
            made.flush()
            made.close()
        self.assertLen(logs.output, 1)
        self.assertFalse(made.is_on)

    def test_a_disk_that_hangs_holds_up_nobody_who_adds(self):
        hangs, opened, write = threading.Event(), threading.Event(), recorder.Recorder._write_bytes

        def write_later(made, *data):
            hangs.set()
            opened.wait()
            write(made, *data)

        def add(made):
            made.add(Kind.WAIT, time.time(), name="a new name")
            made.note_clock(1, 0.5, 0.25)
            made.add_source(lambda is_final: made.make_events(0))

        with mock.patch.object(recorder.Recorder, "_write_bytes", write_later):
            made = self.make()
            self.addCleanup(opened.set)
            self.assertTrue(hangs.wait(_DEADLINE_SECONDS))
            adding = threading.Thread(target=add, args=(made,), daemon=True)
            adding.start()
            adding.join(_DEADLINE_SECONDS)
            self.assertFalse(adding.is_alive())
            opened.set()
            made.close()
        (process,) = read_job(self.directory).processes
        self.assertEqual([process.text(event) for event in process.events], ["a new name"])
        self.assertIn("clock", [line["kind"] for line in process.lines])

    def hang(self):
        """Has the files of the next recorder hang until the test is over."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))
        os.set_blocking(writing, True)
        files = [open(os.dup(writing), "wb", buffering=0) for _ in range(2)]  # noqa: SIM115
        os.close(writing)
        self.enter_context(mock.patch.object(recorder, "_open_new", lambda folder: files))

        def go_on():
            with open(reading, "rb") as file:
                file.read()  # Until the recorder closes its end.

        reader = threading.Thread(target=go_on)
        self.addCleanup(reader.join)
        self.addCleanup(reader.start)

    def test_a_disk_that_hangs_holds_up_no_session_and_the_end_for_a_while_only(self):
        self.enter_context(mock.patch.object(recorder, "MAX_BUFFERED", 10))
        self.enter_context(mock.patch.object(recorder, "CLOSE_SECONDS", 0.1))
        self.hang()
        made = self.make()
        wait_until(made._writing.locked)

        def train():
            for session in range(1, 9):
                made.begin_session(session)  # An event, too.
                for step in range(4):
                    made.begin_step(step)
                    made.add(Kind.STEP, time.time())
            made.close()
            made.close()

        training = threading.Thread(target=train, daemon=True)
        with self.assertLogs("absl", "WARNING") as logs:
            training.start()
            training.join(_DEADLINE_SECONDS)
        self.assertFalse(training.is_alive())
        (line,) = logs.output
        self.assertIn(f"{8 * (1 + 4)} events are lost", line)
        self.assertFalse(made.is_on)
        self.assertLess(made._num_pending() + len(made._buffer), 3 * 10)

    def test_a_disk_that_hangs_for_a_while_has_all_of_it(self):
        """Events of a session that has ended meanwhile keep that session."""
        hangs, opened, write = threading.Event(), threading.Event(), recorder.Recorder._write_bytes

        def write_later(made, *data):
            hangs.set()
            opened.wait()
            write(made, *data)

        with mock.patch.object(recorder.Recorder, "_write_bytes", write_later):
            made = self.make()
            self.addCleanup(opened.set)
            self.assertTrue(hangs.wait(_DEADLINE_SECONDS))
            made.add_source(lambda is_final: made.make_events(int(is_final), Kind.COMPUTE))
            for session in (1, 2):
                made.begin_session(session)
            opened.set()
            made.close()
        (process,) = read_job(self.directory).processes
        self.assertEqual(process.of_kind(Kind.COMPUTE)["session"].tolist(), [0, 1, 2])
        self.assertEqual(process.of_kind(Kind.SESSION)["number"].tolist(), [1, 2])

    def test_nothing_piles_up_after_the_end(self):
        made = self.make()
        made.follows = True
        made.close()
        made.follow(True)
        self.assertFalse(made.is_on)
        made.add(Kind.RECEIVE, time.time(), name="a new name")
        made.add_line("loss", rank=1)
        self.assertEmpty(made._buffer)
        self.assertEmpty(made._new_lines)

    def test_what_takes_next_to_no_time_is_left_out(self):
        now = time.time()
        made = self.make(now=lambda: now)
        for seconds in (1e-5, 1e-3):
            with recorded(made, Kind.ENCODE):
                now += seconds
        made.close()
        (process,) = read_job(self.directory).processes
        np.testing.assert_allclose(process.events["seconds"], [1e-3], rtol=1e-3)

    def test_another_process_has_other_files(self):
        self.make().close()
        self.make().close()
        self.assertEqual([path.name for path in self.files("jsonl")], ["events.0.jsonl", "events.1.jsonl"])

    def test_a_process_that_was_killed_has_left_a_part_of_a_row(self):
        made = self.make()
        made.add(Kind.STEP, time.time())
        made.close()
        (rows,), (lines,) = self.files("bin"), self.files("jsonl")
        rows.write_bytes(rows.read_bytes() + b"part")
        lines.write_text(lines.read_text() + '{"kind": "re')
        self.assertLen(read_job(self.directory).processes[0].events, 1)

    def test_nothing_to_read(self):
        with self.assertRaisesRegex(ValueError, "`log_dir` must be a directory in which .* Received: "):
            read_job(self.directory)

    @parameterized.parameters({}, {"num_inodes": 1}, {"is_read_only": True})
    def test_a_disk_that_cannot_be_written_to_is_one_warning(self, **disk):
        self.enter_context(mounted_disk(self.directory, **disk))
        with self.assertLogs("absl", "WARNING") as logs:
            made = make_recorder(pathlib.Path(self.directory) / "rank_0", **_ABOUT)
            for _ in range(100) if made is not None else ():
                for _ in range(1000):
                    made.add(Kind.STEP, time.time())
                made.flush()
            if made is not None:
                self.assertFalse(made.is_on)
                made.close()
        (line,) = logs.output
        self.assertIn(f"Cannot write to the files in {self.directory}/rank_0 (`log_dir`): ", line)
        self.assertNotIn("hop_tf records", [thread.name for thread in threading.enumerate()])


class SizeTest(absltest.TestCase):
    """Tests the sizes of files that `docs/see.md` promises."""

    def test_a_million_steps(self):
        """Each recorded step has 8 messages sent, 8 received, 8 waits and 4 other events."""
        directory = self.enter_context(tempfile.TemporaryDirectory())
        made = make_recorder(pathlib.Path(directory) / "rank_0", **_ABOUT)
        self.addCleanup(made.close)
        made.begin_session(1)
        num_events = 0
        for step in range(1_000_000):
            made.begin_step(step)
            if made.is_on:
                for kind in [*[Kind.SEND, Kind.RECEIVE, Kind.WAIT] * 8, *[Kind.STEP] * 4]:
                    made.add(kind, 0.0)
                    num_events += 1
                if len(made._buffer) > recorder.MAX_BUFFERED - 100:
                    made.flush()
        made.close()
        (rows,) = pathlib.Path(directory).glob("rank_0/events.0.bin")
        self.assertEqual(rows.stat().st_size, (num_events + 1) * PACKER.size)
        self.assertLessEqual(num_events, 6_144 * 28)
        self.assertLess(rows.stat().st_size, 7 << 20)

    def test_never_more_than_the_limit(self):
        directory = self.enter_context(tempfile.TemporaryDirectory())
        with mock.patch.object(recorder, "MAX_BYTES", 10_000):
            made = make_recorder(pathlib.Path(directory) / "rank_0", **_ABOUT)
            for _ in range(50):
                for _ in range(20):
                    made.add(Kind.STEP, 0.0)
                made.flush()
            self.assertFalse(made.is_on)
            made.begin_step(1)
            self.assertFalse(made.is_on)
            made.close()
        size = sum(path.stat().st_size for path in pathlib.Path(directory).glob("rank_0/events.*"))
        self.assertBetween(size, 9_000, 10_200)  # With the line that says so.
        self.assertIn("full", [line["kind"] for line in read_job(directory).processes[0].lines])


if __name__ == "__main__":
    absltest.main()
