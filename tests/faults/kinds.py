"""What may happen to a rank in a job of processes, and how a test brings it about."""

import contextlib
import dataclasses
import json
import os
import resource
import signal
import socket
import time

import tensorflow as tf

from hop_tf.options import CommunicationOptions
from hop_tf.transport import GrpcTransport

TOKEN = "secret"
TIMEOUT_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """One thing that may happen to a rank.

    Attributes:
      loses: Whether the others lose the rank.
      exit_code: How its process ends.
      raises: Whether its `fit` raises HopError, whatever the strategy.
    """

    loses: bool
    exit_code: int = 0
    raises: bool = False


KINDS = {
    "kill": Kind(loses=True, exit_code=-signal.SIGKILL),
    "restart": Kind(loses=True),  # It is killed, and started again.
    "freeze": Kind(loses=True, exit_code=-signal.SIGKILL),  # Until the others have ended.
    "exception": Kind(loses=True, exit_code=1),
    "exit": Kind(loses=True, exit_code=3),
    "cut": Kind(loses=True, raises=True),  # All its links, in both directions.
    "deaf": Kind(loses=True, raises=True),  # Nothing reaches it any more.
    "dumb": Kind(loses=True, raises=True),  # Nothing comes from it any more.
    "pause": Kind(loses=False),  # It is frozen for less than the timeout.
    "stall": Kind(loses=False),  # As "cut", for less than the timeout.
    "garbage": Kind(loses=False),  # Strangers send it to its port.
    "strangers": Kind(loses=False),  # They connect to it, and say nothing.
    "credentials": Kind(loses=False),  # A stranger says that it is another rank, with another token.
    "disk": Kind(loses=False),  # It cannot write to its files any more.
}
# What happens to the links of a rank, with the direction.
LINKS = {"cut": "both", "deaf": "to", "dumb": "from", "stall": "both"}
# What a rank does to itself.
_OWN = ("exception", "exit", "disk")
_SHORT_SECONDS = TIMEOUT_SECONDS / 3
_CONNECT_SECONDS = 60.0


def happen_within(kind):
    """What the rank does to itself."""
    match kind:
        case "exception":
            raise MemoryError("on purpose")
        case "exit":
            raise SystemExit(3)
        case "disk":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # To write is an error instead.
            _limit_files(0)


@contextlib.contextmanager
def files_again():
    """In the end a process can write to its files again: its result is in one."""
    try:
        yield
    finally:
        _limit_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])


def _limit_files(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def happen(kind, victim, runner, proxy, rng):
    """Brings it about from outside.

    Returns:
      When that began, of `time.monotonic`; None where the rank does it to itself.
    """
    if kind in _OWN:
        return None
    now = time.monotonic()
    match kind:
        case "kill":
            runner.kill(victim)
        case "restart":
            runner.kill(victim)
            runner.restart(victim)
        case "freeze":
            runner.pause(victim)
        case "pause":
            runner.pause(victim)
            time.sleep(_SHORT_SECONDS)
            runner.resume(victim)
        case "stall":
            proxy.stall(victim, _SHORT_SECONDS)
        case "cut" | "deaf" | "dumb":
            proxy.cut(victim, direction=LINKS[kind])
        case "garbage":
            _send(runner.addresses[victim], rng.randbytes(3000), num_connections=20)
        case "strangers":
            _send(runner.addresses[victim], b"", num_connections=100)
        case "credentials":
            _impersonate(runner.addresses, victim)
    return now


def _send(address, data, num_connections):
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):  # The other side may close them.
        for _ in range(num_connections):
            connection = sockets.enter_context(socket.create_connection((host, int(port)), _SHORT_SECONDS))
            connection.sendall(data)
        time.sleep(0.3)


def _impersonate(addresses, victim):
    """Knocks at the victim's door as another rank, with another token, until it is turned away."""
    options = CommunicationOptions(cluster_token=f"not {TOKEN}")
    claimed = (victim + 1) % len(addresses)
    with contextlib.closing(GrpcTransport(claimed, addresses, identity={}, options=options)) as stranger:
        stranger.connect(victim)
        deadline = time.monotonic() + _CONNECT_SECONDS
        while not stranger.status(victim).last_problem and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not stranger.status(victim).ever_connected


class FailingLinks:
    """Links between the processes of a job, which can fail: a proxy carries all that they send to each other.

    Args:
      directory: Where processes find what each other's addresses are.
    """

    def __init__(self, directory):
        self._path = os.path.join(directory, "addresses")

    def resolver(self):
        """In a process: the cluster, where others are reached through the proxy. Blocks until there is one."""
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        tasks = resolver.cluster_spec().as_dict()
        print(
            "addresses",
            json.dumps([address for name in ("worker", "ps") for address in tasks.get(name, ())]),
            flush=True,
        )
        deadline = time.monotonic() + _CONNECT_SECONDS
        while not os.path.exists(self._path):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._path} is not there.")
            time.sleep(0.02)
        with open(self._path) as file:
            seen_from = json.load(file)
        resolver.make_transport = lambda number, addresses, **arguments: GrpcTransport(
            number, seen_from[number], **arguments
        )
        return resolver

    def connect(self, runner, proxy):
        """In the test: tells the processes of `runner` where `proxy` carries what they send."""
        addresses = json.loads(runner.wait_for_output(0, "^addresses (.*)$").group(1))
        ports = [int(address.rpartition(":")[2]) for address in addresses]
        seen_from = [
            [addresses[of] if of == viewer else proxy.address(of, viewer, port) for of, port in enumerate(ports)]
            for viewer in range(len(ports))
        ]
        with open(f"{self._path}.new", "w") as file:
            json.dump(seen_from, file)
        os.replace(f"{self._path}.new", self._path)
