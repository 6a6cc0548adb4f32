"""Messages of one lane that come while another one is delivered: of an earlier connection, or for another queue."""

import threading

import numpy as np
from absl.testing import absltest

from hop_tf.transport.base import Message
from hop_tf.transport.inbox import Dispatcher

_DEADLINE_SECONDS = 30
_NOTHING = np.empty(0, np.uint8)


class InboxTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.errors, self.delivered = [], []
        self.dispatcher = Dispatcher(on_error=self.errors.append)
        self.inbox = self.dispatcher.inbox(1, 0)
        self.epoch, _ = self.inbox.begin(1)
        self._is_blocked, self._goes_on = threading.Event(), threading.Event()
        self._threads = []
        self.dispatcher.register("slow", self._block)
        self.dispatcher.register("queue", lambda message: self.delivered.append(message.header))
        self.accept("slow", b"slow")
        self.assertTrue(self._is_blocked.wait(_DEADLINE_SECONDS))

    def tearDown(self):
        self.go_on()
        self.assertEmpty(self.errors)
        super().tearDown()

    def _block(self, message):
        self._is_blocked.set()
        self._goes_on.wait(_DEADLINE_SECONDS)

    def accept(self, queue, header):
        """Begins to deliver the next message, on a thread of its own."""
        epoch, sequence = self.epoch, self.inbox.next_sequence(self.epoch)
        message = Message(1, queue, header, _NOTHING)
        thread = threading.Thread(target=self.inbox.accept, args=(epoch, sequence, message))
        self._threads.append(thread)
        thread.start()
        while self.inbox.next_sequence(epoch) == sequence:
            thread.join(0.001)

    def go_on(self):
        """Ends the delivery of the slow message, and all that follow."""
        self._goes_on.set()
        for thread in self._threads:
            thread.join(_DEADLINE_SECONDS)
            self.assertFalse(thread.is_alive())

    def test_another_connection_does_not_overtake(self):
        for number in range(20):
            self.accept("queue", bytes([number]))
            self.epoch, received = self.inbox.begin(number + 2)
            self.assertEqual(received, number + 2)
        self.go_on()
        self.assertEqual(self.delivered, [bytes([number]) for number in range(20)])

    def test_a_handler_is_looked_up_when_it_is_called(self):
        self.accept("queue", b"message")
        self.dispatcher.unregister("queue")
        self.dispatcher.register("queue", lambda message: self.delivered.append("later"))
        self.accept("queue", b"message")
        self.go_on()
        self.assertEqual(self.delivered, ["later"])

    def test_messages_of_a_former_process_are_dropped(self):
        self.accept("queue", b"former")
        self.dispatcher.begin_again(1)
        self.epoch, _ = self.inbox.begin(1)
        self.accept("queue", b"new")
        self.go_on()
        self.assertEqual(self.delivered, [b"new"])


if __name__ == "__main__":
    absltest.main()
