"""A rank's counters, and their way to TensorBoard."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.cluster import Cluster
from hop_tf.keras_hook.determinism import is_deterministic
from hop_tf.options import CommunicationOptions, rank_folder
from hop_tf.records import Kind, Recorder
from hop_tf.runtime.curves import Curves
from hop_tf.tensors.host import on_host, runs_on_host
from hop_tf.version import __version__

# Of these packages, only the patch level may differ between ranks.
_COMPARED_PACKAGES = ("tensorflow", "keras")
# Number of steps for the median duration.
_NUM_LATEST = 64
# Number of steps that are kept. A recorder asks for them every other second. The older half may be overwritten while it
# is read.
_NUM_KEPT = 4 * _NUM_LATEST
_NUM_KEPT_FOR_RECORDER = 16384


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
    """Steps made and time waited, counted by the training graph itself.

    Times are measured only in graphs, and not under op determinism, which forbids reading the clock.

    Args:
      recorder: Gets the times of each step. Default: times are not recorded.
    """

    def __init__(self, recorder: Recorder | None = None):
        self._recorder = recorder
        self._lock = threading.Lock()
        self._state: _StepState | None = None
        self._num_recorded = 0

    def count_step(self) -> None:
        """Emits the op that counts a step."""
        self._get_state().steps.assign_add(1)

    def count_start(self) -> None:
        """Emits the op that records the start of a step, when its batch is there."""
        if _takes_times():
            with tf.device("/cpu:0"):
                self._get_state().record_start()

    def count_gradients(self, gradients: Sequence[tf.Tensor], step: tf.Tensor) -> None:
        """Emits the op that records, for the recorder, the time when a step has its gradients.

        Args:
          gradients: The gradients to wait for.
          step: int64 scalar: the step of the session.
        """
        if self._recorder is not None and _takes_times():
            with tf.device("/cpu:0"), tf.control_dependencies(gradients):
                self._get_state().record_gradients(step)

    def count_wait(self, ready: Sequence, done: Sequence[tf.Tensor]) -> None:
        """Emits the ops that count the time from `ready` (gradients) to `done` (the result); 0 if negative."""
        if not _takes_times():
            return
        state = self._get_state()
        with tf.device("/cpu:0"):
            with tf.control_dependencies(ready):
                state.record_ready()
            with tf.control_dependencies(done):
                state.add_wait()

    def counters(self) -> dict[str, float]:
        """`steps` and `wait_seconds` so far, and `compute_seconds`: the median of the latest steps without waiting."""
        if self._state is None:
            return {"steps": 0, "wait_seconds": 0.0, "compute_seconds": 0.0}
        return {
            "steps": int(self._state.steps),
            "wait_seconds": float(self._state.wait_seconds),
            "compute_seconds": self._state.compute_seconds(),
        }

    def latest_seconds(self) -> np.ndarray:
        """The durations of the latest steps without waiting, as a float64 array. The last step is at the end."""
        return np.empty(0) if self._state is None else self._state.latest_seconds()

    def _get_state(self) -> _StepState:
        with self._lock:
            if self._state is None:
                with tf.init_scope(), tf.device("/cpu:0"):
                    self._state = _StepState(_NUM_KEPT if self._recorder is None else _NUM_KEPT_FOR_RECORDER)
                if self._recorder is not None:
                    self._recorder.add_source(self._events)
            return self._state

    def _events(self, is_final: bool) -> np.ndarray:
        """The events of the steps that have ended since the last call: see `Recorder.add_source`."""
        recorder, state = self._recorder, self._state
        with on_host():
            first, times = state.times(self._num_recorded, is_final)
        recorder.drop(first - self._num_recorded)  # A slow disk has delayed the recorder.
        self._num_recorded = first + len(times)
        steps, started, ready, done, waited = times.T
        steps = steps.astype(np.int64)
        is_kept = (ready >= started) & np.array([recorder.records(step) for step in steps.tolist()], bool)
        computed = _make_events(recorder, Kind.COMPUTE, steps, started, ready - started, is_kept)
        results = _make_events(recorder, Kind.RESULT, steps, done - waited, waited, is_kept & (waited > 0))
        return np.concatenate([computed, results])


def _takes_times() -> bool:
    """True in a graph that may read the clock. Eagerly, gradients and results are there when they are requested."""
    return not (tf.executing_eagerly() or is_deterministic())


def _make_events(
    recorder: Recorder, kind: Kind, steps: np.ndarray, begins: np.ndarray, seconds: np.ndarray, where: np.ndarray
) -> np.ndarray:
    events = recorder.make_events(np.count_nonzero(where), kind)
    events["step"], events["begin"], events["seconds"] = steps[where], begins[where], seconds[where]
    return events


class _StepState:
    """The counters, and the times of the latest steps, in variables: the graph records them without Python.

    In a graph, TensorFlow runs operations with side effects in the order of the program. These include the clock and
    every assertion. So a reading of the clock after the assertion on a result would wait for the result. But calls of
    functions are ordered only by the variables that they use. So functions read the clock. Two of them share a variable
    only if the second has to wait for the first.

    Args:
      num_kept: Number of steps whose times are kept.
    """

    def __init__(self, num_kept: int):
        def variable(name: str, value: object = 0.0, dtype: tf.DType = tf.float64) -> tf.Variable:
            return tf.Variable(value, dtype=dtype, trainable=False, name=f"hop_tf_{name}")

        self._num_kept = num_kept
        self.steps = variable("steps", 0, tf.int64)
        self.wait_seconds = variable("wait_seconds")
        self.ready_at = variable("ready_at")
        self._num_starts = variable("starts", 0, tf.int64)
        # Of the running step: its number, the time of its gradients, and the end of its wait.
        self._of_step = [variable(name) for name in ("step", "gradients_at", "waited_until")]
        # A row for each step: its start, then `_of_step` of the previous step, then the total waiting time until that
        # start.
        self._rows = variable("rows", tf.zeros([num_kept, 5], tf.float64))

    @tf.function(autograph=False)
    def record_start(self) -> None:
        row = tf.stack([tf.timestamp(), *self._of_step, self.wait_seconds])
        put = self._rows.scatter_update(tf.IndexedSlices(row, self._num_starts % self._num_kept))
        with tf.control_dependencies([put]):
            self._num_starts.assign_add(1)

    @tf.function(autograph=False)
    def record_gradients(self, step: tf.Tensor) -> None:
        number, gradients_at, _ = self._of_step
        number.assign(tf.cast(step, tf.float64))
        gradients_at.assign(tf.timestamp())

    @tf.function(autograph=False)
    def record_ready(self) -> None:
        self.ready_at.assign(tf.timestamp())

    @tf.function(autograph=False)
    def add_wait(self) -> None:
        now = tf.timestamp()
        self.wait_seconds.assign_add(tf.maximum(now - self.ready_at, 0.0))
        self._of_step[-1].assign(now)

    def compute_seconds(self) -> float:
        """The median time from the start of a step to the next, less its waiting time; 0.0 without steps."""
        latest = self.latest_seconds()
        return float(np.median(latest)) if latest.size else 0.0

    def latest_seconds(self) -> np.ndarray:
        """The times from step to step less waiting times. The latest step is at the end."""
        _, rows = self._read(int(self._num_starts) - 1 - _NUM_LATEST)
        started, waited = rows[:, 0], rows[:, -1]
        return (np.diff(started) - np.diff(waited))[-_NUM_LATEST:]  # Steps may have ended since.

    def times(self, first: int, is_final: bool) -> tuple[int, np.ndarray]:
        """The times of the steps that have ended.

        Args:
          first: The first step of interest.
          is_final: True if the last step has ended, too: no step is running.

        Returns:
          The first step that is still known. Then a row for each step: its number in the session, and the times of its
          start, of its gradients and of the end of its wait. The last column is its waiting time. For a step without
          gradients, the time of its gradients is before its start.
        """
        first, rows = self._read(first)
        if is_final:
            rows = np.concatenate([rows, [[0.0, *(float(each) for each in self._of_step), float(self.wait_seconds)]]])
        started, waited = rows[:-1, :1], np.diff(rows[:, -1:], axis=0)
        steps, ready, done = np.split(rows[1:, 1:4], 3, axis=1)
        return first, np.concatenate([steps, started, ready, done, waited], axis=1)

    def _read(self, first: int) -> tuple[int, np.ndarray]:
        """Returns the number of the first known step at or after `first`, and the rows from that step on."""
        num_starts = int(self._num_starts)
        first = max(first, num_starts - self._num_kept // 2, 0)
        return first, self._rows.sparse_read(np.arange(first, num_starts) % self._num_kept).numpy()


class ReportWriter:
    """Writes the curves of `report()` for TensorBoard at intervals, as a run `rank_<r>` below `log_dir`.

    A disk that is full, read-only or gone ends the records, with one warning. Training continues.

    Args:
      report: Returns the counters.
      options: `log_dir` (None: nothing is written) and `report_interval_seconds`.
      rank: This rank.
      recorder: Gets the counters at intervals, or None.
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
        self._curves = Curves()
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
        """Writes the curves up to now. Errors are logged. After an error of the disk, nothing more is written."""
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
            for point in self._curves.points(counters):
                tf.summary.write(point.tag, tf.cast(point.value, tf.float32), metadata=_metadata(point.description))
        self._writer.flush()

    def _give_up(self, error: tf.errors.OpError) -> None:
        # Otherwise TensorFlow would keep all further records in memory, and fail at each of them again.
        self._writer = None
        self._stop.set()
        logging.warning(
            "Cannot write to the files in %s (`log_dir`): %s. Training continues, without records of `report()` for "
            "TensorBoard.",
            self._path,
            _reason_of(error),
        )

    def close(self) -> None:
        """Writes once more, and ends the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.write()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @runs_on_host
    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self.write()


def _metadata(description: str) -> tf.compat.v1.SummaryMetadata:
    """Metadata that make a tensor a curve. `tf.summary.scalar` adds them, too, but fails if TensorBoard is missing."""
    return tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"}, summary_description=description)


def _reason_of(error: tf.errors.OpError) -> str:
    """The first line of an error, without the names of TensorFlow's operations around it."""
    return re.sub(r"^\{\{.*?\}\} | \[Op:.*\].*$", "", error.message.partition("\n")[0])
