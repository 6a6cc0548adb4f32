"""Network namespaces and TUN devices of Linux."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

_libc = ctypes.CDLL(None, use_errno=True)


def available() -> str | None:
    """Returns the reason that this machine cannot have an `EmulatedNetwork`, or None if it can."""
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux")):
        if shutil.which(program, path=_SYSTEM_PATH) is None:
            return f"the command {program} is missing (package {package})"
    # Tries to enter a new namespace, to return (which not every sandbox permits), and to make a device in another one.
    unshare, back = [path_of("unshare"), "--net"], [path_of("nsenter"), f"--net=/proc/{os.getpid()}/ns/net"]
    trial = [*unshare, *back, *unshare, path_of("ip"), "tuntap", "add", "dev", "tun0", "mode", "tun"]
    result = subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        said = result.stderr.strip() or f"exit status {result.returncode}"
        return f"network namespaces and TUN devices need root and a kernel that has them: {said}"
    return None


def new_namespace() -> int:
    """Moves this process into a new network namespace, and returns a descriptor that keeps the namespace open."""
    if _libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot create a network namespace: {os.strerror(ctypes.get_errno())}")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(namespace: int) -> None:
    """Moves this thread into a network namespace."""
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def make_device(name: str) -> int:
    """Makes a TUN device in this process's namespace that sends and receives bundles of segments."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return device


def path_of(program: str) -> str:
    """The path of a program, also in the system's folders, or its name if it is not found."""
    return shutil.which(program, path=_SYSTEM_PATH) or program


def ip(*lines: str) -> None:
    """Runs commands of `ip`, a line each, in the namespace of this process."""
    execute(["ip", "-batch", "-"], "\n".join(lines))


def execute(argv: Sequence[str], text: str = "") -> None:
    """Runs a program with `text` as its input.

    Raises:
      RuntimeError: If the program cannot be run, or fails.
    """
    try:
        result = subprocess.run([path_of(argv[0]), *argv[1:]], input=text, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"cannot run {argv[0]}: {error}") from error
    if result.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {result.stderr.strip()} {text}")
