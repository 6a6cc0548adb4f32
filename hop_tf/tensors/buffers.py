"""`BufferPool`: aligned memory for large arrays, recycled when the last reference to it is gone.

Fresh memory of many megabytes costs a page fault for every page, on every message. So blocks are used again, but only
when the last array in a block is gone: TensorFlow adopts aligned arrays without a copy, and may read them long after
the code that made them has returned.
"""

from __future__ import annotations

import collections
import functools
import mmap
import threading
import weakref

import numpy as np

from hop_tf.tensors.page_lock import Block, PageLock

_PAGE_BYTES = mmap.PAGESIZE
# A size is rounded up to one of eight steps between powers of two, so that blocks fit several sizes.
_STEPS_PER_DOUBLING = 8
# Smaller blocks are copied to a device quickly even if they are not page-locked.
_LOCKED_BYTES = 1 << 20


class BufferPool:
    """Provides uint8 arrays whose memory is used again when the last view of it is gone.

    The pool holds at most a quarter more memory than was in use at the busiest moment. Further unused blocks go back to
    the operating system. Without this quarter, steps that alternate between sizes would map memory in each step. May
    be used from any thread.

    Args:
      page_lock: Page-locks large blocks, which are copied to a GPU and back. Default None: no block is page-locked.
    """

    def __init__(self, page_lock: PageLock | None = None):
        self._page_lock = page_lock
        self._lock = threading.Lock()
        self._free: collections.OrderedDict[int, list[Block]] = collections.OrderedDict()
        self._free_bytes = 0
        self._live_bytes = 0
        self._peak_bytes = 0
        self._loans: dict[int, _Loan] = {}
        # The garbage collector may end a loan at any point, even within `take`. A deque needs no lock.
        self._returned: collections.deque[_Loan] = collections.deque()

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns an array to write to.

        Args:
          num_bytes: Size of the array; may be 0.

        Returns:
          1-D uint8 array with undefined contents, aligned to a memory page (hence to 64 bytes). The memory is not used
          again while a view of the array, or a tensor that shares its memory, exists.

        Raises:
          ValueError: If `num_bytes` is negative.
          OSError: If there is not enough memory.
        """
        if num_bytes < 0:
            raise ValueError(f"`num_bytes` must be at least 0. Received: num_bytes={num_bytes}.")
        block = self._take_block(_block_bytes(num_bytes))
        if self._page_lock is not None and len(block) >= _LOCKED_BYTES:
            block.lock(self._page_lock)
        array = np.frombuffer(block, np.uint8, num_bytes)
        # Views of an array refer to the array's base, not to the array: the base lives as long as the last of them.
        loan = _Loan(array.base, self._returned.append)
        loan.block = block
        self._loans[id(loan)] = loan
        return array

    @property
    def live_bytes(self) -> int:
        """Bytes in use now."""
        with self._lock:
            self._collect_returned()
            return self._live_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes kept for later use."""
        with self._lock:
            self._collect_returned()
            return self._free_bytes

    def _take_block(self, size: int) -> Block:
        with self._lock:
            if self._returned:
                self._collect_returned()
            block = self._pop_free(size) if size in self._free else Block.new(size)
            self._live_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
            # Gives up blocks of the sizes that were used least recently.
            while 4 * (self._live_bytes + self._free_bytes) > 5 * self._peak_bytes:
                self._pop_free(next(iter(self._free)))
            return block

    def _collect_returned(self) -> None:
        while self._returned:
            loan = self._returned.popleft()
            block = self._loans.pop(id(loan)).block
            self._live_bytes -= len(block)
            self._free_bytes += len(block)
            self._free.setdefault(len(block), []).append(block)
            self._free.move_to_end(len(block))

    def _pop_free(self, size: int) -> Block:
        blocks = self._free[size]
        self._free_bytes -= size
        block = blocks.pop()
        if not blocks:
            del self._free[size]
        return block


class _Loan(weakref.ref):
    """Notices that an array and all its views are gone. Neither creation nor callback runs Python code."""

    __slots__ = ("block",)


@functools.lru_cache(maxsize=1024)
def _block_bytes(num_bytes: int) -> int:
    step = max(_PAGE_BYTES, (1 << max(0, num_bytes - 1).bit_length()) // (2 * _STEPS_PER_DOUBLING))
    return max(step, -(-num_bytes // step) * step)
