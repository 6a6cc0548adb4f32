"""Faults of a rank in a job of processes, and functions that cause them."""

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
from hop_tf.transport.grpc_transport import GrpcTransport

TOKEN = "secret"
TIMEOUT_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """The effects of one fault of a rank.

    Attributes:
      loses: True if the other ranks lose the rank.
      exit_code: Exit code of the rank's process.
      raises: True if the rank's `fit` raises HopError under every strategy.
    """

    loses: bool
    exit_code: int = 0
    raises: bool = False


KINDS = {
    "kill": Kind(loses=True, exit_code=-signal.SIGKILL),
    "restart": Kind(loses=True),  # The rank is killed, and restarted.
    "freeze": Kind(loses=True, exit_code=-signal.SIGKILL),  # Until the others have ended.
    "exception": Kind(loses=True, exit_code=1),
    "exit": Kind(loses=True, exit_code=3),
    "cut": Kind(loses=True, raises=True),  # All its links, in both directions.
    "deaf": Kind(loses=True, raises=True),  # The rank no longer receives.
    "dumb": Kind(loses=True, raises=True),  # The rank's messages no longer arrive.
    "pause": Kind(loses=False),  # It is frozen for less than the timeout.
    "stall": Kind(loses=False),  # As "cut", for less than the timeout.
    "garbage": Kind(loses=False),  # Strangers send random bytes to the rank's port.
    "strangers": Kind(loses=False),  # Strangers connect and send nothing.
    "credentials": Kind(loses=False),  # A stranger claims to be another rank, with a wrong token.
    "disk": Kind(loses=False),  # The rank can no longer write to its files.
}
# Faults of a rank's links, with the direction.
LINKS = {"cut": "both", "deaf": "to", "dumb": "from", "stall": "both"}
# Faults that a rank causes itself.
_OWN = ("exception", "exit", "disk")
_SHORT_SECONDS = TIMEOUT_SECONDS / 3
_CONNECT_SECONDS = 60.0


def happen_within(kind):
    """Causes a fault of the calling rank."""
    match kind:
        case "exception":
            raise MemoryError("on purpose")
        case "exit":
            raise SystemExit(3)
        case "disk":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Writing raises an error instead.
            _limit_files(0)


@contextlib.contextmanager
def files_again():
    """Lets the process write to files again in the end, because it writes its result to one."""
    try:
        yield
    finally:
        _limit_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])


def _limit_files(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def happen(kind, victim, runner, proxy, rng):
    """Causes a fault from outside.

    Returns:
      The time of `time.monotonic` at which the fault began, or None if the rank causes the fault itself.
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
    """Connects to the victim as another rank, with a wrong token, until the victim refuses."""
    options = CommunicationOptions(cluster_token=f"not {TOKEN}")
    claimed = (victim + 1) % len(addresses)
    with contextlib.closing(GrpcTransport(claimed, addresses, identity={}, options=options)) as stranger:
        stranger.connect(victim)
        deadline = time.monotonic() + _CONNECT_SECONDS
        while not stranger.status(victim).last_problem and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not stranger.status(victim).ever_connected


class FailingLinks:
    """Links between the processes of a job, which can fail because a proxy carries all messages.

    Args:
      directory: Directory of the file in which the test tells processes the proxy's addresses.
    """

    def __init__(self, directory):
        self._path = os.path.join(directory, "addresses")

    def resolver(self):
        """In a process: returns the cluster, with the proxy's addresses for peers. Blocks until the proxy is there."""
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
        """In the test: tells the processes of `runner` the addresses of `proxy`."""
        addresses = json.loads(runner.wait_for_output(0, "^addresses (.*)$").group(1))
        ports = [int(address.rpartition(":")[2]) for address in addresses]
        seen_from = [
            [addresses[of] if of == viewer else proxy.address(of, viewer, port) for of, port in enumerate(ports)]
            for viewer in range(len(ports))
        ]
        with open(f"{self._path}.new", "w") as file:
            json.dump(seen_from, file)
        os.replace(f"{self._path}.new", self._path)
