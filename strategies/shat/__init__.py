"""SHAT: an asynchronous parameter server that mixes by scale and staleness (Ko and Kim, Applied Sciences 2022)."""

from hop_tf.strategies.shat.settings import mixing_weight
from hop_tf.strategies.shat.strategy import SHATParameterServerStrategy

__all__ = ["SHATParameterServerStrategy", "mixing_weight"]
