"""Transports: named queues between ranks."""

from hop_tf.transport.base import Handler, Message, PeerStatus, Transport
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.in_process import InProcessNetwork, InProcessTransport
from hop_tf.transport.tcp_transport import TcpTransport

__all__ = [
    "GrpcTransport",
    "Handler",
    "InProcessNetwork",
    "InProcessTransport",
    "Message",
    "PeerStatus",
    "TcpTransport",
    "Transport",
]
