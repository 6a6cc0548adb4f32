"""The settings of `SHATParameterServerStrategy`, and Equation 4."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

from hop_tf import codecs
from hop_tf.arguments import check_choice, check_integer, check_share
from hop_tf.keras_hook.optimizers import use_ema
from hop_tf.runtime.choosing import AUTO
from hop_tf.runtime.ways import Way, list_ways
from hop_tf.strategies.shat.server.consistency import Consistency
from hop_tf.strategies.shat.server.sharding import SHARDINGS
from hop_tf.tensors.packing import TensorSpec

_PUSHES = ("steps", "gradients")
_ALGORITHM = "parameter server"  # In the texts of choices.
_RULES = ("shat", "shat_root")
# The two ends of Equation 3: Hogwild, and training alone.
_CONSTANTS = {"asp": 1.0, "ensemble": 0.0}


def mixing_weight(c: int, n: int, rule: str = "shat", log_base: float = math.e, min_mixing: float = 0.0) -> float:
    """The weight alpha of the server's model when a worker mixes it with its own:

        alpha = 1 - s / log n        "shat" (Equation 4)
        alpha = 1 - s / sqrt n       "shat_root" (Section 4.1.2)          s = n / c

    but at least `min_mixing`. A lone worker takes the server's model: alpha is 1. With several workers, alpha is
    `min_mixing` if no other worker has pushed (c = 0, s is infinite). The paper does not give the base of its
    logarithm. With base 2, both rules would be the same for 4 and for 16 workers, which the paper's Table 2 excludes.
    With base 10, alpha would be negative for up to 8 workers that are equally fast.

    Args:
      c: The number of others' pushes that the server has applied since this worker's last one, at least 0.
      n: Number of workers, at least 1.
      rule: "shat" or "shat_root".
      log_base: Base of the logarithm, above 1. Default e.
      min_mixing: In [0, 1]. Default 0.

    Returns:
      alpha, in [min_mixing, 1].

    Raises:
      ValueError: If an argument is out of range.

    References:
      Ko and Kim. SHAT: A Novel Asynchronous Training Algorithm That Provides Fast Model Convergence in Distributed Deep
      Learning. Applied Sciences 12(1), 2022. Equation 4, Section 4.1.2.
    """
    check_integer("c", c, at_least=0)
    check_integer("n", n, at_least=1)
    check_choice("rule", rule, _RULES)
    _check_log_base(log_base)
    check_share("min_mixing", min_mixing)
    if n == 1:
        return 1.0
    if c == 0:
        return float(min_mixing)
    scale = math.sqrt(n) if rule == "shat_root" else math.log(n) / math.log(log_base)
    return float(max(min_mixing, 1.0 - (n / c) / scale))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShatSettings:
    """The checked arguments of `SHATParameterServerStrategy`, which describes them.

    Raises:
      TypeError: If `codec` is of another type.
      ValueError: If a value is out of range.
    """

    mixing: str | float
    pushes: str | None
    sharding: str
    consistency: str
    max_staleness: int
    min_mixing: float | None
    log_base: float
    codec: codecs.Codec | str
    interval: int = 1
    batch_shares: str = "None"  # For the servers, which check that workers agree.

    def __post_init__(self):
        if isinstance(self.mixing, str):
            check_choice("mixing", self.mixing, (*_RULES, *_CONSTANTS))
        else:
            check_share("mixing", self.mixing)
            object.__setattr__(self, "mixing", float(self.mixing))
        if self.pushes is not None:
            check_choice("pushes", self.pushes, _PUSHES)
        check_choice("sharding", self.sharding, SHARDINGS)
        Consistency.make(self.consistency, self.max_staleness)
        if self.min_mixing is not None:
            check_share("min_mixing", self.min_mixing)
        _check_log_base(self.log_base)
        check_integer("interval", self.interval, at_least=1)
        if self.interval > 1 and (self.pushes == "gradients" or self.consistency == "bsp"):
            raise ValueError(
                "`interval` must be 1 with pushes='gradients', where servers make a step for each gradient, and with "
                f"consistency='bsp'. For windows of synchronous ranks see DTSStrategy(delay=0, interval={self.interval}"
                f"). Received: interval={self.interval}, pushes={self.pushes!r}, consistency={self.consistency!r}."
            )
        if self.codec != AUTO:
            object.__setattr__(self, "codec", codecs.get(self.codec))
            if self.codec.selects_values:
                raise ValueError(
                    f"`codec` must be one that sends something for every value. Received: codec={self.codec!r}."
                )

    def ways(self, specs: Sequence[TensorSpec] | None = None) -> list[Way]:
        """The ways to push, the one without a codec first; see `list_ways`."""
        return list_ways(_ALGORITHM, self.codec, world_size=1, specs=specs)

    @property
    def chooses(self) -> bool:
        """True if workers choose between several ways."""
        return len(self.ways()) > 1

    @property
    def lossiest(self) -> codecs.Codec:
        """The codec of pushes that are encoded."""
        return self.ways()[-1].codec

    def without_times(self) -> ShatSettings:
        """The settings for workers that do not choose by measured times."""
        return dataclasses.replace(self, codec=self.ways()[0].codec)

    @property
    def keeps_own_models(self) -> bool:
        """True if each worker keeps its own model when `fit` ends."""
        return self.mixing == "ensemble" and self.consistency != "bsp"

    def pushes_steps_of(self, optimizer: Any) -> bool:
        """True if workers with this optimizer push its steps. Otherwise they push gradients."""
        if self.pushes is not None:
            return self.pushes == "steps"
        # With "bsp", the servers' mean of gradients is synchronous training. With `use_ema`, servers keep the averages.
        return self.consistency != "bsp" and not use_ema(optimizer)

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises ValueError if the settings do not allow the optimizer."""
        if self.interval > 1 and use_ema(optimizer):
            raise ValueError(
                "`interval` must be 1 with `use_ema`, with which workers push gradients. "
                f"Received: interval={self.interval} with {optimizer!r}."
            )
        if self.pushes == "steps" and use_ema(optimizer):
            raise ValueError(
                "`pushes` must be 'gradients' with `use_ema`: the servers keep the averages of weights, and make no "
                f"steps of the optimizer if workers push their own steps. Received: pushes='steps' with {optimizer!r}."
            )

    def share(self, n: int) -> float:
        """The factor for a worker's step at the servers, with n workers. With "bsp" it is 1: servers take the mean."""
        return 1.0 if self.consistency == "bsp" else 1.0 / n

    def weight(self, c: int, n: int) -> float:
        """The weight alpha for one of n workers. For c see `mixing_weight`. A rule applies to each step of a window."""
        if self.consistency == "bsp":  # All have the same model: PS-Sync.
            return 1.0
        if not isinstance(self.mixing, str):
            return self.mixing
        if self.mixing in _CONSTANTS:
            return _CONSTANTS[self.mixing]
        floor = 1 / n if self.min_mixing is None else self.min_mixing
        weight = mixing_weight(c, n, self.mixing, self.log_base, floor)
        return weight if self.interval == 1 else 1 - (1 - weight) ** self.interval


def _check_log_base(value: object) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 1 < value < math.inf:
        raise ValueError(f"`log_base` must be a finite number above 1. Received: log_base={value!r}.")
