"""`Hosts`: the common base of a network and its substitute."""

from __future__ import annotations

import atexit
import contextlib
import math
import subprocess
from collections.abc import Iterator, Sequence

from .links import Links


class Hosts:
    """The common base of a network and its substitute: hosts, their processes, and links that fail.

    A context manager: entering starts the network, leaving closes it. May be used from any thread.
    """

    addresses: tuple[str, ...]

    def __init__(self, links: Links):
        self.links = links
        self._processes: list[subprocess.Popen] = []

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return self.links.num_hosts

    def address(self, of: int, seen_from: int, port: int) -> str:
        """The "host:port" at which host `seen_from` reaches a port of host `of`."""
        self._check_hosts(of, seen_from)
        return f"{self.addresses[of]}:{port}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Returns a command that runs `argv` inside of a host. The command's process id is that of the program."""
        self._check_hosts(host)
        return list(argv)

    def popen(self, host: int, argv: Sequence[str], **kwargs) -> subprocess.Popen:
        """Starts a program inside of a host. It is killed when the network is closed, if it still runs.

        Args:
          host: The host.
          argv: The program and its arguments.
          **kwargs: The arguments of `subprocess.Popen`.
        """
        process = subprocess.Popen(self.command(host, argv), **kwargs)
        self._processes.append(process)
        return process

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Moves the calling thread into a host until the `with` block ends.

        A socket that the thread creates there, and a process that it starts, belong to that host for good. Other
        threads do not, even if a library starts them later.
        """
        self._check_hosts(host)
        yield

    def stall(self, host: int, seconds: float, other: int | None = None, *, direction: str = "both") -> None:
        """Holds back all packets from or to a host, for some time from now.

        Packets that fit into the queue arrive afterwards, in order.

        Args:
          host: The host.
          seconds: The time.
          other: Another host, to hold back only packets between the two. Default: all hosts.
          direction: "from" for only packets from the host, "to" for only packets to the host. Default "both".

        Raises:
          ValueError: If a host or a direction does not exist or `seconds` is negative.
          RuntimeError: If the network has no relay.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"`seconds` must be finite and not negative. Received: seconds={seconds}.")
        self._order("stall", host, other, direction, seconds)

    def cut(self, host: int, other: int | None = None, *, direction: str = "both") -> None:
        """Drops all packets from or to a host (or between two hosts) until `restore`. See `stall`."""
        self._order("cut", host, other, direction)

    def restore(self, host: int, other: int | None = None, *, direction: str = "both") -> None:
        """Undoes `cut`."""
        self._order("restore", host, other, direction)

    def close(self) -> None:
        """Kills every process of every host and removes the network. May be called twice."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        self._stop()
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def __enter__(self):
        atexit.register(self.close)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _start(self) -> None:
        raise NotImplementedError

    def _stop(self) -> None:
        raise NotImplementedError

    def _fail(self, kind: str, pairs: list[tuple[int, int]], seconds: float) -> None:
        """Applies `Path.fail` to directed pairs of hosts."""
        raise NotImplementedError

    def _order(self, kind: str, host: int, other: int | None, direction: str, seconds: float = 0.0) -> None:
        self._check_hosts(host, *([] if other is None else [other]))
        others = range(self.num_hosts) if other is None else [other]
        pairs = {"from": [(host, b) for b in others], "to": [(b, host) for b in others]}
        pairs["both"] = sorted({*pairs["from"], *pairs["to"]})
        if direction not in pairs:
            raise ValueError(f"`direction` must be one of {', '.join(sorted(pairs))}. Received: {direction!r}.")
        self._fail(kind, pairs[direction], seconds)

    def _check_hosts(self, *hosts: int) -> None:
        for host in hosts:
            if not 0 <= host < self.num_hosts:
                raise ValueError(f"A host must be 0 to {self.num_hosts - 1}. Received: host={host}.")
