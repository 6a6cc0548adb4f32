"""The public name of `hop_tf.tools.simulate`."""

from typing import TYPE_CHECKING

from hop_tf.tools import simulate as _tool

if TYPE_CHECKING:
    from hop_tf.tools.simulate import *  # noqa: F403


def __getattr__(name):
    return getattr(_tool, name)
