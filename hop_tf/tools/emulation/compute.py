"""Emulated compute in the training graph: steps that take longer without using the processor.

With `hop_tf launch --step_seconds` and `--slowdown`, a rank's gradients arrive no sooner than the emulated time after
the start of the step. Messages that a strategy sends at the start of a step leave at that time, as they would with real
compute. So the behaviour of many uneven machines can be studied on few cores.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import tensorflow as tf
from absl import logging

from hop_tf.runtime.plugins import Plugin
from hop_tf.tensors.host import runs_on_host
from hop_tf.tools.emulation import ComputeEmulation, StepTimes


class EmulatedCompute(Plugin):
    """Delays gradients. A thread waits; the graph waits for the thread through a queue, so no core is used.

    Args:
      durations: Seconds that each step takes at least, from the start of the step to its gradients.
      step_times: Records every step, so that the launcher can measure how busy the cores were; or None.
    """

    delays_gradients = True

    def __init__(self, durations: Iterator[float], step_times: StepTimes | None = None):
        self._durations = durations
        self._step_times = step_times
        with tf.init_scope(), tf.device("/cpu:0"):
            self._started = tf.queue.FIFOQueue(2, [tf.float64, tf.float64], shapes=[[], []])
            self._elapsed = tf.queue.FIFOQueue(2, [tf.bool], shapes=[[]])
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hop_tf emulated compute", daemon=True)
        self._has_started = False

    def delay(self, started_at: tf.Tensor, gradients: list, times: tf.Tensor | float = 1.0) -> list:
        """Emits the ops that hold `gradients` back until the step's emulated time is over; see `Plugin.delay`.

        The emulated time is multiplied by `times`, because the step has that many times the usual rows.
        """
        if not self._has_started:
            # Not in the constructor: between creating a strategy and training, programs may set a seed, for instance.
            # Setting a seed clears TensorFlow's caches of kernels, and was seen to crash a thread in its first
            # operation.
            self._has_started = True
            self._thread.start()
        with tf.device("/cpu:0"):
            started = self._started.enqueue([started_at, tf.cast(times, tf.float64)])
            # In eager mode, `enqueue` has already run, and returns no operation to depend on.
            with tf.control_dependencies([] if started is None else [started]):
                elapsed = self._elapsed.dequeue()
        with tf.control_dependencies([elapsed]):
            return [
                None if gradient is None else tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
                for gradient in gradients
            ]

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closing.set()
        self._started.close(cancel_pending_enqueues=True)
        if self._has_started:
            self._thread.join(timeout=5)
        if self._step_times is not None:
            self._step_times.close()
            self._step_times = None

    @runs_on_host
    def _run(self) -> None:
        while True:
            try:
                started_at, times = map(float, self._started.dequeue())
            except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
                return
            self._mark()
            self._closing.wait(max(0.0, started_at + times * next(self._durations) - time.time()))
            self._elapsed.enqueue(True)

    def _mark(self) -> None:
        if self._step_times is not None:
            try:
                self._step_times.mark()
            except OSError:  # A full disk must not hold up the training.
                logging.exception("could not note the time of a step")


def make_plugin(rank: int, world_size: int) -> EmulatedCompute:
    """Makes the emulated compute that this process's environment asks for.

    Raises:
      ValueError: If a variable cannot be read.
    """
    emulation = ComputeEmulation.from_environment(os.environ)
    return EmulatedCompute(emulation.step_durations(rank, world_size), StepTimes.from_environment(os.environ))
