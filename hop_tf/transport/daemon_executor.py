"""`DaemonExecutor`: runs calls on threads that do not keep the process alive."""

from __future__ import annotations

import collections
import concurrent.futures
import queue
import threading
from collections.abc import Callable


class DaemonExecutor(concurrent.futures.Executor):
    """Runs each call on a daemon thread of its own.

    The interpreter joins the threads of `ThreadPoolExecutor` before it exits. A server's threads wait in streams that
    last as long as the process, so the interpreter would never exit.

    Args:
      name: Name of the threads.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._reserved: collections.deque[queue.SimpleQueue] = collections.deque()

    @property
    def threads(self) -> list[threading.Thread]:
        """The running threads."""
        with self._lock:
            return list(self._threads)

    def try_reserve(self) -> bool:
        """Starts the thread of the next `submit`, which then cannot fail. Returns False if the system refuses."""
        calls = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(calls,), name=self._name, daemon=True)
        with self._lock:  # A thread in `threads` has been started, so it can be joined.
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:
                self._threads.discard(thread)
                return False
            self._reserved.append(calls)
            return True

    def submit(self, fn, /, *args, **kwargs):
        future = concurrent.futures.Future()
        if not self._reserved and not self.try_reserve():
            raise RuntimeError("no thread can be started: the system allows no more.")
        self._reserved.popleft().put((future, fn, args, kwargs))
        return future

    def close(self) -> None:
        """Ends threads that were reserved and not used."""
        with self._lock:
            while self._reserved:
                self._reserved.popleft().put(None)

    def _run(self, calls: queue.SimpleQueue) -> None:
        call = calls.get()
        try:
            if call is not None:
                _perform(*call)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())


def _perform(future: concurrent.futures.Future, fn: Callable, args: tuple, kwargs: dict) -> None:
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(fn(*args, **kwargs))
    except BaseException as error:
        future.set_exception(error)
