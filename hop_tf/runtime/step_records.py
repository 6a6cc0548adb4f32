"""`StepRecords`: records of the calls that Keras makes on a rank while it trains."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator, Mapping

from hop_tf.records import Kind
from hop_tf.records.recorder import Recorder
from hop_tf.runtime.profiling import StepProfiler


class StepRecords:
    """Records steps and validations, and profiles some steps.

    Args:
      recorder: Takes the records, or None.
      profiler: Profiles some steps, or None.
    """

    def __init__(self, recorder: Recorder | None, profiler: StepProfiler | None):
        self._recorder = recorder
        self._profiler = profiler
        self._batch_began_at = 0.0

    def begin_batch(self) -> None:
        """Called when `fit` is about to run a step, or several."""
        if self._profiler is not None:
            self._profiler.begin_batch()
        if self._recorder is not None:
            self._batch_began_at = self._recorder.now()

    def end_batch(self) -> None:
        """Called when `fit` has run the step, or steps."""
        self._add(Kind.STEP, self._batch_began_at)
        if self._profiler is not None:
            self._profiler.end_batch()

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """Surrounds `evaluate` within `fit`."""
        begin = 0.0 if self._recorder is None else self._recorder.now()
        yield
        self._add(Kind.VALIDATION, begin)

    def end_epoch(self, logs: Mapping[str, object]) -> None:
        """Called when an epoch has ended with these metrics. If epochs are short, only some are recorded."""
        if self._recorder is not None:
            values = {name: float(value) for name, value in logs.items() if isinstance(value, numbers.Real)}
            self._recorder.add_now_and_then("metrics", {"values": values})

    def _add(self, kind: Kind, begin: float) -> None:
        if self._recorder is not None and self._recorder.is_on:
            self._recorder.add(kind, begin, self._recorder.now() - begin)

    def close(self) -> None:
        """Ends profiling. Idempotent."""
        if self._profiler is not None:
            self._profiler.close()
