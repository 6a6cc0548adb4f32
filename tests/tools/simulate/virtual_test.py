"""The virtual clock and transport: what others count on, and what can go wrong there."""

import math

import numpy as np
import tensorflow as tf

from hop_tf.errors import DeadlineExceededError, PeerLostError
from hop_tf.options import CommunicationOptions
from hop_tf.tools.simulate import DeadlockError, Scheduler, VirtualCluster

_OPTIONS = CommunicationOptions(timeout_seconds=10, progress_timeout_seconds=30)


def _cluster(fate=lambda number: 1.0, **arguments):
    """Two ranks; `fate(number)` is how long a message takes."""
    numbers = iter(range(10**6))
    return VirtualCluster(2, lambda *_: fate(next(numbers)), **arguments)


def _received(cluster):
    """Returns a list that gets the time and header of each message to a queue of rank 1."""
    received = []
    transport = cluster.memberships[1].transport
    transport.register("queue", lambda message: received.append((cluster.scheduler.now, message.header)))
    return received


class SchedulerTest(tf.test.TestCase):
    def test_a_run_that_takes_too_long(self):
        def body():
            while True:
                scheduler.sleep(1.0)

        scheduler = Scheduler(limit_seconds=5.5)
        scheduler.spawn("idle", body)
        with self.assertRaisesRegex(DeadlockError, r"at 6\.0+ s these have not ended: \['idle'\]"):
            scheduler.run()

    def test_what_comes_when_all_have_ended_is_no_deadlock(self):
        happened = []
        scheduler = Scheduler(limit_seconds=5.5)
        scheduler.spawn("short", lambda: scheduler.sleep(1.0))
        scheduler.call_at(100.0, lambda: happened.append(scheduler.now))
        scheduler.run()
        self.assertEqual(happened, [100.0])

    def test_stops(self):
        """No thread goes on after the stop, whether it runs or waits."""
        happened = []

        def tick():
            while True:
                scheduler.sleep(1.0)
                happened.append(scheduler.now)

        scheduler = Scheduler()
        for name in ("one", "another"):
            scheduler.spawn(name, tick)
        scheduler.call_at(2.5, scheduler.stop)
        scheduler.run()
        self.assertEqual(happened, [1.0, 1.0, 2.0, 2.0])


class DeadlinesTest(tf.test.TestCase):
    def _wait(self, cluster):
        """Lets rank 0 wait for rank 1 from second 2 on; returns the error of rank 0 and its time."""

        def body(rank):
            membership = cluster.memberships[rank]
            membership.transport.send(1 - rank, "hello")
            cluster.scheduler.sleep(2.0)
            if rank == 0:
                try:
                    membership.wait(lambda: [1], operation="receive")
                except (DeadlineExceededError, PeerLostError) as error:
                    raised.append((error, cluster.scheduler.now))

        raised = []
        cluster.run(body)
        ((error, seconds),) = raised
        return error, seconds

    def test_who_waits_for_ever_is_found_at_once_where_nobody_looks(self):
        with self.assertRaisesRegex(DeadlockError, r"Waiting: \['rank 0'\]"):
            self._wait(_cluster(options=_OPTIONS))

    def test_who_looks_sees_that_a_deadline_has_passed(self):
        error, seconds = self._wait(_cluster(options=_OPTIONS, limit_seconds=100))
        self.assertIsInstance(error, DeadlineExceededError)
        self.assertBetween(seconds, 2.0 + 30, 2.0 + 30 + 0.5)

    def test_a_rank_behind_a_cut_link_is_silent(self):
        cluster = _cluster(options=_OPTIONS, limit_seconds=100)
        cluster.scheduler.call_at(1.5, lambda: cluster.cut(1, 0))
        error, seconds = self._wait(cluster)
        self.assertIsInstance(error, PeerLostError)
        self.assertBetween(seconds, 1.5 + 10, 1.5 + 10 + 0.5)


