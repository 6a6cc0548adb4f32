"""The public name of `hop_tf.tools.timing`."""

import sys

from hop_tf.tools import timing

sys.modules[__name__] = timing
