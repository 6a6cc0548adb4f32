"""The choice of a strategy: the costs of settings of all five on given links, with steps of given durations.

candidates   the settings that are compared
outcomes     the costs of a step under each strategy: the model or simulation of each
accuracy     the measured changes of accuracy with some settings
comparison   the costs of all settings, and the best ones
"""

from hop_tf.tools.planning.accuracy import Change
from hop_tf.tools.planning.candidates import Candidate, candidates
from hop_tf.tools.planning.comparison import Prediction, best, compare, predict

__all__ = ["Candidate", "Change", "Prediction", "best", "candidates", "compare", "predict"]
