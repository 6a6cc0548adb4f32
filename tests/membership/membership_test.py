"""Sessions, departures and deadlines, on a virtual clock."""

import functools
from unittest import mock

import numpy as np
import tensorflow as tf

from hop_tf import errors
from hop_tf.membership import membership_pb2
from hop_tf.membership.monitor import Monitor, ThreadMonitor
from hop_tf.membership.session import Membership
from hop_tf.membership.waiting import Interrupted
from hop_tf.options import CommunicationOptions
from hop_tf.records import Kind
from hop_tf.runtime.joiner import State
from hop_tf.runtime.joining import Joining
from hop_tf.tools.simulate import VirtualCluster
from hop_tf.transport.base import Message, PeerStatus, Transport
from hop_tf.transport.in_process import InProcessNetwork, InProcessTransport
from hop_tf.transport.outbox import Outbox


def _line():
    """Four ranks, each of which deals with the one before and the one after it only."""
    cluster = VirtualCluster(4)
    for rank, membership in enumerate(cluster.memberships):
        membership.peers = tuple(peer for peer in (rank - 1, rank + 1) if 0 <= peer < 4)
        membership._all_are_peers = False
    return cluster


def _hear(membership, queue, message, sender=0):
    """A message comes."""
    membership.transport._handlers[queue](Message(sender, queue, message.SerializeToString(), np.empty(0, np.uint8)))


