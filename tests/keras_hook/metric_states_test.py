"""The states of metrics as sums: each of Keras's metrics, with parts of the data on several ranks."""

import keras
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.keras_hook.metric_states import MetricStates, states_are_sums

_NUM_ROWS = 60
_m = keras.metrics
# How each is made, by the kind of data that it takes.
_METRICS = {
    "binary": [
        _m.AUC,
        lambda: _m.AUC(curve="PR", num_thresholds=20),
        _m.BinaryAccuracy,
        _m.BinaryCrossentropy,
        lambda: _m.BinaryIoU([0, 1]),
        lambda: _m.F1Score(threshold=0.5, average="micro"),
        _m.F1Score,
        _m.FalseNegatives,
        _m.FalsePositives,
        _m.Hinge,
        _m.Precision,
        lambda: _m.PrecisionAtRecall(0.5),
        _m.Recall,
        lambda: _m.RecallAtPrecision(0.5),
        lambda: _m.SensitivityAtSpecificity(0.5),
        lambda: _m.SpecificityAtSensitivity(0.5),
        _m.SquaredHinge,
        _m.TrueNegatives,
        _m.TruePositives,
    ],
    "classes": [
        lambda: _m.AUC(multi_label=True, num_labels=3),
        _m.CategoricalAccuracy,
        _m.CategoricalCrossentropy,
        _m.CategoricalHinge,
        lambda: _m.FBetaScore(average="macro", beta=2.0),
        _m.FBetaScore,
        _m.KLDivergence,
        lambda: _m.OneHotIoU(3, [0, 2]),
        lambda: _m.OneHotMeanIoU(3),
        _m.Poisson,
        lambda: _m.TopKCategoricalAccuracy(2),
    ],
    "sparse": [
        _m.SparseCategoricalAccuracy,
        _m.SparseCategoricalCrossentropy,
        lambda: _m.SparseTopKCategoricalAccuracy(2),
    ],
    "numbers": [
        _m.ConcordanceCorrelation,
        _m.CosineSimilarity,
        _m.LogCoshError,
        _m.MeanAbsoluteError,
        _m.MeanAbsolutePercentageError,
        _m.MeanSquaredError,
        _m.MeanSquaredLogarithmicError,
        _m.PearsonCorrelation,
        _m.R2Score,
        lambda: _m.R2Score(class_aggregation=None, num_regressors=1),
        _m.RootMeanSquaredError,
        lambda: _m.MeanMetricWrapper(lambda y, p: keras.ops.abs(y - p) ** 3),
        lambda: _m.MeanSquaredError(dtype="bfloat16"),
    ],
    "ids": [_m.Accuracy, lambda: _m.IoU(3, [0, 2]), lambda: _m.MeanIoU(3)],
    "values": [_m.Mean, _m.Sum],
}
_CASES = [(kind, make) for kind, all_of_kind in _METRICS.items() for make in all_of_kind]


def _data(kind):
    """Targets, predictions and weights."""
    random = np.random.default_rng(0)
    ids = random.integers(0, 3, _NUM_ROWS)
    classes, weights = random.dirichlet([1.0] * 3, _NUM_ROWS), random.uniform(0.5, 2.0, _NUM_ROWS)
    numbers = random.uniform(0.5, 3.0, (2, _NUM_ROWS, 3))
    return {
        "binary": ((ids[:, None] > 1), 0.6 * (ids[:, None] > 1) + 0.4 * random.random((_NUM_ROWS, 1)), weights),
        "classes": (np.eye(3)[ids], classes, weights),
        "sparse": (ids[:, None], classes, weights),
        "numbers": (*numbers, weights),
        "ids": (ids[:, None], random.integers(0, 3, (_NUM_ROWS, 1)), weights),
        "values": (numbers[0, :, 0], weights),
    }[kind]


class _Model(keras.Model):
    """Has the metrics that it is given."""

    def __init__(self, *metrics):
        super().__init__()
        for index, metric in enumerate(metrics):
            setattr(self, f"metric{index}", metric)


def _updated(metric, data, rows):
    metric.update_state(*(each[rows].astype(np.float32) for each in data))
    return metric


def _numbers(metric):
    return np.asarray(keras.ops.cast(metric.result(), "float64"))


class Largest(keras.metrics.Metric):
    """Its state is no sum."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.value = self.add_weight(initializer="zeros", name="value")

    def update_state(self, values):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(values)))

    def result(self):
        return self.value


class Counted(Largest):
    """Its state is a sum, and so are those of its parts."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.mean = keras.metrics.Mean()

    def update_state(self, values):
        self.value.assign_add(keras.ops.cast(keras.ops.size(values), "float32"))
        self.mean.update_state(values)

    def result(self):
        return {"number": self.value, "mean": self.mean.result(), "none": None}


class MetricStatesTest(parameterized.TestCase):
    @parameterized.parameters(*range(len(_CASES)))
    @pytest.mark.stress(but=17)
    def test_a_metric_of_keras(self, case):
        kind, make = _CASES[case]
        data = _data(kind)
        ranks = [slice(0, 14), slice(14, 20), slice(20, None)]
        parts = [_Model(_updated(make(), data, rows)) for rows in ranks]
        states = [MetricStates(model) for model in parts]
        expected = make()
        for rows in ranks:
            _updated(expected, data, rows)
        sums = [sum(values) for values in zip(*(each.values for each in states), strict=True)]
        for model, each in zip(parts, states, strict=True):
            (metric,) = model.metrics
            self.assertEqual(each.names, [metric.name])
            tolerance = 1e-2 if "bfloat16" in str(metric.dtype) else 1e-5
            result = each.results_of(sums)[metric.name]
            np.testing.assert_allclose(result, _numbers(expected), rtol=tolerance)
            # The rank's own are what they were.
            np.testing.assert_array_equal(_numbers(metric), each.results[metric.name])

    def test_all_of_keras_are_tried(self):
        kinds = [kind for kind in vars(_m).values() if isinstance(kind, type) and issubclass(kind, _m.Metric)]
        self.assertEqual(set(kinds) - {_m.Metric}, {type(make()) for _, make in _CASES})

    def test_what_is_known_to_be_no_sum_is_left_out(self):
        model = _Model(keras.metrics.Mean(name="mean"), Largest(name="largest"))
        for metric in model.metrics:
            metric.update_state(np.array([2.0, 4.0]))
        states = MetricStates(model)
        self.assertEqual(states.results, {"mean": 3.0, "largest": 4.0})
        self.assertEqual((states.names, len(states.values)), (["mean"], 2))
        self.assertEqual(states.results_of([10.0, 4.0]), {"mean": 2.5})
        self.assertEqual(float(model.metrics[1].result()), 4.0)

    def test_a_metric_that_is_marked(self):
        metric = Counted()
        self.assertFalse(states_are_sums(metric))
        hop_tf.state(metric, "sum")
        metric.update_state(np.array([2.0, 4.0]))
        states = MetricStates(_Model(metric))
        self.assertEqual(states.results, {"number": 2.0, "mean": 3.0})
        self.assertEqual(states.results_of([3 * value for value in states.values]), {"number": 6.0, "mean": 3.0})

    def test_a_class_that_only_makes_more_states(self):
        class More(keras.metrics.Mean):
            def __init__(self):
                super().__init__()
                self.more = self.add_weight(initializer="ones")

        self.assertTrue(states_are_sums(More()))


if __name__ == "__main__":
    absltest.main()
