"""ExchangeRunner: the bridge between the training graph and a scheme."""

import pathlib
import tempfile
import threading
import weakref
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.errors import HopError, PeerLostError
from hop_tf.membership.waiting import Interrupted, LeftBehind
from hop_tf.records import Kind, make_recorder
from hop_tf.runtime.exchange import Exchange, Result
from hop_tf.runtime.exchange_runner import CATCH_UP, ExchangeRunner
from hop_tf.runtime.joining import Joining
from hop_tf.tensors.packing import Packing, TensorSpec

_DEADLINE_SECONDS = 20.0
_VALUES = (np.arange(16, dtype=np.float32), np.arange(8, dtype=np.float64) / 3)


class FakeExchange(Exchange):
    """An exchange that doubles its buckets, unless `behaviors` has something else for a step."""

    def __init__(self):
        self.steps = []
        self.behaviors = {}
        self.arrays = []

    def reset(self, session):
        self.steps.clear()

    def step(self, request):
        self.steps.append(request.step)
        self.arrays.extend(weakref.ref(bucket) for bucket in request.buckets)
        behave = self.behaviors.pop(request.step, None)
        answer = behave() if behave is not None else None
        return answer or Result(request.step, request.segment, tuple(2 * bucket for bucket in request.buckets))

    def no_op(self, request):
        return Result(request.step, request.segment, tuple(np.zeros_like(bucket) for bucket in request.buckets))

    @property
    def sent_rounds(self):
        return len(self.steps)

    def outcomes(self):
        return {"late": len(self.steps)}  # One in each step.


def _threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hop_tf exchange test/")]


def _raise(error):
    def behave():
        raise error

    return behave


class ExchangeRunnerTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.errors = []
        self.exchange = FakeExchange()
        self.joining = mock.create_autospec(Joining, instance=True)
        self.runner = self.make_runner()

    def make_runner(self, recorder=None):
        specs = [TensorSpec("a", (16,), tf.float32), TensorSpec("b", (8,), tf.float64)]
        runner = ExchangeRunner(
            name="test",
            packing=Packing(specs),
            exchange=self.exchange,
            on_error=self.errors.append,
            joining=self.joining,
            recorder=recorder,
        )
        self.addCleanup(runner.close)
        return runner

    @tf.function
    def submit(self, step):
        self.runner.submit(step, 0, [tf.constant(value) for value in _VALUES])

    @tf.function
    def collect(self, step):
        return self.runner.collect(step, 0, (16, 8))[0]

    def run_step(self, step):
        step = tf.constant(step, tf.int64)
        self.submit(step)
        return self.collect(step)

    def run_steps_in_one_graph(self, num_steps):
        """Runs steps as with `steps_per_execution`; returns the last result."""

        @tf.function
        def run():
            result = [tf.zeros([16]), tf.zeros([8], tf.float64)]
            for step in tf.range(num_steps, dtype=tf.int64):
                self.runner.submit(step, 0, [tf.constant(v) + tf.cast(step, v.dtype) for v in _VALUES])
                result = self.runner.collect(step, 0, (16, 8))[0]
            return result

        return run()

    def test_the_result_comes_back(self):
        for step in range(3):
            for got, value in zip(self.run_step(step), _VALUES, strict=True):
                self.assertAllEqual(got, 2 * value)
        self.assertEqual(self.exchange.steps, [0, 1, 2])

    def test_outcomes_are_of_the_recorded_step_alone(self):
        """Steps 1056 to 1087 are not recorded."""
        recorder = make_recorder(pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())))
        self.addCleanup(recorder.close)
        self.runner.close()
        self.runner = self.make_runner(recorder)
        with mock.patch.object(recorder, "add") as add:
            for step in (1054, 1055, 1056, 1057, 1088, 1089):
                self.run_step(step)
        outcomes = [call.kwargs for call in add.call_args_list if call.args[0] == Kind.OUTCOME]
        self.assertEqual(
            [(each["step"], each["name"], each["number"]) for each in outcomes],
            [(step, "late", 1) for step in (1054, 1055, 1088, 1089)],
        )

    def test_a_step_can_begin_again(self):
        """A loop that takes its batch within the step begins a step again when the data have ended."""
        self.run_step(0)
        self.submit(tf.constant(1, tf.int64))
        for got, value in zip(self.run_step(1), _VALUES, strict=True):
            self.assertAllEqual(got, 2 * value)
        self.run_step(2)
        self.assertEqual(self.exchange.steps, [0, 1, 2])

    def test_works_in_a_loop_of_the_graph(self):
        for got, value in zip(self.run_steps_in_one_graph(20), _VALUES, strict=True):
            self.assertAllEqual(got, 2 * (value + 19))
        self.assertEqual(self.exchange.steps, list(range(20)))

    def test_works_eagerly(self):
        step = tf.constant(0, tf.int64)
        self.runner.submit(step, 0, [tf.constant(value) for value in _VALUES])
        for got, value in zip(self.runner.collect(step, 0, (16, 8))[0], _VALUES, strict=True):
            self.assertAllEqual(got, 2 * value)

    def test_results_have_static_shapes(self):
        """The optimizer assigns only values of known shapes."""
        graph = self.collect.get_concrete_function(tf.TensorSpec([], tf.int64))
        shapes = [output.shape.as_list() for output in graph.outputs]
        self.assertEqual(shapes, [[16], [8]])

    def test_a_failure_is_raised_in_the_graph(self):
        error = PeerLostError("rank 0, step 1: receive update on rank 3 failed.")
        self.exchange.behaviors[1] = _raise(error)
        self.run_step(0)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "PeerLostError: rank 0, step 1: receive update"):
            self.run_step(1)
        self.assertEqual(self.errors, [error])

    def test_a_failure_closes_no_queue(self):
        """Keras takes the error of a closed queue for the end of the data."""
        self.exchange.behaviors[0] = _raise(ValueError("broken"))
        with self.assertRaises(tf.errors.InvalidArgumentError):
            self.run_step(0)
        self.runner.drain(_DEADLINE_SECONDS)
        self.assertAllEqual(self.run_step(1)[0], 2 * _VALUES[0])

    def test_after_a_failure_the_scheme_is_asked_for_nothing_more(self):
        """The runner does not finish steps in flight, because they would fail and report further errors."""
        error = ValueError("broken")
        self.exchange.behaviors[1] = _raise(error)
        self.run_step(0)
        for step in (1, 2, 3):
            with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "ValueError: broken"):
                self.run_step(step)
        self.assertEqual(self.exchange.steps, [0, 1])
        self.assertEqual(self.errors, [error])

    def test_any_exception_is_a_failure(self):
        self.exchange.behaviors[0] = _raise(SystemExit(3))
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "SystemExit: 3"):
            self.run_step(0)
        self.assertIsInstance(self.errors[0], SystemExit)

    def test_an_interrupted_step_changes_nothing(self):
        self.exchange.behaviors[0] = _raise(Interrupted())
        for got, value in zip(self.run_step(0), _VALUES, strict=True):
            self.assertAllEqual(got, np.zeros_like(value))
        self.assertEmpty(self.errors)

    def test_after_an_interruption_nothing_is_sent_until_the_session_has_ended(self):
        """Only waiting bounds how far a rank gets ahead. A rank that no longer waits must stop sending."""
        self.exchange.behaviors[1] = _raise(Interrupted())
        for step in range(4):
            factor = 2 if step == 0 else 0
            self.assertAllEqual(self.run_step(step)[0], factor * _VALUES[0])
        self.assertEqual(self.exchange.steps, [0, 1])
        self.runner.drain(_DEADLINE_SECONDS)
        self.exchange.reset(2)
        self.assertAllEqual(self.run_step(0)[0], 2 * _VALUES[0])

    def test_a_result_of_another_step_is_refused(self):
        self.exchange.behaviors[4] = lambda: Result(3, 0, _VALUES)
        with self.assertRaises(tf.errors.InvalidArgumentError):
            self.run_step(4)

    def test_a_result_of_another_segment_is_refused(self):
        self.exchange.behaviors[4] = lambda: Result(4, 1, _VALUES)
        with self.assertRaises(tf.errors.InvalidArgumentError):
            self.run_step(4)

    def test_the_result_may_come_with_a_later_segment(self):
        self.exchange.step = lambda request: Result(0, 1, _VALUES) if request.segment else None
        self.submit(tf.constant(0, tf.int64))
        self.runner.submit(tf.constant(0, tf.int64), 1, [tf.constant(value) for value in _VALUES])
        buckets, *_ = self.runner.collect(tf.constant(0, tf.int64), 1, (16, 8))
        self.assertAllEqual(buckets[1], _VALUES[1])

    @parameterized.parameters((5, 5), (Interrupted(), 0), (LeftBehind(), 1))
    def test_who_catches_up_is_answered(self, found, expected):
        """Also if the exchange has no result for interrupted steps. A rank that was left behind skips a step."""
        self.joining.is_to_begin_again = isinstance(found, LeftBehind)
        self.exchange.no_op = lambda request: None
        self.joining.catch_up.side_effect = [found]
        self.runner.submit(tf.constant(1, tf.int64), CATCH_UP, [tf.zeros([0], value.dtype) for value in _VALUES])
        _, num_skipped, _ = self.runner.collect(tf.constant(1, tf.int64), CATCH_UP, (0, 0))
        self.assertEqual(int(num_skipped), expected)

    def test_drain_waits_for_what_was_submitted(self):
        released = threading.Event()
        self.exchange.behaviors[0] = lambda: released.wait(_DEADLINE_SECONDS) and None
        self.submit(tf.constant(0, tf.int64))
        with self.assertRaisesRegex(HopError, "did not drain in time"):
            self.runner.drain(timeout_seconds=0.0)
        released.set()
        self.runner.drain(_DEADLINE_SECONDS)
        self.assertEqual(self.exchange.steps, [0])

    def test_drain_drops_what_nobody_took(self):
        for step in range(3):
            self.submit(tf.constant(step, tf.int64))
        self.runner.drain(_DEADLINE_SECONDS)
        self.exchange.reset(2)
        self.assertAllEqual(self.run_step(0)[0], 2 * _VALUES[0])
        self.assertEqual(self.exchange.steps, [0])

    def test_drain_after_close_returns(self):
        self.runner.close()
        self.runner.drain(_DEADLINE_SECONDS)

    def test_arrays_are_not_kept(self):
        """A step's parameters must not stay in memory until the next step's arrive."""
        self.run_step(0)
        self.runner.drain(_DEADLINE_SECONDS)
        self.assertEqual([reference() for reference in self.exchange.arrays], [None, None])

    def test_close_ends_the_thread(self):
        self.run_step(0)
        self.assertLen(_threads(), 1)
        self.runner.close()
        self.assertEmpty(_threads())

    def test_close_drops_results_that_nobody_took(self):
        for step in range(3):  # One more than the result queue holds: the thread waits for room.
            self.submit(tf.constant(step, tf.int64))
        self.runner.close()
        self.assertEmpty(_threads())


