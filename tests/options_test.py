"""`CommunicationOptions`: what is refused, and in which words."""

from __future__ import annotations

import datetime
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hop_tf import options as options_module
from hop_tf.options import CommunicationOptions, read_tls_files

_NUMBERS = {
    "timeout_seconds": "seconds",
    "progress_timeout_seconds": "seconds",
    "report_interval_seconds": "seconds",
    "bandwidth_bits_per_second": "bits per second",
}
_TLS_FILES = ("tls_certificate_chain", "tls_private_key", "tls_root_certificates")
_PEM, _PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


class NumbersTest(parameterized.TestCase):
    @parameterized.product(name=[*_NUMBERS], value=[True, np.True_, "60", b"60", None, 1j, [60], np.array([60.0])])
    def test_refuses_what_is_no_number(self, name, value):
        message = rf"`{name}` must be a finite, positive number of {_NUMBERS[name]}\. Received: {name}="
        with self.assertRaisesRegex(TypeError, message):
            CommunicationOptions(**{name: value})

    @parameterized.product(name=[*_NUMBERS], value=[0, -1.0, float("nan"), float("inf"), 10**400, np.float32(-1)])
    def test_refuses_numbers_that_cannot_be(self, name, value):
        message = rf"`{name}` must be a finite, positive number of {_NUMBERS[name]}\. Received: {name}="
        with self.assertRaisesRegex(ValueError, message):
            CommunicationOptions(**{name: value})

    def test_no_clock_shows_such_a_time_but_links_are_as_fast(self):
        with self.assertRaisesRegex(ValueError, "`timeout_seconds` must be"):
            CommunicationOptions(timeout_seconds=4e11)
        self.assertEqual(CommunicationOptions(bandwidth_bits_per_second=4e11).bandwidth_bits_per_second, 4e11)

    @parameterized.parameters(5, 5.0, np.float32(5), np.int64(5))
    def test_numbers_of_any_kind_become_floats(self, value):
        options = CommunicationOptions(timeout_seconds=value)
        self.assertEqual(options.timeout_seconds, 5.0)
        self.assertIs(type(options.timeout_seconds), float)


class DataPlaneTest(parameterized.TestCase):
    @parameterized.parameters("tcp", "grpc")
    def test_takes(self, name):
        self.assertEqual(CommunicationOptions(data_plane=name).data_plane, name)

    @parameterized.parameters("udp", None, 3)
    def test_refuses(self, value):
        with self.assertRaisesRegex(ValueError, r"`data_plane` must be one of tcp, grpc\. Received: data_plane="):
            CommunicationOptions(data_plane=value)


class InterfacesTest(parameterized.TestCase):
    def test_takes(self):
        options = CommunicationOptions(interfaces=["10.0.0.1", "fe80::1"])
        self.assertEqual(options.interfaces, ("10.0.0.1", "fe80::1"))
        with mock.patch.dict("os.environ", {"HOP_TF_INTERFACES": "10.0.0.1, 10.1.0.1"}):
            self.assertEqual(CommunicationOptions().interfaces, ("10.0.0.1", "10.1.0.1"))
            self.assertEqual(CommunicationOptions(interfaces=["10.0.0.2"]).interfaces, ("10.0.0.2",))
        self.assertIsNone(CommunicationOptions().interfaces)

    @parameterized.parameters("eth0", "127.0.0.1,", "10.0.0.1,10.0.0.1")
    def test_an_error_tells_that_they_come_from_the_environment(self, text):
        with (
            mock.patch.dict("os.environ", {"HOP_TF_INTERFACES": text}),
            self.assertRaisesRegex(ValueError, r"`interfaces` must be .* Received: HOP_TF_INTERFACES, interfaces=\["),
        ):
            CommunicationOptions()

    @parameterized.parameters(
        (["eth0"], ValueError),
        (["127.0.0.1:5"], ValueError),
        ([], ValueError),
        ("10.0.0.1", TypeError),
        ([3], TypeError),
    )
    def test_refuses(self, interfaces, error):
        with self.assertRaisesRegex(
            error, r"`interfaces` must be IP addresses .* at least one, .*\. Received: interfaces="
        ):
            CommunicationOptions(interfaces=interfaces)

    @parameterized.parameters((["127.0.0.1", "127.0.0.1"],), (["fe80::1", "10.0.0.1", "FE80:0::1"],))
    def test_refuses_two_lanes_on_one_interface(self, interfaces):
        with self.assertRaisesRegex(ValueError, "`interfaces` must be different addresses: .*Received: interfaces="):
            CommunicationOptions(interfaces=interfaces)

    def test_only_plain_sockets_have_them(self):
        with self.assertRaisesRegex(ValueError, "`interfaces` must be None with TLS or data_plane='grpc'"):
            CommunicationOptions(interfaces=["10.0.0.1"], data_plane="grpc")


