"""`ExchangeRunner`: the bridge between the training graph and a scheme's `Exchange`.

In the graph, once a step: pack -> encode, if the scheme does -> `outbox` ... `results` -> use. `outbox` and `results`
are TensorFlow FIFO queues in this process. A communication thread takes requests from the outbox, runs the scheme's
`Exchange.step`, and puts results into the result queue. In a dataflow graph, an operation waits only for its inputs. So
values that enter the outbox at the start of a step travel while the step computes. Only the operations that use the
result wait for the result.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.errors import HopError
from hop_tf.membership.rounds import Rounds
from hop_tf.membership.waiting import Interrupted
from hop_tf.records import Kind, Recorder
from hop_tf.runtime.exchange import Exchange, Request, Result
from hop_tf.runtime.joining import Joining
from hop_tf.tensors.fifo import dequeue, enqueue_arrays
from hop_tf.tensors.host import on_host, runs_on_host
from hop_tf.tensors.packing import Packing

# Segments that are no part of a step: a restarted rank asks for the others' position; synchronous ranks meet such a
# rank.
CATCH_UP, MEETING = -1, -2

# The types of the numbers of a `Result`.
_NUMBERS = (tf.int64, tf.int32, tf.int64, tf.int64)
_END_OF_SESSION = -1
_POISON = -1


class ExchangeRunner:
    """Runs an `Exchange` on communication threads, behind two TensorFlow queues.

    Failures never close a queue, because Keras would take a closed queue for the end of the data. Failures travel
    through the result queue as a poison element, and an assertion in the graph raises them.

    Args:
      name: Name of the threads.
      packing: The buckets that are sent and received.
      exchange: The scheme.
      on_error: Called on a communication thread with an exception that `Exchange.step` raised.
      joining: Gets every step, and answers the segments `CATCH_UP` and `MEETING`. With `CATCH_UP`, the step is the
        number of skipped steps; with `MEETING`, it is the step that follows.
      on_nonfinite: Called on a communication thread with the number of a step whose values are not finite, before the
        scheme gets the values. May raise.
      recorder: Records the steps, or None.
      rounds: Checks, when a step begins, if another rank waits for this one; or None.

    Attributes:
      begun_step: The last step of the session that a thread has taken; -1 if there is none.
    """

    def __init__(
        self,
        *,
        name: str,
        packing: Packing,
        exchange: Exchange,
        on_error: Callable[[BaseException], None],
        joining: Joining,
        on_nonfinite: Callable[[int], None] = lambda step: None,
        recorder: Recorder | None = None,
        rounds: Rounds | None = None,
    ):
        self._name = name
        self._rounds = rounds
        self._joining = joining
        self._packing = packing
        self._exchange = exchange
        self._on_error = on_error
        self._on_nonfinite = on_nonfinite
        self._recorder = recorder
        # The outcomes at the end of the previous step, if that step is recorded.
        self._outcomes: Mapping[str, int] = {}
        self._is_counting = False
        self._quiet = threading.Event()
        self._interrupted = False
        # The number of the earliest element that has failed, and its error.
        self._failure: tuple[int, BaseException] | None = None
        self.begun_step = -1
        self._begun_step: int | None = None  # Also of elements that are no step.
        self._begun_segments: set[int] = set()
        self._taking = threading.Lock()
        self._num_taken = 0
        self._putting = threading.Condition()
        self._num_put = 0
        with tf.init_scope(), tf.device("/cpu:0"):
            # With room for the marker that ends a session.
            capacity = exchange.max_in_flight + 1
            self._outbox = tf.queue.FIFOQueue(capacity, [tf.int64, tf.int32, tf.bool, *packing.dtypes])
            self._results = tf.queue.FIFOQueue(capacity, [*_NUMBERS, tf.string, *packing.dtypes])
            self._no_error, self._true = tf.constant(""), tf.constant(True)
        self._nothing = tuple(np.empty(0, dtype.as_numpy_dtype) for dtype in packing.dtypes)
        self._threads = [
            threading.Thread(target=self._run, name=f"hop_tf exchange {name}/{index}", daemon=True)
            for index in range(exchange.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    # In the graph.

    def submit(
        self, step: tf.Tensor, segment: int, buckets: Sequence[tf.Tensor], are_finite: tf.Tensor | None = None
    ) -> tf.Operation:
        """Emits the op that hands a step's buckets to the scheme.

        Args:
          step: int64 scalar.
          segment: Index of the segment.
          buckets: One flat tensor per bucket of the packing, or the outputs of `Exchange.emit_encode`.
          are_finite: bool scalar, true if the values are finite; None if they always are. This flag travels with the
            values, because an operation that checks it here would have a side effect. Such operations wait for each
            other within a step.

        Returns:
          The op. It blocks its step, not the process, while an earlier step is not taken yet.
        """
        with tf.device("/cpu:0"):
            are_finite = tf.constant(True) if are_finite is None else are_finite
            return self._outbox.enqueue([step, tf.constant(segment, tf.int32), are_finite, *buckets])

    def collect(
        self, step: tf.Tensor, segment: int, sizes: Sequence[int]
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Emits the ops that take the scheme's result for `step` and `segment`.

        Args:
          step: int64 scalar.
          segment: Index of the segment.
          sizes: Elements of each bucket.

        Returns:
          One flat tensor per bucket, and int64 scalars `Result.num_skipped` and `Result.num_dropped`. Operations that
          use them wait until the scheme has the result. If the scheme failed, taking any of them but `num_dropped`
          fails.

        Raises:
          tf.errors.InvalidArgumentError: When executed, if the scheme failed. The text is the failure's.
        """
        with tf.device("/cpu:0"):
            got_step, got_segment, num_skipped, num_dropped, error, *buckets = self._results.dequeue()
            in_order = tf.logical_and(tf.equal(got_step, step), tf.equal(got_segment, segment))
            # Not `tf.debugging.Assert`: it makes branches to keep texts off a GPU, and branches take long to trace.
            check = tf.raw_ops.Assert(condition=in_order, data=[error, got_step, step], summarize=1)
            with tf.control_dependencies([check]):
                buckets = [tf.identity(bucket) for bucket in buckets]
                num_skipped = tf.identity(num_skipped)
            for number in (num_skipped, num_dropped):
                number.set_shape([])
        for bucket, size in zip(buckets, sizes, strict=True):
            bucket.set_shape([size])
        return buckets, num_skipped, num_dropped

    # Outside of the graph.

    def drain(self, timeout_seconds: float) -> None:
        """Waits until everything submitted is answered, and drops results that the graph has not taken.

        Raises:
          HopError: If the scheme does not come to rest in time.
        """
        if not any(thread.is_alive() for thread in self._threads):
            return
        self._quiet.clear()
        with on_host():
            self._outbox.enqueue([tf.constant(_END_OF_SESSION, tf.int64), 0, self._true, *self._nothing])
        while not self._quiet.wait(0.05):
            self._drop_results()  # A full result queue would keep a thread from reaching the marker.
            timeout_seconds -= 0.05
            if timeout_seconds < 0:
                raise HopError(f"exchange {self._name} did not drain in time.")
        self._drop_results()

    def close(self) -> None:
        """Ends the threads."""
        self._outbox.close(cancel_pending_enqueues=True)
        self._drop_results()
        self._results.close(cancel_pending_enqueues=True)
        for thread in self._threads:
            thread.join(timeout=5)

    def _drop_results(self) -> None:
        for _ in range(int(self._results.size())):
            self._results.dequeue()

    @runs_on_host
    def _run(self) -> None:
        # No variable here may keep a step's arrays alive while the thread waits for the next step: they can be large.
        try:
            while True:
                self._answer(*self._take())
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            pass  # `close` closed the queues.

    def _take(self) -> tuple[int, Request, bool, bool]:
        """Takes an element. Returns its number, the element, True if it is to be run, and True if values are finite."""
        with self._taking:
            step, segment, are_finite, *buckets = map(np.asarray, dequeue(self._outbox))
            request = Request(int(step), int(segment), tuple(buckets))
            self._num_taken += 1
            if self._recorder is not None and request.segment >= 0 and request.step != _END_OF_SESSION:
                self._recorder.begin_step(self._exchange.steps_of(request.step).start)
            return self._num_taken, request, self._begin(request), bool(are_finite)

    def _begin(self, request: Request) -> bool:
        if request.step == _END_OF_SESSION:
            self._begun_step, self.begun_step = None, -1
            return False
        if self._begun_step != request.step:
            self._begun_step = request.step
            self._begun_segments.clear()
        if request.segment in self._begun_segments:
            return False  # A repeated step: the first time, the data had ended, and the result was not taken.
        self._begun_segments.add(request.segment)
        if request.segment >= 0:
            self.begun_step = request.step
        return True

    def _answer(self, number: int, request: Request, is_step: bool, are_finite: bool) -> None:
        result, error = None, self._no_error
        try:
            if is_step and self._failure_until(number) is None:
                if not are_finite:
                    self._on_nonfinite(request.step)
                result = self._step(request) if self._recorder is None else self._recorded_step(request)
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            pass  # `close` closed the queues.
        except BaseException as raised:
            self._fail(number, raised)
        with self._in_turn(number):
            # All earlier elements are answered, so that the result does not depend on the threads' speeds.
            if is_step and (failure := self._failure_until(number)) is not None:
                result = Result(_POISON, request.segment, self._nothing)
                error = tf.constant(f"{type(failure).__name__}: {failure}")
            if result is not None:
                self._put(result, error)
            elif request.step == _END_OF_SESSION:
                self._interrupted, self._failure = False, None
                self._quiet.set()

    def _fail(self, number: int, failure: BaseException) -> None:
        with self._putting:
            if self._failure is None or number < self._failure[0]:
                self._failure = number, failure
        self._on_error(failure)

    def _failure_until(self, number: int) -> BaseException | None:
        """The error of this element or an earlier one. After a failure, the scheme cannot make later steps."""
        failure = self._failure
        return failure[1] if failure is not None and failure[0] <= number else None

    @contextlib.contextmanager
    def _in_turn(self, number: int) -> Iterator[None]:
        """Waits until all earlier elements are answered."""
        with self._putting:
            self._putting.wait_for(lambda: self._num_put == number - 1)
            try:
                yield
            finally:
                self._num_put = number
                self._putting.notify_all()

    def _put(self, result: Result, error: tf.Tensor) -> None:
        # Not constants, which take long to create.
        numbers = result.step, result.segment, result.num_skipped, result.num_dropped
        numbers = [np.array(each, dtype.as_numpy_dtype) for each, dtype in zip(numbers, _NUMBERS, strict=True)]
        enqueue_arrays(self._results, [*numbers, error, *result.buckets])

    def _step(self, request: Request) -> Result | None:
        # Sends nothing after an interrupt: without waiting, nothing bounds the distance between ranks.
        if not self._interrupted:
            try:
                if request.segment == CATCH_UP:
                    return self._answer_of(request, self._joining.catch_up(self._name, request.step))
                if request.segment == MEETING:
                    self._joining.meet(self._name, request.step)
                    return self._answer_of(request, 0)
                if request.segment == 0:
                    self._joining.at_step(self._exchange.steps_of(request.step)[-1] + self._exchange.step_offset)
                if self._rounds is not None and self._rounds.is_asked:
                    self._rounds.look_again()
                return self._exchange.step(request)
            except Interrupted:
                self._interrupted = True
        if request.segment in (CATCH_UP, MEETING):
            # A rank that is left behind again continues to skip steps.
            return self._answer_of(request, int(request.segment == CATCH_UP and self._joining.is_to_begin_again))
        return self._exchange.no_op(request)

    def _recorded_step(self, request: Request) -> Result | None:
        recorder, begin = self._recorder, time.time()
        is_on, step = recorder.is_on, recorder.step
        if is_on and not self._is_counting:  # Excludes the outcomes of steps that are not recorded.
            self._outcomes = self._exchange.outcomes()
        self._is_counting = is_on
        result = self._step(request)
        if is_on:
            seconds = time.time() - begin
            recorder.add(Kind.EXCHANGE, begin, seconds, step=step, name=self._name, number=request.segment & 0xFFFFFFFF)
            self._record_outcomes(step, 0 if result is None else result.num_skipped)
        return result

    def _record_outcomes(self, step: int, num_skipped: int) -> None:
        outcomes = self._exchange.outcomes()
        if not num_skipped and outcomes == self._outcomes:
            return
        new = {name: count - self._outcomes.get(name, 0) for name, count in outcomes.items()}
        new |= {"skipped": num_skipped, "jumps": int(num_skipped > 0)}
        for name, number in new.items():
            if number > 0:
                self._recorder.add(Kind.OUTCOME, time.time(), step=step, name=name, number=number)
        self._outcomes = outcomes

    def _answer_of(self, request: Request, num_skipped: int) -> Result:
        return Result(request.step, request.segment, self._nothing, num_skipped)
