"""`Lending`: a connection's thread lends the connection, and gets it back."""

import threading
import time
import unittest.mock

from absl.testing import absltest

from hop_tf.transport import lending
from hop_tf.transport.lending import Lending
from support.transports import wait_until


class LendingTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.lending = Lending()

    def _lend(self):
        """The lane's thread, behind a message."""
        thread = threading.Thread(target=self.lending.lend, daemon=True)
        thread.start()
        return thread

    def test_is_not_lent_unless_it_is_wanted(self):
        self.lending.lend()
        self.assertFalse(self.lending.borrow())

    def test_is_lent_and_goes_back(self):
        with self.lending.waiting():
            pass
        thread = self._lend()
        wait_until(self.lending.borrow)
        self.assertFalse(self.lending.borrow())  # There is one borrower.
        self.lending.give_back()
        self.assertTrue(self.lending.borrow())
        time.sleep(2 * lending.KEEP_SECONDS)
        self.assertTrue(thread.is_alive())
        self.lending.give_back()
        thread.join()
        self.assertFalse(self.lending.borrow())

    def test_is_not_lent_to_one_while_another_waits(self):
        with self.lending.waiting():
            pass
        with self.lending.waiting():
            self.lending.lend()
            self.assertFalse(self.lending.borrow())

    def test_goes_back_at_once_when_it_was_of_no_use(self):
        with unittest.mock.patch.object(lending, "KEEP_SECONDS", 1e6):
            with self.lending.waiting():
                pass
            thread = self._lend()
            wait_until(self.lending.borrow)
            self.lending.give_back()
            self.lending.note_use(False)
            thread.join()
            with self.lending.waiting():
                pass
            self.lending.lend()  # For a while no thread wants the lane.
            self.assertFalse(self.lending.borrow())

    def test_goes_back_when_a_thread_waits_or_the_lane_ends(self):
        with unittest.mock.patch.object(lending, "KEEP_SECONDS", 1e6):
            for end in (self._wait_and_leave, lambda: self.lending.end()):
                self.lending = Lending()
                with self.lending.waiting():
                    pass
                thread = self._lend()
                wait_until(self.lending.borrow)
                self.lending.give_back()
                end()
                thread.join()
                self.assertFalse(self.lending.borrow())

    def test_a_wish_while_it_is_lent_counts_for_the_next_time(self):
        with self.lending.waiting():
            pass
        thread = self._lend()
        wait_until(self.lending.borrow)
        self.lending.give_back()
        with self.lending.waiting():
            thread.join()
        self._lend()
        wait_until(self.lending.borrow)
        self.lending.give_back()

    def test_all_or_none_are_borrowed(self):
        others = [Lending(), Lending()]
        with self.lending.waiting():
            pass
        self._lend()
        wait_until(self.lending.borrow)
        self.lending.give_back()
        self.assertFalse(lending.borrow_all([self.lending, *others]))
        self.assertTrue(lending.borrow_all([self.lending]))
        lending.give_back_all([self.lending])
        self.assertTrue(self.lending.borrow())
        self.lending.give_back()

    def _wait_and_leave(self):
        with self.lending.waiting():
            pass


if __name__ == "__main__":
    absltest.main()
