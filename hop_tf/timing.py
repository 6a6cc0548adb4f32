"""The public name of `hop_tf.tools.timing`."""

from typing import TYPE_CHECKING

from hop_tf.tools import timing as _tool

if TYPE_CHECKING:
    from hop_tf.tools.timing import *  # noqa: F403


def __getattr__(name):
    return getattr(_tool, name)
