"""Tests of rounds, in which ranks bring each other values: on a virtual clock, in many orders of events."""

import struct
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from hop_tf.errors import PeerLostError, ProtocolError
from hop_tf.membership import membership_pb2
from hop_tf.membership.rounds import Rounds
from hop_tf.tools.simulate import VirtualCluster
from support.logs import logging_disabled


class _Job:
    """Ranks in one session, each with `Rounds`.

    Args:
      body: Each rank calls `body(rounds, rank)`.
      world_size: Number of ranks.
      seed: Seed of the random times of messages. None: messages take no time.
      settings: Makes a rank's further arguments of `Rounds`.
      **cluster_settings: Arguments of `VirtualCluster`.
    """

    def __init__(self, body, world_size=3, seed=None, settings=lambda rank: {}, **cluster_settings):
        self._body, self._settings = body, settings
        random = np.random.default_rng(seed)
        link_seconds = None if seed is None else (lambda *_: random.exponential(1.0))
        self.cluster = VirtualCluster(world_size, link_seconds, **cluster_settings)
        self.scheduler = self.cluster.scheduler
        self.rounds, self.results = {}, {}
        self.num_messages = 0  # Of rounds, by all ranks.

    def run(self):
        self.cluster.run(self._run_rank)
        return [self.results[rank] for rank in sorted(self.results)]

    def _run_rank(self, rank):
        membership = self.cluster.memberships[rank]
        rounds = self.rounds[rank] = Rounds(membership, "anything", **self._settings(rank))
        send = membership.transport.send

        def counted(peer, queue, *arguments, **keywords):
            self.num_messages += queue == rounds.name
            return send(peer, queue, *arguments, **keywords)

        membership.transport.send = counted
        rounds.reset(membership.session + 1)
        membership.begin_session()
        self.results[rank] = self._body(rounds, rank)
        membership.leave(sent_rounds={rounds.name: rounds.sent_rounds}, reason="")

    def kill(self, rank, after_seconds=1.0):
        """Ends the process of a rank that calls this."""
        self.scheduler.call_at(self.scheduler.now + after_seconds, lambda: self.cluster.kill(rank))
        self.scheduler.sleep(1e3)


_GOES_ON = {"continue_without_lost": True, "detection_seconds": 1.0}


