"""The public name of `hop_tf.tools.emulation`."""

import sys

from hop_tf.tools import emulation

sys.modules[__name__] = emulation
