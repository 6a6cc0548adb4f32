"""`Plugin`: a tool that takes part in training, such as emulated compute. Tools know the training code, not vice versa.

An environment variable asks for a tool. The launcher or the user sets it. Only then is the tool's module imported.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

import tensorflow as tf

from hop_tf.options import PLAN_VARIABLE, STEP_SECONDS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

# By the variable that asks for it: a module with `make_plugin(rank, world_size) -> Plugin`.
_MODULES = {
    PLAN_VARIABLE: "hop_tf.tools.commands.plan_plugin",
    STEP_SECONDS_VARIABLE: "hop_tf.tools.emulation.compute",
}


class Plugin:
    """Does nothing. A tool overrides the methods that it needs.

    Attributes:
      delays_gradients: True if `delay` does something.
    """

    delays_gradients = False

    def delay(self, started_at: tf.Tensor, gradients: list, times: tf.Tensor | float = 1.0) -> list:
        """Emits the ops that hold gradients back.

        Args:
          started_at: float64 scalar: `tf.timestamp()` at the start of the step.
          gradients: Tensors, `tf.IndexedSlices` or None.
          times: float64 scalar: the step's number of rows, divided by the number of rows of an equal share.

        Returns:
          The same gradients, later.
        """
        del started_at, times
        return gradients

    def after_fit(self, strategy: tf.distribute.Strategy) -> None:
        """Called when a `fit` under the strategy has ended well, on this rank."""

    def close(self) -> None:
        """Called when the strategy is shut down. Idempotent."""


def requested_plugins(rank: int, world_size: int) -> Sequence[Plugin]:
    """Makes the tools that this process's environment asks for.

    Raises:
      ValueError: If an environment variable has an invalid value.
    """
    modules = [module for variable, module in _MODULES.items() if os.environ.get(variable)]
    return [importlib.import_module(module).make_plugin(rank, world_size) for module in modules]
