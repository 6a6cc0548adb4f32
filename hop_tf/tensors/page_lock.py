"""`PageLock`: memory that a GPU copies from and to directly.

TensorFlow passes the memory of an array to CUDA. CUDA copies pageable memory through a buffer of its own, while the
caller waits. It copies page-locked memory at the full speed of the bus, in the background.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

_LIBRARY = "libcuda.so.1"
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for the contexts of all devices.
_SUCCESS = 0

_ADDRESS, _SIZE, _INT, _UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_FUNCTIONS = {
    "cuDeviceGetCount": (ctypes.POINTER(_INT),),
    "cuDevicePrimaryCtxGetState": (_INT, ctypes.POINTER(_UINT), ctypes.POINTER(_INT)),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_ADDRESS), _INT),
    "cuCtxPushCurrent_v2": (_ADDRESS,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_ADDRESS),),
    "cuMemHostRegister_v2": (_ADDRESS, _SIZE, _UINT),
    "cuMemHostUnregister": (_ADDRESS,),
}


class PageLock:
    """Page-locks memory, by the CUDA driver, once TensorFlow has begun to use a GPU.

    Pageable memory works, too. So it is no error if the driver refuses, or if the limit is reached. May be used from
    any thread.

    Args:
      library: The driver.
      max_bytes: Limit on the bytes that are page-locked at a time. Default: a sixteenth of the machine's memory.
    """

    def __init__(self, library: ctypes.CDLL, max_bytes: int | None = None):
        self._functions = {name: getattr(library, name) for name in _FUNCTIONS}
        for name, arguments in _FUNCTIONS.items():
            self._functions[name].argtypes, self._functions[name].restype = arguments, _INT
        self._max_bytes = _memory_bytes() // 16 if max_bytes is None else max_bytes
        self._num_bytes = 0
        self._counting = threading.Lock()
        self._context: ctypes.c_void_p | None = None

    @classmethod
    def find(cls) -> PageLock | None:
        """Returns the `PageLock` of this machine's driver; None if there is no driver."""
        try:
            return cls(ctypes.CDLL(_LIBRARY))
        except (OSError, AttributeError):
            return None

    def lock(self, address: int, num_bytes: int) -> bool:
        """Page-locks memory, which must start at a page. Returns False if it stays pageable."""
        if not self._has_context() or not self._count(num_bytes):
            return False
        if self._in_context("cuMemHostRegister_v2", address, num_bytes, _PORTABLE):
            return True
        self._count(-num_bytes)
        self._max_bytes = 0  # Avoids further calls of the driver, which take time.
        return False

    def unlock(self, address: int, num_bytes: int) -> None:
        """Makes memory pageable again. Call this before the memory is unmapped."""
        self._in_context("cuMemHostUnregister", address)
        self._count(-num_bytes)

    def _count(self, num_bytes: int) -> bool:
        with self._counting:
            if num_bytes > self._max_bytes - self._num_bytes:
                return False
            self._num_bytes += num_bytes
            return True

    def _has_context(self) -> bool:
        """True if this process uses a device. Creating a context here would waste memory of a device."""
        if self._context is None:
            count, flags, is_active, context = _INT(), _UINT(), _INT(), _ADDRESS()
            if not self._call("cuDeviceGetCount", count):  # The driver is not in use yet.
                return False
            for device in range(count.value):
                found = self._call("cuDevicePrimaryCtxGetState", device, flags, is_active) and is_active.value
                if found and self._call("cuDevicePrimaryCtxRetain", context, device):
                    self._context = context
                    break
        return self._context is not None

    def _in_context(self, name: str, *arguments: int) -> bool:
        if not self._call("cuCtxPushCurrent_v2", self._context):
            return False
        try:
            return self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", _ADDRESS())

    def _call(self, name: str, *arguments) -> bool:
        return self._functions[name](*arguments) == _SUCCESS


class Block(mmap.mmap):
    """Anonymous memory that may be page-locked until it is unmapped."""

    _unlock = None

    @classmethod
    def new(cls, num_bytes: int) -> Block:
        """Maps memory."""
        return cls(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def lock(self, page_lock: PageLock) -> None:
        """Page-locks the memory, unless that is done already, or impossible."""
        if self._unlock is not None:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        if page_lock.lock(address, len(self)):
            self._unlock = page_lock.unlock, address, len(self)
            # A forked process would share the pages. The first write here would then give this process a new page, but
            # the device would use the old one.
            self.madvise(mmap.MADV_DONTFORK)

    def __del__(self):
        if self._unlock is not None:
            unlock, *arguments = self._unlock
            unlock(*arguments)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
