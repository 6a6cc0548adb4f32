"""Measures the cost of faults: of six ranks, one is killed or stopped every few seconds.

    python benchmarks/benchmark_storm.py

Each strategy goes on without a lost rank. It trains scikit-learn's digits twice for `--steps` steps of `--step_seconds`
each (emulated, without using the processor): undisturbed, and in a storm. In the storm, every `--interval` seconds a
rank is killed (SIGKILL) and restarted at once, or stopped for `--stop_seconds` (SIGSTOP). `--seed` decides the rank and
the fault. The last fault is early enough for the rank to come back. The benchmark takes a quarter of an hour.

The time to recover is the time from a rank's death until its new process has made a step. A rank is up from its start
to its last step, except while it is stopped or recovers. Shown are

- kept: the rows that ranks have trained on in the storm for each second in which they were up, as a part of those for
  each second undisturbed. The remaining ranks share a lost rank's rows, and their steps take longer. Required: at least
  0.95;
- the median time to recover, most of which a new process takes to start and to trace its step;
- accuracies, of rank 0, undisturbed and in the storm;
- equal: 1 if all ranks end with the same weights, to the bit (if that is promised);
- problems: processes that have not ended with 0; threads, processes and sockets that are left.

Processes are forked from one that has imported everything: a real process takes some seconds more to come back. With
`--strategies=torchft`, torchft trains the same model: see `storm_torchft.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import random
import tempfile
import threading
import time
from collections.abc import Iterator

import keras
import numpy as np
import peers
import psutil
import results
import storm_torchft
from absl import app, flags
from sklearn.datasets import load_digits

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner, stop_fork_server
from hop_tf.tools.testing.multi_process import DEFAULT_PRELOAD, MultiProcessError

_STRATEGIES = flags.DEFINE_list("strategies", ["pipe_sgd", "dts", "hop", "canary", "shat"], "Which ones.")
_STEPS = flags.DEFINE_integer("steps", 180, "Steps of a training.", lower_bound=20)
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.2, "How long a step takes at least.", lower_bound=0.001)
_INTERVAL = flags.DEFINE_float("interval", 8.0, "Seconds from one fault to the next.", lower_bound=1.0)
_STOP_SECONDS = flags.DEFINE_float("stop_seconds", 10.0, "For how long a rank is stopped.", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Of the faults.")

_NUM_RANKS = 6
_BATCH_SIZE = 60
_TIMEOUT_SECONDS = 300.0
# The least value that can be required if all ranks wait for each other.
_CONTINUE = {"on_peer_loss": "continue", "patience_seconds": 0.5}
_MAKE = {
    "pipe_sgd": lambda options: hop_tf.PipeSGDStrategy(communication_options=options, **_CONTINUE),
    "dts": lambda options: hop_tf.DTSStrategy(communication_options=options, **_CONTINUE),
    "hop": lambda options: hop_tf.HopStrategy(num_backup_workers=1, communication_options=options),
    "canary": lambda options: hop_tf.CanaryStrategy(communication_options=options),
    "shat": lambda options: hop_tf.SHATParameterServerStrategy(communication_options=options),
}
_EQUAL_AT_THE_END = ("pipe_sgd", "dts", "canary")


# In the processes of the ranks.


class _Rows(keras.metrics.Metric):
    """The number of rows that this process has trained on."""

    def __init__(self):
        super().__init__(dtype="int64")
        self._total = self.add_variable((), "zeros", dtype="int64")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self._total.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "int64"))

    def result(self):
        return keras.ops.convert_to_tensor(self._total)

    def reset_state(self):
        pass


class _Steps(keras.callbacks.Callback):
    """Writes the end of each step, and its number of rows."""

    def __init__(self, path: pathlib.Path, rows: _Rows):
        super().__init__()
        self._path = path
        self._rows = rows
        self._total = 0

    def on_train_batch_end(self, batch, logs=None):
        before, self._total = self._total, int(self._rows.result())
        with open(self._path, "a") as file:
            file.write(f"{time.time()} {self._total - before}\n")


def _train(name: str, folder: str, num_steps: int) -> tuple[float, str]:
    """Trains a rank; returns its final accuracy, and a digest of its weights."""
    if name == "torchft":
        return storm_torchft.train(folder, num_steps, _BATCH_SIZE, float(os.environ["HOP_TF_STEP_SECONDS"]))
    strategy = _MAKE[name](hop_tf.CommunicationOptions(timeout_seconds=40.0))
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        counted = _Rows()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy", counted])
    batches = len(x) // _BATCH_SIZE
    epochs = -(-num_steps // batches)
    steps = _Steps(pathlib.Path(folder, f"rank_{strategy.rank}"), counted)
    rows = batches * _BATCH_SIZE
    model.fit(x[:rows], y[:rows], batch_size=_BATCH_SIZE, epochs=epochs, callbacks=[steps], verbose=0)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    _, accuracy, _ = model.evaluate(x, y, verbose=0)
    strategy.shutdown()
    return accuracy, hashlib.sha256(weights).hexdigest()


# In the process that measures.


@dataclasses.dataclass
class _Run:
    """A training.

    Attributes:
      steps: By rank, an array with a row for each step: its end, and its number of rows.
      faults: Rank, time, and the seconds for which the rank was stopped, or None if it was killed.
      values: By rank, the result, or None.
      problems: Descriptions of problems.
    """

    steps: list[np.ndarray]
    faults: list[tuple[int, float, float | None]]
    values: list
    problems: list[str]

    @property
    def downs(self) -> Iterator[tuple[int, float, float]]:
        """Yields rank, begin and end of each time in which a rank is not up."""
        for rank, begin, seconds in self.faults:
            ends = self.steps[rank][:, 0]
            later = ends[ends > begin + 0.5]
            yield rank, begin, begin + seconds if seconds is not None else later.min(initial=np.inf)

    @property
    def recoveries(self) -> list[float]:
        """Seconds from each death to the first step of the new process."""
        return [
            end - begin
            for (_, begin, end), (*_, seconds) in zip(self.downs, self.faults, strict=True)
            if seconds is None
        ]

    @property
    def rate(self) -> float:
        """Rows that ranks have trained on for each second in which one was up."""
        begin, ends = max(each[0, 0] for each in self.steps), [each[-1, 0] for each in self.steps]
        num_rows = sum(each[each[:, 0] > begin, 1].sum() for each in self.steps)
        down = sum(max(0.0, min(last, ends[rank]) - max(first, begin)) for rank, first, last in self.downs)
        return float(num_rows / (sum(ends) - len(ends) * begin - down))

    @property
    def accuracy(self) -> float:
        """Accuracy of rank 0."""
        return self.values[0][0] if self.values and self.values[0] else np.nan


def _run(name: str, with_faults: bool) -> _Run:
    env = {"HOP_TF_STEP_SECONDS": repr(_STEP_SECONDS.value)}
    preload = DEFAULT_PRELOAD
    if name == "torchft":
        preload = (*DEFAULT_PRELOAD, "torchft", "sklearn.datasets")
        lighthouse = peers.make_lighthouse(1, quorum_tick_ms=20, heartbeat_timeout_ms=storm_torchft.SILENCE_MS)
        env["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "preload": preload,
            "args": (name, folder, _STEPS.value),
            "num_ps": int(name == "shat"),
            "env": env,
        }
        with MultiProcessRunner(_train, _NUM_RANKS, timeout_seconds=_TIMEOUT_SECONDS, **arguments) as runner:
            while not all(_steps_of(folder, rank).size for rank in range(_NUM_RANKS)):
                time.sleep(0.05)
            faults = _storm(runner) if with_faults else []
            try:
                done = runner.join()
                codes = {str(each.task): each.exit_code for each in (*done.workers, *done.ps)}
                problems, values = [f"{task} ended with {code}" for task, code in codes.items() if code], done.values
            except MultiProcessError as error:
                problems, values = [str(error).splitlines()[0]], []
        return _Run([_steps_of(folder, rank) for rank in range(_NUM_RANKS)], faults, values, problems)


def _steps_of(folder: str, rank: int) -> np.ndarray:
    path = pathlib.Path(folder, f"rank_{rank}")
    lines = path.read_text().splitlines() if path.exists() else []
    return np.array([[float(word) for word in line.split()] for line in lines]).reshape(-1, 2)


def _storm(runner: MultiProcessRunner) -> list[tuple[int, float, float | None]]:
    drawn = random.Random(_SEED.value)
    seconds = 0.7 * _STEPS.value * _STEP_SECONDS.value
    resumed: list[threading.Timer] = []
    faults = []
    for _ in range(max(1, int(seconds / _INTERVAL.value))):
        struck = [rank for rank, *_ in faults[-2:]]  # These may not be up yet.
        rank, is_kill = drawn.choice([each for each in range(_NUM_RANKS) if each not in struck]), drawn.random() < 0.5
        faults.append((rank, time.time(), None if is_kill else _STOP_SECONDS.value))
        if is_kill:
            runner.kill(rank)
            runner.restart(rank)
        else:
            runner.pause(rank)
            resumed.append(threading.Timer(_STOP_SECONDS.value, runner.resume, [rank]))
            resumed[-1].start()
        time.sleep(_INTERVAL.value)
    for timer in resumed:
        timer.join()
    return faults


def _left() -> tuple[int, int]:
    """Threads, and children, of this process."""
    return threading.active_count(), len(psutil.Process().children(recursive=True))


def _compare(name: str) -> None:
    """Trains undisturbed and in a storm, and shows what the storm costs."""
    free = _run(name, with_faults=False)
    before = _left()
    storm = _run(name, with_faults=True)
    problems = [*free.problems, *storm.problems, *(["something is left"] if _left() > before else [])]
    print(name, *problems, sep="; ")
    kills = len(storm.recoveries)
    shown = {"kills": kills, "stops": len(storm.faults) - kills, "kept": storm.rate / free.rate}
    if kills:
        shown["recovery"] = np.median(storm.recoveries)
    shown |= {"accuracy undisturbed": free.accuracy, "accuracy in the storm": storm.accuracy}
    if name in _EQUAL_AT_THE_END:
        shown["equal"] = len({value[1] for value in storm.values if value}) == 1
    results.show(name, {**shown, "problems" if name in _MAKE else "problems of peers": len(problems)})


def main(_) -> None:
    for name in _STRATEGIES.value:
        if name == "torchft" and not peers.is_installed(name):
            print("torchft is left out: it is not installed.")
        else:
            _compare(name)
    stop_fork_server()


if __name__ == "__main__":
    app.run(main)
