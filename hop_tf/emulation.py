"""The public name of `hop_tf.tools.emulation`."""

from typing import TYPE_CHECKING

from hop_tf.tools import emulation as _tool

if TYPE_CHECKING:
    from hop_tf.tools.emulation import *  # noqa: F403


def __getattr__(name):
    return getattr(_tool, name)
