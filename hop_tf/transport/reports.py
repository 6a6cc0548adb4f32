"""Reports of a running rank, for whoever supervises the job: served on the rank's own address, and read-only."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping

import grpc

REPORT_METHOD = "/hop_tf.Supervision/Report"


class ReportHandler(grpc.GenericRpcHandler):
    """Answers a request, whose bytes are the cluster token, with the rank's report as JSON.

    Args:
      rank: This rank.
      token: The secret that all ranks share, or None.

    Attributes:
      report: Returns the counters. None: there are none yet.
    """

    def __init__(self, rank: int, token: str | None):
        self._rank = rank
        self._token = (token or "").encode()
        self.report: Callable[[], Mapping[str, object]] | None = None
        self._rpc = grpc.unary_unary_rpc_method_handler(self._serve)

    def service(self, handler_call_details):
        return self._rpc if handler_call_details.method == REPORT_METHOD else None

    def _serve(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if not hmac.compare_digest(request, self._token):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong cluster token")
        report = {} if self.report is None else self.report()
        return json.dumps({"rank": self._rank, **report}, default=float).encode()


class ReportReader:
    """Asks a rank for its reports.

    Args:
      address: "host:port" of the rank in the cluster description.
      token: The secret that all ranks share, or None.
      credentials: For TLS; None: plain text.
    """

    def __init__(self, address: str, token: str | None = None, credentials: grpc.ChannelCredentials | None = None):
        self.address = address
        self._token = (token or "").encode()
        options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self._call = self._channel.unary_unary(REPORT_METHOD)

    def read(self, timeout_seconds: float) -> dict[str, object]:
        """The rank's report.

        Raises:
          grpc.RpcError: If the rank cannot be reached, or refuses.
          ValueError: If the answer is no report.
        """
        report = json.loads(self._call(self._token, timeout=timeout_seconds))
        if not isinstance(report, dict):
            raise ValueError(f"{self.address} answered with no report.")
        return report

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()
