"""A server of ssh, for tests."""

from __future__ import annotations

import contextlib
import getpass
import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import time

from hop_tf.tools.processes.local_cluster import PortReservation

_DEADLINE_SECONDS = 60.0
_PRIVILEGE_SEPARATION = "/run/sshd"
# At a time: others are turned away.
MAX_LOGINS = 3


class Sshd:
    """A server of a test's own, with keys of its own, on a free port of 127.0.0.1 and 127.0.0.2."""

    def __init__(self, directory):
        self._stack = contextlib.ExitStack()
        self._directory = directory
        reservation = self._stack.enter_context(PortReservation(1))
        self.port = reservation.ports[0]
        for name in ("host", "user"):
            path = os.path.join(directory, name)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        config = os.path.join(directory, "sshd_config")
        with open(config, "w") as file:
            file.write(
                f"ListenAddress 127.0.0.1:{self.port}\nListenAddress 127.0.0.2:{self.port}\n"
                f"HostKey {directory}/host\nAuthorizedKeysFile {directory}/user.pub\n"
                "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
                f"MaxStartups {MAX_LOGINS}:100:{MAX_LOGINS}\n"
            )
        if os.geteuid() == 0 and not os.path.isdir(_PRIVILEGE_SEPARATION):
            os.mkdir(_PRIVILEGE_SEPARATION)
            self._stack.callback(os.rmdir, _PRIVILEGE_SEPARATION)
        reservation.release()
        self._log = os.path.join(directory, "sshd.log")
        program = shutil.which("sshd") or "/usr/sbin/sshd"  # It must be started by its whole path.
        self._process = subprocess.Popen([program, "-D", "-E", self._log, "-f", config])
        try:
            self._wait_until_up()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def missing():
        """Returns a text that names a missing requirement, or an empty text if nothing is missing."""
        if not (shutil.which("sshd") or os.path.exists("/usr/sbin/sshd")) or not shutil.which("ssh"):
            return "sshd or ssh is not installed (Debian: openssh-server)"
        # A sandbox such as Bazel's forbids sshd to change groups at each login.
        return "sshd may not change groups here" if "deny" in pathlib.Path("/proc/self/setgroups").read_text() else ""

    @property
    def command(self):
        """The ssh command that reaches it."""
        options = {"StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null", "LogLevel": "ERROR"}
        words = ["ssh", "-F", "none", "-p", str(self.port), "-i", os.path.join(self._directory, "user")]
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        return shlex.join([*words, "-l", getpass.getuser()])

    def close(self):
        self._process.terminate()
        self._process.wait()
        self._stack.close()

    def _wait_until_up(self):
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.2", self.port)):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                with open(self._log) as log:
                    raise AssertionError(f"sshd does not serve: {log.read()}")
            time.sleep(0.05)
