"""Tests of the handshake: it admits or refuses processes, and names the reason."""

import datetime
import ipaddress
import tempfile
import time
import unittest.mock
from pathlib import Path

import numpy as np
from absl.testing import absltest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hop_tf.errors import MismatchError
from hop_tf.options import CommunicationOptions
from hop_tf.transport import handshake
from hop_tf.transport.certificates import names_host
from hop_tf.transport.framing import PROTOCOL_VERSION
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import DEADLINE_SECONDS, TransportTestMixin, wait_until


class GreetingTest(TransportTestMixin, absltest.TestCase):
    member = GrpcTransport

    def test_a_mismatch_is_named_on_both_sides(self):
        addresses = self.addresses(2)
        first = self.start_at(0, addresses)
        with self.assertLogs("absl", "ERROR"):
            second = self.start_at(1, addresses, identity={**self.identity, "option.max_iteration_gap": "3"})
            second.connect(0)
            wait_until(lambda: first.status(1).failure and second.status(0).failure)
        for transport, rank, theirs, ours in ((first, 1, "3", "2"), (second, 0, "2", "3")):
            failure = transport.status(rank).failure
            self.assertIsInstance(failure, MismatchError)
            self.assertRegex(
                str(failure),
                f"rank {1 - rank}: rank {rank} at {addresses[rank]} disagrees on 'option.max_iteration_gap': "
                f"'{theirs}' there, '{ours}' here",
            )
            with self.assertRaises(MismatchError):
                transport.send(rank, "queue")

    def test_a_field_that_only_one_side_has_is_a_mismatch(self):
        for rank in (0, 1):
            with self.subTest(extra_at=rank):
                addresses = self.addresses(2)
                identities = [self.identity, self.identity]
                identities[rank] = {**self.identity, "option.new": "x"}
                transports = [self.start_at(r, addresses, identity=identities[r]) for r in (0, 1)]
                transports[0].connect(1)
                wait_until(lambda: all(t.status(1 - t.rank).failure for t in transports))  # noqa: B023
                self.assertRegex(str(transports[rank].status(1 - rank).failure), "'option.new': '' there, 'x' here")
                self.assertRegex(str(transports[1 - rank].status(rank).failure), "'option.new': 'x' there, '' here")

    def test_another_version_is_a_mismatch(self):
        """Of either side; whatever comes after the greeting."""
        for rank in (0, 1):
            with self.subTest(newer=rank):
                addresses = self.addresses(2)
                first = self.start_at(rank, addresses)
                with unittest.mock.patch.object(handshake, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1):
                    second = self.start_at(1 - rank, addresses)
                second.connect(rank)
                wait_until(lambda: first.status(1 - rank).failure and second.status(rank).failure)  # noqa: B023
                there, here = (repr(str(PROTOCOL_VERSION + newer)) for newer in (1, 0))
                failure = first.status(1 - rank).failure
                self.assertIsInstance(failure, MismatchError)
                self.assertRegex(str(failure), f"disagrees on 'transport.protocol': {there} there, {here} here")

    def test_a_wrong_token_is_refused_and_the_others_go_on(self):
        addresses = self.addresses(3)
        for token in (None, "other"):
            with self.subTest(token=token):
                good = CommunicationOptions(cluster_token="secret")
                first, second = (self.start_at(rank, addresses, options=good) for rank in (0, 1))
                self.check_works(first, second)
                with self.assertLogs("absl", "WARNING") as logs:
                    stranger = self.start_at(2, addresses, options=CommunicationOptions(cluster_token=token))
                    stranger.connect(0)
                    wait_until(lambda: first.counters()["connections_refused"] > 0)  # noqa: B023
                wait_until(lambda: "cluster token" in stranger.status(0).last_problem)  # noqa: B023
                self.assertRegex(logs.output[0], "rank 0: a connection from .* was refused: wrong cluster token")
                self.assertNotIn("secret", "".join(logs.output))
                for rank in (1, 2):
                    self.assertIsNone(first.status(rank).failure)
                self.assertFalse(first.status(2).ever_connected)
                self.assertFalse(stranger.status(0).ever_connected)
                self.check_works(first, second)
                self.check_works(second, first)
                for transport in (first, second, stranger):
                    transport.close()

    def test_a_peer_with_another_cluster_is_told(self):
        addresses = self.addresses(3)
        first = self.start_at(0, addresses)
        confused = self.start_at(1, [addresses[2], addresses[1], addresses[0]])
        confused.connect(2)
        wait_until(lambda: "another rank" in confused.status(2).last_problem)
        self.assertIsNone(first.status(1).failure)
        self.assertFalse(first.status(1).ever_connected)

    def test_another_process_with_the_same_incarnation_is_no_restart(self):
        addresses = self.addresses(2)
        first = self.start_at(0, addresses)
        second = self.start_at(1, addresses, incarnation="same")
        self.check_works(second, first)
        second.close()
        second = self.start_at(1, addresses, incarnation="same")
        second.connect(0)
        wait_until(lambda: first.status(1).connected)
        self.assertIsNone(first.status(1).failure)

    def test_a_later_strategy_of_a_process_is_told_to_wait(self):
        """The later strategy may be of another kind. Ranks in the earlier one do not take the process for restarted.

        They go on without that process, and log no warning.
        """
        for have_met in (True, False):
            with self.subTest(have_met=have_met), self.assertNoLogs("absl", "WARNING"):
                addresses, restarts = self.addresses(2), []
                first = self.start_at(0, addresses, incarnation="p.0")
                second = self.start_at(1, addresses, incarnation="q.0", on_restart=restarts.append)
                if have_met:
                    self.check_works(first, second)
                    self.check_works(second, first)
                first.close()
                other = {**self.identity, "strategy": "PipeSGDStrategy"}
                later = self.start_at(0, addresses, incarnation="p.1", identity=other)
                self._check_waits(later, second)
                self.assertEmpty(restarts)
                second.close()
                last = self.start_at(1, addresses, incarnation="q.1", identity=other)
                self.check_works(later, last)
                self.check_works(last, later)

    def test_strategies_that_are_alike_and_have_not_met_are_told_apart(self):
        addresses = self.addresses(2)
        self.start_at(0, addresses, incarnation="p.0").close()
        second = self.start_at(1, addresses, incarnation="q.0")
        later = self.start_at(0, addresses, incarnation="p.1")
        second.connect(0)
        wait_until(lambda: "has shut down the strategy that this process uses" in second.status(0).last_problem)
        self._check_waits(later, second)
        self.assertFalse(second.status(0).ever_connected)
        wait_until(lambda: second.status(0).was_silent_for(2.0))  # It does not wait for ever.

    def test_a_restarted_process_joins_the_strategy_that_its_peers_are_in(self):
        addresses = self.addresses(3)
        for number in range(2):
            ranks = [
                self.start_at(rank, addresses, incarnation=f"{rank}.{number}", on_restart=lambda _: None)
                for rank in range(3)
            ]
            self.check_works(ranks[0], ranks[1])
            ranks[1].close()
            if not number:
                ranks[0].close()
                ranks[2].close()
        again = self.start_at(1, addresses, incarnation="again.0", on_restart=lambda _: None)
        ranks[2].connect(1)  # It has never met a process of that rank.
        self.check_works(again, ranks[0])
        self.check_works(ranks[2], again)
        self.check_works(again, ranks[2])

    def test_a_restarted_process_joins_though_nobody_has_met_it_in_this_strategy(self):
        """All have made another one after its former process had died; or it has died between two."""
        addresses = self.addresses(2)
        ranks = [self.start_at(rank, addresses, incarnation=f"{rank}.0") for rank in range(2)]
        self.check_works(*ranks)
        for transport in ranks:
            transport.close()
        survivor = self.start_at(0, addresses, incarnation="0.1")
        again = self.start_at(1, addresses, incarnation="again.0")
        survivor.connect(1)
        self.check_works(again, survivor)
        self.check_works(survivor, again)
        for transport in (survivor, again):  # From now on both make theirs in turn.
            transport.close()
        survivor = self.start_at(0, addresses, incarnation="0.2")
        again = self.start_at(1, addresses, incarnation="again.1")
        self.check_works(survivor, again)
        self.check_works(again, survivor)

    def test_a_later_strategy_of_a_restarted_process_is_no_restart(self):
        addresses, restarts = self.addresses(2), []
        first = self.start_at(0, addresses, incarnation="p.0", on_restart=restarts.append)
        second = self.start_at(1, addresses, incarnation="q.0")
        self.check_works(first, second)
        second.close()
        self.start_at(1, addresses, incarnation="again.0").close()
        later = self.start_at(1, addresses, incarnation="again.1")
        self._check_waits(later, first)
        self.assertEmpty(restarts)

    def test_servers_are_in_no_turn(self):
        """A later strategy of a worker that the server has met still counts as later, and not as a restart."""
        addresses, restarts = self.addresses(2), []
        self.start_at(0, addresses, incarnation="p.0").close()
        worker = self.start_at(0, addresses, incarnation="p.1")
        server = self.start_at(1, addresses, incarnation="server.0", in_turn=False, on_restart=restarts.append)
        self.check_works(worker, server)
        self.check_works(server, worker)
        worker.close()
        self._check_waits(self.start_at(0, addresses, incarnation="p.2"), server)
        self.assertEmpty(restarts)

    def _check_waits(self, later, earlier):
        """The later strategy of a process tries again and again to join a rank that is in an earlier one."""
        start = time.monotonic()
        later.connect(earlier.rank)
        wait_until(lambda: "has not shut down an earlier strategy" in later.status(earlier.rank).last_problem)
        refused = earlier.counters()["connections_refused"]
        wait_until(lambda: earlier.counters()["connections_refused"] > refused + 3)
        # It counts as a sign of life.
        self.assertLess(later.status(earlier.rank).silent_seconds, time.monotonic() - start)
        for transport, peer in ((earlier, later), (later, earlier)):
            self.assertIsNone(transport.status(peer.rank).failure)


