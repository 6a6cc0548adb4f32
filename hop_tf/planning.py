"""The public name of `hop_tf.tools.planning`."""

import sys

from hop_tf.tools import planning

sys.modules[__name__] = planning
