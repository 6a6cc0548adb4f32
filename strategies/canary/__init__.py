"""Canary: sketched gradients in pieces, and no rank waits for a straggler (Zhou et al., TPDS 2021)."""

from hop_tf.strategies.canary.strategy import CanaryStrategy

__all__ = ["CanaryStrategy"]