class TlsTest(TransportTestMixin, absltest.TestCase):
    member = GrpcTransport

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.ours, cls.evil = _make_certificates(folder, "ours", ipaddress.ip_address("127.0.0.1"), "evil.example")
        (cls.others,) = _make_certificates(folder, "others", ipaddress.ip_address("127.0.0.1"))

    def test_ranks_with_certificates_talk(self):
        first, second = self.start(options=CommunicationOptions(**self.ours, cluster_token="secret"))
        collector = self.register(second)
        data = np.random.default_rng(1).integers(0, 256, 5_000_000, dtype=np.uint8)
        first.send(1, "queue", payload=[data])
        np.testing.assert_array_equal(collector.wait(1)[0].payload, data)

    def test_peers_without_are_refused_and_the_others_go_on(self):
        for name, credentials in (("plain", {}), ("other authority", self.others)):
            with self.subTest(name):
                addresses = self.addresses(3)
                ours = CommunicationOptions(**self.ours)
                first, second = (self.start_at(rank, addresses, options=ours) for rank in (0, 1))
                stranger = self.start_at(2, addresses, options=CommunicationOptions(**credentials))
                stranger.connect(0)
                first.connect(2)
                for transport, rank in ((stranger, 0), (first, 2)):
                    wait_until(lambda t=transport, r=rank: t.status(r).last_problem)
                    self.assertFalse(transport.status(rank).ever_connected)
                    self.assertIsNone(transport.status(rank).failure)
                self.check_works(first, second)
                self.check_works(second, first)

    def test_a_certificate_for_another_host_is_refused_and_the_others_go_on(self):
        """Although the authority is the same. Otherwise any host with a certificate could pass as any rank."""
        addresses = self.addresses(3)
        ours = CommunicationOptions(**self.ours)
        first, second = (self.start_at(rank, addresses[:2], options=ours) for rank in (0, 1))
        self.check_works(second, first)
        self.check_works(first, second)
        with self.assertLogs("absl", "WARNING") as logs:
            evil = self.start_at(1, (addresses[0], addresses[2]), options=CommunicationOptions(**self.evil))
            evil.connect(0)
            wait_until(lambda: "certificate does not name the host" in evil.status(0).last_problem)
        self.assertRegex(
            logs.output[0], f"it claims to be rank 1 at {addresses[1]}, but its certificate is for evil.examp"
        )
        self.assertIsNone(first.status(1).failure)
        self.check_works(first, second)
        self.check_works(second, first)

    def test_certificates_that_are_renewed(self):
        """New connections use them, and no rank has to start again."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        renewed = {name: folder / name for name in self.ours}

        def write(source):
            for name, path in renewed.items():
                new = path.with_suffix(".new")
                new.write_bytes(source[name].read_bytes())
                new.replace(path)

        write(self.ours)
        addresses = self.addresses(3)
        first = self.start_at(0, addresses, options=CommunicationOptions(**renewed))
        second = self.start_at(1, addresses, options=CommunicationOptions(**self.ours))
        self.check_works(second, first)
        renewed["tls_private_key"].write_text("half of a key")
        first.send(1, "queue")  # Over a new connection, with what there was before.
        self.assertTrue(first.flush(1, DEADLINE_SECONDS))
        write(self.others)
        third = self.start_at(2, addresses, options=CommunicationOptions(**self.others))
        self.check_works(third, first)
        self.check_works(first, third)


class CertificateNamesTest(absltest.TestCase):
    def test_names_host(self):
        names = frozenset(["Rank-1.Example.org", "*.pods.example", "10.0.0.7", "2001:db8::7"])
        for host in ("rank-1.example.org", "rank-1.example.org.", "a.pods.example", "10.0.0.7", "2001:0db8:0::7"):
            self.assertTrue(names_host(names, host), host)
        for host in ("example.org", "rank-2.example.org", "pods.example", "a.b.pods.example", "10.0.0.8", "localhost"):
            self.assertFalse(names_host(names, host), host)
        self.assertFalse(names_host(frozenset(), "10.0.0.7"))
        self.assertFalse(names_host(frozenset(["*.0.0.7"]), "10.0.0.7"))


class TcpGreetingTest(GreetingTest):
    member = TcpTransport


class TcpTlsTest(TlsTest):
    member = TcpTransport

    def test_no_socket_is_open_beside_the_encrypted_port(self):
        first, second = self.start(options=CommunicationOptions(**self.ours))
        self.check_works(first, second)
        self.assertEqual(first._handshake.socket_port, 0)


def _make_certificates(folder, name, *hosts):
    """An authority, and a certificate of it for each host; yields `CommunicationOptions`' arguments for each."""
    now = datetime.datetime.now(datetime.UTC)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"{name} authority")])

    def builder(subject, public_key):
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    authority = (
        builder(authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    for number, host in enumerate(hosts):
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.DNSName(host) if isinstance(host, str) else x509.IPAddress(host)
        certificate = (
            builder(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]), key.public_key())
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        contents = {
            "tls_root_certificates": authority.public_bytes(pem),
            "tls_certificate_chain": certificate.public_bytes(pem),
            "tls_private_key": key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        }
        paths = {option: folder / f"{name}_{number}_{option}.pem" for option in contents}
        for option, content in contents.items():
            paths[option].write_bytes(content)
        yield paths


if __name__ == "__main__":
    absltest.main()
