"""A message is written by the thread that sends it, where the connection has nothing else to do."""

import threading

import numpy as np
from absl.testing import absltest

from hop_tf.transport.outbox import Outbox
from support.transports import wait_until


def _unchecked(waited_seconds):
    del waited_seconds


class WriteAtOnceTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.outbox = Outbox()
        self.written = []
        self.rest = ()
        self.epoch = self.outbox.resume(0)
        self.outbox.write_at_once(self.epoch, self._write)

    def _write(self, message):
        self.written.append((message.sequence, threading.current_thread()))
        return self.rest

    def _put(self, *, num_bytes=10, **arguments):
        return self.outbox.put(b"queue", b"", [np.zeros(num_bytes, np.uint8)], num_bytes, _unchecked, **arguments)

    def _take(self):
        return self.outbox.take(self.epoch, 0.01)

    def test_by_the_thread_that_sends(self):
        self._put()
        self._put()
        here = threading.current_thread()
        self.assertEqual(self.written, [(1, here), (2, here)])
        self.assertIsNone(self._take())
        self.assertEqual(self.outbox.num_unacknowledged, 2)
        self.outbox.acknowledge(self.epoch, 2)
        self.assertTrue(self.outbox.is_empty)

    def test_what_is_left_of_a_message_goes_before_others(self):
        self.rest = (memoryview(b"rest"),)
        self._put()
        self.rest = ()
        self._put()  # Behind the rest.
        self.assertLen(self.written, 1)
        first, second = self._take(), self._take()
        self.assertEqual((first.sequence, first.rest), (1, (memoryview(b"rest"),)))
        self.assertEqual((second.sequence, second.rest), (2, ()))
        self._put()  # The connection is at work.
        self.assertLen(self.written, 1)
        self.assertEqual(self._take().sequence, 3)
        self.assertIsNone(self._take())
        self._put()
        self.assertEqual([sequence for sequence, _ in self.written], [1, 4])

    def test_others_queue_up_behind_a_thread_that_writes(self):
        entered, go_on = threading.Event(), threading.Event()

        def write(message):
            self.written.append((message.sequence, None))
            entered.set()
            go_on.wait()
            return ()

        self.outbox.write_at_once(self.epoch, write)
        threads = [threading.Thread(target=self._put)]
        threads[0].start()
        entered.wait()
        self._put()
        threads.append(threading.Thread(target=self.outbox.end_writing))
        threads[1].start()
        self.assertIsNone(self._take())  # It would overtake the first one.
        self.assertTrue(threads[1].is_alive())
        go_on.set()
        for thread in threads:
            thread.join()
        self.assertLen(self.written, 1)
        self.assertEqual(self._take().sequence, 2)

    def test_a_broken_connection(self):
        """The next connection begins with the message that could not be written."""

        def write(message):
            del message
            raise BrokenPipeError

        self.outbox.write_at_once(self.epoch, write)
        self._put()
        self.assertFalse(self.outbox.is_current(self.epoch))
        self._put()
        self.epoch = self.outbox.resume(0)
        self.assertEqual([self._take().sequence for _ in range(2)], [1, 2])

    def test_the_rest_of_an_ended_connection_is_of_no_use(self):
        self.rest = (memoryview(b"rest"),)
        self._put()
        self.outbox.end_writing()
        self.epoch = self.outbox.resume(0)
        message = self._take()
        self.assertEqual((message.sequence, message.rest), (1, ()))

    def test_another_connection_writes_nothing_at_once(self):
        old, self.epoch = self.epoch, self.outbox.resume(0)
        self.outbox.write_at_once(old, self._write)
        self._put()
        self.assertEmpty(self.written)

    def test_a_large_message_is_left_to_the_connection(self):
        self._put(num_bytes=5 << 20)
        self.assertEmpty(self.written)
        self.assertEqual(self._take().sequence, 1)

    def test_what_supersedes_waits_where_another_one_is_in_flight(self):
        self.rest = (memoryview(b"rest"),)
        self._put(supersedes=True)
        self.assertFalse(self._put(supersedes=True))
        self.assertTrue(self._put(supersedes=True))
        self.assertEqual([self._take().sequence for _ in range(2)], [1, 2])

    def test_the_connection_is_woken_by_a_rest(self):
        taken = []
        thread = threading.Thread(target=lambda: taken.append(self.outbox.take(self.epoch)))
        thread.start()
        self.rest = (memoryview(b"rest"),)
        self._put()
        wait_until(lambda: taken)
        thread.join()
        self.assertEqual(taken[0].sequence, 1)


if __name__ == "__main__":
    absltest.main()
