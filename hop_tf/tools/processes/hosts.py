"""A cluster on several machines: the list of machines, the placement of processes, and their start by `ssh`."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence

from hop_tf.tools.processes import relay
from hop_tf.tools.processes.local_cluster import Task, make_tf_configs, share_of_machine
from hop_tf.tools.processes.remote import make_order

# Below the ports that the launcher takes on one machine.
DEFAULT_FIRST_PORT = 7400
_LARGEST_PORT = 65535

# BatchMode, because there is nobody to ask for a password. With the timeouts, ssh gives up on machines that do not
# answer, and on dead connections. The user's options come first, because ssh uses the first value of an option.
_SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=30"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ServerAliveCountMax=4"),
)
_HOST = re.compile(
    r"(?:(?P<user>[^@\s:]+)@)?(?P<name>[^@\s:\[\]]+|\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\])(?::(?P<count>\d+))?"
)


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
      name: The name or address, IPv6 in brackets, under which the ranks reach the machine.
      user: The user to log in as, or None for ssh's default.
      num_workers: The number of workers there.
      is_local: True if the machine is this one, which needs no ssh.
    """

    name: str
    user: str | None
    num_workers: int
    is_local: bool

    @property
    def login(self) -> str:
        """The destination for ssh, with the user if there is one."""
        name = self.name.strip("[]")
        return f"{self.user}@{name}" if self.user else name


@dataclasses.dataclass(frozen=True)
class Command:
    """The command that starts a process.

    Attributes:
      argv: The program and its arguments.
      environment: All environment variables of the process.
    """

    argv: list[str]
    environment: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options for starting processes on machines.

    Attributes:
      hosts: The machines.
      first_port: Port of the first process of each machine. The next processes have the next ports.
      ssh: The ssh command, and options of the user.
    """

    hosts: tuple[Host, ...]
    first_port: int = DEFAULT_FIRST_PORT
    ssh: tuple[str, ...] = ("ssh",)

    def __post_init__(self):
        if not self.ssh:
            raise ValueError("`ssh` must be a command. Received: ssh=''.")
        if not 0 < self.first_port <= _LARGEST_PORT:
            raise ValueError(f"`first_port` must be from 1 to {_LARGEST_PORT}. Received: first_port={self.first_port}.")

    @property
    def num_workers(self) -> int:
        """The number of workers on all machines."""
        return sum(host.num_workers for host in self.hosts)

    @property
    def all_local(self) -> bool:
        """True if all processes run on this machine."""
        return all(host.is_local for host in self.hosts)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses a list such as "a,user@b:4,[fd00::1]:2": names, each with its number of workers, by default one.

    Raises:
      ValueError: If the text is not such a list, or a machine is listed twice. Also if there are other machines and
        this machine's name is a loopback address.
    """
    hosts = tuple(_parse_host(part, text) for part in text.split(","))
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise ValueError(f"`hosts` must list each host once, as in 'a:2' for two workers. Received: hosts={text!r}.")
    for host in hosts:
        if host.is_local and not all(other.is_local for other in hosts) and _is_loopback(host.name):
            raise ValueError(
                f"`hosts` must name this machine as the others reach it: {host.name!r} is a loopback address here. Use "
                f"another name or its address. Received: hosts={text!r}."
            )
    return hosts


def _parse_host(part: str, text: str) -> Host:
    found = _HOST.fullmatch(part.strip())
    if not found or int(found["count"] or 1) < 1:
        raise ValueError(
            "`hosts` must be names or addresses (IPv6 in brackets) with commas in between, each with its number of "
            f"workers if that is not 1, as in 'a,b:4,user@c'. Received: hosts={text!r}."
        )
    return Host(found["name"], found["user"], int(found["count"] or 1), _is_this_machine(found["name"]))


def _is_this_machine(name: str) -> bool:
    """True if a name is this machine's name, "localhost", or one of its addresses except loopback addresses."""
    own = socket.gethostname().lower()
    if name.lower() in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    if address.is_loopback:
        return False
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def _is_loopback(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:  # The rank will report a name that is not known here.
        return False
    return all(ipaddress.ip_address(address[0].partition("%")[0]).is_loopback for *_, address in found)


def place_tasks(tasks: Sequence[Task], options: HostOptions) -> dict[Task, tuple[Host, str]]:
    """Assigns a machine and a "host:port" to each task. Workers fill one machine after another, servers go in turn.

    Raises:
      ValueError: If there are not enough ports.
    """
    hosts = options.hosts
    seats = [host for host in hosts for _ in range(host.num_workers)]
    places: dict[Task, tuple[Host, str]] = {}
    num_placed = dict.fromkeys(hosts, 0)
    for task in tasks:
        host = seats[task.index] if task.type == "worker" else hosts[task.index % len(hosts)]
        port = options.first_port + num_placed[host]
        num_placed[host] += 1
        if port > _LARGEST_PORT:
            raise ValueError(
                f"The ports of {host.name}, from `first_port` on, must be at most {_LARGEST_PORT}. "
                f"Received: first_port={options.first_port}, and more than {num_placed[host] - 1} processes."
            )
        places[task] = host, f"{host.name}:{port}"
    return places


def host_commands(
    tasks: Sequence[Task],
    options: HostOptions,
    *,
    python: str,
    script: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> dict[Task, Command]:
    """Returns the commands that start each task, from this machine.

    Args:
      tasks: The tasks of the job.
      options: The machines.
      python: The path of the interpreter on all machines.
      script: The path of the script on all machines, relative to the working directory of this process.
      arguments: Arguments of the script.
      environment: Variables to set. The processes of this machine also inherit those of this process.

    Returns:
      For a task on this machine, the command that runs the script. For other tasks, the command of the relay that runs
      the script there.
    """
    places = place_tasks(tasks, options)
    configs = make_tf_configs(tasks, [address for _, address in places.values()])
    num_placed = dict.fromkeys(options.hosts, 0)
    commands: dict[Task, Command] = {}
    for task, (host, _) in places.items():
        index = None
        if task.type == "worker":
            index = num_placed[host]
            num_placed[host] += 1
        variables = {**environment, "TF_CONFIG": configs[task]}
        if host.is_local:
            base = {**os.environ, **variables}
            share = share_of_machine(base, num_workers=host.num_workers, index=index)
            commands[task] = Command([python, script, *arguments], share)
        else:
            order = make_order(
                host=host.name,
                script=script,
                arguments=list(arguments),
                environment=variables,
                num_workers=host.num_workers,
                index=index,
            )
            argv = [*options.ssh, *_SSH_OPTIONS, host.login, _remote_command(python, host.name)]
            environ = {**os.environ, relay.ORDER_VARIABLE: order}
            commands[task] = Command([sys.executable, "-P", relay.__file__, *argv], environ)
    return commands


def _remote_command(python: str, host: str) -> str:
    """Returns the shell command for the other machine."""
    path = os.pathsep.join(
        os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry
    )
    variables = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    missing = (
        f"hop_tf launch: host {host}: there is no Python interpreter {python}. Have it at the same path as on the "
        "machine of the launcher, or name it: --python."
    )
    script = (
        f"command -v {shlex.quote(python)} > /dev/null || {{ echo {shlex.quote(missing)} >&2; exit 127; }}; "
        f"exec env {variables}{shlex.quote(python)} -P -m hop_tf.tools.processes.remote"
    )
    return f"exec sh -c {shlex.quote(script)}"
