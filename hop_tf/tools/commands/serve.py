"""`hop_tf serve`: runs the parameter server that `TF_CONFIG` names, until the workers are done."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import logging

from hop_tf.errors import HopError
from hop_tf.options import DATA_PLANES, CommunicationOptions
from hop_tf.transport.own_name import check_own_name

if TYPE_CHECKING:
    from hop_tf.strategies.shat.server.snapshots import SnapshotOptions

_DESCRIPTION = """\
Serves as the parameter server that TF_CONFIG names (a task of type "ps") for SHATParameterServerStrategy, until all
workers have ended. The server gets its part of the model, and the optimizer, from the workers. For an optimizer of your
own, start your script on the server instead, which imports the optimizer's class.
"""


def main(argv: Sequence[str]) -> int:
    """Runs `hop_tf serve` with the arguments `argv`. Returns the exit code."""
    parser = _make_parser()
    arguments = parser.parse_args(argv)
    from hop_tf.cluster import Cluster
    from hop_tf.strategies.shat.server.service import serve

    try:
        options, snapshots = _read_options(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    logging.set_verbosity(logging.INFO)
    try:
        cluster = Cluster.from_resolver()
        if cluster.task_type == "ps":
            check_own_name(cluster.all_addresses, cluster.number, options.timeout_seconds)
        serve(cluster, options=options, snapshots=snapshots)
    except (HopError, OSError) as error:
        print(f"hop_tf serve: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hop_tf serve",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--snapshot_dir", help="directory for snapshots, from which a restarted server goes on")
    add("--snapshot_seconds", type=float, help="longest time between two snapshots (default: 60.0)")
    add("--snapshot_pushes", type=int, help="most pushes between two snapshots (default: no limit)")
    add(
        "--timeout_seconds",
        type=float,
        default=60.0,
        help="silence after which a worker is lost (default: %(default)s)",
    )
    add("--log_dir", help="directory for the server's records (see `hop_tf timeline`)")
    add(
        "--data_plane", choices=DATA_PLANES, default=DATA_PLANES[0], help="connection for arrays (default: %(default)s)"
    )
    add("--cluster_token_file", help="file that holds the secret of the job")
    for name in ("tls_certificate_chain", "tls_private_key", "tls_root_certificates"):
        add(f"--{name}", help="PEM file; the three go together")
    return parser


def _read_options(arguments: argparse.Namespace) -> tuple[CommunicationOptions, SnapshotOptions]:
    from hop_tf.strategies.shat.server.snapshots import SnapshotOptions

    token = arguments.cluster_token_file and pathlib.Path(arguments.cluster_token_file).read_text().strip()
    options = CommunicationOptions(
        timeout_seconds=arguments.timeout_seconds,
        data_plane=arguments.data_plane,
        cluster_token=token,
        log_dir=arguments.log_dir,
        tls_certificate_chain=arguments.tls_certificate_chain,
        tls_private_key=arguments.tls_private_key,
        tls_root_certificates=arguments.tls_root_certificates,
    )
    when = {"every_seconds": arguments.snapshot_seconds, "every_pushes": arguments.snapshot_pushes}
    when = {name: value for name, value in when.items() if value is not None}
    if when and arguments.snapshot_dir is None:
        raise ValueError("--snapshot_seconds and --snapshot_pushes need --snapshot_dir: without it, none are written.")
    snapshots = SnapshotOptions(directory=arguments.snapshot_dir, **when)
    return options, snapshots
