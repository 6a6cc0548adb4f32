"""The public name of `hop_tf.tools.ray`."""

import sys

from hop_tf.tools import ray

sys.modules[__name__] = ray
