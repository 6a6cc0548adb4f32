"""`Handshake`: the greeting between two ranks before the first message, and the reasons to refuse it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

from hop_tf.errors import HopError, MismatchError, PeerLostError, ProtocolError
from hop_tf.transport import control_pb2
from hop_tf.transport.certificates import names_host
from hop_tf.transport.framing import MAX_LANES, PROTOCOL_VERSION
from hop_tf.transport.incarnation import past_of, process_of
from hop_tf.transport.peer import Peer
from hop_tf.transport.proof import NotProvenError, Secret, Session, new_challenge, parse, seal_refusal
from hop_tf.transport.unauthenticated_peers import GuessRateLimiter

# The lane of heartbeats, after the lanes of messages.
CONTROL_LANE = MAX_LANES
_PROTOCOL_FIELD = "transport.protocol"
_TOO_EARLY = "its process has not shut down an earlier strategy, which this process has shut down"
_TOO_LATE = "its process has shut down the strategy that this process uses, and created another one"
# Refusals that may be temporary, and that do not change the state of the peer.
_PASSING = {
    control_pb2.BAD_TOKEN: "it refused this rank's cluster token (see CommunicationOptions.cluster_token)",
    control_pb2.BAD_RANK: "it has another rank, or knows this rank under another number; check TF_CONFIG on both",
    control_pb2.TOO_MANY_GUESSES: "it has received many wrong cluster tokens from this host: try again later",
    control_pb2.UNCONFIRMED: "it knows another process of this rank, and now checks this rank's address",
    control_pb2.BAD_CERTIFICATE: "this rank's certificate does not name the host that the cluster lists for it",
}
_UNSIGNED = (control_pb2.BAD_TOKEN, control_pb2.TOO_MANY_GUESSES)


class RefusedError(HopError):
    """A greeting was refused. Another attempt may succeed."""


@dataclasses.dataclass(frozen=True)
class Greeting:
    """An accepted hello.

    Attributes:
      peer: The peer that will send.
      lane: The lane of its messages.
      first_sequence: Number of the oldest message that the peer still has.
      session: The messages of the greeting so far, and the keys derived from them.
      shared_memory: The memory that the sender offers, or None.
    """

    peer: Peer
    lane: int
    first_sequence: int
    session: Session
    shared_memory: control_pb2.SharedMemory | None


class Handshake:
    """This rank's side of every greeting.

    Args:
      rank: This rank.
      addresses: "host:port" of every rank.
      peers: All other ranks.
      incarnation: Name of this transport, see `new_incarnation`.
      identity: Fields that must be equal on all ranks.
      secret: The token that all ranks share.
      guesses: Limits the rate of wrong tokens.
      encrypted: True if connections protect their data themselves.
      on_doubt: Called, on any thread, with a peer in whose name another process may have greeted. Begins to connect to
        the peer, unless this rank has begun before, because the process at the peer's address is the real one.
      on_restart: Called, on any thread, with a peer after another process has greeted in its place. Must forget all
        messages in flight between this rank and the old process before it returns. Default None: a restart makes the
        peer fail. (A process that greets with a later transport has to wait until this rank has closed its transport.)
      in_turn: True if all ranks create transports in the same order. Default True.

    Attributes:
      socket_port: Port of this rank's plain sockets, which answers to greetings announce; 0 if it has none.
      interface_addresses: "host:port" of the sockets on further interfaces, announced in the same way.
    """

    def __init__(
        self,
        *,
        rank: int,
        addresses: Sequence[str],
        peers: Mapping[int, Peer],
        incarnation: str,
        identity: Mapping[str, str],
        secret: Secret,
        guesses: GuessRateLimiter,
        encrypted: bool,
        on_doubt: Callable[[Peer], object],
        on_restart: Callable[[Peer], None] | None = None,
        in_turn: bool = True,
    ):
        self._rank = rank
        self._past = past_of(incarnation, rank, addresses)
        self._in_turn = in_turn
        self._generation: int | None = None
        self._peers = peers
        self._incarnation = incarnation
        self._version = PROTOCOL_VERSION
        self._identity = {_PROTOCOL_FIELD: str(self._version), **identity}
        self._secret = secret
        self._guesses = guesses
        self._encrypted = encrypted
        self._on_doubt = on_doubt
        self._on_restart = on_restart
        self._meeting = threading.Lock()
        self.socket_port = 0
        self.interface_addresses: tuple[str, ...] = ()

    def begin(self) -> None:
        """Called when this transport begins to serve. The process's earlier transports no longer serve."""
        if self._in_turn:
            self._past.generation += 1
            self._generation = self._past.generation

    def _join_generation(self, theirs: control_pb2.Hello | control_pb2.HelloReply) -> None:
        """Adopts a peer's generation if it is ahead of this rank's: this process has then replaced another."""
        with self._meeting:
            if self._lead_of(theirs) > 0:
                self._generation = self._past.generation = theirs.generation

    def _lead_of(self, theirs: control_pb2.Hello | control_pb2.HelloReply) -> int:
        """The number of strategies that a peer has created beyond this rank's; 0 if that is not known."""
        if self._generation is None or not theirs.HasField("generation"):
            return 0
        return theirs.generation - self._generation

    # The side that opens a stream.

    def hello(
        self,
        peer: Peer,
        lane: int,
        first_sequence: int,
        challenge: bytes,
        shared_memory: control_pb2.SharedMemory | None = None,
    ) -> tuple[bytes, Session]:
        """The message that opens a stream to `peer`, and the session that it begins.

        Args:
          peer: The peer.
          lane: See `control.proto`.
          first_sequence: See `control.proto`.
          challenge: The peer's first message.
          shared_memory: See `control.proto`.

        Raises:
          ProtocolError: If `challenge` is no challenge.
        """
        session = Session(self._secret, challenge, encrypted=self._encrypted)
        hello = control_pb2.Hello(
            protocol_version=self._version,
            sender=self._rank,
            receiver=peer.rank,
            lane=lane,
            incarnation=self._incarnation,
            identity=self._identity,
            first_sequence=first_sequence,
            receiver_incarnation=peer.incarnation or "",
            generation=self._generation,
            shared_memory=shared_memory,
        )
        return session.seal_hello(hello.SerializeToString()), session

    def check_reply(self, peer: Peer, data: bytes, session: Session) -> control_pb2.HelloReply:
        """Judges the answer to `hello`. A permanent refusal is also recorded as the peer's failure.

        Returns:
          The answer, which accepts the greeting.

        Raises:
          RefusedError: If the peer refused for a reason that may be temporary.
          MismatchError: If the peer disagrees on a field.
          PeerLostError: If one of the two processes was restarted.
          ProtocolError: If `data` is no answer.
        """
        reply = _open_reply(data, session)
        if reply.refusal in _PASSING:
            raise RefusedError(_PASSING[reply.refusal])
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
        return reply

    # The side that is greeted.

    def challenge(self) -> tuple[bytes, Session]:
        """The first message on a new connection, and the session that it begins."""
        challenge = new_challenge()
        return challenge, Session(self._secret, challenge, encrypted=self._encrypted)

    def check_hello(
        self, data: bytes, session: Session, source: str, certificate_names: frozenset[str] | None
    ) -> Greeting:
        """Judges a hello. If a peer proves to be in the cluster and disagrees, its failure is recorded.

        Args:
          data: The hello.
          session: The session that `challenge` returned.
          source: The connection's source, see `source_of`.
          certificate_names: Names in the certificate of the peer; None without TLS.

        Raises:
          HelloRefusedError: If the hello is refused. The error holds the answer to send.
          ProtocolError: If `data` is no hello.
        """
        hello = self._authenticate(data, session, source)
        try:
            return self._judge(hello, session, certificate_names)
        except HelloRefusedError as error:
            error.reply = session.seal_reply(error.reply)
            raise

    def _authenticate(self, data: bytes, session: Session, source: str) -> control_pb2.Hello:
        """Returns the hello if its sender knows the token. Other senders get only a refusal."""
        if not self._guesses.take(source):
            reply = control_pb2.HelloReply(refusal=control_pb2.TOO_MANY_GUESSES).SerializeToString()
            raise HelloRefusedError("too many wrong cluster tokens came from that host", seal_refusal(reply))
        try:
            body = session.open_hello(data)
        except NotProvenError as error:
            reply = control_pb2.HelloReply(refusal=control_pb2.BAD_TOKEN).SerializeToString()
            raise HelloRefusedError(str(error), seal_refusal(reply)) from None
        self._guesses.give_back(source)
        return parse(control_pb2.Hello, body)

    def _judge(self, hello: control_pb2.Hello, session: Session, certificate_names: frozenset[str] | None) -> Greeting:
        peer = self._peers.get(hello.sender)
        if peer is None or hello.lane > CONTROL_LANE:
            problem = f"impossible rank {hello.sender} or lane {hello.lane}"
            raise HelloRefusedError(problem, self._reply(control_pb2.BAD_RANK))
        if certificate_names is not None and not names_host(certificate_names, peer.host):
            names = ", ".join(sorted(certificate_names)) or "no host"
            problem = f"it claims to be {peer}, but its certificate is for {names}"
            raise HelloRefusedError(problem, self._reply(control_pb2.BAD_CERTIFICATE))
        # Disagreements between earlier strategies of the two processes do not matter.
        if hello.receiver_incarnation not in ("", self._incarnation):
            is_same = process_of(hello.receiver_incarnation) == process_of(self._incarnation)
            problem = f"{peer} takes this {'strategy' if is_same else 'process'} for an earlier one"
            raise (OtherStrategyError if is_same else HelloRefusedError)(
                problem, self._reply(control_pb2.OTHER_PROCESS)
            )
        if not hello.receiver_incarnation and peer.incarnation != hello.incarnation:
            self._check_generation(peer, hello)
        if not self._secret and certificate_names is None:
            self._check_plausible(peer, hello)
        self._check_identity(peer, {**hello.identity, _PROTOCOL_FIELD: str(hello.protocol_version)})
        if hello.receiver != self._rank:
            problem = f"{peer} takes this rank for rank {hello.receiver}"
            raise HelloRefusedError(problem, self._reply(control_pb2.BAD_RANK))
        try:
            self._meet(peer, hello.incarnation)
        except PeerLostError as error:
            raise HelloRefusedError(str(error), self._reply(control_pb2.RESTARTED)) from error
        self._join_generation(hello)
        shared_memory = hello.shared_memory if hello.HasField("shared_memory") else None
        return Greeting(peer, hello.lane, hello.first_sequence, session, shared_memory)

    def _check_plausible(self, peer: Peer, hello: control_pb2.Hello) -> None:
        """Raises HelloRefusedError if an unknown process greets, without proof, in the name of a peer that was met.

        If the peer was really restarted, this rank's own connection to its address shows that. Then this rank admits
        the process.
        """
        if peer.failure is None and not peer.has_been(hello.incarnation):
            self._on_doubt(peer)
            problem = f"it claims to be another process of {peer} than the known one"
            raise HelloRefusedError(problem, self._reply(control_pb2.UNCONFIRMED))

    def _check_generation(self, peer: Peer, hello: control_pb2.Hello) -> None:
        """Raises OtherStrategyError if `peer`, which has not met this transport yet, uses another strategy."""
        if self._is_later(peer, hello):
            problem = f"{peer} has shut down a strategy that this rank still uses, and created another one"
            raise OtherStrategyError(problem, self._reply(control_pb2.TOO_EARLY))
        # A process that was started again has created fewer strategies, and joins the others in the present one.
        if self._lead_of(hello) < 0 and self._past.processes.get(peer.rank) in (None, process_of(hello.incarnation)):
            problem = f"{peer} has not shut down a strategy that this rank has shut down"
            raise OtherStrategyError(problem, self._reply(control_pb2.TOO_LATE))

    def _is_later(self, peer: Peer, theirs: control_pb2.Hello | control_pb2.HelloReply) -> bool:
        """True if `theirs` is from a transport that the peer's process has made after the one that this rank knows."""
        is_same_process = peer.incarnation is not None and process_of(peer.incarnation) == process_of(
            theirs.incarnation
        )
        return (is_same_process and peer.incarnation != theirs.incarnation) or self._lead_of(theirs) > 0

    def _meet(self, peer: Peer, incarnation: str) -> None:
        """Checks that `peer` is the process `incarnation`, or lets that process replace an earlier one.

        Raises:
          PeerLostError: If the process may not replace the earlier one.
        """
        with self._meeting:
            if not peer.is_incarnation(incarnation):
                self._replace(peer, incarnation)
            self._past.processes[peer.rank] = process_of(incarnation)

    def _replace(self, peer: Peer, incarnation: str) -> None:
        if self._on_restart is None:
            raise self._fail(peer, self._peer_was_restarted(peer))
        if not peer.replace(incarnation):
            raise PeerLostError(
                f"rank {self._rank}: a process of {peer} came back after another process took its place."
            )
        self._on_restart(peer)
        peer.introduce()

    def accept(self, greeting: Greeting, received_sequence: int, *, shares_memory: bool = False) -> bytes:
        """The answer that accepts a hello; see `control.proto`."""
        return greeting.session.seal_reply(
            self._reply(
                control_pb2.ACCEPTED,
                received_sequence=received_sequence,
                socket_port=self.socket_port,
                interface_addresses=self.interface_addresses,
                shares_memory=shares_memory,
            )
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
            f"rank {self._rank}: {peer} was restarted: a new process answers at its address. The state of the old one "
            "is lost. Start the job again."
        )

    def _this_was_restarted(self, peer: Peer) -> PeerLostError:
        return PeerLostError(
            f"rank {self._rank}: {peer} is in a job with another process of rank {self._rank}: "
            "this process was restarted, or replaced. Start the whole job again."
        )


class HelloRefusedError(HopError):
    """A hello was refused.

    Attributes:
      reply: The answer to send.
    """

    def __init__(self, message: str, reply: bytes):
        super().__init__(message)
        self.reply = reply


class OtherStrategyError(HelloRefusedError):
    """A hello was refused because one of the two ranks still uses an earlier strategy. This is no mistake."""


def _open_reply(data: bytes, session: Session) -> control_pb2.HelloReply:
    """The answer to a hello. A peer that does not prove the token may only refuse."""
    try:
        return parse(control_pb2.HelloReply, session.open_reply(data))
    except NotProvenError as error:
        reply = parse(control_pb2.HelloReply, error.body)
        if reply.refusal not in _UNSIGNED:
            raise RefusedError("it did not prove that it knows the cluster token") from None
        return reply
