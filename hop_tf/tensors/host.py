"""`on_host`: keeps TensorFlow's eager operations on the host.

A new thread has no device scope. TensorFlow then places the thread's operations, and the arrays that they get, on the
first GPU. An array that is put into a queue on the host would be copied to the GPU and back. Both copies wait for all
kernels of the training step, and the first copy holds Python's global lock meanwhile.

So the threads of hop_tf run their operations on the host. Functions that threads of a transport may call enter the
scope themselves.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable

import tensorflow as tf

_of_this_thread = threading.local()


def on_host() -> contextlib.AbstractContextManager:
    """Returns a scope in which eager operations run on the host. In a graph, use `tf.device("/cpu:0")` instead."""
    try:
        return _of_this_thread.scope  # Entering the same scope again takes a third of the calls that a new one takes.
    except AttributeError:
        with tf.init_scope():
            _of_this_thread.scope = tf.device("/cpu:0")
        return _of_this_thread.scope


def runs_on_host(body: Callable[[], None]) -> Callable[[], None]:
    """Returns the body of a thread, with its eager operations on the host."""

    @functools.wraps(body)
    def run(*args, **kwargs):
        with (scope := on_host()):
            _of_this_thread.scope = contextlib.nullcontext()  # There is no need to enter it once more.
            try:
                body(*args, **kwargs)
            finally:
                _of_this_thread.scope = scope

    return run
