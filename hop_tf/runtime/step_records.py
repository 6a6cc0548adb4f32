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

    Attributes:
      recorder: Takes the records, or None.
      profiler: Profiles some steps, or None.
    """

    def __init__(self):
        self.recorder: Recorder | None = None
        self.profiler: StepProfiler | None = None
        self._batch_began_at = 0.0

    def begin_batch(self) -> None:
        """Called when `fit` is about to run a step, or several."""
        if self.profiler is not None:
            self.profiler.begin_batch()
        if self.recorder is not None:
            self._batch_began_at = self.recorder.now()

    def end_batch(self) -> None:
        """Called when `fit` has run the step, or steps."""
        self._add(Kind.STEP, self._batch_began_at)
        if self.profiler is not None:
            self.profiler.end_batch()

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """Surrounds `evaluate` within `fit`."""
        begin = 0.0 if self.recorder is None else self.recorder.now()
        yield
        self._add(Kind.VALIDATION, begin)

    def end_epoch(self, logs: Mapping[str, object]) -> None:
        """Called when an epoch has ended with these metrics. If epochs are short, only some are recorded."""
        if self.recorder is not None:
            values = {name: float(value) for name, value in logs.items() if isinstance(value, numbers.Real)}
            self.recorder.add_now_and_then("metrics", {"values": values})

    def _add(self, kind: Kind, begin: float) -> None:
        if self.recorder is not None and self.recorder.is_on:
            self.recorder.add(kind, begin, self.recorder.now() - begin)

    def close(self) -> None:
        """Ends profiling. Idempotent."""
        if self.profiler is not None:
            self.profiler.close()
