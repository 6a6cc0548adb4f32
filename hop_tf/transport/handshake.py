"""`Handshake`: what two ranks tell each other before the first message, and when they refuse to go on."""

from __future__ import annotations

import dataclasses
import hmac
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence

from google.protobuf.message import DecodeError

from hop_tf.errors import HopError, MismatchError, PeerLostError, ProtocolError
from hop_tf.transport import control_pb2
from hop_tf.transport.framing import MAX_LANES, PROTOCOL_VERSION
from hop_tf.transport.peer import Peer

# The lane of heartbeats, beside those of messages.
CONTROL_LANE = MAX_LANES
_PROTOCOL_FIELD = "transport.protocol"
_BAD_TOKEN = "it refused this rank's cluster token (see CommunicationOptions.cluster_token)"
_BAD_RANK = "it has another rank, or knows this rank under another number; check TF_CONFIG on both"
_TOO_EARLY = "its process has not shut an earlier strategy down, as this one has"
_TOO_LATE = "its process has shut the strategy down that this one is in, and made another one"
_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()


def new_incarnation() -> str:
    """A name that no other transport has. Up to a dot, those of one process are alike."""
    return f"{_PROCESS}-{os.getpid()}.{next(_numbers)}"


def _process(incarnation: str) -> str:
    return incarnation.partition(".")[0]


@dataclasses.dataclass
class _Past:
    """What a process keeps of the transports that it has made at one place.

    Attributes:
      generation: That of the last one; see `Hello.generation`.
      processes: By rank, the process that was met last.
    """

    generation: int = -1
    processes: dict[int, str] = dataclasses.field(default_factory=dict)


# By process (this one; in tests one passes for several), rank and cluster.
_pasts: dict[tuple[str, int, tuple[str, ...]], _Past] = {}


class RefusedError(HopError):
    """A greeting was refused; another attempt may succeed."""


@dataclasses.dataclass(frozen=True)
class Greeting:
    """An accepted hello: who will send on which lane, and the oldest message that it still has."""

    peer: Peer
    lane: int
    first_sequence: int


