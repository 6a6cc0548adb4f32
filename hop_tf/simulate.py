"""The public name of `hop_tf.tools.simulate`."""

import sys

from hop_tf.tools import simulate

sys.modules[__name__] = simulate
