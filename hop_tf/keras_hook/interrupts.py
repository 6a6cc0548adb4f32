"""Ctrl-C while TensorFlow waits.

While an operation waits inside TensorFlow, Python runs no signal handlers: Ctrl-C would take effect only after the
wait. The handler at the level of the operating system does run, and wakes a thread through `signal.set_wakeup_fd`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_keyboard_interrupt(callback: Callable[[], None]) -> Iterator[None]:
    """Calls `callback`, on a thread, as soon as Ctrl-C is pressed within the context.

    The callback must end TensorFlow's wait. Then Python raises `KeyboardInterrupt` as usual. On other threads than the
    main thread, or if SIGINT does not raise `KeyboardInterrupt`, the context does nothing.

    Args:
      callback: Must be thread-safe and must not block.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(
        target=_watch, args=(receiver, previous, callback), name="hop_tf interrupts", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        # The watcher reads the end of the stream and ends, even if a forked process still has the socket.
        sender.shutdown(socket.SHUT_WR)
        watcher.join()
        sender.close()
        receiver.close()


def _watch(receiver: socket.socket, previous: int, callback: Callable[[], None]) -> None:
    while signals := receiver.recv(64):
        if previous >= 0:
            os.write(previous, signals)
        # The program may have set a handler of its own meanwhile. That handler decides how to stop.
        if signal.SIGINT in signals and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            callback()