class SessionTest(tf.test.TestCase):
    def test_ranks_enter_a_session_together(self):
        cluster = VirtualCluster(3)
        entered = {}

        def body(rank):
            cluster.scheduler.sleep(10.0 * rank)
            cluster.memberships[rank].begin_session()
            entered[rank] = cluster.scheduler.now

        cluster.run(body)
        self.assertEqual(entered, {0: 20.0, 1: 20.0, 2: 20.0})

    def test_a_wait_from_time_0_on_is_recorded(self):
        recorders = []

        def make(rank, scheduler):
            del rank
            recorders.append(mock.Mock(is_on=True, step=0, now=lambda: scheduler.now))
            return recorders[-1]

        cluster = VirtualCluster(2, recorders=make)

        def body(rank):
            cluster.scheduler.sleep(10.0 * rank)
            cluster.memberships[rank].begin_session()

        cluster.run(body)
        waits = [call for call in recorders[0].add.call_args_list if call.args[0] == Kind.WAIT]
        self.assertEqual([(call.args[1:], call.kwargs["peer"]) for call in waits], [((0.0, 10.0), 1)])

    def test_the_next_session_begins_when_the_last_rank_enters_it(self):
        cluster = VirtualCluster(2)
        entered = []

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            cluster.scheduler.sleep(5.0 + 7.0 * rank)
            membership.leave(sent_rounds={"g": 3}, reason="")
            membership.begin_session()
            entered.append((rank, cluster.scheduler.now, membership.departed()))

        cluster.run(body)
        self.assertCountEqual(entered, [(0, 12.0, set()), (1, 12.0, set())])

    def test_a_departure_ends_waiting_for_later_steps_only(self):
        cluster = VirtualCluster(2)
        seen = []

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            if rank == 1:
                membership.leave(sent_rounds={"g": 5}, reason="early stopping")
                return
            membership.wait(lambda: [1] if membership.delivers(1, "g", 5) else [], operation="receive")
            seen.append([membership.delivers(1, "g", step) for step in (4, 5)])
            seen.append(membership.departure(1).reason)

        cluster.run(body)
        self.assertEqual(seen, [[True, False], "early stopping"])

    def test_all_ranks_have_rank_0s_seed(self):
        cluster = VirtualCluster(5)

        def body(rank):
            for session in range(2):
                cluster.memberships[rank].begin_session(seed=100 * session + rank)
                seeds[session].append(cluster.memberships[rank].seed)
                cluster.memberships[rank].leave(sent_rounds={}, reason="")

        seeds = [], []
        cluster.run(body)
        self.assertEqual(seeds, ([0] * 5, [100] * 5))

    def test_the_lowest_rank_owns_what_several_claim(self):
        cluster = VirtualCluster(6)
        owners = []

        def body(rank):
            for session, claims in enumerate(([f"of {rank}"], [f"of {rank // 2}", "of all"], [])):
                cluster.memberships[rank].begin_session(claims=claims)
                owners.append((session, cluster.memberships[rank].owners))
                cluster.memberships[rank].leave(sent_rounds={}, reason="")

        cluster.run(body)
        expected = (
            {f"of {rank}": rank for rank in range(6)},
            {"of 0": 0, "of 1": 2, "of 2": 4, "of all": 0},
            {},
        )
        self.assertCountEqual(owners, [(session, each) for session, each in enumerate(expected) for _ in range(6)])

    def test_a_newcomer_has_the_sessions_seed(self):
        membership = VirtualCluster(3, continue_without_lost=True).memberships[1]
        membership.session = 1
        under_way = membership_pb2.Ready(session=1, under_way=True, seed=7, owners={"a file": 1})
        _hear(membership, "membership/ready", under_way, sender=2)
        self.assertEqual((membership.joining, membership.seed, membership.owners), (True, 7, {"a file": 1}))

    def test_news_of_a_departure_reach_ranks_that_are_no_peers(self):
        cluster = _line()

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            if rank == 0:
                membership.leave(sent_rounds={}, reason="done")
            else:
                membership.wait(lambda: [] if 0 in membership.departed() else [rank - 1], operation="hear of it")

        cluster.run(body)
        self.assertEqual([membership.departed() for membership in cluster.memberships[1:]], [{0}] * 3)

    def test_a_farewell_of_which_only_one_message_arrives_reaches_all(self):
        """The leaving rank dies at once. Messages on the way to all ranks but one are lost."""
        for leaving in (0, 5):
            for reached in sorted({*range(16)} - {leaving}):
                cluster = VirtualCluster(16, lambda *_: 0.1, detection_seconds=2.0)

                def body(rank, cluster=cluster, leaving=leaving):
                    membership = cluster.memberships[rank]
                    membership.begin_session()
                    if rank == leaving:
                        cluster.scheduler.sleep(10.0 - cluster.scheduler.now)
                        membership.leave(sent_rounds={"group": 7}, reason="done")
                        cluster.scheduler.sleep(10.0)
                    else:
                        membership.wait(lambda: [] if membership.departed() else [leaving], operation="hear of it")

                kill = functools.partial(cluster.kill, leaving, reaches=[reached])
                cluster.scheduler.call_at(10.05, kill)
                cluster.run(body)
                for membership in cluster.memberships:
                    if membership.rank != leaving:
                        self.assertEqual(membership.departure(leaving).sent_rounds, {"group": 7})

    def test_a_farewell_reaches_all_through_the_hub_of_a_star(self):
        """The leaving rank tells the hub, and its neighbors in the tree. One of them is dead."""
        cluster = VirtualCluster(
            16,
            lambda *_: 0.1,
            peers=lambda rank: range(16) if rank == 0 else [0],
            detection_seconds=2.0,
            continue_without_lost=True,
        )

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            cluster.scheduler.sleep(20.0 - cluster.scheduler.now)
            if rank == 15:
                membership.leave(sent_rounds={"group": 7}, reason="done")
            membership.wait(lambda: [] if {15} <= membership.departed() | {rank} else [15], operation="hear of it")

        cluster.scheduler.call_at(10.0, lambda: cluster.kill(5))
        cluster.run(body)
        for membership in cluster.memberships:
            if membership.rank not in (5, 15):
                self.assertEqual(membership.departure(15).sent_rounds, {"group": 7})

    def test_the_end_of_a_session_takes_few_messages(self):
        """For 32 ranks, 31 messages tell of its end, and each rank passes on those of others to at most ten ranks."""
        cluster = VirtualCluster(32, lambda *_: 0.1, num_servers=1)
        heard, before = [], []
        cluster.servers[0].register("membership/leave", lambda message: heard.append(message.sender))

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            cluster.scheduler.sleep(10.0)
            before.append(membership.transport.counters()["messages_sent"])
            membership.leave(sent_rounds={}, reason="")
            membership.wait(lambda: sorted({*range(32)} - {rank} - membership.departed()), operation="hear of all")

        cluster.run(body)
        after = [membership.transport.counters()["messages_sent"] for membership in cluster.memberships]
        self.assertAllLessEqual(np.array(after) - before, 1 + 31 + 31 * 10)
        self.assertCountEqual(heard, range(32))

    def test_a_wait_for_many_ranks_looks_at_each_of_them_a_few_times(self):
        """The messages of 63 ranks come one after the other, within a second."""
        cluster = VirtualCluster(64, lambda sender, *_: sender / 64)
        membership, heard = cluster.memberships[0], set()

        def hear(message):
            heard.add(message.sender)
            membership.monitor.notify_all()

        membership.transport.register("queue", hear)
        status = self.enterContext(mock.patch.object(membership.transport, "status", wraps=membership.transport.status))

        def body(rank):
            if rank:
                cluster.memberships[rank].transport.send(0, "queue")
            else:
                membership.wait(lambda: sorted({*range(1, 64)} - heard), operation="hear of all")

        cluster.run(body)
        self.assertLen(heard, 63)
        self.assertBetween(status.call_count, 63, 63 * 9)

    def test_a_death_at_the_time_of_a_message_is_noticed(self):
        """The wait has looked at the dead rank shortly before, and does not look again after each message."""
        cluster = VirtualCluster(3, lambda *_: 0.1, detection_seconds=0.1)
        membership, heard = cluster.memberships[0], []

        def hear(message):
            heard.append(message.sender)
            membership.monitor.notify_all()

        membership.transport.register("queue", hear)

        def body(rank):
            if rank == 0:
                with self.assertRaisesRegex(errors.HopError, "on rank 2 at virtual:2 failed"):
                    membership.wait(lambda: [1, 2], operation="hear of both")
                return
            for pause in (0.95, 0.05) if rank == 1 else (1.5,):
                cluster.scheduler.sleep(pause)
                cluster.memberships[rank].transport.send(0, "queue")

        cluster.scheduler.call_at(1.0, lambda: cluster.kill(2))
        cluster.run(body)
        self.assertEqual(heard, [1, 1])

    def test_news_pass_through_a_rank_that_is_about_to_enter_the_next_session(self):
        cluster = _line()

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            if rank == 0:
                cluster.scheduler.sleep(1.0)
            if rank > 1:
                membership.wait(lambda: [] if 0 in membership.departed() else [rank - 1], operation="hear of it")
            membership.leave(sent_rounds={}, reason="done")
            membership.begin_session()

        cluster.run(body)
        self.assertEqual([membership.session for membership in cluster.memberships], [2] * 4)

    def test_departures_from_earlier_sessions_are_forgotten(self):
        cluster = VirtualCluster(3)

        def body(rank):
            for _ in range(10):
                cluster.memberships[rank].begin_session()
                cluster.scheduler.sleep(0.1 * rank)
                cluster.memberships[rank].leave(sent_rounds={}, reason="")

        cluster.run(body)
        for membership in cluster.memberships:
            self.assertLessEqual({session for session, _ in membership._departures._left}, {9, 10})

    def test_news_of_sessions_long_ago_are_no_news(self):
        """Unless a rank has ended for good."""
        membership = VirtualCluster(4).memberships[0]
        membership.session = 5
        passed_on = []
        for final in (False, True):
            leave = membership_pb2.Leave(rank=2, session=3, final=final)
            with mock.patch.object(membership.transport, "send") as send:
                membership.transport._handlers["membership/leave"](
                    Message(1, "membership/leave", leave.SerializeToString(), np.empty(0, np.uint8))
                )
            passed_on.append(send.called)
        self.assertEqual(passed_on, [False, True])

    def test_an_abort_is_raised_by_all(self):
        cluster = VirtualCluster(3)
        raised = {}

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            cluster.scheduler.sleep(1.0)
            if rank == 0:
                membership.leave(sent_rounds={}, reason="PeerLostError: rank 7 was lost", abort=True)
                return
            try:
                membership.wait(lambda: [0], operation="receive")
            except errors.PeerLostError as error:
                raised[rank] = str(error)

        cluster.run(body)
        self.assertCountEqual(raised, [1, 2])
        self.assertIn("rank 0 gave up: PeerLostError: rank 7 was lost", raised[1])

    def test_all_are_told_who_was_lost_whoever_notices(self):
        cluster, raised = VirtualCluster(6, peers=lambda rank: (), detection_seconds=0.5), {}
        awaited = {0: 2, 1: 0, 2: 5, 3: 1, 4: 1}  # In the tree.

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            if rank == 5:
                cluster.scheduler.sleep(2.0)
            try:
                membership.wait(lambda: [awaited[rank]], operation="receive", step=3)
            except errors.PeerLostError as error:
                raised[rank] = str(error)
                membership.leave(sent_rounds={}, reason=f"PeerLostError: {error}", abort=True)

        cluster.scheduler.call_at(1.0, lambda: cluster.kill(5))
        cluster.run(body)
        self.assertCountEqual(raised, range(5))
        for rank in (0, 1, 3, 4):
            self.assertStartsWith(
                raised[rank], f"rank {rank}: training ended because rank 5 was lost: rank 2, step 3: "
            )

    def test_hears_from_several_servers_of_a_rank_once(self):
        membership = VirtualCluster(3, continue_without_lost=True, num_servers=2).memberships[0]
        with self.assertLogs(level="WARNING") as logs:
            for lost in ({}, {1: "silent for 9 s", 0: "itself"}):
                for server in (3, 4):
                    membership.hear_of_lost(server, lost)
        self.assertEqual(membership.num_lost, 1)
        self.assertLen(logs.output, 1)
        self.assertIn("rank 0: the servers continue without rank 1: silent for 9 s", logs.output[0])
        for server in (3, 4):
            membership.hear_of_lost(server, {})
        membership.hear_of_lost(4, {1: "silent again"})
        self.assertEqual(membership.num_lost, 2)

    def test_goes_on_without_a_lost_rank(self):
        """Rank 3 is lost to rank 2 only, which tells the others, and rank 3 itself."""
        cluster = VirtualCluster(4, continue_without_lost=True)
        errors_of_lost = []

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            cluster.scheduler.sleep(1.0)
            if rank == 3:
                with self.assertRaisesRegex(
                    errors.PeerLostError, "the other ranks continued without this rank"
                ) as raised:
                    membership.wait(lambda: [2], operation="receive", step=5)
                errors_of_lost.append(raised.exception)
            else:
                membership.wait(lambda: [] if membership.departure(3) is not None else [3], operation="receive", step=5)

        lost = PeerStatus("virtual:3", connected=False, silent_seconds=0.0, incarnation="known", refused_seconds=9.0)
        transport = cluster.memberships[2].transport
        status = transport.status

        def status_in_time(peer):
            return lost if peer == 3 and cluster.scheduler.now else status(peer)

        with mock.patch.object(transport, "status", status_in_time):
            cluster.run(body)
        self.assertLen(errors_of_lost, 1)
        for membership in cluster.memberships[:3]:
            self.assertTrue(membership.departure(3).lost)
            self.assertFalse(membership.delivers(3, "g", 0))
            with self.assertRaisesRegex(errors.PeerLostError, "to average needs all ranks, and rank 3 was lost"):
                membership.require_all("to average")

    def test_a_lost_rank_is_not_believed_that_others_are_lost(self):
        """A process that was frozen, and goes on, has heard nothing of the others for as long as they of it."""
        cluster = VirtualCluster(3, continue_without_lost=True)

        def accuse(sender, rank):
            leave = membership_pb2.Leave(rank=rank, session=1, final=True, lost=True, reason="silent")
            for membership in cluster.memberships:
                if membership.rank != sender:
                    message = Message(sender, "membership/leave", leave.SerializeToString(), np.empty(0, np.uint8))
                    membership.transport._handlers["membership/leave"](message)

        def body(rank):
            cluster.memberships[rank].begin_session()
            cluster.scheduler.sleep(1.0)
            if rank == 2:
                accuse(2, 1)
                accuse(0, 1)
                accuse(1, 0)
                accuse(1, 2)

        cluster.run(body)
        self.assertEqual([membership.departed() for membership in cluster.memberships], [{1}, set(), {1}])
        self.assertEqual([membership.failure is None for membership in cluster.memberships], [True, False, True])

    def test_a_newcomer_hears_of_the_end_of_a_later_incarnation(self):
        """Rank 2 was lost, joined as incarnation 1 and ended; what a newcomer hears first does not matter."""
        end = membership_pb2.Leave(rank=2, session=1, incarnation=1, final=True, reason="done")
        under_way = membership_pb2.Ready(session=1, under_way=True, incarnations={2: 1})
        news = [("membership/leave", end), ("membership/ready", under_way)]
        for order in (news, news[::-1]):
            membership = VirtualCluster(3, continue_without_lost=True).memberships[0]
            membership.session = 1
            for queue, message in order:
                _hear(membership, queue, message, sender=1)
            self.assertEqual(membership.incarnation_of(2), 1)
            self.assertEqual(membership.departure(2).reason, "done")

    def test_what_a_process_hears_before_its_first_session_is_no_loss_of_its_own(self):
        """Others train, and lose ranks, while it loads its data; or all of them begin anew."""
        notices = {
            "lost": {"rank": 2, "lost": True, "final": True},
            "so many are lost that too few would be left": {"rank": 3, "lost": True, "final": True},
            "failed": {"rank": 2, "failed": True, "reason": "ValueError: x"},
            "ended": {"rank": 2, "final": True, "reason": "done"},
            "its former process was lost": {"rank": 1, "lost": True, "final": True},
        }
        for name, fields in notices.items():
            for session in (0, 1):  # Before it begins, and while it waits for the others.
                with self.subTest(name, session=session):
                    membership = VirtualCluster(
                        4, peers=lambda rank: range(4), continue_without_lost=True, min_ranks=4
                    ).memberships[1]
                    membership.session = session
                    leave = membership_pb2.Leave(session=1, num_rounds=5, **fields)
                    _hear(membership, "membership/leave", leave)
                    membership.require_all("to begin")
                    membership.check()
                    self.assertEqual((membership.num_lost, membership.is_given_up), (0, False))
                    for other in (2, 3):
                        _hear(membership, "membership/ready", membership_pb2.Ready(session=1), sender=other)
                    membership.session = 1
                    self.assertEmpty(membership.departed())

    def test_the_end_of_a_job_that_a_process_would_join_is_its_own(self):
        membership = VirtualCluster(4, continue_without_lost=True).memberships[1]
        _hear(membership, "membership/leave", membership_pb2.Leave(rank=2, session=1, abort=True, reason="x"))
        with self.assertRaisesRegex(errors.PeerLostError, "rank 2 gave up: x"):
            membership.check()

    def test_a_newcomer_is_admitted_when_its_process_is_met(self):
        """Messages sent earlier would be dropped together with those for the former process."""
        cluster = VirtualCluster(3, continue_without_lost=True)
        membership, news = cluster.memberships[0], []
        membership.session = 1

        def readmit(incarnation):
            news.append(
                membership.readmit(
                    membership_pb2.Join(rank=2, session=1, incarnation=1, transport_incarnation=incarnation)
                )
            )

        former, new = cluster.memberships[2].transport.incarnation, cluster.restart(2).transport.incarnation
        for met in (former, new):
            status = PeerStatus("virtual:2", connected=True, silent_seconds=0.0, incarnation=met)
            with mock.patch.object(membership.transport, "status", return_value=status):
                readmit(new)
        readmit(new)
        self.assertEqual(news, [False, True, False])
        self.assertEqual((membership.incarnation_of(2), membership.num_joined), (1, 1))

    def test_a_restart_of_a_rank_that_is_no_peer_is_no_loss(self):
        """It may be noticed long after peers have told that the new process takes part."""
        cluster = VirtualCluster(8, peers=lambda rank: (), continue_without_lost=True)
        membership = cluster.memberships[7]
        membership.session = membership._begun_session = 1
        other = next(rank for rank in range(7) if rank not in membership.peers)
        self.assertTrue(
            membership.readmit(membership_pb2.Join(rank=other, session=1, incarnation=1, transport_incarnation="new"))
        )
        membership.on_restart(other)
        self.assertIsNone(membership.departure(other))
        peer = membership.peers[0]
        membership.on_restart(peer)
        self.assertTrue(membership.departure(peer).lost)

    def test_two_newcomers(self):
        """A newcomer that knew the other when it joined owes it no welcome. Otherwise it sends one after the news."""
        for incarnations, welcomed in (({1: 1}, {2}), ({}, set())):
            membership = VirtualCluster(3, continue_without_lost=True).memberships[1]
            membership.session = membership.incarnation = 1
            joining = Joining(membership, mock.create_autospec(State), timeout_seconds=0.0)
            join = membership_pb2.Join(
                rank=2, session=1, incarnation=1, transport_incarnation="new", incarnations=incarnations
            )
            _hear(membership, "joining/join", join)
            self.assertEqual(joining._welcomed, welcomed)
            self.assertEqual(membership.incarnation_of(2), 1)

    def test_interrupt_ends_waiting(self):
        cluster = VirtualCluster(2)

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            if rank == 0:
                cluster.scheduler.call_at(3.0, membership.interrupt)
                with self.assertRaises(Interrupted):
                    membership.wait(lambda: [1], operation="receive")
                self.assertEqual(cluster.scheduler.now, 3.0)

        cluster.run(body)


