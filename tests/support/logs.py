"""What tests do about logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from absl import logging


@contextlib.contextmanager
def logging_disabled() -> Iterator[None]:
    """Where failures are what is tested, and would be logged by every rank: nothing is."""
    former = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        logging.set_verbosity(former)
