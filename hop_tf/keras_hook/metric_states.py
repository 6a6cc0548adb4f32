"""Computes metrics of an epoch from their states: the states of Keras's metrics are sums, which add up over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers.compile_utils import CompileMetrics, MetricsList

from hop_tf.keras_hook.ownership import Owner, mark_of

_OWN_METHODS = ("update_state", "reset_state", "result")


def states_are_sums(metric: keras.metrics.Metric) -> bool:
    """True if the metric's result for the data of all ranks follows from the sums of the ranks' states.

    That holds for Keras's metrics. If a class overrides one of their methods, a metric of the class has to be marked by
    `hop_tf.state(metric, "sum")`.
    """
    methods = [getattr(type(metric), name) for name in _OWN_METHODS]
    return mark_of(metric) is Owner.SUM or all(each.__module__.partition(".")[0] == "keras" for each in methods)


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model, without Keras's containers around the metrics of `compile`."""
    return [metric for each in model.metrics for metric in _parts(each)]


def _parts(metric: keras.metrics.Metric) -> list[keras.metrics.Metric]:
    if isinstance(metric, CompileMetrics | MetricsList):
        return [part for each in metric.metrics for part in _parts(each)]
    return [metric]


class MetricStates:
    """A snapshot of the metrics of a model.

    Args:
      model: The model.

    Attributes:
      results: The metrics' results, by name, as Keras logs them.
      values: The states that are sums. Floating-point states are float64.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._others = [metric for metric in metrics_of(model) if not states_are_sums(metric)]
        summed = [metric for metric in metrics_of(model) if states_are_sums(metric)]
        self._variables = list({id(v): v for metric in summed for v in metric.variables}.values())
        self.results = _as_arrays(model.get_metrics_result())
        self.values = [_widened(variable) for variable in self._variables]

    @property
    def names(self) -> list[str]:
        """The names of the results that follow from `values` alone."""
        return list(self.results_of(self.values))

    def has_shapes_of(self, values: Sequence[np.ndarray]) -> bool:
        """True if these values have the shapes of the states."""
        return [each.shape for each in values] == [each.shape for each in self.values]

    def results_of(self, values: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The results, by name, if the states had these values. Metrics whose states are not sums are left out."""
        mapping = [(v, keras.ops.cast(value, v.dtype)) for v, value in zip(self._variables, values, strict=True)]
        with _without_results(self._others), keras.StatelessScope(state_mapping=mapping):
            results = self._model.get_metrics_result()
            return _as_arrays(results)


@contextlib.contextmanager
def _without_results(metrics: Sequence[keras.metrics.Metric]) -> Iterator[None]:
    """A context in which these metrics have the result None."""
    for metric in metrics:
        metric.result = lambda: None
    try:
        yield
    finally:
        for metric in metrics:
            del metric.result


def _as_arrays(results: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Results as NumPy arrays, without None. The mapping of a metric with several results is flattened."""
    arrays = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            arrays |= _as_arrays(value)
        elif value is not None:
            arrays[name] = _widened(value)
    return arrays


def _widened(value: Any) -> np.ndarray:
    """A value as an array; float64 for floating-point numbers, because sums fit into it and NumPy lacks bfloat16."""
    tensor = keras.ops.convert_to_tensor(value)
    is_float = keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))
    return np.asarray(keras.ops.cast(tensor, "float64") if is_float else tensor)
