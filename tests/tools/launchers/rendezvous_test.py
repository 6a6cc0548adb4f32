"""Processes that meet at the address of process 0: here, threads."""

import concurrent.futures
import os
import socket
import time
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from hop_tf.errors import ClusterConfigError, DeadlineExceededError, HopError, ProtocolError
from hop_tf.tools.launchers import host, messages, rendezvous
from hop_tf.tools.launchers.variables import Place
from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.transport import control_pb2
from hop_tf.transport.proof import NotProvenError, Session, new_challenge, parse

_PATIENCE_SECONDS = 60.0
_IMPATIENCE_SECONDS = 1.0
# For process 0, where some never come: the others have come by then.
_HOST_SECONDS = 8.0


class RendezvousTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        reservation = self.enter_context(PortReservation(1))
        reservation.release()
        self.master = ("127.0.0.1", reservation.ports[0])
        self.pool = self.enter_context(concurrent.futures.ThreadPoolExecutor(8))

    def place(self, number, num_processes):
        return Place(launcher="a test", number=number, num_processes=num_processes, master=self.master)

    def start(self, number, num_processes, *, num_ps=0, token=None, seconds=_PATIENCE_SECONDS):
        """A process, in a thread; its result is the addresses that it gets."""

        def meet():
            place = self.place(number, num_processes)
            addresses, port = rendezvous.meet(place, num_ps=num_ps, token=token, timeout_seconds=seconds)
            port.close()
            return addresses

        return self.pool.submit(meet)

    def connect(self):
        """A connection to process 0, as soon as it listens."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self.enter_context(socket.create_connection(self.master, _PATIENCE_SECONDS))
            except ConnectionRefusedError:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)

    def expect(self, future, error, message):
        with self.assertRaisesRegex(error, message):
            future.result(_PATIENCE_SECONDS)

    @parameterized.parameters(None, "a secret")
    def test_all_get_the_same_list(self, token):
        futures = [self.start(number, 4, token=token) for number in (3, 1, 0, 2)]
        lists = [future.result(_PATIENCE_SECONDS) for future in futures]
        self.assertEqual(lists, [lists[0]] * 4)
        self.assertLen(set(lists[0]), 4)
        for address in lists[0]:
            self.assertRegex(address, r"^127\.0\.0\.1:\d+$")

    def test_the_name_of_the_master_is_kept(self):
        self.master = ("localhost", self.master[1])
        futures = [self.start(number, 2) for number in (0, 1)]
        first, second = futures[1].result(_PATIENCE_SECONDS)
        self.assertStartsWith(first, "localhost:")
        self.assertRegex(second, r"^(127\.0\.0\.1|\[::1\]):\d+$")

    def test_a_host_may_be_given(self):
        with mock.patch.dict(os.environ, HOP_TF_HOST="127.0.0.2"):
            futures = [self.start(number, 2) for number in (0, 1)]
            addresses = futures[1].result(_PATIENCE_SECONDS)
        self.assertEqual([address.split(":")[0] for address in addresses], ["127.0.0.2"] * 2)

    def test_a_host_that_is_not_this_machine(self):
        with mock.patch.dict(os.environ, HOP_TF_HOST="192.0.2.1"):
            self.expect(self.start(0, 2), ClusterConfigError, "HOP_TF_HOST must be .*Received: '192.0.2.1'")

    @pytest.mark.slow
    def test_names_who_has_not_come_to_all_who_have(self):
        futures = [self.start(0, 5, seconds=_HOST_SECONDS), self.start(1, 5), self.start(3, 5)]
        refused = self.start(4, 6)
        self.expect(refused, ClusterConfigError, "one of 6 processes.*rank 0 one of 5")
        for future in futures:
            self.expect(
                future,
                DeadlineExceededError,
                r"waited 8 s for ranks 2, 4 at 127\.0\.0\.1:\d+\. Last refused: .*the same numbers.*loopback",
            )

    def test_names_who_does_not_answer(self):
        future = self.start(1, 2, seconds=_IMPATIENCE_SECONDS)
        self.expect(future, DeadlineExceededError, r"rank 1: waited 1 s for rank 0 at 127\.0\.0\.1:\d+: .*refused")

    def test_names_a_program_that_says_nothing(self):
        with socket.create_server(self.master):  # As torchrun's own store does.
            future = self.start(1, 2, seconds=_IMPATIENCE_SECONDS)
            self.expect(future, DeadlineExceededError, "(timed out|in time).*no other program uses that port")

    def test_a_program_that_speaks_another_language(self):
        with socket.create_server(self.master) as server:
            future = self.start(1, 2, seconds=_IMPATIENCE_SECONDS)
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                self.expect(future, DeadlineExceededError, "does not speak this protocol")

    def test_the_port_is_in_use(self):
        with socket.create_server(self.master):
            self.expect(self.start(0, 2), HopError, "rank 0 cannot listen on .*in use.*HOP_TF_RENDEZVOUS_PORT")

    @parameterized.parameters(
        ("192.0.2.1", "MASTER_ADDR must be an address"), ("nowhere.invalid", "MASTER_ADDR must be a name")
    )
    def test_the_master_is_another_machine(self, name, message):
        self.master = (name, self.master[1])
        self.expect(self.start(0, 2), HopError, message)

    @parameterized.parameters(("one", "other"), ("one", None), (None, "other"))
    def test_tokens_differ(self, token, other):
        waiting = self.start(0, 2, token=token)
        self.expect(self.start(1, 2, token=other), HopError, "rank 1 was refused by 127.*HOP_TF_CLUSTER_TOKEN")
        again = self.start(1, 2, token=token)
        self.assertEqual(waiting.result(_PATIENCE_SECONDS), again.result(_PATIENCE_SECONDS))

    def test_who_knows_no_token_gets_no_list(self):
        with socket.create_server(self.master) as server:
            future = self.start(1, 2, token="a secret")
            connection, _ = server.accept()
            with connection:
                challenge = new_challenge()
                connection.sendall(messages.frame(challenge))
                session = Session(messages.rendezvous_secret("a guess"), challenge, encrypted=False)
                with self.assertRaises(NotProvenError):
                    session.open_hello(_read(connection))
                reply = session.seal_reply(messages.addresses_to_bytes(["127.0.0.1:1", "127.0.0.1:2"]))
                connection.sendall(messages.frame(reply))
                self.expect(future, HopError, "the process at .* does not know this rank's cluster token")

    def test_numbers_differ(self):
        waiting = self.start(0, 2)
        self.expect(self.start(1, 3), ClusterConfigError, "one of 3 processes.*rank 0 one of 2")
        self.expect(self.start(1, 2, num_ps=1), ClusterConfigError, "num_ps=1, rank 0 one of 2 with num_ps=0")
        again = self.start(1, 2)
        self.assertEqual(waiting.result(_PATIENCE_SECONDS), again.result(_PATIENCE_SECONDS))

    def test_two_processes_have_one_number(self):
        waiting = [self.start(number, 3) for number in (0, 1, 1)]  # The second guest with number 1 is refused.
        done, others = concurrent.futures.wait(waiting[1:], _PATIENCE_SECONDS, concurrent.futures.FIRST_COMPLETED)
        self.expect(done.pop(), ClusterConfigError, "rank 1 is there already, from 127.*two processes")
        last = self.start(2, 3)
        for future in (waiting[0], others.pop()):
            self.assertEqual(future.result(_PATIENCE_SECONDS), last.result(_PATIENCE_SECONDS))

    def test_who_has_gone_is_waited_for_again(self):
        waiting = self.start(0, 3)
        gone = self.connect()
        gone.sendall(messages.frame(_hello(_read(gone), 1, 3)))
        gone.close()
        again = [self.start(number, 3) for number in (1, 2)]
        for future in again:
            self.assertEqual(waiting.result(_PATIENCE_SECONDS), future.result(_PATIENCE_SECONDS))

    def test_strangers_do_not_disturb(self):
        waiting = self.start(0, 2)
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x05\x00\x00\x00", messages.frame(b"x"), b"\xff" * 10000):
            stranger = self.connect()
            stranger.sendall(data)
        challenge = _read(stranger := self.connect())
        for body in (b"[" * 4000, b"[]", b"{}", b'{"number": true, "num_processes": 2, "num_ps": 0, "address": "a"}'):
            stranger.sendall(messages.frame(_seal(challenge, body)))
            with self.assertRaises(HopError):
                messages.addresses_from_bytes(_reply_body(stranger))
            challenge = _read(stranger := self.connect())
        with mock.patch.object(host, "MAX_UNAUTHENTICATED", 0):
            for _ in range(8):
                self.connect()
            second = self.start(1, 2).result(_PATIENCE_SECONDS)
        self.assertEqual(waiting.result(_PATIENCE_SECONDS), second)

    def test_a_stranger_is_not_waited_for(self):
        with mock.patch.object(host, "GREETING_SECONDS", 0.1):
            waiting = self.start(0, 2)
            stranger = self.connect()
            _read(stranger)
            with self.assertRaisesRegex(HopError, "no greeting came in time"):
                messages.addresses_from_bytes(_reply_body(stranger))
        self.start(1, 2).result(_PATIENCE_SECONDS)
        waiting.result(_PATIENCE_SECONDS)

    def test_guesses_of_the_token_are_limited(self):
        waiting = self.start(0, 2, token="a secret")
        problems = []
        for _ in range(40):
            stranger = self.connect()
            stranger.sendall(messages.frame(_hello(_read(stranger), 1, 2)))
            try:
                messages.addresses_from_bytes(_reply_body(stranger))
            except HopError as error:
                problems.append(str(error))
        self.assertContainsSubset({"too many wrong cluster tokens from this host"}, problems)
        with mock.patch.object(host.GuessRateLimiter, "take", return_value=True):
            self.start(1, 2, token="a secret").result(_PATIENCE_SECONDS)
        waiting.result(_PATIENCE_SECONDS)

    def test_loopback_addresses_are_of_no_use_to_others(self):
        waiting = self.start(0, 3)
        for number, address in ((1, "10.0.0.2:4"), (2, "10.0.0.3:4")):
            guest = self.connect()
            guest.sendall(messages.frame(_hello(_read(guest), number, 3, address)))
        message = r"rank 0 at 127\.0\.0\.1:\d+ has a loopback address.*, such as that of rank 1 at 10\.0\.0\.2:4\."
        self.expect(waiting, ClusterConfigError, message)


class MessagesTest(absltest.TestCase):
    def test_a_reply_that_is_none(self):
        for data in (b"", b"[]", b"{}", b'{"addresses": [1]}', b'{"addresses": "a"}', b"[" * 100_000):
            with self.assertRaises(ProtocolError):
                messages.addresses_from_bytes(data)

    def test_a_frame_in_pieces(self):
        received = bytearray()
        taken = []
        for byte in messages.frame(b"abc") + messages.frame(b""):
            received.append(byte)
            taken.append(messages.take_frame(received, 3))
        self.assertEqual([body for body in taken if body is not None], [b"abc", b""])
        with self.assertRaisesRegex(ProtocolError, "4 bytes, more than 3"):
            messages.take_frame(bytearray(messages.frame(b"abcd")), 3)


def _read(connection):
    return rendezvous._receive(connection, messages.MAX_REPLY_BYTES, time.monotonic() + _PATIENCE_SECONDS)


def _seal(challenge, body):
    """Seals a guest's hello without a token."""
    return Session(messages.rendezvous_secret(None), challenge, encrypted=False).seal_hello(body)


def _hello(challenge, number, num_processes, address="127.0.0.1:4"):
    return _seal(challenge, messages.Hello(number, num_processes, 0, address).to_bytes())


def _reply_body(connection):
    return parse(control_pb2.Signed, _read(connection)).body


if __name__ == "__main__":
    absltest.main()