class ThreadsTest(tf.test.TestCase):
    """A scheme that makes several steps at the same time."""

    def setUp(self):
        super().setUp()
        self.errors = []
        self.exchange = FakeExchange()
        self.exchange.num_threads = self.exchange.max_in_flight = 3
        self.runner = self.make_runner(on_error=self.errors.append)

    def make_runner(self, on_error, kind=ExchangeRunner):
        runner = kind(
            name="test",
            packing=Packing([TensorSpec("a", (16,), tf.float32)]),
            exchange=self.exchange,
            on_error=on_error,
            joining=mock.create_autospec(Joining, instance=True),
        )
        self.addCleanup(runner.close)
        return runner

    def submit(self, step):
        self.runner.submit(tf.constant(step, tf.int64), 0, [tf.fill([16], float(step))])

    def collect(self, step):
        return self.runner.collect(tf.constant(step, tf.int64), 0, (16,))[0][0]

    def test_results_come_in_order_whichever_step_ends_first(self):
        later_has_ended = threading.Event()
        self.exchange.behaviors = {0: lambda: later_has_ended.wait(_DEADLINE_SECONDS) and None, 2: later_has_ended.set}
        for step in range(3):
            self.submit(step)
        self.assertTrue(later_has_ended.wait(_DEADLINE_SECONDS))
        for step in range(3):
            self.assertAllEqual(self.collect(step), np.full(16, 2 * step))
        self.assertEqual(self.errors, [])

    def test_a_failure_comes_in_its_turn(self):
        failed = threading.Event()

        def fail():
            failed.set()
            raise PeerLostError("rank 2 was lost")

        self.exchange.behaviors = {0: lambda: failed.wait(_DEADLINE_SECONDS) and None, 1: fail}
        self.submit(0)
        self.submit(1)
        self.assertAllEqual(self.collect(0), np.zeros(16))
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "rank 2 was lost"):
            self.collect(1)
        self.assertLen(self.errors, 1)

    def test_a_failure_spares_what_was_taken_before_and_is_begun_later(self):
        failed = threading.Event()

        class Late(ExchangeRunner):
            def _answer(self, number, request, *arguments):
                if request.step == 0:
                    failed.wait(_DEADLINE_SECONDS)
                super()._answer(number, request, *arguments)

        def on_error(error):
            self.errors.append(error)
            failed.set()

        def fail():
            raise PeerLostError("rank 2 was lost")

        self.exchange.behaviors = {1: fail}
        self.runner = self.make_runner(on_error, Late)
        self.submit(0)
        self.submit(1)
        self.assertAllEqual(self.collect(0), np.zeros(16))
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "rank 2 was lost"):
            self.collect(1)
        self.assertLen(self.errors, 1)

    def test_what_is_taken_after_a_failure_fails_though_it_was_done(self):
        done = threading.Event()

        def fail():
            done.wait(_DEADLINE_SECONDS)
            raise PeerLostError("rank 2 was lost")

        self.exchange.behaviors = {0: fail, 1: done.set}
        self.submit(0)
        self.submit(1)
        for step in range(2):
            with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "rank 2 was lost"):
                self.collect(step)
        self.assertLen(self.errors, 1)

    def test_drain_waits_for_all(self):
        release = threading.Event()
        self.exchange.behaviors = {step: lambda: release.wait(_DEADLINE_SECONDS) and None for step in range(3)}
        for step in range(3):
            self.submit(step)
        with self.assertRaisesRegex(HopError, "did not drain in time"):
            self.runner.drain(0.2)
        release.set()
        self.runner.drain(_DEADLINE_SECONDS)
        self.assertCountEqual(self.exchange.steps, [0, 1, 2])
        self.submit(0)
        self.assertAllEqual(self.collect(0), np.zeros(16))

    def test_close_ends_all_threads(self):
        self.assertLen(_threads(), 3)
        self.runner.close()
        self.assertEmpty(_threads())


if __name__ == "__main__":
    tf.test.main()
