"""Tests HopStrategy's `fit` in three processes, a chief and two workers, on a directed ring, against NumPy."""

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner

_WORLD_SIZE = 3
_ROWS_PER_RANK = 4
_BATCH_SIZE = _WORLD_SIZE * _ROWS_PER_RANK
_NUM_STEPS = 8
_NUM_FEATURES = 5
_LEARNING_RATE = 0.05

# [j, i] is the weight of rank j's parameters at rank i: 1/2 for its own, 7/20 for those of the rank before it in the
# ring and 3/20 for those of the rank after it. Doubly stochastic; transposed, it is another matrix.
_MIXING_MATRIX = np.array([[0.5, 0.35, 0.15], [0.15, 0.5, 0.35], [0.35, 0.15, 0.5]])


def _data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_NUM_STEPS * _BATCH_SIZE, _NUM_FEATURES)).astype("float32")
    return x, (x @ rng.normal(size=(_NUM_FEATURES, 1)) + rng.normal(size=(len(x), 1))).astype("float32")


def _batch(rank, step):
    """Returns the rows that `rank` sees in `step`."""
    start = step * _BATCH_SIZE + rank * _ROWS_PER_RANK
    return tuple(array[start : start + _ROWS_PER_RANK].astype("float64") for array in _data())


def _least_squares_gradient(w, x, y):
    return 2 / len(x) * x.T @ (x @ w - y)


def _linear_gradient(w, x, y):
    del w, y
    return x.mean(axis=0)[:, np.newaxis]


def _figure_7(w0, gradient, mixing_matrix):
    """Computes x_k+1,i = sum over j of W[j, i] x_k,j - eta g_i(x_k,i), with synchronous ranks."""
    w = np.tile(np.asarray(w0, "float64"), (_WORLD_SIZE, 1, 1))
    for step in range(_NUM_STEPS):
        gradients = np.stack([gradient(w[rank], *_batch(rank, step)) for rank in range(_WORLD_SIZE)])
        w = np.einsum("ji,jab->iab", mixing_matrix, w) - _LEARNING_RATE * gradients
    return w


def _mean_output(y_true, y_pred):
    del y_true
    return keras.ops.mean(y_pred, axis=-1)


def _make_rank_0_the_chief():
    """Rewrites this process's TF_CONFIG: the first worker becomes the chief, and the others are renumbered."""
    config = json.loads(os.environ["TF_CONFIG"])
    (first, *others), rank = config["cluster"]["worker"], config["task"]["index"]
    task = {"type": "worker", "index": rank - 1} if rank else {"type": "chief", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"chief": [first], "worker": others}, "task": task})


def _run(max_iteration_gap):
    _make_rank_0_the_chief()
    strategy = hop_tf.HopStrategy(
        topology=_MIXING_MATRIX,
        max_iteration_gap=max_iteration_gap,
        communication_options=hop_tf.CommunicationOptions(timeout_seconds=60),
    )
    result = {loss: _fit(strategy, loss) for loss in ("mse", _mean_output)}
    strategy.shutdown()
    return {"least_squares": result["mse"], "linear": result[_mean_output]}


def _fit(strategy, loss):
    with strategy.scope():
        keras.utils.set_random_seed(strategy.rank)  # All ranks begin with rank 0's initial values.
        model = keras.Sequential([keras.layers.Input((_NUM_FEATURES,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(_LEARNING_RATE), loss)
    (initial,) = model.get_weights()
    model.fit(*_data(), batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
    return {"initial": initial, "final": model.get_weights()[0]}


@pytest.mark.slow
class HopFitTopologyTest(tf.test.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with MultiProcessRunner(_run, num_workers=_WORLD_SIZE, args=(2,), timeout_seconds=200) as runner:
            cls.values = runner.join().raise_for_errors().values

    def _initial(self, problem):
        return self.values[0][problem]["initial"]

    def _final(self, problem):
        return np.stack([values[problem]["final"] for values in self.values])

    def test_least_squares_equals_figure_7(self):
        initial, final = self._initial("least_squares"), self._final("least_squares")
        self.assertAllClose(final, _figure_7(initial, _least_squares_gradient, _MIXING_MATRIX), rtol=1e-5, atol=1e-5)

    def test_wrong_weights_would_be_noticed(self):
        initial, final = self._initial("least_squares"), self._final("least_squares")
        uniform = np.full_like(_MIXING_MATRIX, 1 / _WORLD_SIZE)
        for wrong in (_MIXING_MATRIX.T, uniform, np.eye(_WORLD_SIZE)):
            expected = _figure_7(initial, _least_squares_gradient, wrong)
            for rank in range(_WORLD_SIZE):
                self.assertGreater(np.abs(final[rank] - expected[rank]).max(), 1e-3)

    def test_ranks_begin_with_rank_0s_values(self):
        self.assertNotAllClose(self.values[1]["least_squares"]["initial"], self._initial("least_squares"), atol=0.01)

    def test_mean_equals_closed_form_for_linear_loss(self):
        initial, final = self._initial("linear"), self._final("linear")
        x = _data()[0].astype("float64").reshape(_NUM_STEPS, _BATCH_SIZE, _NUM_FEATURES)
        expected = initial[:, 0] - _LEARNING_RATE * x.mean(axis=1).sum(axis=0)
        self.assertAllClose(final.mean(axis=0)[:, 0], expected, rtol=1e-5, atol=1e-5)
        self.assertAllClose(final, _figure_7(initial, _linear_gradient, _MIXING_MATRIX), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    tf.test.main()
