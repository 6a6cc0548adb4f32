"""Reports of a running rank, for the supervision of a job: served on the rank's own address, and read-only.

A reader proves that it knows the cluster token in the same way as a connecting rank (`proof.py`), in a call of its own.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Mapping

import grpc

from hop_tf.errors import ProtocolError
from hop_tf.transport.daemon_executor import DaemonExecutor
from hop_tf.transport.proof import NotProvenError, Secret, Session, new_challenge
from hop_tf.transport.unauthenticated_peers import GuessRateLimiter, UnauthenticatedPeers, source_of

REPORT_METHOD = "/hop_tf.Supervision/Report"


class ReportHandler(grpc.GenericRpcHandler):
    """Answers readers that know the cluster token with the rank's report as JSON.

    Args:
      rank: This rank.
      secret: The token.
      unauthenticated: The connections that have not proven yet that they know the token.
      guesses: Limits the rate of wrong proofs.
      executor: Runs the thread of each call.

    Attributes:
      report: Returns the counters. None if there are no counters yet.
    """

    def __init__(
        self,
        rank: int,
        secret: Secret,
        *,
        unauthenticated: UnauthenticatedPeers,
        guesses: GuessRateLimiter,
        executor: DaemonExecutor,
    ):
        self._rank = rank
        self._secret = secret
        self._unauthenticated = unauthenticated
        self._guesses = guesses
        self._executor = executor
        self.report: Callable[[], Mapping[str, object]] | None = None
        self._rpc = grpc.stream_stream_rpc_method_handler(self._serve)

    def service(self, handler_call_details):
        """The call's handler. If there are too many calls, it is None, and the call takes no thread."""
        is_admitted = handler_call_details.method == REPORT_METHOD and self._unauthenticated.admit(
            self._executor.try_reserve
        )
        return self._rpc if is_admitted else None

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        source = source_of(context.peer())
        challenge = new_challenge()
        session = Session(self._secret, challenge, encrypted=False)
        caller = self._unauthenticated.enter(source, context.cancel)
        try:
            yield challenge
            hello = next(requests, b"")
        finally:
            self._unauthenticated.leave(caller)
        if caller.problem:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, caller.problem)
        self._authenticate(hello, session, source, context)
        report = {} if self.report is None else self.report()
        yield session.seal_reply(json.dumps({"rank": self._rank, **report}, default=float).encode())

    def _authenticate(self, hello: bytes, session: Session, source: str, context: grpc.ServicerContext) -> None:
        if not self._guesses.take(source):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many wrong cluster tokens came from this host")
        try:
            session.open_hello(hello)
        except (NotProvenError, ProtocolError):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong cluster token")
        self._guesses.give_back(source)


class ReportReader:
    """Asks a rank for its reports.

    Args:
      address: "host:port" of the rank in the cluster description.
      token: The secret that all ranks share, or None.
      credentials: Credentials for TLS, or None for plain text.
    """

    def __init__(self, address: str, token: str | None = None, credentials: grpc.ChannelCredentials | None = None):
        self.address = address
        self._secret = Secret(token)
        options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self._call = self._channel.stream_stream(REPORT_METHOD)

    def read(self, timeout_seconds: float) -> dict[str, object]:
        """The rank's report.

        Raises:
          grpc.RpcError: If the rank cannot be reached, or refuses.
          ValueError: If the answer is no report, or comes from a process that does not know the token.
        """
        requests = queue.SimpleQueue()
        call = self._call(iter(requests.get, None), timeout=timeout_seconds)
        try:
            session = Session(self._secret, next(call, b""), encrypted=False)
            requests.put(session.seal_hello(b""))
            report = json.loads(session.open_reply(next(call, b"")))
        except (NotProvenError, ProtocolError) as error:
            raise ValueError(f"{self.address} answered with no report: {error}") from error
        finally:
            requests.put(None)
            call.cancel()
        if not isinstance(report, dict):
            raise ValueError(f"{self.address} answered with no report.")
        return report

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()
