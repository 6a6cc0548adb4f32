"""`meet`: a rendezvous of processes that know only process 0's address. Each sends its own address and gets all."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from hop_tf.errors import ClusterConfigError, DeadlineExceededError, HopError, ProtocolError
from hop_tf.tools.launchers import messages
from hop_tf.tools.launchers.host import Host
from hop_tf.tools.launchers.variables import Place
from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.transport.proof import NotProvenError, Session
from hop_tf.transport.unauthenticated_peers import GREETING_SECONDS

HOST_VARIABLE = "HOP_TF_HOST"
_CONNECT_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


def meet(place: Place, *, num_ps: int, token: str | None, timeout_seconds: float) -> tuple[list[str], PortReservation]:
    """Meets the other processes of a job.

    Process 0 listens at `place.master`. Each process reserves a free port of its machine, at the host in HOP_TF_HOST.
    If this variable is not set, process 0 uses the name in `place.master`, and the others use the address from which
    they connect.

    Args:
      place: The place of this process, with a `master`.
      num_ps: The number of processes that are parameter servers. All must agree.
      token: The cluster token, or None.
      timeout_seconds: The time to wait for the others.

    Returns:
      "host:port" of every process, in order; and the reservation of this process's port, which the caller keeps until
      the port is in use.

    Raises:
      DeadlineExceededError: If process 0, or others, do not arrive in time.
      ClusterConfigError: If processes contradict each other.
      HopError: If a port is not available, or another token is used.

    Blocks: until all have arrived, at most `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    if place.number == 0:
        host = Host(place.master, num_processes=place.num_processes, num_ps=num_ps, token=token)
        with contextlib.closing(host), contextlib.ExitStack() as stack:
            name = os.environ.get(HOST_VARIABLE) or place.master[0]
            own = name if os.environ.get(HOST_VARIABLE) else host.listening_on
            port = stack.enter_context(reserve_port(own))
            addresses = host.gather(join_address(name, port.ports[0]), deadline, timeout_seconds)
            stack.pop_all()
            return addresses, port
    return _Guest(place, num_ps, token).ask(deadline, timeout_seconds)


class _Guest:
    """The part of a process other than process 0 in a rendezvous."""

    def __init__(self, place: Place, num_ps: int, token: str | None):
        self._place = place
        self._num_ps = num_ps
        self._secret = messages.rendezvous_secret(token)
        self._port: PortReservation | None = None
        self._address = ""

    def ask(self, deadline: float, timeout_seconds: float) -> tuple[list[str], PortReservation]:
        """Tries until process 0 answers."""
        pause_seconds, problem = _FIRST_PAUSE_SECONDS, None
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    addresses = self._try(deadline, stack)
                    stack.pop_all()
                    return addresses, self._port
                except (OSError, ProtocolError) as error:
                    # A ProtocolError is kept, because it is the most useful error. Later attempts may fail at an
                    # earlier stage.
                    if not isinstance(problem, ProtocolError):
                        problem = error
                    if time.monotonic() + pause_seconds >= deadline:
                        raise self._too_late(problem, timeout_seconds) from problem
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _try(self, deadline: float, stack: contextlib.ExitStack) -> list[str]:
        with socket.create_connection(self._place.master, _until(deadline, _CONNECT_SECONDS)) as connection:
            if self._port is None:
                host = os.environ.get(HOST_VARIABLE) or connection.getsockname()[0]
                self._port = stack.enter_context(reserve_port(host))
                self._address = join_address(host, self._port.ports[0])
            greeting_deadline = min(deadline, time.monotonic() + GREETING_SECONDS)
            challenge = _receive(connection, messages.MAX_HELLO_BYTES, greeting_deadline)
            session = Session(self._secret, challenge, encrypted=False)
            place = self._place
            hello = messages.Hello(place.number, place.num_processes, self._num_ps, self._address)
            connection.sendall(messages.frame(session.seal_hello(hello.to_bytes())))
            reply = _receive(connection, messages.MAX_REPLY_BYTES, deadline)
            try:
                addresses = messages.addresses_from_bytes(session.open_reply(reply))
            except NotProvenError as error:
                raise self._refused(error.body) from error
        if len(addresses) != place.num_processes or addresses[place.number] != self._address:
            raise ProtocolError(
                f"expected a list of {place.num_processes} addresses. Received: {len(addresses)} addresses"
            )
        return addresses

    def _refused(self, reply: bytes) -> HopError:
        """The error in a reply without a proof."""
        try:
            messages.addresses_from_bytes(reply)
        except ProtocolError as error:
            return error
        except HopError as error:
            return type(error)(f"rank {self._place.number} was refused by {self._where()}: {error}.")
        return HopError(
            f"rank {self._place.number}: the process at {self._where()} does not know this rank's cluster token. Give "
            "all processes the same token (HOP_TF_CLUSTER_TOKEN)."
        )

    def _too_late(self, problem: Exception, timeout_seconds: float) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"rank {self._place.number}: waited {timeout_seconds:g} s for rank 0 at {self._where()}: {problem}. Check "
            "that rank 0 was started, that MASTER_ADDR and MASTER_PORT lead to its machine, and that no other program "
            "uses that port."
        )

    def _where(self) -> str:
        return join_address(*self._place.master)


def reserve_port(host: str) -> PortReservation:
    """Reserves a free port of this machine. The strategy can bind it, and no other job gets it before that.

    Args:
      host: Name or address of this machine, on which the strategy will listen.

    Returns:
      The reservation, to be kept until the port is in use.

    Raises:
      ClusterConfigError: If the machine cannot listen on this name or address.
    """
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise ClusterConfigError(
            f"{HOST_VARIABLE} must be a name or an address of this process's machine. Received: {host!r}, on which it "
            f"cannot listen: {error}."
        ) from error
    reservation = PortReservation(1, host)
    reservation.release()
    return reservation


def _receive(connection: socket.socket, limit: int, deadline: float) -> bytes:
    """Receives a message. Raises TimeoutError if it is late, or ConnectionError if the connection has ended."""
    received = bytearray()
    while (body := messages.take_frame(received, limit)) is None:
        connection.settimeout(_until(deadline))
        data = connection.recv(65536)
        if not data:
            raise ConnectionError("it has closed the connection")
        received += data
    return body


def _until(deadline: float, at_most: float = float("inf")) -> float:
    """The remaining seconds. Raises TimeoutError if there are none."""
    seconds = min(at_most, deadline - time.monotonic())
    if seconds <= 0:
        raise TimeoutError("no answer came in time")
    return seconds


def join_address(host: str, port: int) -> str:
    """A host and a port as "host:port", IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
