"""hop_tf within Ray Train: `ClusterConfig` for the trainer, `ReportCheckpointCallback` for `fit`.

Needs the extra `ray`.
"""

import importlib as _importlib

try:
    import ray.train as _ray_train  # noqa: F401
except ImportError as error:
    raise ImportError("hop_tf.integrations.ray needs Ray Train: pip install 'hop_tf[ray]'.") from error

# Imported at first use: the process that watches the workers needs neither TensorFlow nor Keras.
_PUBLIC = {
    "ClusterConfig": "hop_tf.tools.ray.backend",
    "ReportCheckpointCallback": "hop_tf.tools.ray.reports",
}

__all__ = ["ClusterConfig", "ReportCheckpointCallback"]


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(_PUBLIC[name]), name)
