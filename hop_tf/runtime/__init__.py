"""One rank at run time: its groups of variables, their exchanges, and the course of a training.

A strategy of your own builds on `Algorithm`, `Exchange` (or `AveragingExchange`) and `DeltaTracker`: see
`hop_tf.strategy.ExchangeStrategy`.
"""

from hop_tf.runtime.algorithm import Algorithm, Scheme
from hop_tf.runtime.averaging_exchange import AveragingExchange
from hop_tf.runtime.deltas import DeltaTracker
from hop_tf.runtime.exchange import Exchange, Request, Result
from hop_tf.runtime.group import ExchangeContext, Group

__all__ = [
    "Algorithm",
    "AveragingExchange",
    "DeltaTracker",
    "Exchange",
    "ExchangeContext",
    "Group",
    "Request",
    "Result",
    "Scheme",
]
