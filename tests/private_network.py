"""A network of a test's own: names and addresses that nothing else on this machine sees. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import psutil

_DEADLINE_SECONDS = 60.0
# A command behind this prefix ends with the process that has started it.
BOUND = ("setpriv", "--pdeathsig", "KILL")
_KINDS = ("--net", "--mount", "--uts")


def reason_to_skip(*programs):
    """Returns the reason why this machine cannot make such a network, or lacks a program; an empty text if it can."""
    missing = [name for name in (*programs, "unshare", "nsenter", "setpriv", "ip") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    tried = subprocess.run(["unshare", *_KINDS, "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class PrivateNetwork:
    """Linux namespaces with one network interface, which has all addresses. They end with this process.

    Args:
      directory: Working directory of programs in the network, and directory of its table of names.
      addresses: The address of each name.

    Attributes:
      inside: Words to put before a command that runs in the network.
    """

    def __init__(self, directory, addresses):
        names = os.path.join(directory, "hosts")
        with open(names, "w") as file:
            file.write("127.0.0.1 localhost\n" + "".join(f"{addresses[name]} {name}\n" for name in addresses))
        commands = ["ip link set lo up", *(f"ip address add {address} dev lo" for address in addresses.values())]
        commands += [f"mount --bind {names} /etc/hosts", f"hostname {next(iter(addresses))}", "exec sleep infinity"]
        self._first = subprocess.Popen([*BOUND, "unshare", *_KINDS, "sh", "-c", " && ".join(commands)])
        self.inside = (*BOUND, "nsenter", "--target", str(self._first.pid), *_KINDS, f"--wd={directory}")
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def close(self):
        """Ends the network. Programs that still run there keep their part of it."""
        self._first.kill()
        self._first.wait()

    def _wait_until_ready(self):
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while psutil.Process(self._first.pid).name() != "sleep":
            if self._first.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no network: its first process has ended with {self._first.poll()}")
            time.sleep(0.01)
