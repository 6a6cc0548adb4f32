"""The options of `hop_tf launch`, and the checks that they go together."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Mapping

from hop_tf.options import DEVICES_VARIABLE, PLAN_KINDS, PLAN_VARIABLE, PROFILE_VARIABLE, parse_profile_steps
from hop_tf.tools.emulation import ComputeEmulation, Slowdown
from hop_tf.tools.processes.hosts import DEFAULT_FIRST_PORT, HostOptions, parse_hosts, place_tasks
from hop_tf.tools.processes.local_cluster import make_tasks

_DESCRIPTION = """\
Starts a training script once per worker, each with its own TF_CONFIG, and waits until the job has ended: on this
machine, or with --hosts on several ones, over ssh.

The launcher prints the lines of all processes with the process's name, and writes a log file for each. If a process
fails, the launcher ends the others, unless --keep_going or --restart is given. It names the process that failed first,
and returns its exit code (128 + signal number if a signal ended it). When all workers are done, it ends the parameter
servers. It passes Ctrl-C on to all processes; a second one ends them. No process survives the launcher.
"""
_EPILOG = """\
Each worker gets its share of the cores (OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS) and, if there
are several GPUs, its part of them (CUDA_VISIBLE_DEVICES). Variables that you have set stay. Parameter servers get no
GPU.

With --hosts, nothing is copied: the working directory, the script and the interpreter must be at the same paths on all
machines, and ssh must log in without a question. Of your variables, processes there get only those of --env.
"""
_PLAN_DESCRIPTION = """\
Compares the five strategies for a training script, and prints the three best. It starts the script, as hop_tf launch
does. When its first fit has ended, the ranks measure their links and steps. The options are those of hop_tf launch.

With --num_parameters it starts nothing, and takes numbers of yours: see hop_tf plan --num_parameters=1 --help.