class Handshake:
    """This rank's side of every greeting.

    Args:
      rank: This rank.
      addresses: "host:port" of every rank.
      peers: All other ranks.
      incarnation: Name of this transport, see `new_incarnation`.
      identity: Fields that must be equal on all ranks.
      token: The secret that all ranks share, or None.
      on_restart: Called, on any thread, with a peer in whose place another process has greeted. What was on its way
        between this rank and the old process is to be forgotten before it returns. None: that fails the peer. (A
        process that greets with a later transport is to wait until this one, too, has been closed.)
      in_turn: Whether all ranks make transports in the same order. Default True.

    Attributes:
      socket_port: Port of this rank's plain sockets, which is told to all peers; 0 if it has none.
      interface_addresses: "host:port" of those on further interfaces, which are told, too.
    """

    def __init__(
        self,
        *,
        rank: int,
        addresses: Sequence[str],
        peers: Mapping[int, Peer],
        incarnation: str,
        identity: Mapping[str, str],
        token: str | None,
        on_restart: Callable[[Peer], None] | None = None,
        in_turn: bool = True,
    ):
        self._rank = rank
        self._past = _pasts.setdefault((_process(incarnation), rank, tuple(addresses)), _Past())
        self._in_turn = in_turn
        self._generation: int | None = None
        self._peers = peers
        self._incarnation = incarnation
        self._identity = {_PROTOCOL_FIELD: str(PROTOCOL_VERSION), **identity}
        self._token = (token or "").encode()
        self._on_restart = on_restart
        self._meeting = threading.Lock()
        self.socket_port = 0
        self.interface_addresses: tuple[str, ...] = ()

    def begin(self) -> None:
        """This transport serves from now on, and those that the process has made before do not."""
        if self._in_turn:
            self._past.generation += 1
            self._generation = self._past.generation

    def _join_generation(self, theirs: control_pb2.Hello | control_pb2.HelloReply) -> None:
        """A peer is in this strategy: if it has made more before, this process has taken the place of another."""
        with self._meeting:
            if self._lead_of(theirs) > 0:
                self._generation = self._past.generation = theirs.generation

    def _lead_of(self, theirs: control_pb2.Hello | control_pb2.HelloReply) -> int:
        """How many strategies more than this rank a peer has made before; 0 where that cannot be known."""
        if self._generation is None or not theirs.HasField("generation"):
            return 0
        return theirs.generation - self._generation

    # The side that opens a stream.

    def hello(self, peer: Peer, lane: int, first_sequence: int) -> bytes:
        """The message that opens a stream to `peer`. For the arguments see `control.proto`."""
        return control_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            sender=self._rank,
            receiver=peer.rank,
            lane=lane,
            incarnation=self._incarnation,
            token=self._token,
            identity=self._identity,
            first_sequence=first_sequence,
            receiver_incarnation=peer.incarnation or "",
            generation=self._generation,
        ).SerializeToString()

    def check_reply(self, peer: Peer, data: bytes) -> int:
        """Judges the answer to `hello`. What cannot be mended is also recorded as the peer's failure.

        Returns:
          Sequence number of the last message that the peer has received on the lane.

        Raises:
          RefusedError: If the peer refused, for a reason that may pass.
          MismatchError: If the peer disagrees on a field.
          PeerLostError: If one of the two processes was restarted.
          ProtocolError: If that is no answer.
        """
        reply = _parse(control_pb2.HelloReply, data)
        if reply.refusal == control_pb2.BAD_TOKEN:
            raise RefusedError(_BAD_TOKEN)
        if reply.refusal == control_pb2.BAD_RANK:
            raise RefusedError(_BAD_RANK)
        if reply.refusal == control_pb2.TOO_EARLY:
            peer.heard()  # Its earlier training may take a while.
            peer.reached()
            raise RefusedError(_TOO_EARLY)
        is_other = reply.refusal == control_pb2.OTHER_PROCESS
        if reply.refusal == control_pb2.TOO_LATE or (is_other and self._is_later(peer, reply)):
            raise RefusedError(_TOO_LATE)
        if reply.refusal == control_pb2.MISMATCH:
            raise self._fail(peer, self._mismatch(peer, reply.field, reply.value))
        if reply.refusal == control_pb2.RESTARTED:
            raise self._fail(peer, self._this_was_restarted(peer))
        if is_other:
            self._meet(peer, reply.incarnation)
            raise RefusedError("it was restarted")
        if reply.refusal != control_pb2.ACCEPTED:
            raise ProtocolError(f"{peer} gave unknown refusal {reply.refusal}.")
        self._meet(peer, reply.incarnation)
        self._join_generation(reply)
        peer.interface_addresses = tuple(reply.interface_addresses)
        peer.record_socket_port(reply.socket_port)
        return reply.received_sequence

    # The side that is greeted.

    def check_hello(self, data: bytes) -> Greeting:
        """Judges a hello. A peer that proves to be in the cluster and disagrees has its failure recorded.

        Raises:
          HelloRefusedError: If it is refused; holds the answer to send.
          ProtocolError: If that is no hello.
        """
        hello = _parse(control_pb2.Hello, data)
        if not hmac.compare_digest(hello.token, self._token):
            raise HelloRefusedError("wrong cluster token", self._reply(control_pb2.BAD_TOKEN))
        peer = self._peers.get(hello.sender)
        if peer is None or hello.lane > CONTROL_LANE:
            problem = f"impossible rank {hello.sender} or lane {hello.lane}"
            raise HelloRefusedError(problem, self._reply(control_pb2.BAD_RANK))
        # What earlier strategies of the two processes disagree on is of no matter.
        if hello.receiver_incarnation not in ("", self._incarnation):
            is_same = _process(hello.receiver_incarnation) == _process(self._incarnation)
            problem = f"{peer} takes this {'strategy' if is_same else 'process'} for an earlier one"
            raise (OtherStrategyError if is_same else HelloRefusedError)(
                problem, self._reply(control_pb2.OTHER_PROCESS)
            )
        if not hello.receiver_incarnation and peer.incarnation != hello.incarnation:
            self._check_generation(peer, hello)
        self._check_identity(peer, {**hello.identity, _PROTOCOL_FIELD: str(hello.protocol_version)})
        if hello.receiver != self._rank:
            problem = f"{peer} takes this rank for rank {hello.receiver}"
            raise HelloRefusedError(problem, self._reply(control_pb2.BAD_RANK))
        try:
            self._meet(peer, hello.incarnation)
        except PeerLostError as error:
            raise HelloRefusedError(str(error), self._reply(control_pb2.RESTARTED)) from error
        self._join_generation(hello)
        return Greeting(peer, hello.lane, hello.first_sequence)

    def _check_generation(self, peer: Peer, hello: control_pb2.Hello) -> None:
        """Raises OtherStrategyError if `peer` is in another strategy than this rank. They have not met in this one."""
        if self._is_later(peer, hello):
            problem = f"{peer} has shut a strategy down that this rank has not, and made another one"
            raise OtherStrategyError(problem, self._reply(control_pb2.TOO_EARLY))
        # A process that was started again has made fewer, and joins the others in theirs.
        if self._lead_of(hello) < 0 and self._past.processes.get(peer.rank) in (None, _process(hello.incarnation)):
            problem = f"{peer} has not shut a strategy down that this rank has"
            raise OtherStrategyError(problem, self._reply(control_pb2.TOO_LATE))

    def _is_later(self, peer: Peer, theirs: control_pb2.Hello | control_pb2.HelloReply) -> bool:
        """Whether the process of `peer` has made this transport after the one that belongs to this rank's."""
        is_same_process = peer.incarnation is not None and _process(peer.incarnation) == _process(theirs.incarnation)
        return (is_same_process and peer.incarnation != theirs.incarnation) or self._lead_of(theirs) > 0

    def _meet(self, peer: Peer, incarnation: str) -> None:
        """Makes sure that `peer` is that process; lets it take the place of an earlier one if that is allowed.

        Raises:
          PeerLostError: If it is not.
        """
        with self._meeting:
            if not peer.is_incarnation(incarnation):
                self._replace(peer, incarnation)
            self._past.processes[peer.rank] = _process(incarnation)

    def _replace(self, peer: Peer, incarnation: str) -> None:
        if self._on_restart is None:
            raise self._fail(peer, self._peer_was_restarted(peer))
        if not peer.replace(incarnation):
            raise PeerLostError(f"rank {self._rank}: a process of {peer} came back after another took its place.")
        self._on_restart(peer)
        peer.introduce()

    def accept(self, received_sequence: int) -> bytes:
        """The answer that accepts a hello; see `control.proto`."""
        return self._reply(
            control_pb2.ACCEPTED,
            received_sequence=received_sequence,
            socket_port=self.socket_port,
            interface_addresses=self.interface_addresses,
        )

    def _check_identity(self, peer: Peer, theirs: Mapping[str, str]) -> None:
        for field in [*self._identity, *sorted(theirs.keys() - self._identity.keys())]:
            if theirs.get(field) != self._identity.get(field):
                error = self._fail(peer, self._mismatch(peer, field, theirs.get(field, "")))
                reply = self._reply(control_pb2.MISMATCH, field=field, value=self._identity.get(field, ""))
                raise HelloRefusedError(str(error), reply)

    def _reply(self, refusal: int, **fields) -> bytes:
        return control_pb2.HelloReply(
            refusal=refusal, incarnation=self._incarnation, generation=self._generation, **fields
        ).SerializeToString()

    # Errors.

    def _fail(self, peer: Peer, error: HopError) -> HopError:
        peer.fail(error)
        return error

    def _mismatch(self, peer: Peer, field: str, theirs: str) -> MismatchError:
        return MismatchError(
            f"rank {self._rank}: {peer} disagrees on {field!r}: {theirs!r} there, "
            f"{self._identity.get(field, '')!r} here. It must be the same on all ranks."
        )

    def _peer_was_restarted(self, peer: Peer) -> PeerLostError:
        return PeerLostError(
            f"rank {self._rank}: {peer} was restarted: another process answers there than before. "
            "Its state is lost; start the job again."
        )

    def _this_was_restarted(self, peer: Peer) -> PeerLostError:
        return PeerLostError(
            f"rank {self._rank}: {peer} is in a job with another process of rank {self._rank}: "
            "this process was restarted, or replaced. Start the whole job again."
        )


class HelloRefusedError(HopError):
    """A hello was refused.

    Attributes:
      reply: The answer that says so.
    """

    def __init__(self, message: str, reply: bytes):
        super().__init__(message)
        self.reply = reply


class OtherStrategyError(HelloRefusedError):
    """A hello was refused because one of the two ranks is not done with an earlier strategy, which is no mistake."""


def _parse(message_type, data: bytes):
    try:
        return message_type.FromString(data)
    except (DecodeError, ValueError) as error:
        raise ProtocolError(f"a malformed {message_type.DESCRIPTOR.name}: {error}.") from error
