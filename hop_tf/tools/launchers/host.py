"""Process 0's side of a rendezvous: it listens, collects the addresses of the others, and sends them to all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import selectors
import socket
import time
from collections.abc import Callable

from absl import logging

from hop_tf.errors import ClusterConfigError, DeadlineExceededError, HopError, ProtocolError
from hop_tf.tools.launchers import messages
from hop_tf.transport.proof import NotProvenError, Secret, Session, new_challenge, seal_refusal
from hop_tf.transport.unauthenticated_peers import GREETING_SECONDS, MAX_UNAUTHENTICATED, GuessRateLimiter, source_of

_POLL_SECONDS = 0.5
_PAUSE_SECONDS = 0.1
# Time to send a reply. Replies fit into the system's buffers, or the receiver reads them soon.
_REPLY_SECONDS = 5.0
_MAX_NAMED = 20


@dataclasses.dataclass(eq=False)
class _Guest:
    """A connection from another process.

    Attributes:
      connection: The socket.
      source: The host that it comes from.
      session: The session of its greeting.
      deadline: The time by which it must have greeted.
      received: The bytes of its hello that have come.
      hello: Its hello, or None before that has come.
    """

    connection: socket.socket
    source: str
    session: Session
    deadline: float
    received: bytearray = dataclasses.field(default_factory=bytearray)
    hello: messages.Hello | None = None


class Host:
    """Listens at the address of process 0. The caller must close it.

    Args:
      master: Host and port to listen on.
      num_processes: The number of processes, including this one.
      num_ps: The number of processes that are parameter servers. All must agree.
      token: The cluster token, or None.

    Attributes:
      listening_on: The numeric address of this machine on which the first socket listens.

    Raises:
      HopError: If this machine does not have the address, or another program listens there.
    """

    def __init__(self, master: tuple[str, int], *, num_processes: int, num_ps: int, token: str | None):
        self._master_host = master[0]
        self._where = f"{master[0]}:{master[1]}"
        self._num_processes = num_processes
        self._num_ps = num_ps
        self._secret: Secret = messages.rendezvous_secret(token)
        self._guesses = GuessRateLimiter()
        self._guests: dict[_Guest, None] = {}  # The oldest first.
        self._last_refusal = ""
        self._selector = selectors.DefaultSelector()
        self._sockets = _listen(master)
        for listening in self._sockets:
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ, self._accepting(listening))
        self.listening_on: str = self._sockets[0].getsockname()[0]

    def gather(self, own_address: str, deadline: float, timeout_seconds: float) -> list[str]:
        """Waits for all other processes, and sends all addresses to each of them.

        Args:
          own_address: Address of this process.
          deadline: The time until which to wait, on `time.monotonic`'s clock.
          timeout_seconds: The length of the wait, for the error.

        Returns:
          The addresses, in the order of the processes' numbers.

        Raises:
          DeadlineExceededError: If some processes have not come. The others get the same error.
          ClusterConfigError: If some processes have announced addresses at which others could not reach them.

        Blocks: until all have come, at most until `deadline`.
        """
        try:
            while missing := self._missing():
                if time.monotonic() >= deadline:
                    raise DeadlineExceededError(self._describe(missing, timeout_seconds))
                self._poll(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            others = {guest.hello.number: guest.hello.address for guest in self._present()}
            addresses = [own_address, *(others[number] for number in range(1, self._num_processes))]
            self._check_loopback(addresses)
        except HopError as error:
            self._reply(messages.error_to_bytes(error))
            raise
        self._reply(messages.addresses_to_bytes(addresses))
        return addresses

    def close(self) -> None:
        """Closes all connections."""
        for guest in list(self._guests):
            self._dismiss(guest)
        for listening in self._sockets:
            listening.close()
        self._selector.close()

    def _present(self) -> list[_Guest]:
        return [guest for guest in self._guests if guest.hello is not None]

    def _missing(self) -> list[int]:
        return sorted({*range(1, self._num_processes)} - {guest.hello.number for guest in self._present()})

    def _describe(self, missing: list[int], timeout_seconds: float) -> str:
        names = ", ".join(map(str, missing[:_MAX_NAMED])) + (", ..." if len(missing) > _MAX_NAMED else "")
        notes = f" Last refused: {self._last_refusal}." if self._last_refusal else ""
        if _is_loopback(self.listening_on):
            notes += f" {self.listening_on} is a loopback address: other machines do not reach it."
        return (
            f"waited {timeout_seconds:g} s for ranks {names} at {self._where}.{notes} Check that all "
            f"{self._num_processes} processes were started, and that their machines reach that port."
        )

    def _poll(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            key.data()
        now = time.monotonic()
        for guest in [guest for guest in self._guests if guest.hello is None and now > guest.deadline]:
            self._refuse(guest, ProtocolError("no greeting came in time"))

    def _accepting(self, listening: socket.socket) -> Callable[[], None]:
        def accept() -> None:
            try:
                connection, address = listening.accept()
            except OSError as error:  # The connection has closed again, or file descriptors are used up.
                logging.log_every_n_seconds(logging.WARNING, "Cannot accept a connection: %s.", 10, error)
                time.sleep(_PAUSE_SECONDS)
                return
            connection.setblocking(False)
            challenge = new_challenge()
            session = Session(self._secret, challenge, encrypted=False)
            source = source_of(f"{address[0]}:{address[1]}")
            guest = _Guest(connection, source, session, time.monotonic() + GREETING_SECONDS)
            self._guests[guest] = None
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(guest))
            try:
                connection.send(messages.frame(challenge))  # Fits into the buffer of a new connection.
            except OSError:
                self._dismiss(guest)
            self._make_room()

        return accept

    def _make_room(self) -> None:
        """Refuses the oldest connection without a greeting if there are too many. A process of the job retries."""
        unauthenticated = [guest for guest in self._guests if guest.hello is None]
        if len(unauthenticated) > MAX_UNAUTHENTICATED + self._num_processes:
            self._refuse(unauthenticated[0], ProtocolError("too many connections have not greeted yet"))

    def _read(self, guest: _Guest) -> None:
        if guest not in self._guests:  # The guest was dismissed after `select` had seen it.
            return
        try:
            data = guest.connection.recv(messages.MAX_HELLO_BYTES)
            if not data or guest.hello is not None:  # The guest is gone, or sends more than a hello.
                self._dismiss(guest)
                return
            guest.received += data
            body = messages.take_frame(guest.received, messages.MAX_HELLO_BYTES)
            if body is not None:
                self._admit(guest, body)
        except OSError:
            self._dismiss(guest)
        except HopError as error:
            self._refuse(guest, error)

    def _admit(self, guest: _Guest, body: bytes) -> None:
        if self._secret and not self._guesses.take(guest.source):
            raise ProtocolError("too many wrong cluster tokens from this host")  # The guest may try again.
        try:
            hello = messages.Hello.from_bytes(guest.session.open_hello(body))
        except NotProvenError as error:
            raise HopError(
                "it has another cluster token, or none; see HOP_TF_CLUSTER_TOKEN"
                if self._secret
                else "it has a cluster token, and rank 0 has none; see HOP_TF_CLUSTER_TOKEN"
            ) from error
        if self._secret:
            self._guesses.give_back(guest.source)
        self._check(hello)
        for other in self._present():
            if other.hello.number == hello.number:
                if other.hello.address != hello.address:
                    raise ClusterConfigError(
                        f"rank {hello.number} is there already, from {other.hello.address}: two processes have this "
                        "number"
                    )
                self._dismiss(other)  # The process lost its connection, and has connected again.
        guest.hello = hello

    def _check(self, hello: messages.Hello) -> None:
        own = (self._num_processes, self._num_ps)
        if (hello.num_processes, hello.num_ps) != own:
            raise ClusterConfigError(
                f"rank {hello.number} at {hello.address} is one of {hello.num_processes} processes with "
                f"num_ps={hello.num_ps}, rank 0 one of {own[0]} with num_ps={own[1]}: all processes must have the same "
                "numbers"
            )
        if not 0 < hello.number < self._num_processes:
            raise ClusterConfigError(
                f"rank {hello.number} is not one of the {self._num_processes} processes of this job"
            )

    def _check_loopback(self, addresses: list[str]) -> None:
        """Raises ClusterConfigError if only some addresses are loopback: other machines do not reach these."""
        hosts = [address.rpartition(":")[0] for address in addresses]
        if hosts[0].strip("[]") == self._master_host:  # A name may stand for a loopback address.
            hosts[0] = self.listening_on
        is_loopback = [_is_loopback(host) for host in hosts]
        if any(is_loopback) and not all(is_loopback):
            near, far = is_loopback.index(True), is_loopback.index(False)
            raise ClusterConfigError(
                f"rank {near} at {addresses[near]} has a loopback address, which other machines do not reach, such as "
                f"that of rank {far} at {addresses[far]}. Set MASTER_ADDR to another address of rank 0's machine, or "
                "HOP_TF_HOST to the address of each process's machine."
            )

    def _refuse(self, guest: _Guest, error: HopError) -> None:
        self._last_refusal = f"{guest.source}, as {error}"
        logging.log_every_n_seconds(logging.WARNING, "A connection was refused: %s.", 1, self._last_refusal)
        with contextlib.suppress(OSError):  # The guest is gone, or does not read.
            guest.connection.send(messages.frame(seal_refusal(messages.error_to_bytes(error))))
        self._dismiss(guest)

    def _dismiss(self, guest: _Guest) -> None:
        if guest in self._guests:
            del self._guests[guest]
            self._selector.unregister(guest.connection)
            guest.connection.close()

    def _reply(self, body: bytes) -> None:
        for guest in self._present():
            try:
                guest.connection.settimeout(_REPLY_SECONDS)
                guest.connection.sendall(messages.frame(guest.session.seal_reply(body)))
            except OSError as error:
                logging.warning("rank %d at %s is gone again: %s.", guest.hello.number, guest.hello.address, error)


def _listen(master: tuple[str, int]) -> list[socket.socket]:
    """Returns sockets that listen on all addresses of `master`'s name that belong to this machine."""
    host, port = master
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    with contextlib.ExitStack() as stack:
        for family, address in _resolve(host, port):
            try:
                listening = socket.create_server(address[:2], family=family, backlog=128)
            except OSError as error:
                problem = error
                if error.errno == errno.EADDRINUSE:
                    break
            else:
                sockets.append(stack.enter_context(listening))
        if not sockets or (problem is not None and problem.errno == errno.EADDRINUSE):
            raise HopError(
                f"rank 0 cannot listen on {host}:{port}: {problem.strerror}. MASTER_ADDR must be an address of the "
                "machine that rank 0 runs on, and MASTER_PORT (or HOP_TF_RENDEZVOUS_PORT) free there."
            ) from problem
        stack.pop_all()
    return sockets


def _resolve(host: str, port: int) -> dict[tuple[int, tuple], None]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HopError(
            f"rank 0 cannot listen on {host}:{port}: {error.strerror}. MASTER_ADDR must be a name or an address of the "
            "machine that rank 0 runs on."
        ) from error
    return {(family, address): None for family, _, _, _, address in found}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
