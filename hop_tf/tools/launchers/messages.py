"""The messages of a rendezvous: JSON in frames of bounded size.

A frame is its body's length (four bytes, little-endian) and the body. The host sends a challenge. The guest answers
with a hello, and gets a reply: the list of all addresses, or the reason that there is none. Proofs of the cluster token
are those of `hop_tf.transport.proof`.
"""

from __future__ import annotations

import dataclasses
import json
import struct

from hop_tf.errors import ClusterConfigError, DeadlineExceededError, HopError, ProtocolError
from hop_tf.transport.proof import Secret

# The largest sizes: of a hello, which unauthenticated peers may send, and of a reply, enough for any cluster.
MAX_HELLO_BYTES = 4096
MAX_REPLY_BYTES = 1 << 23
_MAX_ADDRESS = 512

_LENGTH = struct.Struct("<I")
_ERRORS = {error.__name__: error for error in (ClusterConfigError, DeadlineExceededError)}


@dataclasses.dataclass(frozen=True)
class Hello:
    """The hello of a guest.

    Attributes:
      number: The guest's number among all processes, from 1. Process 0 is the host.
      num_processes: The number of processes, as the guest knows it.
      num_ps: The number of processes that are parameter servers.
      address: The guest's "host:port".
    """

    number: int
    num_processes: int
    num_ps: int
    address: str

    def to_bytes(self) -> bytes:
        """Returns the hello as bytes to send."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Hello:
        """Parses the bytes of `to_bytes`.

        Raises:
          ProtocolError: If the bytes are not a hello.
        """
        fields = _parse(data)
        kinds = {"number": int, "num_processes": int, "num_ps": int, "address": str}
        if not (fields.keys() == kinds.keys() and all(type(fields[name]) is kind for name, kind in kinds.items())):
            raise ProtocolError("a hello must have a number, the numbers of processes and servers, and an address")
        if not 0 < len(fields["address"]) <= _MAX_ADDRESS:
            raise ProtocolError(f"an address must have at most {_MAX_ADDRESS} characters")
        return cls(**fields)


def addresses_to_bytes(addresses: list[str]) -> bytes:
    """Returns the reply that lists all addresses."""
    return json.dumps({"addresses": addresses}).encode()


def error_to_bytes(error: HopError) -> bytes:
    """Returns the reply with the error that replaces the list."""
    return json.dumps({"error": str(error), "type": type(error).__name__}).encode()


def addresses_from_bytes(data: bytes) -> list[str]:
    """Returns the list in a reply.

    Raises:
      HopError: If the reply tells an error instead. The exception has the type of that error, if the type is known.
      ProtocolError: If the data is not a reply.
    """
    fields = _parse(data)
    if isinstance(fields.get("error"), str):
        raise _ERRORS.get(fields.get("type"), HopError)(fields["error"])
    addresses = fields.get("addresses")
    if not (isinstance(addresses, list) and all(isinstance(address, str) for address in addresses)):
        raise ProtocolError("a reply must have a list of addresses")
    return addresses


def frame(body: bytes) -> bytes:
    """Returns a frame with this body."""
    return _LENGTH.pack(len(body)) + body


def take_frame(received: bytearray, limit: int) -> bytes | None:
    """Takes a body from the received bytes. Returns None if it is not complete yet.

    Raises:
      ProtocolError: If the body is longer than `limit`.
    """
    if len(received) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(received)
    if size > limit:
        raise ProtocolError(
            f"a message of {size} bytes, more than {limit}: the other side does not speak this protocol"
        )
    end = _LENGTH.size + size
    if len(received) < end:
        return None
    body = bytes(received[_LENGTH.size : end])
    del received[:end]
    return body


def rendezvous_secret(token: str | None) -> Secret:
    """The key for proofs of the cluster token at a rendezvous, useless elsewhere. Without a token there is no key."""
    return Secret(Secret(token).mac("rendezvous").hex() if token else None)


def _parse(data: bytes) -> dict:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ProtocolError("no JSON object")
    return fields
