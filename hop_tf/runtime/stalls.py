"""`StallReport`: the report of a rank that waits for others for a long time."""

from __future__ import annotations

import datetime
import faulthandler
import os
import pathlib

from absl import logging

from hop_tf.options import STACKS_VARIABLE, CommunicationOptions, rank_folder


class StallReport:
    """Logs the reason for a long wait, and writes the stacks of all threads of this process to a file.

    The file is the one that the launcher names. Without the launcher, it is `stacks.txt` in the rank's folder of
    `CommunicationOptions.log_dir`. Without a `log_dir`, no stacks are written.

    Args:
      options: `log_dir`.
      rank: This rank.
    """

    def __init__(self, options: CommunicationOptions, rank: int):
        self._path: pathlib.Path | None = None
        if path := os.environ.get(STACKS_VARIABLE):
            self._path = pathlib.Path(path)
        elif folder := rank_folder(options, rank):
            self._path = folder / "stacks.txt"

    def __call__(self, text: str) -> None:
        """Reports a stall that `text` describes. Training continues even if the file cannot be written."""
        if self._path is None:
            logging.warning("%s", text)
            return
        try:
            self._write(text)
        except OSError as error:
            logging.warning("%s The stacks of its threads cannot be written to %s: %s", text, self._path, error)
        else:
            logging.warning("%s The stacks of its threads are in %s", text, self._path)

    def _write(self, text: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a") as file:
            print(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} {text}", file=file, flush=True)
            faulthandler.dump_traceback(file)
            print(file=file)
