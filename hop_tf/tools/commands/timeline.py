"""`python -m hop_tf timeline`: one trace of all ranks, from their records."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from hop_tf.records.log import read_job
from hop_tf.records.timeline import to_trace


def main(argv: Sequence[str]) -> int:
    """Runs `hop_tf timeline` with the arguments `argv`. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="hop_tf timeline",
        description="Write one trace of all ranks, which https://ui.perfetto.dev and chrome://tracing open.",
    )
    parser.add_argument("log_dir", help="directory of the records: CommunicationOptions(log_dir=...) of the job")
    parser.add_argument("-o", "--output", help="file to write; default: trace.json in that directory")
    arguments = parser.parse_args(argv)
    path = arguments.output or os.path.join(arguments.log_dir, "trace.json")
    try:
        job = read_job(arguments.log_dir)
        with open(path, "w") as file:
            json.dump(to_trace(job), file)
    except (OSError, ValueError) as error:
        print(f"hop_tf timeline: {error}", file=sys.stderr)
        return 1
    names = ", ".join(process.name for process in job.processes)
    print(f"{path}: {names}; {len(job.transfers)} messages. Open it at https://ui.perfetto.dev or in chrome://tracing.")
    return 0
