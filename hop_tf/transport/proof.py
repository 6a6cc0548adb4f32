"""Proofs that a process knows the cluster token, without revealing it, and a connection's keys, derived from it.

The server sends a *nonce*, a random number that is used once. The client answers with a nonce of its own, its hello,
and a proof: the HMAC-SHA256, with the token as the key, over both nonces and the hello. The server's answer carries a
proof over both nonces, the hello and the answer. So each side knows that the other side has the token, although the
token is never sent. Overheard messages are of no use on another connection. Without a token the key is empty, and
anyone can make the proofs.
"""

from __future__ import annotations

import hmac
import secrets

from google.protobuf.message import DecodeError

from hop_tf.errors import HopError, ProtocolError
from hop_tf.transport import control_pb2
from hop_tf.transport.checksum import Checksums, NoChecksums

_NONCE_BYTES = 32


class NotProvenError(HopError):
    """The peer has not proven that it knows the cluster token.

    Attributes:
      body: The body of its message.
    """

    def __init__(self, body: bytes):
        super().__init__("wrong cluster token")
        self.body = body


class Secret:
    """The token that all ranks share.

    Args:
      token: The text, or None. Without a token, proofs prove nothing.
    """

    def __init__(self, token: str | None):
        self._key = (token or "").encode()

    def __bool__(self) -> bool:
        """True if there is a token."""
        return bool(self._key)

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """HMAC-SHA256 over the purpose and the parts (with their lengths)."""
        message = b"".join(len(part).to_bytes(8, "little") + part for part in (purpose.encode(), *parts))
        return hmac.digest(self._key, message, "sha256")


def new_challenge() -> bytes:
    """The server's first message: a `Challenge` with a new nonce."""
    return control_pb2.Challenge(nonce=secrets.token_bytes(_NONCE_BYTES)).SerializeToString()


class Session:
    """A greeting, as both sides see it: the messages so far, and the keys derived from them.

    Args:
      secret: The token.
      challenge: The `Challenge` that the greeting answers.
      encrypted: True if the connection protects its data itself.

    Raises:
      ProtocolError: If `challenge` is no challenge.
    """

    def __init__(self, secret: Secret, challenge: bytes, *, encrypted: bool):
        nonce = parse(control_pb2.Challenge, challenge).nonce
        if len(nonce) != _NONCE_BYTES:
            raise ProtocolError(f"a challenge must have {_NONCE_BYTES} bytes. Received: {len(nonce)} bytes.")
        self._secret = secret
        self._encrypted = encrypted
        self._said = [nonce]

    def seal_hello(self, body: bytes) -> bytes:
        """The client's `Signed` message with a hello."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._said += [nonce, body]
        return control_pb2.Signed(body=body, nonce=nonce, proof=self._proof("hello")).SerializeToString()

    def open_hello(self, data: bytes) -> bytes:
        """The hello in a `Signed` message.

        Raises:
          NotProvenError: If its proof is wrong.
          ProtocolError: If `data` is no such message.
        """
        signed = parse(control_pb2.Signed, data)
        self._said += [signed.nonce, signed.body]
        return self._checked(signed, "hello")

    def seal_reply(self, body: bytes) -> bytes:
        """The `Signed` message with the answer."""
        self._said.append(body)
        return control_pb2.Signed(body=body, proof=self._proof("reply")).SerializeToString()

    def open_reply(self, data: bytes) -> bytes:
        """The answer in a `Signed` message. For errors see `open_hello`."""
        signed = parse(control_pb2.Signed, data)
        self._said.append(signed.body)
        return self._checked(signed, "reply")

    def checksums(self, sender: str) -> Checksums | NoChecksums:
        """The checksums of frames that `sender` ("client", which connects, or "server") sends after the greeting."""
        return NoChecksums() if self._encrypted else Checksums(self._proof(f"frames of the {sender}", *self._said[:2]))

    def _checked(self, signed: control_pb2.Signed, purpose: str) -> bytes:
        if not hmac.compare_digest(signed.proof, self._proof(purpose)):
            raise NotProvenError(signed.body)
        return signed.body

    def _proof(self, purpose: str, *said: bytes) -> bytes:
        return self._secret.mac(purpose, *(said or self._said))


def seal_refusal(body: bytes) -> bytes:
    """The `Signed` message with an answer to a peer without a proof. The answer has no proof either."""
    return control_pb2.Signed(body=body).SerializeToString()


def parse(message_type, data: bytes):
    """Parses a protobuf message.

    Raises:
      ProtocolError: If `data` is no message of that type.
    """
    try:
        return message_type.FromString(data)
    except (DecodeError, ValueError) as error:
        raise ProtocolError(f"a malformed {message_type.DESCRIPTOR.name}: {error}.") from error
