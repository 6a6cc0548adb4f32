"""TLS: this process's certificate, which may be renewed at run time, and the names in a peer's certificate."""

from __future__ import annotations

import ipaddress
import os
import threading
from collections.abc import Mapping, Sequence

import grpc
from absl import logging

from hop_tf.options import TLS_FILES, CommunicationOptions, TlsFiles, read_tls_files

_LOG_PERIOD_SECONDS = 60


class Certificates:
    """The contents of the TLS files. Changed files are read again, for later connections.

    Args:
      options: The options, which name the files.

    Raises:
      ValueError: If the files are invalid.
    """

    def __init__(self, options: CommunicationOptions):
        self._options = options
        self._lock = threading.Lock()
        self._stamp = self._read_stamp()
        self._files = read_tls_files(options)

    def files(self) -> TlsFiles:
        """The present contents; the previous contents while the files do not fit together, as during a renewal."""
        with self._lock:
            try:
                stamp = self._read_stamp()
                if stamp != self._stamp:
                    self._files = read_tls_files(self._options)
                    self._stamp = stamp
            except (OSError, ValueError) as error:
                logging.log_every_n_seconds(
                    logging.WARNING, "The TLS files have changed and cannot be used: %s", _LOG_PERIOD_SECONDS, error
                )
            return self._files

    def for_channel(self) -> grpc.ChannelCredentials:
        """Credentials for a channel that is created now."""
        files = self.files()
        return grpc.ssl_channel_credentials(files.root_certificates, files.private_key, files.certificate_chain)

    def for_server(self) -> grpc.ServerCredentials:
        """Credentials for a server. They follow changes of the files."""
        served = self.files()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            files = self.files()
            if files is served:
                return None
            served = files
            return _configuration(files)

        return grpc.dynamic_ssl_server_credentials(_configuration(served), changed, require_client_authentication=True)

    def _read_stamp(self) -> tuple[tuple[int, int, int], ...]:
        """A value that changes when a file is written or replaced."""
        status = [os.stat(getattr(self._options, name)) for name in TLS_FILES]
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in status)


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(files.private_key, files.certificate_chain)], files.root_certificates
    )


def certificate_names(auth_context: Mapping[str, Sequence[bytes]]) -> frozenset[str]:
    """The DNS names and IP addresses that the peer's certificate has as subject alternative names.

    Args:
      auth_context: gRPC's facts about a connection, `ServicerContext.auth_context()`.
    """
    found = [*auth_context.get("peer_dns", ()), *auth_context.get("peer_ip", ())]
    return frozenset(name.decode(errors="replace") for name in found)


def names_host(names: frozenset[str], host: str) -> bool:
    """True if one of the names matches the host, as in TLS: '*' may stand for a name's first part."""
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
