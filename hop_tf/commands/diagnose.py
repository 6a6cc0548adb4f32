"""`python -m hop_tf diagnose`: where the time of a job went, in plain sentences, from what its ranks have recorded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hop_tf.diagnosis import diagnose
from hop_tf.records.log import read_job


def main(argv: Sequence[str]) -> int:
    """Runs `hop_tf diagnose` with the arguments `argv`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="hop_tf diagnose", description="Say where the time of a job went, who held up whom, and what would help."
    )
    parser.add_argument("log_dir", help="directory of the records: CommunicationOptions(log_dir=...) of the job")
    arguments = parser.parse_args(argv)
    try:
        diagnosis = diagnose(read_job(arguments.log_dir))
    except (OSError, ValueError) as error:
        print(f"hop_tf diagnose: {error}", file=sys.stderr)
        return 1
    print("\n".join(diagnosis.lines))
    return 0