class TransportTest(tf.test.TestCase):
    def test_what_follows_a_message_that_never_arrives(self):
        """On its lane it does not arrive either, on another one it does."""
        cluster = _cluster(lambda number: math.inf if number == 1 else 1.0)
        received = _received(cluster)
        for lane, header in ((0, b"a"), (0, b"b"), (0, b"c"), (1, b"d")):
            cluster.memberships[0].transport.send(1, "queue", header, lane=lane)
        cluster.scheduler.run()
        self.assertEqual(received, [(1.0, b"a"), (1.0, b"d")])

    def test_what_is_on_its_way_over_a_cut_link_is_lost(self):
        cluster = _cluster()
        received = _received(cluster)
        transport = cluster.memberships[0].transport
        for seconds, header in ((0.0, b"a"), (0.9, b"b"), (5.0, b"c")):
            cluster.scheduler.call_at(seconds, lambda header=header: transport.send(1, "queue", header))
        cluster.scheduler.call_at(1.5, lambda: cluster.cut(0, 1))
        cluster.scheduler.run()
        self.assertEqual(received, [(1.0, b"a")])

    def test_flush_waits_until_all_has_arrived(self):
        cluster, flushed = _cluster(lambda number: (3.0, 1.0, math.inf)[number]), []

        def body(rank):
            if rank:
                return
            transport = cluster.memberships[0].transport
            transport.send(1, "queue", lane=1)
            transport.send(1, "queue", lane=2)
            for seconds in (2.0, 2.0):
                flushed.append((transport.flush(1, seconds), cluster.scheduler.now))
            transport.send(1, "queue")
            flushed.append((transport.flush(1, 2.0), cluster.scheduler.now))

        cluster.run(body)
        self.assertEqual(flushed, [(False, 2.0), (True, 3.0), (False, 5.0)])

    def test_flush_waits_for_what_has_not_left(self):
        """Two messages leave one after the other, in 3 seconds each; the way takes another one."""
        cluster, flushed = _cluster(sending_seconds=lambda sender, receiver, num_bytes: 3.0), []

        def body(rank):
            if rank:
                return
            transport = cluster.memberships[0].transport
            for _ in range(2):
                transport.send(1, "queue")
            for seconds in (2.0, 3.0, 100.0):
                flushed.append((transport.flush(1, seconds), cluster.scheduler.now))

        cluster.run(body)
        self.assertEqual(flushed, [(False, 2.0), (False, 5.0), (True, 7.0)])

    def test_a_queue_that_nobody_takes_any_more(self):
        """Unregistering a queue drops its held and later messages. Messages to a queue never registered are held."""
        cluster = _cluster()
        sender, receiver = (membership.transport for membership in cluster.memberships)
        for seconds in (0.0, 5.0):
            for queue in ("never", "no more"):
                values = [np.ones(8, np.float32)]
                cluster.scheduler.call_at(seconds, lambda queue=queue, v=values: sender.send(1, queue, b"", v))
        cluster.scheduler.call_at(2.0, lambda: receiver.unregister("no more"))
        cluster.scheduler.run()
        self.assertEqual(receiver.num_held, 2)
        self.assertGreater(cluster.pool.live_bytes, 0)
        receiver.unregister("never")
        self.assertEqual((receiver.num_held, cluster.pool.live_bytes), (0, 0))

    def test_threads_die_with_their_rank(self):
        cluster, seen = _cluster(), []

        def tick(rank):
            while cluster.scheduler.now < 9:
                cluster.scheduler.sleep(1.0)
                seen.append((rank, cluster.scheduler.now))

        def body(rank):
            cluster.start_thread(rank, "ticks", lambda: tick(rank)).join()
            cluster.scheduler.sleep(20.0)

        cluster.scheduler.call_at(2.5, lambda: cluster.kill(0))
        cluster.run(body)
        self.assertEqual([seconds for rank, seconds in seen if rank == 0], [1.0, 2.0])
        self.assertLen([seconds for rank, seconds in seen if rank == 1], 9)

    def test_servers_hear_of_departures(self):
        cluster, heard = _cluster(num_servers=1), []
        cluster.servers[0].register("membership/leave", lambda message: heard.append(message.sender))
        cluster.run(lambda rank: cluster.memberships[rank].leave(sent_rounds={}, reason=""))
        self.assertEqual(cluster.servers[0].rank, 2)
        self.assertContainsSubset([0, 1], heard)


if __name__ == "__main__":
    tf.test.main()
