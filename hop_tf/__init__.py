"""Decentralized and communication-efficient training of Keras models on many machines.

One line changes in a Keras program: the `tf.distribute.Strategy` that its model is made under. See `README.md`.
"""

import importlib as _importlib
import os as _os

from hop_tf.version import __version__

# An installed hop_tf holds `strategies` and `ops`. In a source tree, these folders lie next to `hop_tf`.
if not _os.path.exists(_os.path.join(__path__[0], "strategies", "__init__.py")):
    __path__.append(_os.path.dirname(_os.path.abspath(__path__[0])))

# Public names, each with the module that defines it. The modules are imported at first use, so that the launcher, which
# needs neither TensorFlow nor Keras, starts at once.
_PUBLIC = {
    "CanarySession": "hop_tf.strategies.canary.session",
    "CanaryStrategy": "hop_tf.strategies.canary",
    "CommunicationOptions": "hop_tf.options",
    "DTSStrategy": "hop_tf.strategies.dts",
    "HopStrategy": "hop_tf.strategies.hop",
    "PipeSGDStrategy": "hop_tf.strategies.pipe_sgd",
    "SHATParameterServerStrategy": "hop_tf.strategies.shat",
    "SkipIterations": "hop_tf.strategies.hop.settings",
    "SnapshotOptions": "hop_tf.strategies.shat.server.snapshots",
    "Topology": "hop_tf.topology",
    "callbacks": "hop_tf.callbacks",
    "cluster_from_environment": "hop_tf.tools.launchers.environment",
    "codecs": "hop_tf.codecs",
    "emulation": "hop_tf.emulation",
    "errors": "hop_tf.errors",
    "ops": "hop_tf.ops",
    "planning": "hop_tf.planning",
    "runtime": "hop_tf.runtime",
    "simulate": "hop_tf.simulate",
    "state": "hop_tf.keras_hook.ownership",
    "strategies": "hop_tf.strategies",
    "strategy": "hop_tf.strategy",
    "testing": "hop_tf.testing",
    "timing": "hop_tf.timing",
}

__all__ = [
    "CanarySession",
    "CanaryStrategy",
    "CommunicationOptions",
    "DTSStrategy",
    "HopStrategy",
    "PipeSGDStrategy",
    "SHATParameterServerStrategy",
    "SkipIterations",
    "SnapshotOptions",
    "Topology",
    "__version__",
    "callbacks",
    "cluster_from_environment",
    "codecs",
    "emulation",
    "errors",
    "ops",
    "planning",
    "runtime",
    "simulate",
    "state",
    "strategies",
    "strategy",
    "testing",
    "timing",
]


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = _importlib.import_module(_PUBLIC[name])
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        message = "hop_tf needs TensorFlow: install it with one of the extras, hop_tf[cpu] or hop_tf[gpu]."
        raise ModuleNotFoundError(message, name=error.name) from error
    value = module if _PUBLIC[name] == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(_PUBLIC))