class GatherTest(parameterized.TestCase):
    @parameterized.parameters(1, 2, 5)
    def test_all_get_the_values_of_all(self, world_size):
        def body(rounds, rank):
            job.scheduler.sleep(10.0 * rank)
            return rounds.gather(0, b"" if rank == 1 else b"%d" % rank), job.scheduler.now

        job = _Job(body, world_size)
        values = {rank: b"" if rank == 1 else b"%d" % rank for rank in range(world_size)}
        for of_rank, now in job.run():
            self.assertEqual(list(of_rank.items()), list(values.items()))  # In the order of ranks.
            self.assertEqual(now, 10.0 * (world_size - 1))
        self.assertEqual(job.num_messages, world_size * (world_size - 1))

    def test_values_of_other_rounds_do_not_mix_in(self):
        for seed in range(20):
            job = _Job(lambda rounds, rank: [rounds.gather(k, b"%d" % k) for k in (0, 1, 4, 5)], seed=seed)
            self.assertEqual(job.run(), [[dict.fromkeys(range(3), b"%d" % k) for k in (0, 1, 4, 5)]] * 3)

    def test_a_rank_that_has_left_is_not_awaited(self):
        """Its last value counts, even if it comes after the news that the rank has left."""
        num_rounds = {0: 3, 1: 1, 2: 3}
        for seed in range(20):
            job = _Job(lambda rounds, rank: [rounds.gather(k, b"%d" % k) for k in range(num_rounds[rank])], seed=seed)
            first, left, third = job.run()
            self.assertEqual(left, [dict.fromkeys(range(3), b"0")])
            self.assertEqual(first, [*left, {0: b"1", 2: b"1"}, {0: b"2", 2: b"2"}])
            self.assertEqual(third, first)

    def test_a_lost_rank_is_not_awaited(self):
        def body(rounds, rank):
            rounds.gather(0, b"0")
            if rank == 1:
                job.kill(rank)
            return rounds.gather(1, b"1")

        job = _Job(body, **_GOES_ON)
        with logging_disabled():
            self.assertEqual(job.run(), [{0: b"1", 2: b"1"}] * 2)

    def test_without_a_lost_rank_the_others_raise_if_they_do_not_go_on(self):
        def body(rounds, rank):
            if rank == 1:
                job.kill(rank)
            with self.assertRaisesRegex(PeerLostError, "rank 1"):
                rounds.gather(0, b"")
            return True

        job = _Job(body)
        with logging_disabled():
            self.assertEqual(job.run(), [True] * 2)

    def test_a_rank_that_has_ended_may_wait_for_the_others(self):
        def body(rounds, rank):
            if rank == 1:
                rounds.end()
                job.scheduler.sleep(1e3)  # It does not leave.
                return None
            values = rounds.gather(3, b"3")
            self.assertTrue(rounds.has_ended(1))
            self.assertFalse(rounds.has_ended(2 - rank))
            return values, job.scheduler.now

        job = _Job(body)
        self.assertEqual(job.run(), [({0: b"3", 2: b"3"}, 0.0), None, ({0: b"3", 2: b"3"}, 0.0)])

    def test_a_session_begins_with_nothing(self):
        def body(rounds, rank):
            membership = job.cluster.memberships[rank]
            values = [rounds.gather(7, b"old")]
            membership.leave(sent_rounds={rounds.name: rounds.sent_rounds}, reason="")
            rounds.reset(membership.session + 1)
            self.assertEqual(rounds.sent_rounds, 0)
            membership.begin_session()
            return [*values, rounds.gather(7, b"new")]

        for seed in range(10):
            job = _Job(body, seed=seed)
            self.assertEqual(job.run(), [[dict.fromkeys(range(3), value) for value in (b"old", b"new")]] * 3)

    def test_an_unknown_message(self):
        def body(rounds, rank):
            if rank == 0:
                rounds._queue.send(1, b"\2" + bytes(8), step=0)

        with self.assertRaisesRegex(ProtocolError, "rank 0 sent an unexpected message"):
            _Job(body).run()


class SkippedRoundsTest(parameterized.TestCase):
    """Rank 0 waits in the rounds 0 and 1. The others make progress instead."""

    def _make_job(self, others, world_size=2, seed=None):
        """The others call `others(rounds, make progress)`."""
        num_steps = [0] * world_size

        def body(rounds, rank):
            def progress():
                num_steps[rank] += 1
                if rounds.is_asked:
                    rounds.look_again()

            if rank:
                return others(rounds, progress)
            return [rounds.gather(number, b"%d" % number) for number in (0, 1)]

        def settings(rank):
            return {
                "progress": lambda: {"steps": num_steps[rank]},
                "has_passed": lambda progress: num_steps[rank] > progress["steps"],
            }

        return _Job(body, world_size, seed, settings)

    @parameterized.parameters(True, False)
    def test_a_rank_that_makes_progress_says_so(self, is_before):
        """It does so before it is asked, or later."""

        def others(rounds, progress):
            if not is_before:
                job.scheduler.sleep(5.0)
                self.assertTrue(rounds.is_asked)
            progress()
            job.scheduler.sleep(5.0)
            self.assertFalse(rounds.is_asked)

        job = self._make_job(others)
        self.assertEqual(job.run(), [[{0: b"0"}, {0: b"1"}], None])
        self.assertEqual(job.num_messages, 4)

    def test_a_rank_that_skips_a_round_waits_in_the_next_one(self):
        def others(rounds, progress):
            progress()
            return rounds.gather(2, b"2")

        for seed in range(20):
            job = self._make_job(others, 3, seed)
            self.assertEqual(job.run(), [[{0: b"0"}, {0: b"1"}], *[{1: b"2", 2: b"2"}] * 2])

    def test_a_rank_without_progress_is_awaited(self):
        def others(rounds, progress):
            job.scheduler.sleep(5.0)
            rounds.look_again()
            job.scheduler.sleep(5.0)
            self.assertTrue(rounds.is_asked)
            values = rounds.gather(0, b"here")
            progress()
            return values

        job = self._make_job(others)
        self.assertEqual(job.run(), [[{0: b"0", 1: b"here"}, {0: b"1"}], {0: b"0", 1: b"here"}])


