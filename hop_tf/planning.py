"""The public name of `hop_tf.tools.planning`."""

from typing import TYPE_CHECKING

from hop_tf.tools import planning as _tool

if TYPE_CHECKING:
    from hop_tf.tools.planning import *  # noqa: F403


def __getattr__(name):
    return getattr(_tool, name)
