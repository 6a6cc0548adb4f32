"""`EmulatedNetwork`: hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from .hosts import Hosts
from .keeper import CLOSE_SECONDS
from .links import Links
from .namespaces import available, enter, path_of
from .relay import RelayStatistics

# The program of the keeper.
_KEEP = "import sys; sys.path.insert(0, sys.argv[1]); import network.keeper; network.keeper.keep()"


class EmulatedNetwork(Hosts):
    """Hosts that are network namespaces, with links between them.

    A context manager: entering makes the network, leaving removes it and kills the processes inside of it.

    Args:
      num_hosts: Number of hosts.
      max_socket_bytes: The size to which the buffers of a TCP connection may grow. Default: the machine's default,
        often 4 to 6 MiB. A connection never has more bytes in flight. To use the whole rate, it needs twice the rate
        times the round trip.
      relay: True if a relay carries the packets. Default: only if links have delays. Failures need a relay. A relay is
        also used if the kernel cannot carry the packets and hosts have one interface.
      num_interfaces: The number of links of each host, each to a switch of its own. Each link has the host's rate. Must
        be 1 with a relay.
      **links: The arguments of `Links`.

    Attributes:
      addresses: The IPv4 address of each host's first interface. Only IPv4 is supported.
      interfaces: The addresses of each host's interfaces.

    Raises:
      ValueError: If a value is out of range, if the links have delays and `relay` is False, or if a relay carries the
        packets and `num_interfaces` is not 1.
      RuntimeError: On entering, if this machine cannot have the network. Nothing is left behind.
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        max_socket_bytes: int | None = None,
        relay: bool | None = None,
        num_interfaces: int = 1,
        **links,
    ):
        super().__init__(Links(num_hosts, **links))
        if max_socket_bytes is not None and max_socket_bytes < 65536:
            raise ValueError(
                f"`max_socket_bytes` must be at least 65536. Received: max_socket_bytes={max_socket_bytes}."
            )
        if relay is False and self.links.delayed:
            raise ValueError(f"`relay` must not be False if links have delays. Received: relay={relay}.")
        self._max_socket_bytes = max_socket_bytes
        self._wants_relay = self.links.delayed if relay is None else relay
        if num_interfaces < 1 or (num_interfaces > 1 and self._wants_relay):
            raise ValueError(
                "`num_interfaces` must be at least 1, and 1 if a relay carries the packets. Received: "
                f"num_interfaces={num_interfaces}."
            )
        self.interfaces = tuple(
            tuple(f"10.{level}.0.{host + 1}" for level in range(num_interfaces)) for host in range(num_hosts)
        )
        self.addresses = tuple(first for first, *_ in self.interfaces)
        self._has_relay = False
        self._namespaces: list[str] = []
        self._keeper: subprocess.Popen | None = None
        self._lock = threading.Lock()

    @property
    def relayed(self) -> bool:
        """True if a relay carries the packets. Otherwise the kernel does."""
        return self._has_relay

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        return [path_of("nsenter"), f"--net={self._namespace(host)}", "--", *argv]

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        with open("/proc/thread-self/ns/net") as home, open(self._namespace(host)) as namespace:
            enter(namespace.fileno())
            try:
                yield
            finally:
                enter(home.fileno())

    def statistics(self) -> RelayStatistics:
        """Returns the relay's statistics so far.

        Raises:
          RuntimeError: If the network has no relay.
        """
        return RelayStatistics(**self._ask_relay({"order": "statistics"}))

    def _start(self) -> None:
        reason = available()
        if reason is not None:
            raise RuntimeError(f"Cannot create a network here: {reason}.")
        # The keeper has a session of its own: Ctrl-C reaches only this process, which then ends the keeper properly.
        argv = [sys.executable, "-P", "-c", _KEEP, str(pathlib.Path(__file__).resolve().parents[1])]
        pipe = subprocess.PIPE
        self._keeper = subprocess.Popen(argv, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
        delays = {"round_trip_seconds": 0.0, "one_way_seconds": self.links.delays}
        links = dataclasses.replace(self.links, bandwidth_bits_per_second=self.links.rates, **delays)
        plan = {"relay": self._wants_relay, "max_socket_bytes": self._max_socket_bytes, "addresses": self.interfaces}
        made = self._ask({**plan, "links": dataclasses.asdict(links)})
        self._has_relay = made["relay"]
        self._namespaces = [f"/proc/{self._keeper.pid}/fd/{descriptor}" for descriptor in made["namespaces"]]

    def _stop(self) -> None:
        keeper, self._keeper, self._namespaces = self._keeper, None, []
        if keeper is None:
            return
        # Sends an order instead of only closing the pipe, which a process that was forked from this one may hold open.
        with contextlib.suppress(OSError), keeper.stdin:
            keeper.stdin.write(json.dumps({"order": "close"}).encode() + b"\n")
        try:
            keeper.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
        keeper.stdout.close()

    def _fail(self, kind: str, pairs: list[tuple[int, int]], seconds: float) -> None:
        self._ask_relay({"order": kind, "pairs": pairs, "seconds": seconds})

    def _namespace(self, host: int) -> str:
        self._check_hosts(host)
        if not self._namespaces:
            raise RuntimeError("The network exists only within its `with` statement.")
        return self._namespaces[host]

    def _ask_relay(self, order: dict) -> dict:
        if not self._has_relay:
            raise RuntimeError(
                "The kernel carries this network's packets, so it has no relay. Pass `relay=True` for one."
            )
        return self._ask(order)

    def _ask(self, order: dict) -> dict:
        """Sends an order to the keeper, and returns the answer. Blocks until the answer comes."""
        with self._lock:
            if self._keeper is None:
                raise RuntimeError("The network is closed.")
            with contextlib.suppress(BrokenPipeError):
                self._keeper.stdin.write(json.dumps(order).encode() + b"\n")
            answer = self._keeper.stdout.readline()
        if not answer:
            raise RuntimeError("The process that holds the network has ended.")
        value = json.loads(answer)
        if "error" in value:
            raise RuntimeError(f"Cannot create the network: {value['error']}")
        return value
