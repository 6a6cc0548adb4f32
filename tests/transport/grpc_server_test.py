"""Tests of a server that gets garbage."""

import concurrent.futures
import contextlib
import socket
import threading
import unittest.mock

import grpc
import numpy as np
from absl.testing import absltest

from hop_tf.options import CommunicationOptions
from hop_tf.transport import control_pb2, framing, unauthenticated_peers
from hop_tf.transport.checksum import NoChecksums
from hop_tf.transport.daemon_executor import DaemonExecutor
from hop_tf.transport.framing import FrameKind
from hop_tf.transport.grpc_link import METHOD
from hop_tf.transport.grpc_transport import GrpcTransport
from support.transports import (
    DEADLINE_SECONDS,
    TransportTestMixin,
    make_hello,
    parse_reply,
    split_address,
    wait_until,
)


class ExecutorTest(absltest.TestCase):
    def test_what_is_about_to_run_can_be_waited_for(self):
        """Otherwise a transport could not be closed while a peer opens a stream."""
        executor, joined, start = (
            DaemonExecutor("test"),
            concurrent.futures.Future(),
            threading.Thread.start,
        )

        def join_all():
            try:
                for thread in executor.threads:
                    thread.join(DEADLINE_SECONDS)
                joined.set_result(None)
            except RuntimeError as error:
                joined.set_exception(error)

        def start_late(thread):
            start(threading.Thread(target=join_all))
            concurrent.futures.wait([joined], timeout=0.2)
            start(thread)

        with unittest.mock.patch.object(threading.Thread, "start", start_late):
            executor.submit(lambda: None)
        joined.result(DEADLINE_SECONDS)
        self.assertEmpty(executor.threads)


class GarbageTest(TransportTestMixin, absltest.TestCase):
    member = GrpcTransport

    def test_garbage_on_the_port(self):
        first, second = self.start()
        self.check_works(second, first)
        generator = np.random.default_rng(1)
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + generator.bytes(1000),
            generator.bytes(100_000),
            b"",
        ):
            with socket.create_connection(split_address(first._address)) as garbage, contextlib.suppress(OSError):
                garbage.sendall(data)
                garbage.shutdown(socket.SHUT_WR)
                garbage.settimeout(DEADLINE_SECONDS)
                while garbage.recv(1000):
                    pass
            self.check_works(second, first)
        self.assertTrue(first.status(1).connected)

    def test_garbage_instead_of_a_greeting(self):
        first, second = self.start(incarnation="known")
        self.check_works(second, first)
        bad_rank = {"sender": (2, 0, 2**32 - 1), "receiver": (1, 2**32 - 1), "lane": (17, 2**32 - 1)}
        greetings = [
            b"",
            b"garbage",
            framing.encode(FrameKind.PING),
            framing.encode(FrameKind.HELLO, body=b"\xff" * 20),
            b"".join(framing.encode_message(_message(), NoChecksums())),
            *({field: value} for field, values in bad_rank.items() for value in values),
        ]
        for count, data in enumerate(greetings):
            with self.subTest(data=data), _stream(first) as (send, call):
                challenge = framing.decode(next(call)).header
                send(data if isinstance(data, bytes) else make_hello(challenge, **data)[0])
                with contextlib.suppress(grpc.RpcError):
                    reply = parse_reply(framing.decode(next(call)).header)
                    self.assertEqual(reply.refusal, control_pb2.BAD_RANK)
                with contextlib.suppress(grpc.RpcError):
                    self.assertEmpty(list(call))
                self.assertEqual(first.counters()["connections_refused"], count + 1)
                self.assertIsNone(first.status(1).failure)
        self.check_works(second, first)

    def test_a_stranger_without_the_token_cannot_take_a_peers_place(self):
        first, second = self.start(options=CommunicationOptions(cluster_token="secret"))
        self.check_works(second, first)
        for token in (None, "guess"):
            with _stream(first) as (send, call):
                reply, _ = _greet(send, call, token)
                self.assertEqual(reply, control_pb2.HelloReply(refusal=control_pb2.BAD_TOKEN))  # Nothing else.
        self.assertIsNone(first.status(1).failure)
        self.check_works(second, first)

    def test_garbage_on_a_lane(self):
        first, second = self.start(incarnation="known")
        collector = self.register(first)
        self.check_works(second, first)

        def head(payload, queue):
            return framing.encode_head(FrameKind.MESSAGE, sequence=1, payload=payload, queue=len(queue)) + queue

        short_payload = head(5, b"q")
        cases = {
            "empty": [b""],
            "random": [b"garbage" * 10],
            "a second hello": framing.encode(FrameKind.HELLO),
            "a ping": framing.encode(FrameKind.PING),
            "no queue": head(0, b""),
            "queue is not UTF-8": head(0, b"\xff\xff"),
            "payload beyond its limit": head(2**60, b"q"),
            "chunk beyond the payload": [short_payload, b"12345678901234"],
            "empty chunk": [short_payload, b""],
            "sequence number 2 before 1": framing.encode_start(_message(sequence=2)),
            "wrong checksum": [framing.encode_start(_message()) + bytes(8)],
        }
        for count, (name, frames) in enumerate(cases.items()):
            with self.subTest(name), _stream(first) as (send, call):
                _, session = _greet(send, call, lane=7)
                checksums = session.checksums("client")
                for frame in [frames + checksums.of(frames)] if isinstance(frames, bytes) else frames:
                    send(frame)
                with self.assertRaises(grpc.RpcError) as caught:
                    next(call)
                self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
                self.assertEqual(first.counters()["connections_refused"], count + 1)
        self.assertEmpty(collector.messages)
        self.assertIsNone(first.status(1).failure)
        self.check_works(second, first)

    def test_messages_on_the_control_lane_are_refused(self):
        (first, _) = self.start(incarnation="known")
        with _stream(first) as (send, call):
            _, session = _greet(send, call, lane=16)
            send(b"".join(framing.encode_message(_message(), session.checksums("client"))))
            with self.assertRaises(grpc.RpcError):
                next(call)

    def test_streams_that_say_nothing_are_closed(self):
        first, second = self.start()
        with unittest.mock.patch.object(unauthenticated_peers, "GREETING_SECONDS", 0.01), _stream(first) as (_, call):
            self.assertEqual(framing.decode(next(call)).kind, FrameKind.CHALLENGE)
            with self.assertRaises(grpc.RpcError):
                next(call)
        wait_until(lambda: first.counters()["connections_refused"] == 1)
        self.check_works(second, first)


def _message(sequence=1):
    return framing.Outgoing(sequence, b"queue", b"", [], 0)


def _greet(send, call, token=None, **fields):
    """Says hello; returns the answer and the session."""
    hello, session = make_hello(framing.decode(next(call)).header, token, **fields)
    send(hello)
    return parse_reply(framing.decode(next(call)).header), session


@contextlib.contextmanager
def _stream(transport):
    """A stream to a transport that speaks for itself: a function that sends bytes, and the answers."""
    requests, changed, ended = [], threading.Condition(), threading.Event()

    def send(data):
        with changed:
            requests.append(data)
            changed.notify_all()

    def generate():
        while True:
            with changed:
                changed.wait_for(lambda: requests or ended.is_set(), DEADLINE_SECONDS)
                if ended.is_set():
                    return
                data = requests.pop(0)
            yield data

    with grpc.insecure_channel(transport._address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(METHOD)(generate(), timeout=DEADLINE_SECONDS)
        try:
            yield send, call
        finally:
            call.cancel()
            with changed:
                ended.set()
                changed.notify_all()


if __name__ == "__main__":
    absltest.main()
