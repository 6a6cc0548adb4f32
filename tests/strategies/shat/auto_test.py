"""Tests of SHAT's workers that choose their codec by times."""

import contextlib
import io
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.runtime.autotuning import Setting
from hop_tf.strategies.shat.servers import Servers
from hop_tf.tools.testing import InProcessCluster
from support import linear_loss, scripted_choices, train_with_late_determinism

_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=60)
_NUM_WORKERS, _NUM_STEPS, _BATCH_SIZE = 2, 40, 4
_SHAPE = (64, 128)  # 32 KiB, of which int8 leaves a quarter.
_SECONDS_PER_BYTE = 1e-5  # Steps are long, so that few of them are needed to choose, also on a busy machine.


def _cluster(**settings):
    def make_strategy(cluster_resolver):
        return hop_tf.SHATParameterServerStrategy(
            cluster_resolver=cluster_resolver, communication_options=_OPTIONS, **settings
        )

    return InProcessCluster(_NUM_WORKERS, make_strategy, num_ps=1, timeout_seconds=120)


def _fit(strategy):
    """Each step changes all weights by the same, so that int8 loses nothing."""
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input(_SHAPE[:1]), keras.layers.Dense(_SHAPE[1], use_bias=False, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(0.5), linear_loss)
    x = np.ones((_NUM_STEPS * _BATCH_SIZE, _SHAPE[0]), np.float32)
    model.fit(x, np.ones((len(x), _SHAPE[1]), np.float32), batch_size=_BATCH_SIZE, verbose=0)
    strategy.synchronize(model)
    return model.get_weights()[0], strategy.report()


def _send_slowly(send):
    """Returns `Servers.send` over a slow link."""

    def slow_send(self, request, shard, is_missing=True):
        time.sleep(_SECONDS_PER_BYTE * sum(array.nbytes for array in request.message(shard, is_missing)[1]))
        send(self, request, shard, is_missing)

    return slow_send


class AutoTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("steps", "gradients")
    @pytest.mark.slow(after=1)
    def test_a_change_of_codec_loses_no_push(self, pushes):
        expected = [weights for weights, _ in _cluster(pushes=pushes, codec=None, consistency="bsp").run(_fit)]
        with scripted_choices(lambda step: Setting(step // 3 % 2, 1)):
            found = [weights for weights, _ in _cluster(pushes=pushes, consistency="bsp").run(_fit)]
        self.assertAllClose(found, expected, rtol=1e-6)
        self.assertNotAllClose(found, np.zeros_like(found))

    @pytest.mark.slow
    def test_a_slow_link(self):
        output = io.StringIO()
        slow = mock.patch.object(Servers, "send", _send_slowly(Servers.send))
        with slow, contextlib.redirect_stderr(output):
            reports = [report for _, report in _cluster().run(_fit)]
        for report in reports:
            self.assertLess(report["shard_0_bytes_sent"], 0.8 * _NUM_STEPS * 4 * np.prod(_SHAPE))
            self.assertIn(report["encoded_bytes_per_value"], (4.0, codecs.Int8().bytes_per_value))
        self.assertRegex(
            output.getvalue(),
            r"hop_tf: int8 over a parameter server: [\d.]+ ms a step; lossless over a parameter server: [\d.]+ ms\. "
            r"To keep these settings, pass codec='int8'\.",
        )

    def test_operations_that_become_deterministic_too_late(self):
        with self.assertRaisesRegex(ValueError, "settings must not be 'auto'"):
            train_with_late_determinism(_cluster(), _NUM_WORKERS, _fit)


if __name__ == "__main__":
    absltest.main()
