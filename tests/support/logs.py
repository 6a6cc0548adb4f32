"""Help for tests with logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from absl import logging


@contextlib.contextmanager
def logging_disabled() -> Iterator[None]:
    """Disables logging, for tests of failures that every rank would log."""
    former = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        logging.set_verbosity(former)
