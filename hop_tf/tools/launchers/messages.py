"""What processes say to each other at a rendezvous: JSON in frames of bounded size.

A frame is its body's length (four bytes, little-endian) and the body. The one who is connected to sends a challenge;
the guest answers with a hello, and gets a reply: the list of all addresses, or why there is none. Proofs of the cluster
token are those of `hop_tf.transport.proof`.
"""

from __future__ import annotations

import dataclasses
import json
import struct

from hop_tf.errors import ClusterConfigError, DeadlineExceededError, HopError, ProtocolError
from hop_tf.transport.proof import Secret

# What a stranger may send, and a reply to more processes than any cluster has.
MAX_HELLO_BYTES = 4096
MAX_REPLY_BYTES = 1 << 23
_MAX_ADDRESS = 512

_LENGTH = struct.Struct("<I")
_ERRORS = {error.__name__: error for error in (ClusterConfigError, DeadlineExceededError)}


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a guest tells of itself.

    Attributes:
      number: Its number among all processes, from 1: process 0 is the one that listens.
      num_processes: How many there are, as it was told.
      num_ps: How many of them are parameter servers.
      address: Its "host:port".
    """

    number: int
    num_processes: int
    num_ps: int
    address: str

    def to_bytes(self) -> bytes:
        """As it is sent."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Hello:
        """What `to_bytes` has made.

        Raises:
          ProtocolError: If it is none.
        """
        fields = _parse(data)
        kinds = {"number": int, "num_processes": int, "num_ps": int, "address": str}
        if not (fields.keys() == kinds.keys() and all(type(fields[name]) is kind for name, kind in kinds.items())):
            raise ProtocolError("a hello must have a number, the numbers of processes and servers, and an address")
        if not 0 < len(fields["address"]) <= _MAX_ADDRESS:
            raise ProtocolError(f"an address must have at most {_MAX_ADDRESS} characters")
        return cls(**fields)


def addresses_to_bytes(addresses: list[str]) -> bytes:
    """The reply that lists all."""
    return json.dumps({"addresses": addresses}).encode()


def error_to_bytes(error: HopError) -> bytes:
    """The reply that tells why there is no list."""
    return json.dumps({"error": str(error), "type": type(error).__name__}).encode()


def addresses_from_bytes(data: bytes) -> list[str]:
    """The list in a reply.

    Raises:
      HopError: What the reply tells instead of it.
      ProtocolError: If it is no reply.
    """
    fields = _parse(data)
    if isinstance(fields.get("error"), str):
        raise _ERRORS.get(fields.get("type"), HopError)(fields["error"])
    addresses = fields.get("addresses")
    if not (isinstance(addresses, list) and all(isinstance(address, str) for address in addresses)):
        raise ProtocolError("a reply must have a list of addresses")
    return addresses


def frame(body: bytes) -> bytes:
    """A body with its length."""
    return _LENGTH.pack(len(body)) + body


def take_frame(received: bytearray, limit: int) -> bytes | None:
    """Takes a body from what was received; None if it is not complete yet.

    Raises:
      ProtocolError: If the body is longer than `limit`.
    """
    if len(received) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(received)
    if size > limit:
        raise ProtocolError(f"a message of {size} bytes, more than {limit}: it speaks another language")
    end = _LENGTH.size + size
    if len(received) < end:
        return None
    body = bytes(received[_LENGTH.size : end])
    del received[:end]
    return body


def rendezvous_secret(token: str | None) -> Secret:
    """The key for proofs of the cluster token at a rendezvous, which are of no use elsewhere; none without a token."""
    return Secret(Secret(token).mac("rendezvous").hex() if token else None)


def _parse(data: bytes) -> dict:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ProtocolError("no JSON object")
    return fields
