"""Ranks with TLS and a cluster token train, and refuse strangers meanwhile."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import tempfile
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import hop_tf
from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.tools.testing import MultiProcessRunner
from hop_tf.transport.grpc_transport import GrpcTransport

_NUM_STEPS = 8
_STOP = 3  # The step after which rank 1 stops until the strangers have been there.
_TOKEN = "correct horse battery staple"
_DEADLINE_SECONDS = 60.0


def train(addresses, credentials, gate):
    """Trains in a rank's process; returns the counters."""
    strategy = hop_tf.HopStrategy(
        topology="complete",
        cluster_resolver=tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": addresses}), task_type="worker", task_id=_rank()
        ),
        communication_options=hop_tf.CommunicationOptions(**credentials),
    )
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def stop(batch, logs):
        if (strategy.rank, batch) == (1, _STOP):
            os.mkfifo(gate)
            print("stops")
            with open(gate):  # Blocks until the test opens the pipe, too.
                pass

    x, y = np.ones((4 * _NUM_STEPS, 4)), np.ones((4 * _NUM_STEPS, 1))
    model.fit(x, y, batch_size=4, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)], verbose=0)
    return strategy.report()


def _rank():
    return tf.distribute.cluster_resolver.TFConfigClusterResolver().task_id


def _make_certificates(directory):
    """Writes an authority's certificate, and one for 127.0.0.1 with its key; returns arguments of the options."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _certify("authority", authority_key, authority_key, x509.BasicConstraints(ca=True, path_length=0))
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = _certify("rank", key, authority_key, x509.SubjectAlternativeName([address]))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files = {
        "tls_root_certificates": authority.public_bytes(pem),
        "tls_certificate_chain": certificate.public_bytes(pem),
        "tls_private_key": key.private_bytes(pem, pkcs8, serialization.NoEncryption()),
    }
    for name, content in files.items():
        Path(directory, name).write_bytes(content)
    return {name: f"{directory}/{name}" for name in files}


def _certify(name, key, authority_key, extension):
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(extension, critical=True)
        .sign(authority_key, hashes.SHA256())
    )


def _problem(addresses, **credentials):
    """Why a stranger, who says that it is rank 1, gets no connection to rank 0."""
    options = hop_tf.CommunicationOptions(**credentials)
    deadline = time.monotonic() + _DEADLINE_SECONDS
    with contextlib.closing(GrpcTransport(1, addresses, identity={}, options=options)) as stranger:
        stranger.connect(0)
        while not stranger.status(0).last_problem and time.monotonic() < deadline:  # Nothing announces it.
            threading.Event().wait(0.01)
        status = stranger.status(0)
    return "" if status.ever_connected else status.last_problem


class CredentialsTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        ports = self.enter_context(PortReservation(2))
        ports.release()
        self.addresses = [f"127.0.0.1:{port}" for port in ports.ports]

    @pytest.mark.slow
    def test_strangers_are_refused_and_training_goes_on(self):
        certificates, gate = _make_certificates(self.directory), f"{self.directory}/gate"
        args = (self.addresses, certificates | {"cluster_token": _TOKEN}, gate)
        with MultiProcessRunner(train, 2, args=args, timeout_seconds=90) as runner:
            runner.wait_for_output(1, "stops")
            self.assertIn("cluster token", _problem(self.addresses, **certificates))
            self.assertIn("cluster token", _problem(self.addresses, **certificates, cluster_token="another"))
            self.assertNotEmpty(_problem(self.addresses, cluster_token=_TOKEN))
            with open(gate, "w"):
                pass
            reports = runner.join().raise_for_errors().values
        self.assertEqual([report["steps"] for report in reports], [_NUM_STEPS] * 2)
        # Who speaks no TLS gets no further than gRPC, which does not tell.
        self.assertGreaterEqual(reports[0]["connections_refused"], 2)
        self.assertEqual(reports[1]["connections_refused"], 0)


if __name__ == "__main__":
    tf.test.main()
