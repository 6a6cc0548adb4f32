"""The public name of `hop_tf.tools.testing`."""

import sys

from hop_tf.tools import testing

sys.modules[__name__] = testing
