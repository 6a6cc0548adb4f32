"""Which strategy to take: what settings of all five would cost on given links, with steps of given durations.

candidates   the settings that are compared, and the model or simulation of each
accuracy     what settings have cost in accuracy, where it was measured
comparison   what each would cost, and which are best
"""

from hop_tf.tools.planning.accuracy import Change
from hop_tf.tools.planning.candidates import Candidate, candidates
from hop_tf.tools.planning.comparison import Prediction, best, compare, predict

__all__ = ["Candidate", "Change", "Prediction", "best", "candidates", "compare", "predict"]
