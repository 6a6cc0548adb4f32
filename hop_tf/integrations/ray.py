"""The public name of `hop_tf.tools.ray`."""

from typing import TYPE_CHECKING

from hop_tf.tools import ray as _tool

if TYPE_CHECKING:
    from hop_tf.tools.ray import *  # noqa: F403


def __getattr__(name):
    return getattr(_tool, name)
