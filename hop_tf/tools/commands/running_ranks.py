"""Reports of the ranks of a running job. `supervise` and `diagnose` share this module."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

import grpc

from hop_tf.options import CommunicationOptions, read_tls_files
from hop_tf.transport.reports import ReportReader

_CALL_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for connections to ranks."""
    parser.add_argument("--token", help="the cluster token; default: the variable HOP_TF_CLUSTER_TOKEN, if it is set")
    for name in ("certificate_chain", "private_key", "root_certificates"):
        parser.add_argument(f"--tls_{name}", help="see CommunicationOptions")


def make_readers(addresses: Sequence[str], arguments: argparse.Namespace) -> list[ReportReader]:
    """Returns a reader for each address. The caller must close the readers. Raises as `CommunicationOptions`."""
    token = arguments.token or os.environ.get("HOP_TF_CLUSTER_TOKEN")
    credentials = _credentials(arguments)
    return [ReportReader(each, token, credentials) for each in addresses]


def read(reader: ReportReader, rank: int) -> dict[str, object]:
    """Returns a rank's report. If there is none, returns the rank's number and the `problem`."""
    try:
        return reader.read(_CALL_SECONDS)
    except grpc.RpcError as error:
        return {"rank": rank, "problem": f"{error.code().name.lower()}: {error.details()}"}
    except ValueError as error:
        return {"rank": rank, "problem": str(error)}


def address(text: str) -> str:
    """Returns `text`. Raises ArgumentTypeError if it is not "host:port", because gRPC would misread it."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"Addresses must be 'host:port', ports from 1 to 65535. Received: {text!r}.")
    return text


def addresses_of_cluster() -> list[str]:
    """The ranks' addresses in TF_CONFIG.

    Raises:
      ValueError: If TF_CONFIG cannot be read.
      ArgumentTypeError: If an entry is not an address.
    """
    text = os.environ.get("TF_CONFIG") or "{}"
    try:
        cluster = json.loads(text).get("cluster", {})
        addresses = [*cluster.get("chief", ()), *cluster.get("worker", ())]
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"TF_CONFIG must be JSON with the lists of a cluster's tasks. Received: {text}") from error
    return [address(str(each)) for each in addresses]


def _credentials(arguments: argparse.Namespace) -> grpc.ChannelCredentials | None:
    files = read_tls_files(
        CommunicationOptions(
            tls_certificate_chain=arguments.tls_certificate_chain,
            tls_private_key=arguments.tls_private_key,
            tls_root_certificates=arguments.tls_root_certificates,
        )
    )
    if files is None:
        return None
    return grpc.ssl_channel_credentials(files.root_certificates, files.private_key, files.certificate_chain)
