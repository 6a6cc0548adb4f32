"""`ReportCheckpointCallback`: metrics and checkpoints of a `fit`, for Ray Train."""

from __future__ import annotations

import json
import pathlib
import tempfile
import threading
from typing import Any

import keras
import ray.train

from hop_tf.arguments import check_boolean, check_integer
from hop_tf.errors import HopError
from hop_tf.keras_hook.backups import begin_at_epoch, restore
from hop_tf.tools.ray.worker import current_attempt

_MODEL, _WEIGHTS, _STATE = "model.keras", "model.weights.h5", "training_state.json"

# True if a `fit` of this process has begun. Only the first `fit` goes on from a checkpoint.
_has_begun = False


class ReportCheckpointCallback(keras.callbacks.Callback):
    """Reports metrics and checkpoints to Ray Train at the end of each epoch, and goes on from the last checkpoint.

        model.fit(x, y, epochs=10, callbacks=[hop_tf.tools.ray.ReportCheckpointCallback()])

    Pass it on all workers: Ray makes rank 0 wait for a worker without it. Only rank 0 reports its metrics and its
    model. Other ranks wait neither for rank 0 nor for each other, and may make different numbers of epochs. So do not
    call `ray.train.report` yourself.

    A checkpoint holds `model.keras`, which `keras.models.load_model` reads. After Ray Train has started all workers
    again, the first `fit` of each goes on from the last checkpoint: its model, optimizer state and epoch. A worker that
    joins the others (see `ClusterConfig.restart`) takes their state, and counts epochs as they do.

    Ray keeps metrics in its `Result` only with a checkpoint. When `fit` ends, the metrics of the last epoch are
    reported once more, without a checkpoint, so that Ray has all of them.

    Args:
      checkpoint_epochs: The number of epochs from one checkpoint to the next, or None for no checkpoints. Default 1.
      save_weights_only: True if checkpoints hold only `model.weights.h5`, for `model.load_weights`: weights and the
        optimizer's state. For models that Keras cannot save as a whole. Default False.

    Raises:
      ValueError: If an argument is out of range.
      RuntimeError: In `fit`, if this process is not a worker of Ray Train.
      HopError: In `fit`, if the last checkpoint was not written by this callback.

    Blocks: at the end of an epoch, on rank 0, until the checkpoint is in Ray's storage and all workers have begun their
    `fit`. While Ray restarts a single worker, rank 0 waits until that worker joins.
    """

    def __init__(self, checkpoint_epochs: int | None = 1, save_weights_only: bool = False):
        super().__init__()
        if checkpoint_epochs is not None:
            check_integer("checkpoint_epochs", checkpoint_epochs, at_least=1)
        check_boolean("save_weights_only", save_weights_only)
        self._checkpoint_epochs = checkpoint_epochs
        self._file = _WEIGHTS if save_weights_only else _MODEL
        self._initial_epoch: int | None = None  # The first epoch of this `fit`, or None until it is known.
        self._metrics: dict[str, float] = {}

    def on_train_begin(self, logs=None):
        global _has_begun
        self._initial_epoch, self._metrics = None, {}
        if not _has_begun:
            _has_begun = True
            self._go_on()
        if _rank() > 0:
            _follow()

    def on_epoch_begin(self, epoch, logs=None):
        begin_at_epoch(self.model, None)  # This `fit` has read the epoch. A later `fit` must begin anew.
        if self._initial_epoch is None:
            self._initial_epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        if _rank() > 0:
            _follow()  # Raises the error that has ended the follower, if there is one.
            return
        self._metrics = {name: float(value) for name, value in (logs or {}).items()} | {"epoch": epoch}
        if self._checkpoint_epochs is None or (epoch + 1) % self._checkpoint_epochs:
            ray.train.report(self._metrics)
            return
        with tempfile.TemporaryDirectory() as directory:
            self._save(pathlib.Path(directory), epoch + 1)
            ray.train.report(self._metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))

    def on_train_end(self, logs=None):
        begin_at_epoch(self.model, None)  # Needed if no epoch was left.
        if _rank() == 0 and self._metrics:
            # When this report begins on the other ranks, their part of the previous report has reached Ray.
            ray.train.report(self._metrics)

    def _go_on(self) -> None:
        """Goes on from the last checkpoint, or counts epochs like the ranks that already train."""
        checkpoint, attempt = ray.train.get_checkpoint(), current_attempt()
        if checkpoint is None:
            return
        with checkpoint.as_directory() as directory:
            folder = pathlib.Path(directory)
            state = _read_state(folder)
            if attempt is None or not attempt.is_rejoining:
                restore(self.model, folder / (_WEIGHTS if (folder / _WEIGHTS).exists() else _MODEL))
        began_with_it = attempt is None or state["attempt"] != attempt.name
        self._initial_epoch = state["epoch"] if began_with_it else state["initial_epoch"]
        begin_at_epoch(self.model, self._initial_epoch)

    def _save(self, folder: pathlib.Path, next_epoch: int) -> None:
        path = folder / self._file
        if self._file == _MODEL:
            self.model.save(path)
        else:
            self.model.save_weights(path)
        attempt = current_attempt()
        state = {
            "epoch": next_epoch,
            "initial_epoch": self._initial_epoch,
            "attempt": attempt.name if attempt else None,
        }
        (folder / _STATE).write_text(json.dumps(state))


def _read_state(folder: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads((folder / _STATE).read_text())
    except FileNotFoundError as error:
        raise HopError(
            f"the last checkpoint of this run must be one of ReportCheckpointCallback, with {_STATE}. Received: one "
            f"with {sorted(path.name for path in folder.iterdir())}. Do not report other checkpoints beside the "
            "callback, and begin with another `RunConfig(name=...)`. To begin with other weights, load them before "
            "`fit`."
        ) from error


def _rank() -> int:
    return ray.train.get_context().get_world_rank()


class _Follower(threading.Thread):
    """Makes an empty report whenever rank 0 reports, because Ray needs a report from each worker."""

    def __init__(self):
        super().__init__(name="hop_tf ray reports", daemon=True)  # The thread ends with the process, which Ray ends.
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            while True:
                ray.train.report({})
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raises the error that has ended the thread, if there is one."""
        if self._error is not None:
            raise self._error


_follower: _Follower | None = None


def _follow() -> None:
    """Lets this process follow rank 0's reports until it ends."""
    global _follower
    if _follower is None:
        _follower = _Follower()
        _follower.start()
    _follower.check()
