"""`python -m hop_tf plan`: the best strategies and settings for a script, its model and its links.

The command starts the script in the same way as `hop_tf launch`. When its first `fit` has ended, the ranks measure
their links and steps. Rank 0 then prints the costs of the settings in `hop_tf.planning`. On a cluster, setting the
environment variable HOP_TF_PLAN=1 for every rank does the same. With `--num_parameters` the command starts nothing, and
the user gives all numbers.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hop_tf.options import PLAN_VARIABLE
from hop_tf.tools.commands.launch_options import add_plan_kinds, make_parser
from hop_tf.tools.emulation import ComputeEmulation, Slowdown

if TYPE_CHECKING:
    from hop_tf.tools.timing import Measurement

# With any of these arguments, nothing is measured.
_GIVEN = _PARAMETERS, _RATE, _LATENCY = "--num_parameters", "--bits_per_second", "--latency_seconds"
_BYTES_PER_VALUE = 4
_NUM_STEPS = 256  # The number of steps generated for each rank if slowdowns are given.


def main(argv: Sequence[str]) -> int:
    """Runs `hop_tf plan`. Returns the exit code.

    Args:
      argv: The arguments: those of `hop_tf launch`, or numbers instead of measurements.
    """
    from hop_tf.tools.commands import launch

    parser = make_parser("plan")
    for name in _GIVEN:
        parser.add_argument(name, action=_Find, help=argparse.SUPPRESS)
    try:
        os.environ[PLAN_VARIABLE] = parser.parse_args(argv).plan_kind
    except _Found:  # Only for options before the script's name. Those after it are the script's own.
        return _plan_given(argv)
    return launch.main(argv, command="plan")


class _Found(Exception):
    """Raised if an option of `_GIVEN` is found."""


class _Find(argparse.Action):
    """Ends the parsing with `_Found`."""

    def __call__(self, *arguments):
        raise _Found


# Without a cluster.


def _plan_given(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hop_tf plan",
        description="Compare strategies on links and machines that you do not have yet. Starts nothing.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--num_workers", type=int, required=True, help="number of workers, at least 2")
    add(_PARAMETERS, type=float, required=True, help="trained parameters, in float32, such as 25e6")
    add("--step_seconds", type=float, required=True, help="time that a step of one worker computes")
    add(_RATE, type=float, required=True, help="rate of each machine's link, such as 1e9")
    add(_LATENCY, type=float, default=1e-4, help="half a round trip (default: %(default)s)")
    add(
        "--slowdown",
        action="append",
        default=[],
        metavar="3:4x|random:6x",
        help="steps of rank 3 take 4 times as long; any step 6 times with probability 1/num_workers",
    )
    add_plan_kinds(parser)
    arguments = parser.parse_args(argv)
    from hop_tf.tools.commands.plan_report import describe

    try:
        measurement = _given(arguments)
        text = describe(measurement, arguments.plan_kind)
    except ValueError as error:
        parser.error(str(error))
    if arguments.plan_kind != "json":
        text = f"Nothing was measured: all numbers are given, and codecs are taken to need no time.\n{text}"
    print(text)
    return 0


def _given(arguments: argparse.Namespace) -> Measurement:
    from hop_tf.tools import timing

    if arguments.num_workers < 2:
        raise ValueError(f"`num_workers` must be at least 2. Received: num_workers={arguments.num_workers}.")
    for name, least in (("num_parameters", 1.0), ("bits_per_second", 1.0), ("latency_seconds", 0.0)):
        value = getattr(arguments, name)
        if not least <= value < math.inf:
            raise ValueError(f"`{name}` must be finite, and at least {least:g}. Received: {name}={value!r}.")
    slowdowns = tuple(Slowdown.parse(text) for texts in arguments.slowdown for text in texts.split(","))
    emulation = ComputeEmulation(step_seconds=arguments.step_seconds, slowdowns=slowdowns)
    ranks = range(arguments.num_workers)
    steps = [emulation.step_durations(rank, arguments.num_workers) for rank in ranks] if slowdowns else []
    return timing.Measurement(
        world_size=arguments.num_workers,
        num_bytes=round(_BYTES_PER_VALUE * arguments.num_parameters),
        network=timing.NetworkCosts(
            latency_seconds=arguments.latency_seconds, seconds_per_byte=8 / arguments.bits_per_second
        ),
        step=timing.Step.of_computing(arguments.step_seconds),
        codec_seconds_per_byte=dict.fromkeys(timing.MEASURED_CODECS, 0.0),
        rank_seconds=tuple(tuple(itertools.islice(each, _NUM_STEPS)) for each in steps),
    )
