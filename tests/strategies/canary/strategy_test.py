"""Canary under `fit`, with ranks in one process, against synchronous training and closed forms."""

import functools
import threading
import time
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.collectives import BCube, get_network
from hop_tf.errors import MismatchError
from hop_tf.strategies.canary.exchange import AsyncSettings
from hop_tf.strategies.canary.gei import Thresholds
from hop_tf.tools.processes.local_cluster import PortReservation
from support import fewer_steps, in_process

_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=60)
_BATCH_SIZE = 72  # In each test, all ranks get the same number of rows.
_NUM_STEPS = 8
_RATE = 0.05


def _cluster(world_size, **settings):
    settings = {"num_colayers": 10, **settings}  # By default small models have one. See `test_by_default`.
    return in_process(hop_tf.CanaryStrategy, world_size, **settings)


@functools.cache
def _data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_BATCH_SIZE * _NUM_STEPS, 6)).astype(np.float32)
    return x, (x @ rng.normal(size=(6, 2)) + rng.normal(size=(len(x), 2))).astype(np.float32)


def _model(optimizer, loss="mse", layers=None, **compile_args):
    layers = layers or [
        keras.layers.Dense(5, activation="tanh", kernel_initializer=keras.initializers.RandomNormal(seed=1)),
        keras.layers.Dense(2, kernel_initializer=keras.initializers.RandomNormal(seed=2)),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(optimizer, loss, **compile_args)
    return model


def _train(strategy, make_optimizer, **arguments):
    """Trains; returns the weights after each step, the final weights, and the report."""
    with strategy.scope():
        model = _model(make_optimizer(), **arguments)
    history = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: history.append(_flat(model)))
    model.fit(*_data(), batch_size=_BATCH_SIZE, shuffle=False, verbose=0, callbacks=[record])
    return history, _flat(model), strategy.report()


def _flat(model):
    return np.concatenate([weights.ravel() for weights in model.get_weights()])


@functools.cache
def _expected(make_optimizer):
    """Returns the weights after each step of training in one process."""
    model, history = _model(make_optimizer()), []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: history.append(_flat(model)))
    model.fit(*_data(), batch_size=_BATCH_SIZE, shuffle=False, verbose=0, callbacks=[record])
    return history


def _sgd():
    return keras.optimizers.SGD(_RATE)


def _momentum():
    return keras.optimizers.SGD(_RATE, momentum=0.9)


def _nesterov():
    return keras.optimizers.SGD(_RATE, momentum=0.9, nesterov=True)


def _adam():
    return keras.optimizers.Adam(0.01)


def _accumulating():
    return keras.optimizers.SGD(_RATE, gradient_accumulation_steps=2)


def _scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(_RATE, momentum=0.9))


def _decaying():
    return keras.optimizers.SGD(_RATE, momentum=0.9, weight_decay=0.1)


class SynchronousTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("mesh", 2, _adam),
        ("tree", 3, _nesterov),
        ("bcube:2,2", 4, _decaying),
        ("mesh", 2, _momentum),
        ("mesh", 3, _sgd),
        ("bcube:2,2", 4, _momentum),
        ("bcube:3,2", 9, _momentum),
        ("tree", 4, _sgd),
        ("bcube:2,3", 8, _sgd),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=1)
    def test_equals_synchronous_training_step_by_step(self, network, world_size, make_optimizer):
        cluster = _cluster(world_size, algorithm=network, consistency="bsp", codec=None, num_colayers=3)
        # Eager steps are slower, but nothing is traced on each of many ranks.
        results = cluster.run(lambda strategy: _train(strategy, make_optimizer, run_eagerly=world_size > 2))
        for history, last, report in results:
            self.assertAllClose(history, _expected(make_optimizer), rtol=1e-5, atol=1e-6)
            self.assertAllEqual(last, results[0][1])
            self.assertEqual(report["steps"], _NUM_STEPS)
            num_interfaces = get_network(network).num_levels
            lanes = {name for name in report if name.startswith("bytes_sent_on_lane_")}
            self.assertEqual(lanes, {f"bytes_sent_on_lane_{lane}" for lane in range(1 + num_interfaces)})

    @parameterized.parameters("sketch", codecs.TopK(ratio=0.8, error_feedback=True))
    @pytest.mark.stress
    def test_lossy(self, codec):
        """Weights are close to the expected ones, and equal on all ranks, to the bit."""
        results = _cluster(2, consistency="bsp", codec=codec).run(lambda strategy: _train(strategy, _momentum))
        self.assertAllEqual(results[0][0], results[1][0])
        self.assertAllClose(results[0][1], _expected(_momentum)[-1], atol=0.02)

    @pytest.mark.slow
    def test_a_fit_after_one_that_ended_early_on_a_rank(self):
        """`synchronize` makes velocities equal, too. Otherwise updates would differ for good."""

        def run(strategy):
            with strategy.scope():
                model = _model(_momentum())
            for is_first in (True, False):
                fewer = fewer_steps(strategy, 1) if is_first else {}
                model.fit(*_data(), batch_size=_BATCH_SIZE, shuffle=False, verbose=0, **fewer)
                if is_first:
                    strategy.synchronize(model)
            return _flat(model)

        weights = _cluster(2, consistency="bsp").run(run)
        self.assertAllEqual(weights[0], weights[1])


