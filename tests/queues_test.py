"""UpdateQueue and TokenQueue."""

import numpy as np
import tensorflow as tf

from hop_tf.errors import ProtocolError
from hop_tf.queues import TokenQueue, Update, UpdateQueue


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


class TokenQueueTest(tf.test.TestCase):
    def test_counts_tokens(self):
        tokens = TokenQueue(num_initial=2, capacity=4)
        tokens.put(7)
        self.assertLen(tokens, 3)
        self.assertEqual([tokens.take() for _ in range(3)], [0, 0, 7])
        self.assertEmpty(tokens)

    def test_refuses_what_the_protocol_cannot_produce(self):
        tokens = TokenQueue(num_initial=1, capacity=1)
        with self.assertRaisesRegex(ProtocolError, "token for iteration 3"):
            tokens.put(3)
        tokens.take()
        with self.assertRaisesRegex(ProtocolError, "empty"):
            tokens.take()


if __name__ == "__main__":
    tf.test.main()