class AnswerTest(parameterized.TestCase):
    """Ranks that answer at once, whatever they do."""

    def _make_job(self, body, seed=None, **cluster_settings):
        return _Job(body, 4, seed, lambda rank: {"answer": lambda: b"%d" % rank}, **cluster_settings)

    @parameterized.parameters([[0]], [[2]], [[1, 3]], [[0, 1, 2, 3]])
    def test_each_rank_sends_one_value(self, ranks):
        def body(rounds, rank):
            if rank in ranks:
                rounds.begin(0)
                rounds.begin(0)
            else:
                job.scheduler.sleep(50.0)
            job.scheduler.sleep(50.0)
            self.assertEqual(rounds.sent_rounds, 1)
            return rounds.collect(0)

        for seed in range(10):
            job = self._make_job(body, seed)
            self.assertEqual(job.run(), [{rank: b"%d" % rank for rank in range(4)}] * 4)
            self.assertEqual(job.num_messages, 12)

    def test_nobody_begins(self):
        job = self._make_job(lambda rounds, rank: rounds.sent_rounds)
        self.assertEqual((job.run(), job.num_messages), ([0] * 4, 0))

    def test_a_lost_rank_is_not_awaited(self):
        def body(rounds, rank):
            if rank == 3:
                job.kill(rank, 0.0)
            job.scheduler.sleep(5.0)
            if rank == 0:
                rounds.begin(0)
            job.scheduler.sleep(5.0)
            return rounds.collect(0)

        job = self._make_job(body, **_GOES_ON)
        with logging_disabled():
            self.assertEqual(job.run(), [{rank: b"%d" % rank for rank in range(3)}] * 3)

    def test_an_answer_belongs_to_the_session_of_its_question(self):
        """The thread that takes messages may send it when this rank is about to enter another session."""

        def body(rounds, rank):
            if rank:
                return None
            membership = job.cluster.memberships[rank]
            with membership.monitor:
                tell = rounds._answered(0)
            rounds.reset(membership.session + 1)
            with mock.patch.object(membership.transport, "send") as send:
                tell()
            sent = [call.args[2] for call in send.call_args_list]
            return [struct.unpack_from("<q", header)[0] - membership.session for header in sent]

        job = self._make_job(body)
        self.assertEqual(job.run()[0], [0, 0, 0])


def _join(values):
    return b",".join(b"%d:%s" % each for each in sorted(values.items()))


