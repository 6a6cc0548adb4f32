"""Pipe-SGD: synchronous training with pipelined all-reduce (Li et al., NeurIPS 2018)."""

from hop_tf.strategies.pipe_sgd.strategy import PipeSGDStrategy

__all__ = ["PipeSGDStrategy"]
