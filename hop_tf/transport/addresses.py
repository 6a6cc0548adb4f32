"""Addresses: "host:port"."""

from __future__ import annotations

import re

LARGEST_PORT = 65535

_ADDRESS = re.compile(r"(?:[^\s/@:\[\]]+|\[[^\s/@\[\]]+\]):(?P<port>[0-9]{1,5})")


def is_address(text: str) -> bool:
    """True if `text` is "host:port" without a scheme: IPv6 in brackets, and a port from 1 to 65535."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found["port"]) <= LARGEST_PORT


def host_of(address: str) -> str:
    """The host of "host:port", an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")
