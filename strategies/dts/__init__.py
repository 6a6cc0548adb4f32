"""DTS: delayed and temporally sparse updates, for links of hundreds of milliseconds."""

from hop_tf.strategies.dts.strategy import DTSStrategy

__all__ = ["DTSStrategy"]