class PathsAndTokenTest(parameterized.TestCase):
    @parameterized.product(name=(*_TLS_FILES, "log_dir"), value=[3, b"/tmp", True])
    def test_refuses_what_is_no_path(self, name, value):
        with self.assertRaisesRegex(TypeError, rf"`{name}` must be a path \(str or os\.PathLike\) or None\. Received"):
            CommunicationOptions(**{name: value})

    def test_refuses_an_empty_path(self):
        with self.assertRaisesRegex(ValueError, r"`log_dir` must be a path .*\. Received: log_dir=''\."):
            CommunicationOptions(log_dir="")

    def test_takes_path_objects(self):
        self.assertEqual(CommunicationOptions(log_dir=pathlib.Path("logs")).log_dir, pathlib.Path("logs"))

    def test_a_token_of_another_type_is_refused_and_not_shown(self):
        with self.assertRaisesRegex(TypeError, r"`cluster_token` must be .*\. Received: cluster_token of type bytes\."):
            CommunicationOptions(cluster_token=b"secret")
        with self.assertRaisesRegex(ValueError, r"`cluster_token` must be a non-empty .*\. Received: cluster_token=''"):
            CommunicationOptions(cluster_token="")
        self.assertNotIn("secret", repr(CommunicationOptions(cluster_token="secret")))


class TlsFilesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        certificate, key = _make_certificate()
        other_certificate, other_key = _make_certificate()
        self.contents = {
            "certificate": certificate.public_bytes(_PEM),
            "key": key.private_bytes(_PEM, _PKCS8, serialization.NoEncryption()),
            "other_certificate": other_certificate.public_bytes(_PEM),
            "other_key": other_key.private_bytes(_PEM, _PKCS8, serialization.NoEncryption()),
            "encrypted_key": key.private_bytes(_PEM, _PKCS8, serialization.BestAvailableEncryption(b"password")),
            "der_certificate": certificate.public_bytes(serialization.Encoding.DER),
            "truncated": certificate.public_bytes(_PEM)[:100],
            "garbage": b"garbage",
            "nothing": b"",
        }
        for name, content in self.contents.items():
            (self.folder / name).write_bytes(content)
        (self.folder / "directory").mkdir()
        self.good = dict(zip(_TLS_FILES, self._paths("certificate", "key", "other_certificate"), strict=True))

    def test_reads_files_that_fit(self):
        files = read_tls_files(CommunicationOptions(**self.good))
        self.assertEqual(files.certificate_chain, self.contents["certificate"])
        self.assertEqual(files.private_key, self.contents["key"])
        self.assertEqual(files.root_certificates, self.contents["other_certificate"])
        self.assertNotIn("PRIVATE", repr(files))

    def test_without_tls_there_is_nothing_to_read(self):
        self.assertIsNone(read_tls_files(CommunicationOptions()))

    @parameterized.parameters(*_TLS_FILES)
    def test_refuses_a_part_of_the_files(self, name):
        with self.assertRaisesRegex(ValueError, rf"must be given together\. Received: .*{name}=/"):
            CommunicationOptions(**{name: self.good[name]})

    @parameterized.product(name=_TLS_FILES, file=["missing", "directory", "null\0byte"])
    def test_refuses_what_cannot_be_read(self, name, file):
        message = rf"`{name}` must be a readable file\. Received: {name}={self.folder}/{file}: "
        with self.assertRaisesRegex(ValueError, message):
            CommunicationOptions(**{**self.good, name: self.folder / file})

    @parameterized.product(
        name=["tls_certificate_chain", "tls_root_certificates"],
        file=["garbage", "nothing", "truncated", "key", "der_certificate"],
    )
    def test_refuses_what_is_no_certificate(self, name, file):
        message = rf"`{name}` must be a PEM file of certificates\. Received: {name}={self.folder}/{file}\."
        with self.assertRaisesRegex(ValueError, message):
            CommunicationOptions(**{**self.good, name: self.folder / file})

    @parameterized.parameters("garbage", "nothing", "certificate", "other_key", "encrypted_key")
    def test_refuses_another_key(self, file):
        message = (
            r"`tls_private_key` must be a PEM file with the private key of `tls_certificate_chain`, not encrypted\. "
            rf"Received: tls_private_key={self.folder}/{file}, tls_certificate_chain={self.folder}/certificate\."
        )
        with self.assertRaisesRegex(ValueError, message):
            CommunicationOptions(**{**self.good, "tls_private_key": self.folder / file})

    def test_files_that_go_away_later_are_named_too(self):
        options = CommunicationOptions(**self.good)
        (self.folder / "key").unlink()
        with self.assertRaisesRegex(ValueError, r"`tls_private_key` must be a readable file\."):
            read_tls_files(options)

    def test_files_that_go_away_meanwhile_are_named_too(self):
        with (
            mock.patch.object(options_module, "_read", return_value=b""),
            self.assertRaisesRegex(ValueError, r"`tls_root_certificates` must be .*/missing"),
        ):
            CommunicationOptions(**{**self.good, "tls_root_certificates": self.folder / "missing"})

    def _paths(self, *names):
        return [str(self.folder / name) for name in names]


def _make_certificate():
    """A certificate that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "rank")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    return certificate, key


if __name__ == "__main__":
    absltest.main()
