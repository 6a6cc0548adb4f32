"""The part of `hop_tf plan` in a training process: the ranks measure when the first `fit` has ended."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hop_tf.arguments import check_choice
from hop_tf.options import PLAN_KINDS, PLAN_VARIABLE
from hop_tf.runtime.plugins import Plugin
from hop_tf.tools import timing
from hop_tf.tools.commands.plan_report import describe

if TYPE_CHECKING:
    from hop_tf.strategy import ExchangeStrategy


class PlanPlugin(Plugin):
    """Measures after the first `fit`, and prints the plan on rank 0.

    Args:
      kind: One of `PLAN_KINDS`.
    """

    def __init__(self, kind: str):
        self._kind = kind
        self._is_shown = False

    def after_fit(self, strategy: ExchangeStrategy) -> None:
        """Measures in the first call, which is a collective operation. See `hop_tf.tools.timing.measure`."""
        if self._is_shown:
            return
        self._is_shown = True
        measurement = timing.measure(strategy)
        if strategy.is_chief:
            print(describe(measurement, self._kind), flush=True)


def make_plugin(rank: int, world_size: int) -> Plugin:
    """Makes the plug-in that HOP_TF_PLAN asks for. If it is "0", the plug-in does nothing.

    Raises:
      ValueError: If HOP_TF_PLAN is neither "0" nor one of `PLAN_KINDS`.
    """
    del rank, world_size
    kind = os.environ[PLAN_VARIABLE]
    if kind == "0":
        return Plugin()
    check_choice(PLAN_VARIABLE, kind, PLAN_KINDS)
    return PlanPlugin(kind)