class DecideTest(parameterized.TestCase):
    """Rank 1 decides. `shares_test` has rounds of different numbers."""

    def _make_job(self, body, world_size=3, seed=None, **cluster_settings):
        return _Job(body, world_size, seed, lambda rank: {"root": 1}, **cluster_settings)

    @parameterized.parameters(2, 5)
    def test_all_get_the_decision(self, world_size):
        def body(rounds, rank):
            return [rounds.decide(number, b"%d" % (rank * number), _join) for number in (1, 2, 4)]

        expected = [b",".join(b"%d:%d" % (rank, rank * number) for rank in range(world_size)) for number in (1, 2, 4)]
        for seed in range(10):
            job = self._make_job(body, world_size, seed)
            self.assertEqual(job.run(), [expected] * world_size)
            self.assertEqual(job.num_messages, 3 * 2 * (world_size - 1))

    def test_a_rank_that_has_left_does_not_count(self):
        def body(rounds, rank):
            decisions = [rounds.decide(1, b"a", _join)]
            return decisions if rank == 2 else [*decisions, rounds.decide(2, b"b", _join)]

        job = self._make_job(body)
        both = [b"0:a,1:a,2:a", b"0:b,1:b"]
        self.assertEqual(job.run(), [both, both, both[:1]])

    @parameterized.parameters(1, 2)
    def test_a_rank_is_lost_at_any_moment(self, lost):
        """No rank waits forever. Unless the root is lost, the others get the same decisions."""

        def make_job():
            def body(rounds, rank):
                job.first_event = job.scheduler.num_events
                return [rounds.decide(number, b"%d" % number, _join) for number in (1, 2)]

            job = self._make_job(body, seed=3, **_GOES_ON)
            return job

        undisturbed = make_job()
        undisturbed.run()
        decisions = set()
        for event in range(undisturbed.first_event, undisturbed.scheduler.num_events):
            job = make_job()
            job.scheduler.call_before_event(event, lambda job=job: job.cluster.kill(lost))
            with logging_disabled():
                job.run()
            first, second = (job.results[rank] for rank in range(3) if rank != lost)
            if lost != 1:
                self.assertEqual(first, second)
            decisions |= {*first, *second}
        self.assertContainsSubset({b"0:1,1:1,2:1", b"0:2,1:2,2:2", None if lost == 1 else b"0:2,1:2"}, decisions)

    def test_without_the_root_there_is_no_decision(self):
        def body(rounds, rank):
            decisions = [rounds.decide(1, b"a", _join)]
            if rank == 1:
                job.kill(rank)
            return [*decisions, rounds.decide(2, b"b", _join)]

        job = self._make_job(body, **_GOES_ON)
        with logging_disabled():
            self.assertEqual(job.run(), [[b"0:a,1:a,2:a", None]] * 2)

    @parameterized.parameters(0, 1)
    def test_a_rank_that_has_ended_is_not_awaited(self, ended):
        def body(rounds, rank):
            if rank == ended:
                rounds.end()
                job.scheduler.sleep(1e3)
                return None
            return rounds.decide(1, b"a", _join), job.scheduler.now

        expected = [(None if ended == 1 else b"1:a,2:a", 0.0)] * 2
        expected.insert(ended, None)
        job = self._make_job(body)
        self.assertEqual(job.run(), expected)

    def test_a_message_past_the_root(self):
        def body(rounds, rank):
            if rank == 0:
                rounds._queue.send(2, bytes(9), step=0)

        with self.assertRaisesRegex(ProtocolError, "rank 0 sent an unexpected message"):
            self._make_job(body).run()


class JoiningTest(parameterized.TestCase):
    @parameterized.parameters(None, 0, 1)
    def test_a_process_that_joins_takes_no_part(self, root):
        """It joins a later session. It does not wait, nor do the others for it. It gets another rank's decisions."""

        def agree(rounds, number):
            if root is None:
                return rounds.gather(number, b"a")
            return rounds.decide(number, b"a", _join)

        def body(rounds, rank):
            membership = cluster.memberships[rank]
            membership.leave(sent_rounds={rounds.name: rounds.sent_rounds}, reason="")
            rounds.reset(2)
            membership.begin_session()
            self.assertTrue(rounds.takes_part)
            if rank == 1:
                job.kill(rank)
            job.scheduler.sleep(20.0)
            membership.readmit(join)  # In production, the new process asks for this.
            return agree(rounds, 5)

        def again():
            membership = cluster.restart(1)
            rounds = Rounds(membership, "anything", root=root)
            rounds.reset(membership.session + 1)
            membership.begin_session()
            self.assertFalse(rounds.takes_part)
            join.transport_incarnation = membership.transport.incarnation
            rounds.reset(join.session)
            self.assertFalse(rounds.takes_part)
            if root is not None:
                self.assertIsNone(rounds.decide(1, b"b", _join))
                job.scheduler.sleep(30.0)
                self.assertEqual(rounds.decide(2, b"b", _join), b"0:a,2:a" if root == 0 else None)

        job = _Job(body, 3, None, lambda rank: {"root": root}, **_GOES_ON)
        cluster = job.cluster
        join = membership_pb2.Join(rank=1, session=2, incarnation=1)
        job.scheduler.call_at(10.0, lambda: cluster.start(1, again))
        with logging_disabled():
            expected = {None: {0: b"a", 2: b"a"}, 0: b"0:a,2:a", 1: None}[root]
            self.assertEqual(job.run(), [expected] * 2)


if __name__ == "__main__":
    absltest.main()
