"""The public name of `hop_tf.tools.testing`."""

from typing import TYPE_CHECKING

from hop_tf.tools import testing as _tool

if TYPE_CHECKING:
    from hop_tf.tools.testing import *  # noqa: F403


def __getattr__(name):
    return getattr(_tool, name)
