"""Small disks for tests: full, without room for another file, or read-only."""

import contextlib
import os
import subprocess
import unittest
from collections.abc import Iterator


@contextlib.contextmanager
def mounted_disk(
    path: str, *, num_bytes: int = 65536, num_inodes: int | None = None, is_read_only: bool = False
) -> Iterator[None]:
    """Mounts a disk at the folder `path`; skips the test if this process may not mount one.

    Args:
      path: The folder.
      num_bytes: Capacity of the disk, in whole pages.
      num_inodes: Number of files and folders that fit on the disk, with the uppermost folder; None for enough.
      is_read_only: True if the disk is read-only.
    """
    options = [f"size={num_bytes}", *([f"nr_inodes={num_inodes}"] if num_inodes else [])]
    options.append("ro" if is_read_only else "rw")
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", ",".join(options), "hop_tf_test", path], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error).encode()
        raise unittest.SkipTest(f"cannot mount a disk: {reason.decode().strip()}") from error
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)  # Lazy: TensorFlow may keep a file open.


def fill(path: str) -> str:
    """Fills the disk at the folder `path`; returns the file that takes the space."""
    name = os.path.join(path, "fills_the_disk")
    with contextlib.suppress(OSError), open(name, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return name
