"""`StepProfiler`: runs TensorFlow's profiler for some steps of `fit`."""

from __future__ import annotations

import os

import tensorflow as tf
from absl import logging

from hop_tf.options import PROFILE_VARIABLE, CommunicationOptions, parse_profile_steps, rank_folder


class StepProfiler:
    """Profiles some steps of a process, into the folder of its other records, where TensorBoard finds them.

    Args:
      folder: The folder to write to.
      first: The first step, counted from 0 over all calls of `fit`; with `steps_per_execution`, the first execution.
      last: The last step, or execution.
    """

    def __init__(self, folder: str, first: int, last: int):
        self._folder = folder
        self._first, self._last = first, last
        self._num_begun = 0
        self._is_running = False

    @classmethod
    def from_environment(cls, options: CommunicationOptions, rank: int) -> StepProfiler | None:
        """The profiler that `hop_tf launch --profile_steps` asks for; None without this flag or a `log_dir`."""
        text = os.environ.get(PROFILE_VARIABLE)
        if not text:
            return None
        first, last = parse_profile_steps(text)
        folder = rank_folder(options, rank)
        if folder is None:
            logging.warning(
                "rank %d: cannot profile steps without a directory: set CommunicationOptions(log_dir=...).", rank
            )
            return None
        return cls(str(folder), first, last)

    def begin_batch(self) -> None:
        """Called when a step is about to be made."""
        if self._num_begun == self._first:
            try:
                tf.profiler.experimental.start(self._folder)
                self._is_running = True
            except tf.errors.OpError as error:  # Another profiler runs, such as a TensorBoard callback's.
                logging.warning("Steps are not profiled: %s", error.message)
        self._num_begun += 1

    def end_batch(self) -> None:
        """Called when the step has been made."""
        if self._is_running and self._num_begun > self._last:
            self.close()

    def close(self) -> None:
        """Ends profiling, if it runs, and writes the profile. Idempotent."""
        if self._is_running:
            self._is_running = False
            try:
                tf.profiler.experimental.stop()
            except tf.errors.OpError as error:
                logging.warning("Cannot write the profile in %s: %s", self._folder, error.message)