class _SteppingMonitor(Monitor):
    """A clock that moves by what is waited."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def notify_all(self):
        pass

    def wait(self, timeout_seconds, deadline=np.inf):
        self.time = min(self.time + timeout_seconds, deadline)


class _FakeTransport(Transport):
    """A peer in a given state."""

    rank, incarnation = 0, "mine"

    def __init__(self, status):
        self._status = status

    def status(self, peer):
        return self._status

    def start(self):
        pass

    def _ignore(self, *args, **kwargs):
        pass

    connect = register = unregister = send = flush = counters = close = _ignore


def _membership(status, monitor, continue_without_lost=False):
    """Rank 0 of two."""
    return Membership(
        transport=_FakeTransport(status),
        monitor=monitor,
        options=CommunicationOptions(timeout_seconds=30, progress_timeout_seconds=600),
        world_size=2,
        peers=[1],
        continue_without_lost=continue_without_lost,
    )


class FailureTest(tf.test.TestCase):
    def test_the_first_one_is_raised_and_each_is_logged_once(self):
        """Several threads may fail by the same one."""
        membership = _membership(
            PeerStatus("host:123", connected=True, silent_seconds=0.0, incarnation="known"), _SteppingMonitor()
        )
        with self.assertLogs("absl", "ERROR") as logs:
            for message in ("rank 1 is lost", "rank 1 is lost", "out of memory"):
                membership.fail(errors.PeerLostError(message))
        self.assertEqual(
            [record.getMessage() for record in logs.records],
            ["rank 0: PeerLostError: rank 1 is lost", "rank 0: PeerLostError: out of memory"],
        )
        with self.assertRaisesRegex(errors.PeerLostError, "rank 1 is lost"):
            membership.wait(lambda: [1], operation="receive update", step=12)


class DeadlineTest(tf.test.TestCase):
    def _wait(self, status, step=12, continue_without_lost=False):
        monitor = _SteppingMonitor()
        membership = _membership(status, monitor, continue_without_lost)
        told = [None, AssertionError("others are told once")]
        try:
            with mock.patch.object(membership, "_forward", side_effect=told):
                membership.wait(lambda: [1], operation="receive update", step=step)
        finally:
            self.waited = monitor.time

    def _status(self, **kwargs):
        default = {"connected": True, "silent_seconds": 0.0, "incarnation": "known"}
        return PeerStatus("host:123", **{**default, **kwargs})

    def test_a_silent_peer_is_lost(self):
        with self.assertRaisesRegex(
            errors.PeerLostError,
            r"rank 0, step 12: receive update on rank 1 at host:123 failed after 0.0 s \(silent for 31.0 s: refused\)",
        ):
            self._wait(self._status(connected=False, silent_seconds=31.0, last_problem="refused"))

    def test_a_lost_peer_that_nobody_can_do_without(self):
        """As in an all-reduce for measurements, where ranks otherwise go on without a lost one."""
        with self.assertRaisesRegex(errors.PeerLostError, "rank 1 at host:123 .*it has ended: .*silent for 31.0 s"):
            self._wait(self._status(connected=False, silent_seconds=31.0), continue_without_lost=True)

    def test_a_peer_that_never_came_is_named(self):
        absent = self._status(connected=False, incarnation=None, silent_seconds=31.0)
        with self.assertRaisesRegex(errors.DeadlineExceededError, r"rank 1 at host:123 .*\(it never appeared\)"):
            self._wait(absent, step=None)
        with self.assertRaisesRegex(errors.PeerLostError, r"rank 1 at host:123 .*\(it never appeared\)"):
            self._wait(absent)  # Of a rank that joins late: the others may know that it was lost.

    def test_a_living_peer_is_waited_for_longer(self):
        with self.assertRaisesRegex(errors.DeadlineExceededError, "it is alive.*progress_timeout_seconds"):
            self._wait(self._status())
        self.assertAlmostEqual(self.waited, 600, delta=1)

    def test_what_cannot_be_mended_is_raised_at_once(self):
        with self.assertRaisesRegex(errors.MismatchError, "other strategy"):
            self._wait(self._status(failure=errors.MismatchError("other strategy")))
        self.assertEqual(self.waited, 0)


class StallTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.told = []
        self.membership = Membership(
            transport=_FakeTransport(PeerStatus("host:123", True, silent_seconds=0.25, incarnation="known")),
            monitor=_SteppingMonitor(),
            options=CommunicationOptions(timeout_seconds=40, progress_timeout_seconds=100),
            world_size=2,
            peers=[1],
            on_stall=lambda text: self.told.append((self.membership.monitor.now(), text)),
        )

    def _wait(self, seconds, operation="receive update", step=12, missing=(1,)):
        end = self.membership.monitor.now() + seconds
        self.membership.wait(
            lambda: missing if self.membership.monitor.now() < end else [], operation=operation, step=step
        )

    def test_is_told_once_and_after_a_quarter_of_the_deadline(self):
        self._wait(90)
        ((seconds, text),) = self.told
        self.assertEqual(seconds, 25)
        self.assertIn("rank 0, step 12: receive update: it has waited 25 s for rank 1 (heard 0.2 s ago)", text)
        self.assertIn("100 s", text)

    def test_who_is_awaited_is_known_meanwhile(self):
        awaited = []

        def missing():
            awaited.append(self.membership.awaited)
            return [1] if len(awaited) < 3 else []

        self.membership.wait(missing, operation="receive update")
        self.assertEqual(awaited, [[], [1], [1]])
        self.assertEmpty(self.membership.awaited)

    def test_counts_for_whom_steps_have_waited(self):
        self._wait(3)
        self._wait(4)
        self._wait(5, step=None)
        self._wait(0)
        self.assertEqual(self.membership.wait_seconds_by_peer(), {"rank_1": 7.0})
        self._wait(2, missing=[1, 2])
        self.assertEqual(self.membership.wait_seconds_by_peer(), {"rank_1": 8.0, "rank_2": 1.0})

    def test_short_waiting_is_none(self):
        for _ in range(5):
            self._wait(20)
        self.assertEmpty(self.told)

    def test_others_that_wait_meanwhile_add_nothing(self):
        """Each of several threads would say the same."""
        with mock.patch.object(self.membership, "_told_at", 0.0):
            self._wait(24)
            self._wait(24.75, "as another thread that began later")
            self.assertEmpty(self.told)
        self._wait(30)
        self.assertLen(self.told, 1)


class _FullTransport(_FakeTransport):
    """There is never room for a message to rank 1. Others take theirs."""

    def __init__(self, status, monitor):
        super().__init__(status)
        self.sent = []
        self.handlers = {}
        self.on_block = lambda: None
        self._monitor = monitor

    def register(self, queue, handler):
        self.handlers[queue] = handler

    def send(self, peer, queue, header=b"", payload=(), lane=0, *, check=None, supersedes=False):
        self.sent.append((peer, queue))
        while peer == 1 and check is not None:
            self._monitor.wait(0.25)
            if self._monitor.time >= 3:
                self.on_block()
            check()


class SendTest(tf.test.TestCase):
    """Tests of the events that end a blocking send to a peer that does not take messages."""

    def _send(
        self,
        continues=True,
        step=12,
        on_block=lambda membership, transport: None,
        newcomer=False,
        interruptible=True,
        all_have_left=False,
        **status,
    ):
        monitor = _SteppingMonitor()
        default = {"connected": True, "silent_seconds": 0.0, "incarnation": "known"}
        transport = _FullTransport(PeerStatus("host:123", **{**default, **status}), monitor)
        membership = Membership(
            transport=transport,
            monitor=monitor,
            options=CommunicationOptions(timeout_seconds=30, progress_timeout_seconds=600),
            world_size=3,
            peers=[1, 2],
            continue_without_lost=continues,
        )
        transport.on_block = lambda: on_block(membership, transport)
        if all_have_left:
            self._leave(rank=1)(membership, transport)
            membership.leave(sent_rounds={}, reason="")
        try:
            if newcomer:  # The loss of the former process must not keep the state from the newcomer.
                self._leave(rank=1, lost=True, final=True)(membership, transport)
                membership.send_to_newcomer(1, "state", b"")
            else:
                membership.send(1, "updates", b"", step=step, interruptible=interruptible)
        finally:
            self.waited = monitor.time
            self.sent = transport.sent
        return membership

    def _leave(self, **fields):
        def on_block(membership, transport):
            leave = membership_pb2.Leave(session=membership.session, **fields)
            message = Message(2, "membership/leave", leave.SerializeToString(), np.empty(0, np.uint8))
            transport.handlers["membership/leave"](message)

        return on_block

    def test_its_departure(self):
        membership = self._send(on_block=self._leave(rank=1, lost=True, final=True, reason="dead"))
        self.assertAlmostEqual(self.waited, 3, delta=0.5)
        membership.check()

    def test_that_its_process_is_dead(self):
        membership = self._send(refused_seconds=9.0)
        self.assertTrue(membership.departure(1).lost)
        self.assertIn((2, "membership/leave"), self.sent)
        self.assertLess(self.waited, 1)

    def test_its_silence(self):
        for incarnation in ("known", None):
            membership = self._send(connected=False, silent_seconds=31.0, incarnation=incarnation)
            self.assertTrue(membership.departure(1).lost)

    def test_a_dead_peer_is_an_error_where_ranks_do_not_go_on(self):
        with self.assertRaisesRegex(errors.PeerLostError, "step 12: send to 'updates' on rank 1 .*no process listens"):
            self._send(continues=False, refused_seconds=9.0)
        with self.assertRaisesRegex(errors.PeerLostError, "no process listens"):
            self._send(step=None, refused_seconds=9.0)

    def test_a_living_peer_is_waited_for(self):
        with self.assertRaisesRegex(errors.DeadlineExceededError, "it is alive"):
            self._send()
        self.assertAlmostEqual(self.waited, 600, delta=1)

    def test_a_peer_is_waited_for_between_sessions(self):
        """That it has left the last one, as all have, says nothing: it takes part in what comes after."""
        with self.assertRaisesRegex(errors.DeadlineExceededError, "it is alive"):
            self._send(all_have_left=True)
        with self.assertRaisesRegex(errors.PeerLostError, "it has ended: the script is over"):
            end = self._leave(rank=1, final=True, reason="the script is over")
            self._send(all_have_left=True, continues=False, on_block=end)

    def test_the_end_of_the_job(self):
        with self.assertLogs("absl", "ERROR") as logs:  # Perhaps no thread waits and raises the error.
            membership = self._send(on_block=self._leave(rank=2, abort=True, reason="a mismatch"))
        self.assertIn("PeerLostError: rank 0: training ended because rank 2 gave up: a mismatch", logs.output[0])
        with self.assertRaisesRegex(errors.PeerLostError, "rank 2 gave up: a mismatch"):
            membership.check()

    def test_that_the_rank_itself_leaves(self):
        for newcomer in (False, True):
            with self.assertRaises(Interrupted):
                self._send(on_block=lambda membership, transport: membership.interrupt(), newcomer=newcomer)

    def test_that_the_rank_itself_leaves_where_it_has_to_send(self):
        """Others may have what goes with it: the receiver's departure ends the waiting, the own leaving does not."""

        def both_leave(membership, transport):
            membership.interrupt()
            self._leave(rank=1, lost=True, final=True)(membership, transport)

        self._send(on_block=both_leave, interruptible=False)
        self.assertAlmostEqual(self.waited, 3, delta=0.5)
        with self.assertRaises(Interrupted):
            self._send(on_block=both_leave)

    def test_the_death_of_a_newcomer(self):
        def die(membership, transport):
            transport._status = PeerStatus("host:123", False, 0.0, True, refused_seconds=9.0)

        membership = self._send(on_block=die, newcomer=True)
        self.assertAlmostEqual(self.waited, 3, delta=0.5)
        membership.check()

    def test_a_peer_that_falls_silent_while_much_is_sent(self):
        """On a real transport, whose own deadline is the same."""
        self.enter_context(mock.patch.dict(Outbox.__init__.__kwdefaults__, max_bytes=1000))
        options = CommunicationOptions(timeout_seconds=0.5)
        network = InProcessNetwork(2)
        transports = [InProcessTransport(rank, network, options=options) for rank in range(2)]
        for transport in transports:
            self.addCleanup(transport.close)
            transport.start()
        membership = Membership(
            transport=transports[0],
            monitor=ThreadMonitor(),
            options=options,
            world_size=2,
            peers=[1],
            continue_without_lost=True,
        )
        transports[0].connect(1)
        self.assertTrue(transports[0].status(1).connected)
        network.kill(1)
        for step in range(3):
            membership.send(1, "updates", b"", [np.zeros(600, np.uint8)], lane=1, step=step)
        self.assertTrue(membership.departure(1).lost)


if __name__ == "__main__":
    tf.test.main()
