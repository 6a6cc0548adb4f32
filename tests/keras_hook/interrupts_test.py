"""Ctrl-C ends what TensorFlow waits for."""

import os
import signal
import threading

import tensorflow as tf

from hop_tf.keras_hook.interrupts import on_keyboard_interrupt


def _watchers():
    return [thread for thread in threading.enumerate() if thread.name == "hop_tf interrupts"]


class OnKeyboardInterruptTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        # As at the start of a program; whoever starts the tests may have had SIGINT ignored, as nohup does.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        self.queue = tf.queue.FIFOQueue(1, [tf.int32])

    def end_the_wait(self):
        self.queue.enqueue(0)

    def test_ends_the_wait_and_raises(self):
        interrupt = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
        with self.assertRaises(KeyboardInterrupt), on_keyboard_interrupt(self.end_the_wait):
            interrupt.start()
            self.queue.dequeue()
        interrupt.join()
        self.assertEqual(_watchers(), [])

    def test_signals_go_on_to_who_listened_before(self):
        listener, sender = os.pipe()
        self.addCleanup(os.close, listener)
        self.addCleanup(os.close, sender)
        os.set_blocking(sender, False)
        self.addCleanup(signal.set_wakeup_fd, signal.set_wakeup_fd(sender))
        self.addCleanup(signal.signal, signal.SIGUSR2, signal.signal(signal.SIGUSR2, lambda *_: None))
        with on_keyboard_interrupt(self.end_the_wait):
            signal.raise_signal(signal.SIGUSR2)
            self.assertEqual(os.read(listener, 1), bytes([signal.SIGUSR2]))
        self.assertEqual(signal.set_wakeup_fd(sender), sender)
        self.assertEqual(self.queue.size(), 0)

    def test_does_not_wait_for_a_process_forked_meanwhile(self):
        """As those that load data for `fit`."""
        end, sender = os.pipe()
        with on_keyboard_interrupt(self.end_the_wait):
            child = os.fork()
            if child == 0:
                os.close(sender)
                os.read(end, 1)
                os._exit(0)
        os.close(sender)  # Only now the process ends.
        os.close(end)
        self.assertEqual(os.waitpid(child, 0)[1], 0)

    def test_leaves_another_handler_alone(self):
        called = threading.Event()
        previous = signal.signal(signal.SIGINT, lambda *_: called.set())
        self.addCleanup(signal.signal, signal.SIGINT, previous)
        with on_keyboard_interrupt(self.end_the_wait):
            self.assertEqual(_watchers(), [])
            signal.raise_signal(signal.SIGINT)
        self.assertTrue(called.is_set())
        self.assertEqual(self.queue.size(), 0)

    def test_leaves_a_handler_alone_that_is_set_meanwhile(self):
        """As by a callback that ends training in its own way."""
        called = threading.Event()
        self.addCleanup(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        with on_keyboard_interrupt(self.end_the_wait):
            signal.signal(signal.SIGINT, lambda *_: called.set())
            signal.raise_signal(signal.SIGINT)
        self.assertTrue(called.is_set())
        self.assertEqual(self.queue.size(), 0)


if __name__ == "__main__":
    tf.test.main()
