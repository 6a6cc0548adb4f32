"""Whose a certificate is: the names in it, and whether they name a host."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence


def certificate_names(auth_context: Mapping[str, Sequence[bytes]]) -> frozenset[str]:
    """The DNS names and IP addresses that the other side's certificate has as subject alternative names.

    Args:
      auth_context: What gRPC tells of a connection, `ServicerContext.auth_context()`.
    """
    found = [*auth_context.get("peer_dns", ()), *auth_context.get("peer_ip", ())]
    return frozenset(name.decode(errors="replace") for name in found)


def names_host(names: frozenset[str], host: str) -> bool:
    """Whether one of the names is that of a host, as TLS compares them: '*' may stand for a name's first part."""
    if _address(host) is not None:
        return any(_address(name) == _address(host) for name in names)
    wanted = host.lower().rstrip(".")
    wildcard = f"*.{wanted.partition('.')[2]}"
    return any(name.lower().rstrip(".") in (wanted, wildcard) for name in names if _address(name) is None)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