class SlowRank(keras.callbacks.Callback):
    """Makes the steps of one rank slow."""

    def __init__(self, strategy, rank, seconds):
        super().__init__()
        self._seconds = seconds if strategy.rank == rank else 0.0

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(self._seconds)


class Meeting:
    """Lets ranks drift apart and meet again in every ten steps.

    In the middle of the ten steps rank 1 waits until rank 0 is four steps ahead. At the next ten, rank 0 waits for
    rank 1.
    """

    def __init__(self):
        self._reached, self._changed = {0: 0, 1: 0}, threading.Condition()

    def of(self, rank):
        """Returns the callback of a rank."""
        return keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: self._begin(rank, batch))

    def _begin(self, rank, step):
        at_least = {(0, 0): step, (1, 5): step + 4}.get((rank, step % 10), 0)
        with self._changed:
            self._reached[rank] = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._reached[1 - rank] >= at_least, timeout=60)


def _train_one_hot(strategy, num_steps=24, callbacks=(), num_fits=1, momentum=0.0, num_unused=0, **compile_args):
    """Trains so that the weights show which gradients were applied.

    The gradient of rank r in step k is 1 for weight (k, r) and 0 for the others. There are `num_unused` more weights,
    whose gradients are 0.

    Returns:
      The weights, [num_steps, n], in units of one contribution; and the report.
    """
    n = strategy.world_size
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((num_steps * n + num_unused,)), layer])
        model.compile(keras.optimizers.SGD(1.0, momentum), lambda y, y_pred: y_pred, **compile_args)
    for _ in range(num_fits):
        x = np.eye(num_steps * n, num_steps * n + num_unused, dtype=np.float32)
        model.fit(x, np.zeros(len(x)), batch_size=n, shuffle=False, verbose=0, callbacks=list(callbacks))
    return -n * model.get_weights()[0][: num_steps * n].reshape(num_steps, n), strategy.report()


class AsynchronousTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(("tree", 3, _adam), ("mesh", 2, _accumulating), ("mesh", 2, _scaled))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_all_end_alike(self, network, world_size, make_optimizer):
        results = _cluster(world_size, algorithm=network).run(
            lambda strategy: _train(strategy, make_optimizer, run_eagerly=world_size > 2)
        )
        for _, last, report in results:
            self.assertAllEqual(last, results[0][1])
            self.assertTrue(np.isfinite(last).all())
            self.assertEqual(report["duplicates"], 0)

    @pytest.mark.slow
    def test_by_default(self):
        """Small layers share a colayer, so there are two."""

        def run(strategy):
            return _train(strategy, _momentum, layers=[keras.layers.Dense(units) for units in (300, 300, 300, 2)])

        results = _cluster(2, num_colayers=None, min_colayers=5).run(run)
        for _, last, report in results:
            self.assertAllEqual(last, results[0][1])
            self.assertEqual((report["overtime_drops"], report["proportion"]), (0, 2))

    @parameterized.parameters(
        {"codec": "sketch", "num_unused": 2000},  # Enough values for the graph to encode them.
        {"consistency": "async", "codec": "int8", "steps_per_execution": 4},
        {"consistency": "ssp", "run_eagerly": True},
        {"algorithm": "bcube:2,2", "sync_interval": 3},
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=1)
    def test_every_contribution_counts_once(self, steps_per_execution=1, run_eagerly=False, num_unused=0, **settings):
        """Each contribution is in the weights of all ranks, once. A slow rank skips the steps that it has missed."""

        def run(strategy):
            slow = SlowRank(strategy, 0, 0.05)
            how = {"steps_per_execution": steps_per_execution, "run_eagerly": run_eagerly}
            return _train_one_hot(strategy, callbacks=[slow], num_unused=num_unused, **how)

        world_size = 4 if "algorithm" in settings else 3
        results = _cluster(world_size, **{"codec": None, **settings}).run(run)
        weights = results[0][0]
        for rank, (own, report) in enumerate(results):
            self.assertAllEqual(own, weights)
            self.assertAllClose(weights, np.round(weights), atol=1e-2)
            self.assertAllInSet(np.round(weights), (0, 1))
            self.assertEqual(np.sum(np.round(weights[:, rank])), report["steps"] - report["overtime_drops"])

    @pytest.mark.slow
    def test_own_steps_stand_in_until_they_are_merged(self):
        """A rank computes with all of its own steps: with 1/n of merged ones, and with others in full."""

        def run(strategy):
            seen, n = [], strategy.world_size

            def record(batch, logs):
                (kernel,) = record.model.get_weights()
                seen.append((-n * kernel.reshape(-1, n), strategy.report()["steps"]))

            callback = keras.callbacks.LambdaCallback(on_train_batch_end=record)
            callback.set_model = lambda model: setattr(record, "model", model)
            _train_one_hot(strategy, callbacks=[callback, SlowRank(strategy, 0, 0.05)])
            return seen

        results = _cluster(3, consistency="async", codec=None).run(run)
        for rank, seen in enumerate(results):
            for weights, num_steps in seen:
                made = np.flatnonzero(weights[:, rank])
                self.assertAllInSet(np.round(weights[made, rank], 3), (1.0, 3.0))
                self.assertAllInSet(np.round(np.delete(weights, rank, axis=1), 3), (0.0, 1.0))
                self.assertLen(made, num_steps)
        self.assertTrue(any(np.any(np.round(weights, 3) == 3.0) for seen in results for weights, _ in seen))

    @pytest.mark.slow
    def test_weights_that_a_callback_loads_are_no_change(self):
        """Training begins with the loaded weights, to the bit, because they do not pass through the codec."""
        loaded = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)

        def run(strategy):
            with strategy.scope():
                layer = keras.layers.Dense(64, use_bias=False, kernel_initializer="ones")
                model = keras.Sequential([keras.Input((64,)), layer])
                model.compile(keras.optimizers.SGD(0.0), "mse")
            load = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: model.set_weights([loaded]))
            for callbacks in ([], [load]):
                model.fit(loaded, loaded, batch_size=16, verbose=0, callbacks=callbacks)
            return model.get_weights()[0]

        for weights in _cluster(2).run(run):
            self.assertAllEqual(weights, loaded)

    @pytest.mark.stress
    def test_overtime(self):
        """A rank that is behind drops its contributions, takes the weights of the fastest rank, and counts both."""

        def run(strategy):
            return _train_one_hot(strategy, num_steps=60, callbacks=[SlowRank(strategy, 1, 0.1)])

        results = _cluster(2, codec=None, max_staleness=0).run(run)
        for rank, (own, report) in enumerate(results):
            self.assertAllEqual(own, results[0][0])
            self.assertEqual(np.count_nonzero(own[:, rank]), report["steps"] - report["overtime_drops"])
        self.assertGreater(results[1][1]["overtime_drops"], 0)
        self.assertGreater(results[1][1]["pulls"], 0)

    @pytest.mark.slow
    def test_momentum_forgets_what_was_dropped(self):
        """A gradient counts 1 + m + m^2 + ... times, a term for each step of its rank from then on, or not at all."""
        momentum, meeting = 0.5, Meeting()

        def run(strategy):
            return _train_one_hot(strategy, 60, callbacks=[meeting.of(strategy.rank)], momentum=momentum)

        results = _cluster(2, codec=None, max_staleness=0).run(run)
        for rank, (own, report) in enumerate(results):
            num_sent = int(report["steps"] - report["overtime_drops"])
            applied = own[:, rank][own[:, rank] != 0]
            self.assertAllClose(applied[::-1], np.cumsum(momentum ** np.arange(num_sent)), rtol=1e-4)
        self.assertGreater(results[1][1]["overtime_drops"], 0)

    @pytest.mark.slow
    def test_several_fits(self):
        results = _cluster(2, codec=None).run(lambda strategy: _train_one_hot(strategy, num_fits=3))
        for own, _ in results:
            self.assertAllEqual(own, results[0][0])
        kept = sum(report["steps"] - report["overtime_drops"] for _, report in results)
        self.assertEqual(np.sum(results[0][0]), kept)

    @pytest.mark.slow
    def test_a_rank_that_stops_early_waits_for_the_others(self):
        """The others do not have to go on without that rank."""

        def run(strategy):
            stop = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: setattr(strategy_model[strategy.rank], "stop_training", True)
            )
            strategy_model[strategy.rank] = None
            with strategy.scope():
                model = strategy_model[strategy.rank] = _model(_sgd())
            for epochs in (1, 2):
                model.fit(
                    *_data(),
                    batch_size=_BATCH_SIZE,
                    shuffle=False,
                    verbose=0,
                    epochs=epochs,
                    callbacks=[stop] if strategy.rank == 0 else [],
                )
            return _flat(model)

        strategy_model = {}
        weights = _cluster(3, codec=None).run(run)
        for each in weights[1:]:
            self.assertAllEqual(each, weights[0])

    def test_weight_decay_is_part_of_the_step(self):
        """Weight decay is applied with the step: on all ranks, once. Here gradients are zero."""

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
                model.compile(keras.optimizers.SGD(0.5, weight_decay=0.1), lambda y, y_pred: 0.0 * y_pred)
            model.fit(np.zeros((16, 3)), np.zeros(16), batch_size=2, verbose=0, callbacks=[SlowRank(strategy, 1, 0.02)])
            return model.get_weights()[0]

        weights = _cluster(2, codec=None).run(run)
        self.assertAllEqual(weights[0], weights[1])
        self.assertAllClose(weights[0], np.full((3, 2), weights[0][0, 0]))
        # Between the effect of one rank's 8 steps over n, and that of both ranks' steps.
        self.assertBetween(weights[0][0, 0], 0.95**8 - 0.02, (1 - 0.05 / 2) ** 8)

    def test_constraints_hold_in_the_end(self):
        def run(strategy):
            initializer = keras.initializers.RandomNormal(seed=1)
            with strategy.scope():
                layer = keras.layers.Dense(2, kernel_initializer=initializer, kernel_constraint="non_neg")
            return _train(strategy, _sgd, layers=[layer])[1]

        weights = _cluster(2, codec=None).run(run)
        self.assertAllEqual(weights[0], weights[1])
        self.assertAllGreaterEqual(weights[0][:12], 0.0)  # The kernel; biases are not constrained.

    @pytest.mark.slow
    def test_moving_statistics(self):
        """The mean contains the statistics of all ranks, and all ranks end with the same."""
        x = np.repeat(np.arange(2.0), 64).reshape(64, 2, order="F").astype(np.float32)

        def run(strategy):
            with strategy.scope():
                normalization = keras.layers.BatchNormalization(momentum=0.5)
                model = keras.Sequential([keras.Input((1,)), normalization, keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            # Of each global batch the first rank gets zeros, the second one ones.
            model.fit(
                x.reshape(-1, 1)[np.argsort(np.tile([0, 0, 1, 1], 32), kind="stable")],
                np.zeros(128),
                batch_size=128,
                epochs=12,
                shuffle=False,
                verbose=0,
            )
            return [weights.tolist() for weights in model.get_weights()]

        weights = _cluster(2).run(run)
        self.assertEqual(weights[0], weights[1])
        mean = weights[0][2][0]
        self.assertBetween(mean, 0.4, 0.6)

    @pytest.mark.stress
    def test_moving_statistics_of_accumulated_batches(self):
        """Statistics change with every batch, not only with updates."""

        def run(strategy):
            with strategy.scope():
                normalization = keras.layers.BatchNormalization(momentum=0.9)
                model = keras.Sequential([keras.Input((1,)), normalization, keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=4), "mse")
            model.fit(np.ones((64, 1)), np.zeros(64), batch_size=4, verbose=0)
            return float(normalization.moving_mean.numpy()[0]), strategy.report()["steps"]

        results = _cluster(2, codec=None).run(run)
        # A rank that is behind skips some updates.
        num_batches = 4 * np.mean([num_updates for _, num_updates in results])
        for mean, _ in results:
            self.assertEqual(mean, results[0][0])
            self.assertGreater(mean, 1 - 0.9 ** (0.8 * num_batches))


class SettingsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({}, Thresholds(16, 4)),
        ({"max_staleness": 3, "min_colayers": 2}, Thresholds(3, 2)),
        ({"min_colayers": 9}, Thresholds(16, 4)),  # There are only four colayers.
        ({"min_colayers": 0}, Thresholds(16, 0)),
        ({"max_staleness": 3, "consistency": "async"}, Thresholds(3, 0)),
    )
    def test_what_the_exchange_is_told(self, settings, thresholds):
        """In a model of four colayers."""
        same = {"sync_interval": 7, "max_in_flight": 3}
        strategy = hop_tf.CanaryStrategy(algorithm="bcube:2,2", codec="int8", **same, **settings)
        expected = AsyncSettings(network=BCube(2, 2), thresholds=thresholds, codec=codecs.get("int8"), **same)
        self.assertEqual(strategy._settings.asynchronous(4), expected)
        self.assertEqual(strategy._settings.drops, thresholds.min_colayers > 0)


class RefusalTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"algorithm": "ring"}, "`algorithm` must be 'mesh'"),
        ({"algorithm": "star", "consistency": "bsp"}, "`algorithm` must be 'mesh'"),
        ({"consistency": "sync"}, "`consistency` must be one of ssp, async, bsp. Received: consistency='sync'."),
        ({"max_staleness": -1}, "`max_staleness` must be an integer of at least 0. Received: max_staleness=-1."),
        ({"min_colayers": 0.5}, "`min_colayers` must be an integer of at least 0. Received: min_colayers=0.5."),
        (
            {"min_colayers": 11},
            "`min_colayers` must be at most `num_colayers`.* Received: min_colayers=11, num_colayers=10.",
        ),
        (
            {"consistency": "async", "min_colayers": 5},
            "`min_colayers` must be None or 0 with consistency='async'.* Received: min_colayers=5.",
        ),
        ({"codec": "top_k"}, "`codec` must send something for every value, unless.*TopK.* consistency='ssp'."),
        (
            {"codec": codecs.TopK(error_feedback=True), "consistency": "async"},
            "`codec` must send something.* consistency='async'.",
        ),
        ({"codec": "top_k", "consistency": "bsp"}, "`codec` must send something.*error_feedback=False.*'bsp'."),
        ({"num_colayers": 0}, "`num_colayers` must be an integer of at least 1. Received: num_colayers=0."),
        ({"sync_interval": 0}, "`sync_interval` must be an integer of at least 1. Received: sync_interval=0."),
        ({"max_in_flight": 1}, "`max_in_flight` must be an integer of at least 2. Received: max_in_flight=1."),
        ({"codec": "low_rank"}, "a `codec` of low rank needs consistency='bsp': .* consistency='ssp'."),
        (
            {"codec": codecs.LowRank(), "consistency": "async"},
            "a `codec` of low rank needs consistency='bsp': .* Received: .*rank=4.*, consistency='async'.",
        ),
        ({"codec": "zip"}, "`codec` must be one of .* Received: codec='zip'."),
        ({"on_peer_loss": "wait"}, "`on_peer_loss` must be one of None, raise, continue."),
        ({"algorithm": "bcube:3,2"}, "`algorithm` must have as many ranks as the cluster"),
        (
            {"interfaces": ["127.0.0.1", "127.0.0.2"]},
            "`interfaces` must be 1 addresses, one for each interface of mesh. Received: .*127.0.0.2",
        ),
        ({"consistency": "bsp", "algorithm": "bcube:2,1", "interfaces": ["::1", "::2"]}, "`interfaces` must be 1 addr"),
        ({"consistency": "bsp", "interfaces": ["::1", "::2"]}, "`interfaces` must be 1 addresses.* of mesh"),
        ({"consistency": "bsp", "algorithm": "ring", "interfaces": ["::1", "::2"]}, "must be 1 addresses.* of ring"),
    )
    def test_arguments(self, settings, message):
        with self.assertRaisesRegex(ValueError, message):
            _cluster(2, **settings).run(lambda strategy: None)

    def test_interfaces_on_one_rank_only(self):
        ports = self.enter_context(PortReservation(2))
        ports.release()
        cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports.ports]})

        def run(rank, interfaces):
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, "", "worker", rank)
            strategy = hop_tf.CanaryStrategy(
                interfaces=interfaces, cluster_resolver=resolver, communication_options=_OPTIONS
            )
            try:
                _train(strategy, _sgd)
            finally:
                strategy.shutdown()

        with futures.ThreadPoolExecutor() as executor:
            ranks = [executor.submit(run, *each) for each in enumerate((["127.0.0.2"], None))]
        for rank, theirs in zip(ranks, ("'0' there, '1' here", "'1' there, '0' here"), strict=True):
            with self.assertRaisesRegex(MismatchError, f"disagrees on 'option number of interfaces': {theirs}"):
                rank.result()

    def test_custom_loops(self):
        def run(strategy):
            with strategy.scope():
                model = _model(_sgd())

            @tf.function
            def step():
                strategy.run(lambda: model.optimizer.apply([tf.ones_like(v) for v in model.trainable_variables]))

            model.optimizer.build(model.trainable_variables)
            step()

        with self.assertRaisesRegex(ValueError, "CanaryStrategy skips .* Only `fit` can skip steps"):
            _cluster(2).run(run)

    def test_small_variables(self):
        def run(strategy):
            with strategy.scope():
                model = _model(_sgd(), layers=[keras.layers.Dense(2, dtype="bfloat16")])
            model.fit(*_data(), verbose=0)

        with self.assertRaisesRegex(ValueError, "must be float32 or float64 unless consistency='bsp'.*bfloat16"):
            _cluster(2).run(run)

    @parameterized.parameters(lambda optimizer: optimizer, keras.optimizers.LossScaleOptimizer)
    @pytest.mark.stress(after=1)
    def test_averages_that_replace_weights_during_training(self, wrap):
        def make_optimizer():
            return wrap(keras.optimizers.SGD(_RATE, use_ema=True, ema_overwrite_frequency=3))

        with self.assertRaisesRegex(ValueError, "`ema_overwrite_frequency` must be None unless.*Received: 3."):
            _cluster(2).run(lambda strategy: _train(strategy, make_optimizer))

    @pytest.mark.stress
    def test_averages_that_replace_weights_in_synchronous_training(self):
        def make_optimizer():
            return keras.optimizers.SGD(_RATE, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)

        results = _cluster(2, consistency="bsp", codec=None).run(lambda strategy: _train(strategy, make_optimizer))
        for history, _, _ in results:
            self.assertAllClose(history, _expected(make_optimizer), rtol=1e-5, atol=1e-6)

    def test_alone(self):
        """In a world of one, training is plain Keras."""
        strategy = hop_tf.CanaryStrategy(algorithm="bcube:3,2")
        history, _, _ = _train(strategy, _momentum)
        self.assertAllClose(history, _expected(_momentum), rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    tf.test.main()
