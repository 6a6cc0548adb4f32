"""`StepRecords`: what a rank records of the calls that Keras makes while it trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from hop_tf.records import Kind
from hop_tf.records.recorder import Recorder
from hop_tf.runtime.profiling import StepProfiler


class StepRecords:
    """Records steps and validations, and profiles some steps.

    Attributes:
      recorder: Takes the records; None: nothing is recorded.
      profiler: Profiles some steps; None: no step is profiled.
    """

    def __init__(self):
        self.recorder: Recorder | None = None
        self.profiler: StepProfiler | None = None
        self._batch_began_at = 0.0

    def begin_batch(self) -> None:
        """`fit` is about to run a step, or several."""
        if self.profiler is not None:
            self.profiler.begin_batch()
        if self.recorder is not None:
            self._batch_began_at = time.time()

    def end_batch(self) -> None:
        """It has run them."""
        self._add(Kind.STEP, self._batch_began_at)
        if self.profiler is not None:
            self.profiler.end_batch()

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """Surrounds `evaluate` within `fit`."""
        begin = time.time()
        yield
        self._add(Kind.VALIDATION, begin)

    def _add(self, kind: Kind, begin: float) -> None:
        if self.recorder is not None and self.recorder.is_on:
            self.recorder.add(kind, begin, time.time() - begin)

    def close(self) -> None:
        """Ends profiling. Idempotent."""
        if self.profiler is not None:
            self.profiler.close()
