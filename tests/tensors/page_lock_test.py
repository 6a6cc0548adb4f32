"""PageLock, on a stand-in for the CUDA driver, which is built here."""

import ctypes
import gc
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest

import pytest
from absl.testing import absltest

from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.page_lock import PageLock

_COMPILER = shlex.split(os.environ.get("CC", "gcc"))
_SOURCE = pathlib.Path(__file__).with_name("driver.c")
_LARGE = 1 << 21


def _flags_of(address):
    """The kernel's flags of the mapping that an address lies in."""
    is_there = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if (found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            is_there = int(found[1], 16) <= address < int(found[2], 16)
        elif is_there and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@unittest.skipIf(shutil.which(_COMPILER[0]) is None, "needs a C compiler")
class PageLockTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enter_context(tempfile.TemporaryDirectory())  # Each test has a driver of its own.
        path = pathlib.Path(folder, "libdriver.so")
        subprocess.run([*_COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, _SOURCE], check=True)
        self.driver = ctypes.CDLL(str(path))
        self.addCleanup(lambda: self.assertEqual(self.driver.NumErrors(), 0))

    def pool(self, **arguments):
        return BufferPool(PageLock(self.driver, **arguments))

    def test_locks_large_blocks_once(self):
        self.driver.UseDevice(1)  # Not the first one, which another process may use.
        pool = self.pool()
        for _ in range(3):
            arrays = [pool.take(size) for size in (100, _LARGE, _LARGE)]
            self.assertEqual(self.driver.NumLocked(), 2)
            del arrays
        self.assertEqual(self.driver.NumRetained(), 1)

    def test_waits_until_a_device_is_in_use(self):
        pool = self.pool()
        first = pool.take(_LARGE)
        self.assertEqual((self.driver.NumLocked(), self.driver.NumRetained()), (0, 0))
        del first
        self.driver.UseDevice(0)
        array = pool.take(_LARGE)
        self.assertEqual(self.driver.NumLocked(), 1)
        array[:] = 1

    @pytest.mark.slow
    def test_unlocks_before_memory_is_unmapped(self):
        self.driver.UseDevice(0)
        pool = self.pool()
        array = pool.take(_LARGE)
        del array
        array = pool.take(4 * _LARGE)  # The pool gives the smaller block up.
        other = pool.take(_LARGE)
        self.assertEqual(self.driver.NumLocked(), 2)
        del pool, other
        gc.collect()
        array[:] = 1
        del array
        gc.collect()
        self.assertEqual(self.driver.NumLocked(), 0)

    def test_takes_pageable_memory_above_the_limit(self):
        self.driver.UseDevice(0)
        pool = self.pool(max_bytes=2 * _LARGE)
        arrays = [pool.take(_LARGE) for _ in range(4)]
        self.assertEqual(self.driver.NumLocked(), 2)
        for array in arrays:
            array[:] = 1

    def test_asks_no_more_when_the_driver_refuses(self):
        self.driver.UseDevice(0)
        self.driver.LockAtMost(1)
        pool = self.pool()
        arrays = [pool.take(_LARGE) for _ in range(2)]
        self.driver.LockAtMost(10)
        arrays.append(pool.take(_LARGE))
        self.assertEqual(self.driver.NumLocked(), 1)
        self.assertLen({array.ctypes.data for array in arrays}, 3)

    def test_a_forked_process_does_not_share_locked_pages(self):
        self.driver.UseDevice(0)
        array = self.pool().take(_LARGE)
        self.assertIn("dc", _flags_of(array.ctypes.data))  # MADV_DONTFORK.


if __name__ == "__main__":
    absltest.main()
