"""UpdateQueue and TokenQueue."""

import numpy as np
import tensorflow as tf

from hop_tf.errors import ProtocolError
from hop_tf.tensors.fifo import NewestUpdates, SimulatedFifo, TokenQueue, Update, UpdateQueue


def _update(iteration, sender):
    return Update(iteration, sender, (np.full(16, 100 * iteration + sender, np.float32), np.ones(8, np.float64)))


def _queue(num_senders=3, max_iteration_gap=2):
    return UpdateQueue(dtypes=[tf.float32, tf.float64], num_senders=num_senders, max_iteration_gap=max_iteration_gap)


class UpdateQueueTest(tf.test.TestCase):
    def test_finds_updates_by_iteration_whatever_the_order_of_arrival(self):
        queue = _queue()
        for iteration, sender in ((1, 2), (0, 1), (2, 0), (0, 0), (1, 0)):
            queue.enqueue(_update(iteration, sender))
        self.assertEqual(queue.senders(0), {0, 1})
        self.assertEqual(queue.senders(1), {0, 2})
        updates = queue.dequeue(1)
        self.assertEqual([update.sender for update in updates], [0, 2])
        self.assertAllEqual(updates[1].buckets[0], np.full(16, 102.0))
        self.assertAllEqual(updates[1].buckets[1], np.ones(8))
        self.assertEqual(queue.senders(1), set())
        self.assertLen(queue, 3)

    def test_queues_rotate(self):
        queue = _queue(num_senders=1, max_iteration_gap=1)
        for iteration in range(10):
            queue.enqueue(_update(iteration, 0))
            self.assertEqual([update.iteration for update in queue.dequeue(iteration)], [iteration])
        self.assertEmpty(queue)

    def test_memory_is_bounded(self):
        queue = _queue(num_senders=2, max_iteration_gap=2)
        for iteration in range(3):
            for sender in range(2):
                queue.enqueue(_update(iteration, sender))
        self.assertLen(queue, (1 + 2) * 2)
        with self.assertRaisesRegex(ProtocolError, "rank 0 sent an update of iteration 3"):
            queue.enqueue(_update(3, 0))

    def test_an_update_comes_once(self):
        queue = _queue()
        queue.enqueue(_update(0, 1))
        with self.assertRaisesRegex(ProtocolError, "rank 1 sent an update of iteration 0"):
            queue.enqueue(_update(0, 1))

    def test_drops_what_a_sender_has_sent(self):
        queue = _queue()
        for iteration, sender in ((0, 0), (0, 2), (1, 0), (1, 1), (2, 0)):
            queue.enqueue(_update(iteration, sender))
        queue.drop_sender(0)
        self.assertEqual([queue.senders(iteration) for iteration in range(3)], [{2}, {1}, set()])
        self.assertAllEqual(queue.dequeue(1)[0].buckets[0], np.full(16, 101.0))

    def test_drops_what_is_older(self):
        queue = _queue()
        for iteration, sender in ((0, 0), (1, 0), (1, 1), (2, 1)):
            queue.enqueue(_update(iteration, sender))
        self.assertEqual(queue.drop_older(2), 3)
        self.assertLen(queue, 1)
        self.assertEqual([update.sender for update in queue.dequeue(2)], [1])


class NewestUpdatesTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.queue = NewestUpdates(dtypes=[tf.float32, tf.float64], senders=[0, 2])

    def test_keeps_the_newest_of_each_sender(self):
        superseded = [self.queue.enqueue(_update(*tag)) for tag in ((0, 2), (1, 0), (3, 2))]
        self.assertEqual(superseded, [False, False, True])
        self.assertLen(self.queue, 2)
        updates = self.queue.dequeue()
        self.assertEqual([(update.sender, update.iteration) for update in updates], [(0, 1), (2, 3)])
        self.assertAllEqual(updates[1].buckets[0], np.full(16, 302.0))
        self.assertEmpty(self.queue)
        self.assertEqual(self.queue.newest, {0: 1, 2: 3})

    def test_drops_what_a_sender_has_sent(self):
        self.queue.enqueue(_update(1, 0))
        self.queue.enqueue(_update(1, 2))
        self.queue.drop_sender(2, newest=7)
        self.assertEqual([update.sender for update in self.queue.dequeue()], [0])
        self.assertEqual(self.queue.newest, {0: 1, 2: 7})

    def test_an_update_is_newer_than_the_one_before(self):
        self.queue.enqueue(_update(2, 0))
        self.queue.dequeue()
        with self.assertRaisesRegex(ProtocolError, "rank 0 sent an update of iteration 2 after one of 2"):
            self.queue.enqueue(_update(2, 0))


class TokenQueueTest(tf.test.TestCase):
    def test_counts_tokens(self):
        tokens = TokenQueue(num_initial=2, capacity=6)
        tokens.put(0)
        tokens.put(3)  # One each for iterations 1 to 3.
        self.assertEqual((tokens.size, tokens.iteration), (6, 3))
        tokens.take(5)
        tokens.take()
        self.assertEqual(tokens.size, 0)

    def test_the_first_tokens_may_be_owed(self):
        tokens = TokenQueue(num_initial=-3, capacity=4, iteration=10)
        tokens.put(12)
        self.assertEqual(tokens.size, -1)
        tokens.put(15)
        self.assertEqual(tokens.size, 2)
        tokens.take(2)
        with self.assertRaisesRegex(ProtocolError, "cannot take 1 tokens of 0"):
            tokens.take()

    def test_refuses_what_the_protocol_cannot_produce(self):
        tokens = TokenQueue(num_initial=1, capacity=2)
        with self.assertRaisesRegex(
            ProtocolError, "for iteration 3 came after those for -1. The queue holds 1 tokens of 2"
        ):
            tokens.put(3)
        tokens.put(0)
        with self.assertRaisesRegex(ProtocolError, "for iteration 0 came after those for 0"):
            tokens.put(0)
        tokens.take(2)
        with self.assertRaisesRegex(ProtocolError, "cannot take 1 tokens of 0"):
            tokens.take()

    def test_does_not_begin_with_more_tokens_than_it_holds(self):
        with self.assertRaisesRegex(ProtocolError, "cannot begin with 7 tokens in iteration 5: it holds 6"):
            TokenQueue(num_initial=7, capacity=6, iteration=5)


class SimulatedFifoTest(tf.test.TestCase):
    def test_is_as_large_as_tensorflow_s(self):
        fifo = SimulatedFifo(1, [tf.int64])
        fifo.put([np.int64(0)])
        with self.assertRaisesRegex(OverflowError, "a full queue of 1"):
            fifo.put([np.int64(1)])


if __name__ == "__main__":
    tf.test.main()
