"""Step times by the papers' models, and the settings that the models recommend.

    costs                the costs of computation and communication
    pipe_sgd             Pipe-SGD: predictions and recommended settings
    dts                  DTS: predictions
    dts_recommendation   the recommended settings of DTS
    measurement          predictions and recommendations for a live cluster
    schedules            the engine: steps of ranks on links that are alike

All times are in seconds and all sizes in bytes. Symbols of the papers are in brackets.
"""

from hop_tf.tools.timing.costs import (
    NetworkCosts,
    Step,
    communication_seconds,
    scaling_efficiency,
    sent_bytes,
    way_of,
)
from hop_tf.tools.timing.dts import DTSPlan, predict_dts
from hop_tf.tools.timing.dts_recommendation import recommend_dts
from hop_tf.tools.timing.measurement import MEASURED_CODECS, Measurement, measure
from hop_tf.tools.timing.pipe_sgd import (
    Plan,
    predict,
    recommend,
)
from hop_tf.tools.timing.schedules import (
    free_running_seconds,
    lock_step_seconds,
    non_computing_seconds,
    server_seconds,
)

__all__ = [
    "MEASURED_CODECS",
    "DTSPlan",
    "Measurement",
    "NetworkCosts",
    "Plan",
    "Step",
    "communication_seconds",
    "free_running_seconds",
    "lock_step_seconds",
    "measure",
    "non_computing_seconds",
    "predict",
    "predict_dts",
    "recommend",
    "recommend_dts",
    "scaling_efficiency",
    "sent_bytes",
    "server_seconds",
    "way_of",
]
