"""What a rank counts, and its way to TensorBoard."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.cluster import Cluster
from hop_tf.options import CommunicationOptions, rank_folder
from hop_tf.records import Kind, Recorder
from hop_tf.version import __version__

# Ranks may differ in the patch level of these, not in more.
_COMPARED_PACKAGES = ("tensorflow", "keras")
# Steps that the median duration is of.
_NUM_LATEST = 64
# Steps whose times are kept until the recorder asks for them, which it does twice a second.
_NUM_KEPT = 2048
# Makes a tensor a curve of TensorBoard, as `tf.summary.scalar` does. That one fails where TensorBoard is not installed.
_SCALAR = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"})


def static_identity(strategy: str, cluster: Cluster, scheme: Mapping[str, str]) -> dict[str, str]:
    """The fields that the handshake compares: all ranks must run the same strategy, options and versions.

    Args:
      strategy: Class name of the strategy.
      cluster: The cluster as this rank sees it.
      scheme: The scheme's settings.

    Returns:
      Field names and values.
    """
    packages = {"hop_tf": __version__, **{name: _minor_version(name) for name in _COMPARED_PACKAGES}}
    return {
        "cluster": ",".join(cluster.all_addresses),
        "strategy": strategy,
        **{f"option {name}": value for name, value in sorted(scheme.items())},
        **{f"version of {name}": version for name, version in packages.items()},
    }


def _minor_version(package: str) -> str:
    version = tf.__version__ if package == "tensorflow" else metadata.version(package)
    return ".".join(version.split(".")[:2])


class StepStatistics:
    """Steps taken and time waited, counted by the training graph itself.

    Attributes:
      recorder: Gets the times of each step; None: nobody does.
    """

    def __init__(self):
        self.recorder: Recorder | None = None
        self._lock = threading.Lock()
        self._state: _StepState | None = None
        self._num_recorded = 0

    def count_step(self) -> None:
        """Emits the op that counts a step."""
        self._get_state().steps.assign_add(1)

    def count_start(self) -> None:
        """Emits the op that notes that a step begins: its batch is there. Counts nothing in eager execution."""
        if not tf.executing_eagerly():
            with tf.device("/cpu:0"):
                self._get_state().record_start()

    def count_gradients(self, gradients: Sequence[tf.Tensor], step: tf.Tensor) -> None:
        """Emits the op that notes, for the recorder, when a step has its gradients. Notes nothing in eager execution.

        Args:
          gradients: What has to be there.
          step: int64 scalar: the step of the session.
        """
        if self.recorder is not None and not tf.executing_eagerly():
            with tf.device("/cpu:0"), tf.control_dependencies(gradients):
                self._get_state().times.record_gradients(step)

    def count_wait(self, ready: Sequence[tf.Tensor], done: Sequence[tf.Tensor]) -> None:
        """Emits the ops that count the time from `ready` (gradients) to `done` (what others sent); 0 if negative.

        Counts nothing in eager execution, where both are there when this is called.
        """
        if tf.executing_eagerly():
            return
        state = self._get_state()
        with tf.device("/cpu:0"):
            with tf.control_dependencies(ready):
                state.record_ready()
            with tf.control_dependencies(done):
                state.add_wait()

    def counters(self) -> dict[str, float]:
        """`steps` and `wait_seconds` so far; `compute_seconds`, the median of the latest steps without waiting."""
        if self._state is None:
            return {"steps": 0, "wait_seconds": 0.0, "compute_seconds": 0.0}
        return {
            "steps": int(self._state.steps),
            "wait_seconds": float(self._state.wait_seconds),
            "compute_seconds": self._state.compute_seconds(),
        }

    def latest_seconds(self) -> np.ndarray:
        """The durations of the latest steps, without what they waited, the last one at the end; float64 array."""
        return np.empty(0) if self._state is None else self._state.latest_seconds()

    def _get_state(self) -> _StepState:
        with self._lock:
            if self._state is None:
                with tf.init_scope(), tf.device("/cpu:0"):
                    self._state = _StepState(keeps_times=self.recorder is not None)
                if self.recorder is not None:
                    self.recorder.add_source(self._events)
            return self._state

    def _events(self, is_final: bool) -> np.ndarray:
        """The events of the steps that have ended since the last call: see `Recorder.add_source`."""
        recorder, state = self.recorder, self._state
        last = state.num_starts - (not is_final)  # Else one is under way.
        first = max(self._num_recorded, last - _NUM_KEPT + 1)
        self._num_recorded = max(last, self._num_recorded)
        if last <= first:
            return recorder.make_events(0)
        steps, started, ready, done, waited = state.times.read(first, last)
        is_kept = (ready >= started) & np.array([recorder.records(step) for step in steps.tolist()], bool)
        computed = _make_events(recorder, Kind.COMPUTE, steps, started, ready - started, is_kept)
        results = _make_events(recorder, Kind.RESULT, steps, done - waited, waited, is_kept & (waited > 0))
        return np.concatenate([computed, results])


def _make_events(
    recorder: Recorder, kind: Kind, steps: np.ndarray, begins: np.ndarray, seconds: np.ndarray, where: np.ndarray
) -> np.ndarray:
    events = recorder.make_events(np.count_nonzero(where), kind)
    events["step"], events["begin"], events["seconds"] = steps[where], begins[where], seconds[where]
    return events


class _StepState:
    """The counters, in variables.

    In a graph TensorFlow runs operations with side effects in the order of the program, among them the clock and every
    assertion: a reading that comes behind the assertion on a result would wait for the result. Functions that use
    variables are ordered by those variables only. So the clock is read in functions.
    """

    def __init__(self, keeps_times: bool = False):
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_steps")
        self.wait_seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hop_tf_wait_seconds")
        self.ready_at = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hop_tf_ready_at")
        self._started_at = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hop_tf_started_at")
        self._waited_before = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hop_tf_waited_before")
        self._num_starts = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_starts")
        self._latest = tf.Variable(tf.zeros([_NUM_LATEST], tf.float64), trainable=False, name="hop_tf_latest_steps")
        self.times = _StepTimes(self._num_starts) if keeps_times else None

    @property
    def num_starts(self) -> int:
        """How many steps have begun."""
        return int(self._num_starts)

    @tf.function
    def record_start(self) -> None:
        now, waited = tf.timestamp(), self.wait_seconds.read_value()
        duration = now - self._started_at - (waited - self._waited_before)
        self._latest.scatter_nd_update([[self._num_starts % _NUM_LATEST]], [duration])
        self._started_at.assign(now)
        self._waited_before.assign(waited)
        if self.times is not None:
            self.times.begin(now)
        self._num_starts.assign_add(1)

    def compute_seconds(self) -> float:
        """Median time from the start of a step to that of the next one, less what it waited; 0.0 if there is none."""
        latest = self.latest_seconds()
        return float(np.median(latest)) if latest.size else 0.0

    def latest_seconds(self) -> np.ndarray:
        """These times, those of the latest step at the end."""
        num_starts, latest = int(self._num_starts), self._latest.numpy()
        # There was no step before the first one.
        return latest[1:num_starts] if num_starts <= _NUM_LATEST else np.roll(latest, -(num_starts % _NUM_LATEST))

    @tf.function
    def record_ready(self) -> None:
        self.ready_at.assign(tf.timestamp())

    @tf.function
    def add_wait(self) -> None:
        now = tf.timestamp()
        total = self.wait_seconds.assign_add(tf.maximum(now - self.ready_at, 0.0))
        if self.times is not None:
            self.times.add_wait(now, total)


class _StepTimes:
    """The times of the latest steps, in variables: what the graph notes costs no Python.

    Each of its functions has variables of its own, so that none of them waits for another one: see `_StepState`.

    Args:
      num_starts: int64 variable: how many steps have begun.
    """

    def __init__(self, num_starts: tf.Variable):
        self._num_starts = num_starts
        self._row = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_row")  # Of the step that is under way.
        # By row: when the step began; its number, and when its gradients were there; when it had waited, and how long
        # all until then had.
        self._started, self._gradients, self._waits = (
            tf.Variable(tf.zeros([_NUM_KEPT, *shape], tf.float64), trainable=False, name=f"hop_tf_{name}")
            for name, shape in (("started", ()), ("gradients", (2,)), ("waits", (2,)))
        )
        self._total = 0.0  # How long steps have waited until the last row that was read.

    def begin(self, now: tf.Tensor) -> None:
        """Emits the ops that begin the row of a step, before it is counted."""
        row = self._num_starts % _NUM_KEPT
        self._row.assign(row)
        self._put(self._started, row, now)

    @tf.function
    def record_gradients(self, step: tf.Tensor) -> None:
        self._put(self._gradients, self._row, [tf.cast(step, tf.float64), tf.timestamp()])

    def add_wait(self, now: tf.Tensor, total: tf.Tensor) -> None:
        """Emits the ops that note until when a step has waited, and how long all steps until then have in all."""
        self._put(self._waits, self._row, [now, total])

    def _put(self, variable: tf.Variable, row: tf.Tensor, value: tf.Tensor | list[tf.Tensor]) -> None:
        variable.scatter_update(tf.IndexedSlices(value, row))

    def read(self, first: int, last: int) -> tuple[np.ndarray, ...]:
        """The rows from `first` up to `last`.

        Returns:
          Of each row: the step; when it began; when its gradients were there, or earlier if they never were; when it
          had waited, and how long.
        """
        where = np.arange(first, last) % _NUM_KEPT
        started, gradients, waits = (
            variable.numpy()[where] for variable in (self._started, self._gradients, self._waits)
        )
        (steps, ready), (done, totals) = gradients.T, waits.T
        has_waited = done >= started  # Else the row still has what is of another step.
        totals = np.maximum.accumulate(np.where(has_waited, totals, self._total))
        waited = np.diff(totals, prepend=self._total)
        self._total = float(totals[-1])
        return steps.astype(np.int64), started, ready, done, waited


class ReportWriter:
    """Writes `report()` to TensorBoard now and then; a run `rank_<r>` below `CommunicationOptions.log_dir`.

    A disk that is full, read-only or gone ends the records, with one warning, and not the training.

    Args:
      report: Returns the counters.
      options: `log_dir` (None: nothing is written) and `report_interval_seconds`.
      rank: This rank.
      recorder: Gets them now and then; None: nobody does.
    """

    def __init__(
        self,
        report: Callable[[], Mapping[str, float]],
        options: CommunicationOptions,
        rank: int,
        recorder: Recorder | None = None,
    ):
        self._recorder = recorder
        self._report = report
        self._interval_seconds = options.report_interval_seconds
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._writer = None
        self._thread = None
        if (folder := rank_folder(options, rank)) is None:
            return
        self._path = str(folder)
        try:
            self._writer = tf.summary.create_file_writer(self._path)
        except tf.errors.OpError as error:
            self._give_up(error)
            return
        self._thread = threading.Thread(target=self._run, name="hop_tf report", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Writes the counters as they are now. What goes wrong is logged; after an error of the disk, nothing more."""
        with self._writing:
            if self._writer is None:
                return
            try:
                counters = self._report()
            except Exception:
                logging.exception("could not make a report for TensorBoard")
                return
            if self._recorder is not None:
                self._recorder.add_now_and_then("report", {name: float(value) for name, value in counters.items()})
            try:
                self._write(counters)
            except tf.errors.OpError as error:
                self._give_up(error)

    def _write(self, counters: Mapping[str, float]) -> None:
        with tf.init_scope(), self._writer.as_default(step=int(counters["steps"])):
            for name, value in counters.items():
                if name not in ("rank", "steps"):
                    tf.summary.write(f"hop_tf/{name}", tf.cast(value, tf.float32), metadata=_SCALAR)
        self._writer.flush()

    def _give_up(self, error: tf.errors.OpError) -> None:
        # Else TensorFlow would keep all further records in memory, and fail at each of them again.
        self._writer = None
        self._stop.set()
        logging.warning(
            "No records of `report()` are written to TensorBoard from now on: the files in %s (`log_dir`) cannot be "
            "written to: %s. Training goes on.",
            self._path,
            _reason_of(error),
        )

    def close(self) -> None:
        """Writes once more and ends the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.write()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self.write()


def _reason_of(error: tf.errors.OpError) -> str:
    """The first line of an error, without the names of TensorFlow's operations around it."""
    return re.sub(r"^\{\{.*?\}\} | \[Op:.*\].*$", "", error.message.partition("\n")[0])
