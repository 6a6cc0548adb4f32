"""Tests of what a console for several processes leaves out."""

from __future__ import annotations

import traceback

from absl.testing import absltest, parameterized

from hop_tf.tools.processes.output_filter import OutputFilter


class OutputFilterTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.filter = OutputFilter()

    def test_shows_a_traceback_when_it_is_complete(self):
        *lines, exception = _traceback(ValueError("no\nway"))[:-1]  # without the message's second line
        self.assertEqual([self.filter.feed("worker 0", line) for line in lines], [[]] * len(lines))
        self.assertEqual(self.filter.feed("worker 0", exception), [*lines, exception])
        self.assertEqual(self.filter.feed("worker 0", "way"), ["way"])
        self.assertEqual(self.filter.last_exception("worker 0"), "ValueError: no")
        self.assertIsNone(self.filter.last_exception("worker 1"))

    def test_says_where_the_same_traceback_was_shown(self):
        lines = _traceback(KeyError("loss"))
        self.assertEqual(self._feed("worker 1", lines), lines)
        said = ["(the same traceback as that of worker 1: KeyError: 'loss')"]
        self.assertEqual(self._feed("worker 0", lines), said)
        self.assertEqual(self._feed("worker 1", lines), said)
        self.assertEqual(self.filter.last_exception("worker 0"), "KeyError: 'loss'")
        other = _traceback(KeyError("accuracy"))
        self.assertEqual(self._feed("worker 0", other), other)

    def test_keeps_the_tracebacks_of_processes_apart_that_print_at_the_same_time(self):
        ours, theirs = _traceback(KeyError("loss")), _traceback(TypeError())
        shown = {0: [], 1: []}
        for pair in zip(ours, theirs, strict=True):
            for rank, line in enumerate(pair):
                shown[rank] += self.filter.feed(f"worker {rank}", line)
        self.assertEqual(shown, {0: ours, 1: theirs})
        self.assertEqual(self.filter.last_exception("worker 1"), "TypeError")

    def test_shows_what_is_held_back_of_a_process_that_has_ended(self):
        lines = _traceback(KeyError("loss"))[:-1]
        self.assertEqual(self._feed("worker 0", lines), [])
        self.assertEqual(self.filter.flush("worker 0"), lines)
        self.assertEqual(self.filter.flush("worker 0"), [])

    def test_holds_back_no_output_without_end(self):
        lines = ["Traceback (most recent call last):", *("  and on" for _ in range(5000))]
        self.assertNotEmpty(self._feed("worker 0", lines))

    def test_what_is_no_exception_ends_a_traceback_too(self):
        lines = ["Traceback (most recent call last):", '  File "x.py", line 1', "step 7 is done"]
        self.assertEqual(self._feed("worker 0", lines), lines)
        self.assertEqual(self._feed("worker 1", lines), lines)
        self.assertIsNone(self.filter.last_exception("worker 0"))

    @parameterized.parameters(
        ("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR", False),
        ("I0000 00:00:1795629287.782173    9739 cpu_feature_guard.cc:227] This TensorFlow binary", False),
        ("To enable the following instructions: FMA, rebuild TensorFlow with the appropriate compiler flags.", False),
        ("2026-01-31 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN", False),
        ("2026-01-31 10:00:00.123456: W tensorflow/core/framework/op_kernel.cc] disk on fire", True),
        ("W0000 00:00:1795629472.288410   25720 op_kernel.cc:1845] UNKNOWN: disk on fire", True),
        ("I1125 10:00:00.123456 140 train.py:7] epoch 3", True),
        ("I am a line of the user's", True),
        ("", True),
    )
    def test_leaves_out_what_native_libraries_say_of_themselves(self, line, shown):
        self.assertEqual(self.filter.feed("worker 0", line), [line] * shown)

    def _feed(self, name, lines):
        return [shown for line in lines for shown in self.filter.feed(name, line)]


def _traceback(error):
    """The lines of a traceback of `error`, raised here."""
    try:
        raise error
    except type(error):
        return traceback.format_exc().splitlines()


if __name__ == "__main__":
    absltest.main()
