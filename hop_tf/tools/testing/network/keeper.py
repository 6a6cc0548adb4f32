"""The keeper: a program of its own that makes a network, and holds it."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import time
from collections.abc import Iterable, Sequence

from . import orders
from .links import Links
from .namespaces import enter, execute, ip, make_device, new_namespace
from .relay import Relay

CLOSE_SECONDS = 10.0


def keep() -> None:
    """Makes a network, and holds it until the owner is gone. Then kills all processes inside of it.

    Runs as a program of its own. The namespaces have no names: they exist as long as this process has them open.
    """
    owner = os.getppid()
    plan = orders.receive()
    if plan is None:
        return
    links = Links(**plan["links"])
    try:
        namespaces, devices = _make_namespaces(plan, links)
    except (OSError, RuntimeError) as error:
        orders.send({"error": str(error)})
        return
    _go_first()
    gc.freeze()
    gc.disable()
    try:
        orders.send({"namespaces": namespaces, "relay": bool(devices)})
        Relay(links, devices).run()
    finally:
        _kill_inside(namespaces, spared={os.getpid(), owner})


def _go_first() -> None:
    """Gives this process priority, so that it runs at once even if the hosts keep the machine busy."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


def _make_namespaces(plan: dict, links: Links) -> tuple[list[int], list[int]]:
    """Returns the hosts' namespaces, and their TUN devices if a relay has to carry the packets."""
    with open("/proc/self/ns/net") as home:
        try:
            addresses = plan["addresses"]
            if plan["relay"] or (len(addresses[0]) == 1 and not _kernel_can(links)):
                made = _make_relayed([first for first, *_ in addresses], links)
            else:
                made = _make_bridged(addresses, links), []
            for namespace in made[0]:
                enter(namespace)
                _set_socket_bytes(plan["max_socket_bytes"])
            return made
        finally:
            enter(home.fileno())


def _kernel_can(links: Links) -> bool:
    """True if the kernel supports `_make_bridged`. Tries it in a namespace that leaves no trace."""
    os.close(new_namespace())
    try:
        ip("link add switch type bridge", "link add port0 type veth peer name eth0")
        _limit("port0", links, links.rates.index(min(links.rates)))
    except RuntimeError:
        return False
    return True


def _make_bridged(addresses: Sequence[Sequence[str]], links: Links) -> list[int]:
    """Makes a namespace for each host, and one for the bridges, one per interface. Returns the hosts' namespaces."""
    switches = new_namespace()
    for level in range(len(addresses[0])):
        ip(f"link add switch{level} type bridge", f"link set switch{level} up")
    namespaces = []
    for host, of_host in enumerate(addresses):
        namespaces.append(new_namespace())
        ip("link set lo up")
        there = f"/proc/{os.getpid()}/fd/{namespaces[-1]}"
        bundle = f"gso_max_size {links.bundle_limit(host)}"
        for level, address in enumerate(of_host):
            port, device = f"port{host}.{level}", f"eth{level}"
            enter(switches)
            ip(f"link add {port} type veth peer name {device} netns {there}")
            ip(f"link set {port} {bundle} master switch{level} up")
            _limit(port, links, host)
            enter(namespaces[-1])
            ip(f"address add {address}/24 dev {device}", f"link set {device} {bundle} up")
            _limit(device, links, host)
    return namespaces


def _make_relayed(addresses: Sequence[str], links: Links) -> tuple[list[int], list[int]]:
    namespaces, devices = [], []
    for host, address in enumerate(addresses):
        namespaces.append(new_namespace())
        devices.append(make_device("eth0"))
        ip(
            "link set lo up",
            f"address add {address}/24 dev eth0",
            f"link set eth0 gso_max_size {links.bundle_limit(host)} txqueuelen 10000 up",
        )
    return namespaces, devices


def _limit(device: str, links: Links, host: int) -> None:
    rate = links.rates[host]
    if math.isfinite(rate):
        limit = f"rate {int(rate)}bit burst {links.bucket_bytes(host)} limit {links.queue_limit(host)}"
        execute(["tc", "qdisc", "add", "dev", device, "root", "tbf", *limit.split()])


def _set_socket_bytes(max_socket_bytes: int | None) -> None:
    if max_socket_bytes is not None:
        for name in ("rmem", "wmem"):
            path = f"/proc/sys/net/ipv4/tcp_{name}"
            with open(path) as file:
                smallest, first, _ = file.read().split()
            with open(path, "w") as file:
                file.write(f"{smallest} {min(int(first), max_socket_bytes)} {max_socket_bytes}")


def _kill_inside(namespaces: Iterable[int], spared: set[int]) -> None:
    """Kills processes until none is left in these network namespaces."""
    inside = {(os.fstat(namespace).st_dev, os.fstat(namespace).st_ino) for namespace in namespaces}
    deadline = time.monotonic() + CLOSE_SECONDS / 2
    while _kill_once(inside, spared) and time.monotonic() < deadline:
        time.sleep(0.005)


def _kill_once(inside: set[tuple[int, int]], spared: set[int]) -> int:
    num_killed = 0
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        # The process may end at any moment. While a descriptor holds it, no other process gets its id.
        with contextlib.suppress(OSError), open(os.pidfd_open(pid)) as process:
            namespace = os.stat(f"/proc/{pid}/ns/net")
            if (namespace.st_dev, namespace.st_ino) in inside and pid not in spared:
                signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
                num_killed += 1
    return num_killed
