"""`python -m hop_tf diagnose`: says in plain sentences where the time of a job goes.

It reads the job's records or, without records, the reports of the ranks of a running job.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import sys
import time
from collections.abc import Sequence

from hop_tf.tools.commands import running_ranks

# Time between two looks at a running job. Each look asks the ranks which ranks they wait for.
_LOOK_SECONDS = 0.25


def main(argv: Sequence[str]) -> int:
    """Runs `hop_tf diagnose` with the arguments `argv`. Returns the exit code."""
    arguments = _parse(argv)
    try:
        lines = _of_running_job(arguments) if arguments.readers else _of_records(arguments)
    except (OSError, ValueError) as error:
        print(f"hop_tf diagnose: {error}", file=sys.stderr)
        return 1
    finally:
        for reader in arguments.readers:
            reader.close()
    print("\n".join(lines))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hop_tf diagnose",
        description="Find where the time of a job goes, and which ranks and links hold it up.",
    )
    parser.add_argument(
        "what",
        nargs="+",
        metavar="log_dir|host:port",
        help="directory of the records: CommunicationOptions(log_dir=...) of the job. Or host:port of each rank of a "
        "running job",
    )
    parser.add_argument("--html", metavar="FILE", help="with records: write a page with pictures, too")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="with a running job: time to look at it (default 10)"
    )
    running_ranks.add_arguments(parser)
    arguments = parser.parse_args(argv)
    arguments.readers = []
    if len(arguments.what) == 1 and (os.path.isdir(arguments.what[0]) or ":" not in arguments.what[0]):
        return arguments
    try:
        addresses = [running_ranks.address(text) for text in arguments.what]
        if arguments.html:
            raise ValueError("--html takes records: a running job reports too little for pictures.")
        if not 0 < arguments.seconds < math.inf:
            raise ValueError(f"--seconds must be positive and finite. Received: {arguments.seconds}.")
        arguments.readers = running_ranks.make_readers(addresses, arguments)
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        parser.error(str(error))
    return arguments


def _of_records(arguments: argparse.Namespace) -> Sequence[str]:
    from hop_tf.records.log import read_job
    from hop_tf.tools.diagnosis import diagnose, make_page

    job = read_job(arguments.what[0])
    diagnosis = diagnose(job)
    if arguments.html:
        with open(arguments.html, "w", encoding="utf-8") as file:
            file.write(make_page(job, diagnosis))
    return diagnosis.lines


def _of_running_job(arguments: argparse.Namespace) -> Sequence[str]:
    from hop_tf.tools.diagnosis import diagnose_reports

    awaited: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    before = _read(arguments)
    begin = now = time.monotonic()  # After the first look, because ranks that do not answer delay that look.
    while now < begin + arguments.seconds:
        time.sleep(min(_LOOK_SECONDS, arguments.seconds))
        now, after = time.monotonic(), _read(arguments)
        for report in after:
            awaited[int(report["rank"])].update(report.get("waits_for", ()))
    if all("problem" in report for report in after):
        raise ValueError(f"no rank answers. {after[0]['problem']}")
    return diagnose_reports(before, after, now - begin, awaited)


def _read(arguments: argparse.Namespace) -> list[dict]:
    return [running_ranks.read(reader, rank) for rank, reader in enumerate(arguments.readers)]