"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of a job.

    Attributes:
      script: Path of the training script.
      script_arguments: Arguments of the script.
      num_workers: Number of workers, at least 1.
      num_ps: Number of parameter servers, which run the same script.
      devices_per_worker: The number of GPUs that each worker gets. On a machine without GPUs, the number of a worker's
        logical devices. None: each worker gets its part of the machine's GPUs.
      log_dir: Directory for logs and `launch.json`, or None for a new temporary one.
      timeout_seconds: Time after which the whole job is ended, or None for no limit.
      python: The Python interpreter.
      emulation: Emulated compute, or None.
      keep_going: True if the other processes keep running when one fails.
      restart: The number of times that each process is started again after it has failed. The others run on.
      hosts: The machines, which run `num_workers` workers together, or None for this one.
      environment: Variables to set for all processes.
      is_verbose: True to show the whole output of processes immediately, without a table or a filter.

    Raises:
      ValueError: If a value is out of range, the script is missing, a slowdown names a rank that does not exist, or
        options do not go together.
    """

    script: str
    script_arguments: tuple[str, ...] = ()
    num_workers: int
    num_ps: int = 0
    devices_per_worker: int | None = None
    log_dir: str | None = None
    timeout_seconds: float | None = None
    python: str = sys.executable
    emulation: ComputeEmulation | None = None
    keep_going: bool = False
    restart: int = 0
    hosts: HostOptions | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_verbose: bool = False

    def __post_init__(self):
        if self.restart < 0:
            raise ValueError(f"`restart` must not be negative. Received: restart={self.restart}.")
        if self.devices_per_worker is not None and self.devices_per_worker < 1:
            raise ValueError(
                "`devices_per_worker` must be a positive integer. "
                f"Received: devices_per_worker={self.devices_per_worker}."
            )
        tasks = make_tasks(num_workers=self.num_workers, num_ps=self.num_ps)
        if self.hosts is not None:
            if self.hosts.num_workers != self.num_workers:
                raise ValueError(
                    "`num_workers` must be the number of workers on all `hosts`, or be left out. "
                    f"Received: num_workers={self.num_workers}, and {self.hosts.num_workers} on the hosts."
                )
            place_tasks(tasks, self.hosts)
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ValueError(f"`timeout_seconds` must be positive. Received: timeout_seconds={self.timeout_seconds}.")
        if not os.path.isfile(self.script):
            raise ValueError(f"`script` must be a file. Received: script={self.script!r}.")
        if self.emulation is not None:
            if not self.is_local:
                raise ValueError(
                    "`step_seconds` must not go with `hosts` other than this machine: emulated steps depend on the "
                    "load of the cores, which the launcher knows only here. Received: "
                    f"step_seconds={self.emulation.step_seconds}."
                )
            self.emulation.check_world_size(self.num_workers)

    @property
    def is_local(self) -> bool:
        """True if all processes run on this machine."""
        return self.hosts is None or self.hosts.all_local


def make_parser(command: str) -> argparse.ArgumentParser:
    """The parser of the arguments of `command`."""
    parser = argparse.ArgumentParser(
        prog=f"hop_tf {command}",
        usage=f"hop_tf {command} [flags] script.py [script arguments]",
        description=_PLAN_DESCRIPTION + _DESCRIPTION if command == "plan" else _DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--num_workers", type=int, help="number of workers (required without --hosts)")
    add("--hosts", metavar="a,b:4", help="machines to start workers on, each with its number of workers (default: one)")
    add(
        "--first_port",
        type=int,
        help=f"with --hosts: port of the first process of each machine (default: {DEFAULT_FIRST_PORT})",
    )
    add("--ssh", help="with --hosts: the ssh command with options, such as 'ssh -p 2222 -i key' (default: ssh)")
    add(
        "--env",
        "-x",
        action="append",
        default=[],
        metavar="NAME[=value]",
        help="a variable for all processes; without a value, the value here; may be repeated",
    )
    add("--num_ps", type=int, default=0, help="number of parameter servers (default: %(default)s)")
    add(
        "--devices_per_worker",
        type=int,
        help="GPUs of each worker; without GPUs logical devices, for tests (default: a worker's part of the GPUs)",
    )
    add("--log_dir", help="directory for logs and launch.json (default: a new temporary one)")
    add(
        "--keep_going",
        action="store_true",
        help="keep the other processes running when one fails, for fault-tolerant strategies",
    )
    add(
        "--restart",
        type=int,
        default=0,
        metavar="TIMES",
        help="start each failed process again, up to this many times, while the others run on (default: %(default)s)",
    )
    add("--verbose", action="store_true", help="print all lines of all processes, without a live table")
    add("--timeout_seconds", type=float, help="end the whole job after this time, with exit code 124")
    add("--python", default=sys.executable, help="Python interpreter of the processes (default: the launcher's own)")
    add("--step_seconds", type=float, help="emulate computing: a training step takes at least this long, and sleeps")
    add(
        "--slowdown",
        action="append",
        default=[],
        metavar="3:4x|random:6x",
        help="emulated steps of rank 3 take 4 times as long; any step 6 times with probability 1/num_workers",
    )
    add("--seed", type=int, default=0, help="seed of the random slowdown (default: %(default)s)")
    add(
        "--profile_steps",
        metavar="10:12",
        help="run TensorFlow's profiler in these steps of each rank, into its CommunicationOptions(log_dir=...)",
    )
    if command == "plan":
        add_plan_kinds(parser)
    add("script", help="the training script")
    add("script_arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def add_plan_kinds(parser: argparse.ArgumentParser) -> None:
    """Adds the kinds of output of `hop_tf plan`, as `plan_kind`: see `PLAN_KINDS`."""
    best, everything, as_json = PLAN_KINDS
    kinds = parser.add_mutually_exclusive_group()
    add = functools.partial(kinds.add_argument, dest="plan_kind", action="store_const", default=best)
    add("--all", const=everything, help="print all compared settings, not only the best")
    add("--json", const=as_json, help="print everything in one line of JSON")


def read_options(arguments: argparse.Namespace) -> LaunchOptions:
    """Returns the options in parsed arguments.

    Raises:
      ValueError: If the options are not valid.
    """
    hosts = _read_hosts(arguments)
    num_workers = arguments.num_workers
    if num_workers is None:
        if hosts is None:
            raise ValueError("--num_workers is required, or --hosts.")
        num_workers = hosts.num_workers
    return LaunchOptions(
        script=arguments.script,
        script_arguments=tuple(arguments.script_arguments),
        num_workers=num_workers,
        num_ps=arguments.num_ps,
        devices_per_worker=arguments.devices_per_worker,
        log_dir=arguments.log_dir,
        timeout_seconds=arguments.timeout_seconds,
        python=arguments.python,
        emulation=_read_emulation(arguments),
        keep_going=arguments.keep_going,
        restart=arguments.restart,
        hosts=hosts,
        is_verbose=arguments.verbose,
        environment={
            **_read_environment(arguments.env),
            **_profile_environment(arguments.profile_steps),
            **_device_environment(arguments.devices_per_worker),
        },
    )


def _device_environment(number: int | None) -> dict[str, str]:
    return {} if number is None else {DEVICES_VARIABLE: str(number)}


def _read_hosts(arguments: argparse.Namespace) -> HostOptions | None:
    if arguments.hosts is None:
        for name in ("first_port", "ssh"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"`{name}` must go with `hosts`. Received: {name}={getattr(arguments, name)}.")
        return None
    try:
        ssh = tuple(shlex.split("ssh" if arguments.ssh is None else arguments.ssh))
    except ValueError as error:
        raise ValueError(f"`ssh` must be a command: {error}. Received: ssh={arguments.ssh!r}.") from error
    first_port = DEFAULT_FIRST_PORT if arguments.first_port is None else arguments.first_port
    return HostOptions(hosts=parse_hosts(arguments.hosts), first_port=first_port, ssh=ssh)


def _read_environment(texts: list[str]) -> dict[str, str]:
    """The variables for all processes: those of the user, and the variable that `hop_tf plan` sets."""
    environment = {name: os.environ[name] for name in (PLAN_VARIABLE,) if name in os.environ}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or name == "TF_CONFIG":
            raise ValueError(f"`env` must be NAME or NAME=value, and not TF_CONFIG. Received: env={text!r}.")
        if not equals and name not in os.environ:
            raise ValueError(f"`env` must name a variable that is set, or give its value. Received: env={text!r}.")
        environment[name] = value if equals else os.environ[name]
    return environment


def _profile_environment(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    parse_profile_steps(text)
    return {PROFILE_VARIABLE: text}


def _read_emulation(arguments: argparse.Namespace) -> ComputeEmulation | None:
    if arguments.step_seconds is None:
        if arguments.slowdown:
            raise ValueError(f"`slowdown` must go with `step_seconds`. Received: slowdown={arguments.slowdown[0]}.")
        return None
    slowdowns = [Slowdown.parse(text) for texts in arguments.slowdown for text in texts.split(",")]
    return ComputeEmulation(step_seconds=arguments.step_seconds, slowdowns=tuple(slowdowns), seed=arguments.seed)
