"""The names of processes: a process listens on the address that its own name resolves to on its machine."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Sequence

from absl import logging

from hop_tf.errors import ClusterConfigError, DeadlineExceededError
from hop_tf.transport.addresses import host_of

_PAUSE_SECONDS = 0.5


def check_own_name(addresses: Sequence[str], number: int, timeout_seconds: float) -> None:
    """Waits until this process's own name resolves, and checks that other machines can reach the address found.

    If machines get their names as they start (Kubernetes), a name may resolve only some seconds later. On some systems,
    a machine's own name resolves to a loopback address, such as 127.0.1.1 in /etc/hosts.

    Args:
      addresses: "host:port" of all processes.
      number: The index of this process among them.
      timeout_seconds: The time to wait.

    Raises:
      DeadlineExceededError: If the name does not resolve in time.
      ClusterConfigError: If the name resolves to a loopback address, and the name of another process does not. Also if
        a name that is looked up is malformed.

    Blocks: until the name resolves, at most `timeout_seconds`. The names of others are looked up within this time, too.
    The last look-up may exceed it, because the resolver of the system has its own time limit.
    """
    hosts = [host_of(address) for address in addresses]
    deadline = time.monotonic() + timeout_seconds
    own = _wait_for(hosts[number], deadline, timeout_seconds)
    # A numeric address, or "localhost", is intended. The others may be other names of this machine.
    if hosts[number] in (*own, "localhost") or not _are_loopback(own):
        return
    for other in dict.fromkeys(hosts):
        if time.monotonic() >= deadline:
            return  # Each look-up may take seconds if name servers do not answer.
        found = _look_up(other) if other != hosts[number] else own
        if isinstance(found, set) and not _are_loopback(found):
            raise ClusterConfigError(
                f"{hosts[number]}, the name of this process's machine, must resolve to an address that other machines "
                f"reach, as {other} does ({', '.join(sorted(found))}). Received: {', '.join(sorted(own))}, a loopback "
                f"address. See /etc/hosts on this machine, and `getent hosts {hosts[number]}`."
            )


def _wait_for(host: str, deadline: float, timeout_seconds: float) -> set[str]:
    is_told = False
    while isinstance(found := _look_up(host), OSError):
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(
                f"waited {timeout_seconds:g} s for this process's own name, {host}, to resolve on its machine: "
                f"{found.strerror}. The cluster description must have names that all its machines can resolve."
            ) from found
        if not is_told:
            logging.warning("hop_tf: %s, this process's own name, does not resolve yet: %s.", host, found.strerror)
            is_told = True
        time.sleep(min(_PAUSE_SECONDS, max(0.0, deadline - time.monotonic())))
    return found


def _look_up(host: str) -> set[str] | OSError:
    """Returns the numeric addresses of a name, or the error if there are none.

    Raises:
      ClusterConfigError: If the name is malformed.
    """
    try:
        return {sockaddr[0] for *_, sockaddr in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return error
    except UnicodeError as error:  # Python encodes names before it looks them up.
        raise ClusterConfigError(
            f"The parts of a host's name between its dots must have 1 to 63 characters. Received: {host!r}."
        ) from error


def _are_loopback(found: set[str]) -> bool:
    return all(ipaddress.ip_address(each).is_loopback for each in found)
