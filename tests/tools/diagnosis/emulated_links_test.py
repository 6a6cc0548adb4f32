"""Tests that `diagnose` finds the slow link in jobs on an emulated network."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

import keras
import numpy as np
import pytest
from absl.testing import absltest

import hop_tf
from hop_tf.records.log import read_job
from hop_tf.tools.diagnosis import diagnose
from hop_tf.tools.testing import network

_LOG_DIR = "HOP_TF_TEST_LOG_DIR"
_PORT = 23000
_NUM_RANKS = 3
_NUM_STEPS = 30
_STEP_SECONDS = 0.1
_DEADLINE_SECONDS = 300
_REASON = network.available()


def _train():
    options = hop_tf.CommunicationOptions(log_dir=os.environ[_LOG_DIR])
    strategy = hop_tf.PipeSGDStrategy(pipeline_width=1, communication_options=options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((500,)), keras.layers.Dense(500)])  # A megabyte.
        model.compile("sgd", "mse")
    x, y = np.ones((_NUM_RANKS * _NUM_STEPS, 500), "float32"), np.ones((_NUM_RANKS * _NUM_STEPS, 500), "float32")
    model.fit(x, y, batch_size=_NUM_RANKS, verbose=0)
    strategy.shutdown()


@unittest.skipIf(_REASON is not None, f"needs an emulated network ({_REASON})")
class EmulatedLinksTest(absltest.TestCase):
    def diagnose(self, **links):
        with tempfile.TemporaryDirectory() as directory:
            with network.EmulatedNetwork(_NUM_RANKS, relay=True, **links) as net:
                workers = [f"{host}:{_PORT}" for host in net.addresses]
                processes = [self.start(net, workers, rank, directory) for rank in range(_NUM_RANKS)]
                for process in processes:
                    self.assertEqual(process.wait(_DEADLINE_SECONDS), 0)
            return diagnose(read_job(directory))

    def start(self, net, workers, rank, log_dir):
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HOP_TF_STEP_SECONDS": str(_STEP_SECONDS),
            _LOG_DIR: log_dir,
        }
        process = net.popen(rank, [sys.executable, __file__], env=environment, stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    @pytest.mark.stress(after=0)
    def test_a_tenth_of_the_bandwidth(self):
        diagnosis = self.diagnose(bandwidth_bits_per_second=[200e6, 20e6, 200e6], round_trip_seconds=0.002)
        finding = diagnosis.findings[0]
        self.assertEqual((finding.kind, finding.where), ("bandwidth", "all links of rank 1"), diagnosis.lines)

    @pytest.mark.stress(after=0)
    def test_ten_times_the_latency(self):
        one_way = np.full((_NUM_RANKS, _NUM_RANKS), 0.003)
        one_way[0, 2] = one_way[2, 0] = 0.03
        diagnosis = self.diagnose(one_way_seconds=one_way.tolist())
        finding = diagnosis.findings[0]
        self.assertEqual((finding.kind, finding.where), ("latency", "rank 0 - rank 2"), diagnosis.lines)


if __name__ == "__main__":
    if _LOG_DIR in os.environ:
        _train()
    else:
        absltest.main()
