"""Hop: decentralized training over a graph of workers (Luo, Lin, Zhuo, Qian, ASPLOS 2019)."""

from hop_tf.strategies.hop.strategy import HopStrategy

__all__ = ["HopStrategy"]
