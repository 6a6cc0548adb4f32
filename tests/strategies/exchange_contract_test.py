"""Tests of the promises of every `Exchange`, on a virtual clock: one table of exchanges, one test for each promise.

A run is a few steps of three ranks, disturbed at any message, or between any two events. A message is late, a link
fails or no longer delivers, a rank dies, or a rank leaves as if its `fit` were interrupted. The results are compared
with the scheme's rule in NumPy. If a rank waited for ever, the clock would raise an error.

A new exchange is a line of `MEMBERS`. If the exchange averages, `Averages` drives it and knows the results. Otherwise
the exchange needs a similar class: with the calls of the scheme's half of the graph, and the rule.
"""

import abc
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import runpy
import weakref
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf import codecs
from hop_tf.collectives import get_algorithm, get_network
from hop_tf.errors import DeadlineExceededError, HopError, PeerLostError
from hop_tf.membership.waiting import Interrupted
from hop_tf.options import CommunicationOptions
from hop_tf.runtime import AveragingExchange
from hop_tf.runtime.autotuning import Autotuner, Pace
from hop_tf.runtime.deltas import DeltaTracker
from hop_tf.runtime.exchange import Exchange, Request
from hop_tf.runtime.gradients import GradientExchange
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.rates import CommonRate
from hop_tf.runtime.ways import Way
from hop_tf.strategies.canary.exchange import AsyncSettings, CanaryExchange
from hop_tf.strategies.canary.gei import Thresholds
from hop_tf.strategies.canary.layout import Layout
from hop_tf.strategies.dts.exchange import DTSExchange, DTSSettings
from hop_tf.strategies.hop.exchange import REDUCTION, STEP, HopExchange
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.strategies.pipe_sgd.exchange import PipeSGDExchange, PipeSGDSettings
from hop_tf.strategies.shat.exchange import ShatExchange
from hop_tf.strategies.shat.server.server import ParameterServer
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.tensors.fifo import SimulatedFifo
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate import VirtualCluster, VirtualMonitor
from hop_tf.topology import resolve
from support.logs import logging_disabled

_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
LocalSGDStrategy = runpy.run_path(str(_EXAMPLES / "own_strategy.py"))["LocalSGDStrategy"]
_SEED = int(os.environ.get("HOP_TF_SCHEDULE_SEED", "0"))
_GROUP = "group"
_RANKS = range(3)
_UNIT = 6  # Whole multiples of it have exact means over one, two and three ranks.
_OPTIONS = CommunicationOptions(timeout_seconds=6, progress_timeout_seconds=15)
_DELAY_SECONDS = 9.0  # Delay of a late message. Ranks wait for longer.
_DETECTION_SECONDS = 2.0
_LIMIT_SECONDS = 300.0
# The places where a run can be disturbed are divided into `_NUM_PARTS` parts. `make test` tests the first part, which
# has `_NUM_IN_FIRST_PART` places. `make stress` tests the others.
_NUM_PARTS = 8
_NUM_IN_FIRST_PART = 4
_TIMES_OF_WINDOWS = Autotuner.spec(len(_RANKS), tf.float32, exact=True)


class Training(abc.ABC):
    """One process of a rank, which calls an exchange as a scheme's half of the graph and `ExchangeRunner` do.

    Attributes:
      specs: Specs of the exchanged tensors.
      exchange: The exchange; None before its first session has begun.
      session: Number of the running session.
      error: The error that has ended this rank's part in the job.
      has_ended: True if the rank has made all steps, except in sessions that it was to leave.
      left: Sessions that the rank was to leave before their end.
      sent: By session, the number of steps in which the rank says to have taken part.
    """

    specs: tuple[TensorSpec, ...]

    def __init__(self, run, rank):
        self.run, self.rank = run, rank
        self.membership = run.cluster.memberships[rank]
        self.packing = Packing([*self.specs, *run.member.beside])
        self.exchange = self.error = None
        self.has_ended = False
        self.left, self.sent = set(), collections.Counter()
        self.session = 0
        self._leaves = self._is_interrupted = False
        self._monitor = VirtualMonitor(run.cluster.scheduler)
        self._num_in_flight = 0

    # A rank's life.

    def train(self):
        try:
            for session in self.run.sessions:
                self.session = session
                self._begin_session()
                self.make_steps()
                self._end_session()
            self.has_ended = True
        except HopError as error:
            self.error = error
            self.membership.fail(error)
            self.note_sent()
            self.membership.leave(sent_rounds={}, reason=str(error), abort=not self.membership.is_given_up)
        self.run.ended_at[self.rank] = self.run.cluster.scheduler.now
        self.membership.flush(self.run.cluster.scheduler.now + _OPTIONS.progress_timeout_seconds)
        self.membership.leave(sent_rounds={}, reason="its process ended", final=True)
        self.run.wait_until_over(self)
        if self.exchange is not None:
            self.exchange.close()

    def _begin_session(self):
        if self.exchange is not None:
            self.exchange.reset(self.session)
        with contextlib.suppress(Interrupted):
            self.membership.begin_session()
            if self.exchange is None:
                self.exchange = self.run.member.make(self._context())
                self.begin()
                self.run.begun.add(self.rank)

    def _context(self):
        optimizer, variables = _model(self.rank, self.specs)
        carried = [variable for variable, spec in zip(variables, self.specs, strict=True) if spec.exact]
        return ExchangeContext(
            _GROUP,
            self.session,
            self.packing,
            self.membership,
            self.run.cluster.pool,
            make_fifo=SimulatedFifo,
            start_thread=functools.partial(self.run.cluster.start_thread, self.rank),
            optimizer=weakref.ref(optimizer),
            trained=variables[: len(variables) - len(carried)],
            carried=DeltaTracker(carried, [variable.read_value() for variable in carried]),
            get_algorithm=get_algorithm,
        )

    def _end_session(self):
        self.note_sent()
        self.membership.leave(sent_rounds={_GROUP: self.sent[self.session]}, reason="")
        if self._leaves:
            self.left.add(self.session)
        self._is_interrupted = self._leaves = False

    def note_sent(self):
        if self.exchange is not None:
            self.sent[self.session] = self.exchange.sent_rounds

    def interrupt(self):
        """Interrupts the rank as an exception in its `fit` does."""
        self._leaves = True
        self.membership.interrupt()

    # Steps.

    def begin(self):
        """Called when the exchange was made."""

    @abc.abstractmethod
    def make_steps(self):
        """Makes the steps of a session."""

    def steps(self):
        """Yields the steps to make, until the rank leaves. Each step takes some time."""
        for step in range(self.run.num_steps):
            if self._leaves:
                return
            self.run.cluster.scheduler.sleep(self.run.durations[self.rank, step])
            yield step

    def submit(self, step, segment, buckets):
        """Enqueues a step's buckets; returns the result, or None if the result comes later or was interrupted."""
        for bucket in buckets:
            bucket.flags.writeable = False
        request = Request(step, segment, tuple(buckets))
        if self.exchange.num_threads == 1:
            return self._step(request)
        while self._num_in_flight == self.exchange.max_in_flight:
            self._monitor.wait(0.0)
        self.membership.check()
        self._num_in_flight += 1
        self.run.cluster.start_thread(self.rank, f"step {step}", functools.partial(self._step_on_thread, request))
        return None

    def _step(self, request):
        """Calls the exchange as `ExchangeRunner` does."""
        if not self._is_interrupted:
            try:
                result = self.exchange.step(request)
                if result is not None:
                    self._take(request, result)
                return result
            except Interrupted:
                self._is_interrupted = True
        if (result := self.exchange.no_op(request)) is not None:
            self.check_no_op(request, result)
        return None

    def _take(self, request, result):
        assert (result.step, result.segment) == (request.step, self.segment_back(request))
        self.take(request, result)
        for bucket in result.buckets:
            bucket.flags.writeable = False  # The graph owns the buckets now.

    def _step_on_thread(self, request):
        try:
            self._step(request)
        except HopError as error:
            self.membership.fail(error)
        self._num_in_flight -= 1
        self._monitor.notify_all()

    def wait_for_threads(self):
        while self._num_in_flight:
            self._monitor.wait(0.0)
        self.membership.check()

    # Results.

    def segment_back(self, request):
        """Returns the segment of the result."""
        return request.segment

    def take(self, request, result):
        """Keeps a copy of a result."""

    def check_no_op(self, request, result):
        """Checks that the result of an interrupted step changes nothing. If results are changes, they are zero."""
        for bucket in result.buckets:
            np.testing.assert_array_equal(bucket, 0)

    @classmethod
    @abc.abstractmethod
    def check(cls, run):
        """Checks that all results follow the scheme's rule, and that ranks that have ended have all results."""

    @classmethod
    def check_undisturbed(cls, run):
        """Checks the counters of a run that was not disturbed."""
        for training in run.ranks:
            assert training.sent == dict.fromkeys(run.sessions, run.num_steps)

    def check_steps(self, results):
        """Checks that a rank that has ended has made all steps; `results` are by session and step."""
        for session in set(self.run.sessions) - self.left if self.has_ended else ():
            assert [step for each, step in results if each == session] == list(range(self.run.num_steps))


class Averages(Training):
    """The result is the mean over the ranks that take part, equal to the bit on all of them."""

    specs = (
        TensorSpec("kernel", (20, 2), tf.float32),
        TensorSpec("bias", (5,), tf.float32),
        TensorSpec("statistics", (3,), tf.float32, exact=True),
    )

    def __init__(self, run, rank):
        super().__init__(run, rank)
        # The tensors of each segment of a step.
        self.members = [list(range(len(self.packing.specs)))]
        self._means = collections.defaultdict(dict)  # By session and step.

    def begin(self):
        self.members = getattr(self.exchange, "members", self.members)

    def make_steps(self):
        for step in self.steps():
            for segment, members in enumerate(self.members):
                self.submit(step, segment, self._pack(members, self._values(self.session, step)))
        self.wait_for_threads()

    def _values(self, session, step):
        values = _values(self.rank, session, step, sum(spec.num_elements for spec in self.specs))
        tensors = np.split(values, np.cumsum([spec.num_elements for spec in self.specs])[:-1])
        return [*tensors, *(self.run.member.value_beside(self.rank).ravel() for _ in self.run.member.beside)]

    def _pack(self, members, values):
        packing = self.packing.part(members)
        buckets = packing.take(self.run.cluster.pool)
        for bucket in buckets:
            bucket.fill(0)
        for place, index in enumerate(members):
            bucket, where = packing.place(place)
            buckets[bucket][where] = values[index]
        return buckets

    def take(self, request, result):
        members = self.members[request.segment]
        packing = self.packing.part(members)
        for place, index in enumerate(members):
            bucket, where = packing.place(place)
            self._means[self.session, request.step][index] = result.buckets[bucket][where].copy()

    def check_no_op(self, request, result):
        for own, same in zip(request.buckets, result.buckets, strict=True):
            np.testing.assert_array_equal(own, same)

    def expected(self, mean, own, exact):
        """Returns the expected result if `mean` is the mean of a tensor."""
        del own, exact
        return mean

    @classmethod
    def check(cls, run):
        for training in run.ranks:
            training.check_steps(sorted(training._means))
            for (session, step), means in training._means.items():
                assert len(means) == len(training.packing.specs) or not training.has_ended or training.left
                for index, mean in means.items():
                    training._check_mean(session, step, index, mean)

    def _check_mean(self, session, step, index, mean):
        present = [other for other in self.run.ranks if other._takes_part(session, step, index)]
        assert self in present
        values = {other: other._values(session, step)[index] for other in present}
        exact = self.packing.specs[index].exact
        # If the others go on, a lost rank may have a part in the mean, or not.
        lost = [other for other in present if other is not self and other._is_lost()]
        ways = [
            self.expected(sum(values[other] for other in of_way) / len(of_way), values[self], exact)
            for number in range(len(lost) + 1)
            for of_way in (
                [each for each in present if each not in gone] for gone in itertools.combinations(lost, number)
            )
        ]
        tolerances = self.run.member.tolerances
        assert any(np.allclose(mean, expected, **tolerances) for expected in ways), (mean, ways)
        if type(self) is Averages or not exact:
            self._check_alike(session, step, index, mean)

    def _check_alike(self, session, step, index, mean):
        """Checks that the mean is the same on all remaining ranks, to the bit."""
        for other in [] if self._is_lost() else [other for other in self.run.ranks if not other._is_lost()]:
            np.testing.assert_array_equal(mean, other._means[session, step].get(index, mean))

    def _is_lost(self):
        """True if others may have gone on without this rank. The rank may have heard of that only after its end."""
        is_gone = self.rank in self.run.died or self.error is not None or self.membership.is_given_up
        return self.run.member.continues and is_gone

    def _takes_part(self, session, step, index):
        """True unless the rank has left and thereby said that it takes no part.

        If a rank is lost and all raise, there is no mean.
        """
        segment = next(number for number, members in enumerate(self.members) if index in members)
        return session not in self.left or self.sent[session] > step * len(self.members) + segment

    @classmethod
    def check_undisturbed(cls, run):
        for training in run.ranks:
            assert training.sent == dict.fromkeys(run.sessions, run.num_steps * len(training.members))


class AveragesGradients(Averages):
    """As `Averages`, but results for moving statistics are changes without the rank's own."""

    def expected(self, mean, own, exact):
        return mean - own if exact else mean

    def check_no_op(self, request, result):
        Training.check_no_op(self, request, result)


class AveragesAndChooses(AveragesGradients):
    """As `AveragesGradients`, but ranks choose how they average. A step with different choices would never end."""

    def _values(self, session, step):
        *tensors, _, rates = super()._values(session, step)
        return [*tensors, np.zeros(Autotuner.spec(len(_RANKS)).num_elements), rates]

    def _check_mean(self, session, step, index, mean):
        if self.packing.specs[index] == Autotuner.spec(len(_RANKS)):  # Measured times.
            self._check_alike(session, step, index, mean)
        else:
            super()._check_mean(session, step, index, mean)


class AveragesWindowsAndChooses(Averages):
    """As `Averages`, but of windows. The result has the schedule that ranks have chosen instead of their times."""

    def _values(self, session, step):
        *tensors, _, counts = super()._values(session, step)
        return [*tensors, np.zeros(_TIMES_OF_WINDOWS.num_elements), counts]

    def _check_mean(self, session, step, index, mean):
        if self.packing.specs[index] == _TIMES_OF_WINDOWS:
            self._check_alike(session, step, index, mean)
        else:
            super()._check_mean(session, step, index, mean)


class Mixes(Training):
    """Hop on a complete graph: a rank averages the parameters of all that took part, then adds its own change.

    The rank's own parameters replace those of ranks that take no part.
    """

    specs = (TensorSpec("x", (16,), tf.float32),)
    _num_backup = 0

    def __init__(self, run, rank):
        super().__init__(run, rank)
        self._x, self._mixed = {}, {}  # By session and step.

    def make_steps(self):
        x = np.zeros(16, np.float32)
        for step in self.steps():
            self._x[self.session, step] = x
            (bucket,) = self.packing.take(self.run.cluster.pool)
            bucket[:] = x
            result = self.submit(step, STEP, (bucket,))
            if self._num_backup:
                result = self.submit(step, REDUCTION, ())
            if result is None:
                return
            self._mixed[self.session, step] = x + result.buckets[0]
            x = self._mixed[self.session, step] + _values(self.rank, self.session, step, 16)

    @classmethod
    def check(cls, run):
        for training in run.ranks:
            training.check_steps(training._mixed)
            for (session, step), mixed in training._mixed.items():
                ways = training._ways(session, step)
                assert any(np.allclose(mixed, expected, rtol=1e-5, atol=1e-4) for expected in ways)

    def _ways(self, session, step):
        """Yields the result for each set of updates that the rank may have used.

        A set contains all updates that surely came, except up to `_num_backup` of them.
        """
        sent = [other for other in self.run.ranks if other is not self and other.sent[session] > step]
        surely = {other for other in sent if not self._may_lack(other, step >= other.sent[session] - 2)}
        for number in range(len(sent) + 1):
            for used in itertools.combinations(sent, number):
                if len(surely.difference(used)) <= self._num_backup:
                    yield self._mix([other._x[session, step] for other in used], self._x[session, step])

    def _may_lack(self, other, is_late):
        """True if an update may be missing: its link has failed, or its rank died right after sending."""
        reaches = self.run.died.get(other.rank)
        return other.rank in self.run.cut or (is_late and reaches is not None and self.rank not in reaches)

    def _mix(self, updates, own):
        return (sum(updates) + (len(_RANKS) - len(updates)) * own) / len(_RANKS)

    @classmethod
    def check_undisturbed(cls, run):
        super().check_undisturbed(run)
        for training in run.ranks:
            assert cls._num_backup or not any(training.exchange.counters().values())


class MixesWithBackup(Mixes):
    """As `Mixes`, but ranks wait for the updates of all but one, and updates that have come count equally."""

    _num_backup = 1

    def _mix(self, updates, own):
        return (sum(updates) + own) / (len(updates) + 1)


class Merges(Training):
    """Canary: weights are the sum of all contributions, over the number of ranks. Each contribution counts once.

    Contributions of a rank are 6 times a power of 1024, so the digits of a weight show each rank's part.
    """

    specs = tuple(TensorSpec(name, (24,), tf.float64) for name in "ab")
    colayers = ((1,), (0,))
    _BASE = 1024

    def __init__(self, run, rank):
        super().__init__(run, rank)
        # By session; contributions also by colayer. Weights at rest are those before the final mean.
        self._contributed, self._at_rest, self._finals, self._num_lost = collections.Counter(), {}, {}, {}

    def begin(self):
        replica = self.exchange.replica
        begin = replica.begin

        def record(weights):  # The last call is the one with the final mean.
            self._at_rest[self.session] = None if replica.weights is None else replica.weights[0].copy()
            begin(weights)

        replica.begin = record

    def make_steps(self):
        exchange, nothing = self.exchange, (np.empty(0),)
        if not self._leaves:
            self.submit(0, exchange.start_segment, (np.zeros(exchange.parts[-1].sizes[0]),))
        num_skipped = last = 0
        for step in self.steps():
            if num_skipped:
                num_skipped -= 1
                continue
            for colayer, part in enumerate(exchange.parts[: len(self.colayers)]):
                result = self._contribute(step, colayer, part)
            num_skipped = 0 if result is None else result.num_skipped
            last = step + num_skipped
        if not self._leaves:
            result = self.submit(last + 1, exchange.finish_segment, nothing)
            if result is not None:
                self._finals[self.session] = result.buckets[0].copy()
                self._num_lost[self.session] = exchange.counters()["contributions_lost"]

    def _contribute(self, step, colayer, part):
        num_drops = self.exchange.counters()["overtime_drops"]
        values = np.full(part.sizes[0], float(_UNIT * self._BASE**self.rank))
        result = self.submit(step, colayer, (values,))
        if not self._is_interrupted and self.exchange.counters()["overtime_drops"] == num_drops:
            num_ranks = len(self.exchange._contributions.layout.ranks)
            self._contributed[self.session, colayer] += _UNIT // num_ranks
        return result

    def segment_back(self, request):
        is_last = request.segment == len(self.colayers) - 1
        return self.exchange.merge_segment if is_last else request.segment

    def check_no_op(self, request, result):
        """Checks nothing: results are weights, not changes."""

    @classmethod
    def check(cls, run):
        for session in run.sessions:
            # Others may have ended without a rank that they gave up, and that heard of it too late.
            ended = [each for each in run.ranks if session in each._finals and not each.membership.is_given_up]
            for training in run.ranks:
                assert not training.has_ended or session in training._finals or session in training.left
            for training in ended:
                np.testing.assert_array_equal(training._finals[session], ended[0]._finals[session])
                training._check_weights(session, {each.rank for each in ended})

    def _check_weights(self, session, ended):
        layout = Layout(b"\1" * len(_RANKS), get_network("mesh"), 0, [[24], [24]], 1)
        digits = self._at_rest[session].astype(np.int64)
        np.testing.assert_array_equal(digits, self._at_rest[session])
        num_missing = 0
        for other, piece in itertools.product(self.run.ranks, layout.pieces):
            found = digits[piece.where] // self._BASE**other.rank % self._BASE
            contributed = other._contributed[session, piece.colayer]
            assert np.all(found <= contributed)
            if other is self:
                num_missing += (contributed - found[0]) * len(_RANKS) // _UNIT
            if other.rank in ended and piece.root in ended:  # No rank on the path has gone.
                np.testing.assert_array_equal(found, contributed)
        if not self.run.cut and len(self.run.sessions) == 1:
            assert num_missing == self._num_lost[session]

    @classmethod
    def check_undisturbed(cls, run):
        for training in run.ranks:
            assert training.sent == dict.fromkeys(run.sessions, 1)  # The final segment only.
            assert training._num_lost == dict.fromkeys(run.sessions, 0)


class Pushes(Training):
    """SHAT: the servers subtract all gradients from their model. Each gradient counts once, when it comes.

    A gradient is 6 times a power of 64, so the digits show how much of each rank's was applied.
    """

    specs = (TensorSpec("w", (16,), tf.float32),)
    _BASE = 64

    def __init__(self, run, rank):
        super().__init__(run, rank)
        self._applied = {}  # By session and step, the sum of each rank's applied gradients.

    def begin(self):
        _, (variable,) = _model(self.rank, self.specs)
        variable.assign(tf.zeros_like(variable))
        self.exchange.state.configure(joins=False)

    def make_steps(self):
        for step in self.steps():
            buckets = self.packing.take(self.run.cluster.pool)
            for bucket in buckets:
                bucket.fill(0)
            buckets[0][:] = _UNIT * self._BASE**self.rank
            bucket, where = self.packing.place(1)
            buckets[bucket][where] = 1.0, True  # The rate, and True because the gradient counts.
            self.submit(step, 0, buckets)

    def take(self, request, result):
        (total,) = set(-result.buckets[0].astype(np.int64))
        applied = [total // self._BASE**rank % self._BASE for rank in _RANKS]
        self._applied[self.session, request.step] = np.array(applied)

    @classmethod
    def check(cls, run):
        for training in run.ranks:
            training.check_steps(training._applied)
        cls._check_applied(run)

    @classmethod
    def _check_applied(cls, run):
        answers = [applied for training in run.ranks for applied in training._applied.values()]
        latest = max(answers, key=sum, default=np.zeros(len(_RANKS)))
        for training in run.ranks:
            for (session, step), applied in training._applied.items():
                num_before = sum(training.sent[earlier] for earlier in range(1, session))
                num_left = len([each for each in training.left if each < session])
                training._check_dropped(num_before + step + 1, applied, num_left)
            most = len(training.left) if training.has_ended else 1
            training._check_dropped(sum(training.sent.values()), latest, most)

    def _check_dropped(self, num_pushed, applied, most):
        """Checks that at most `most` pushes are missing: those right before the rank left may have been dropped."""
        assert 0 <= num_pushed - applied[self.rank] / _UNIT <= most


class PushesTogether(Pushes):
    """As `Pushes`, but a server applies the mean of all ranks' pushes, and then answers all."""

    @classmethod
    def _check_applied(cls, run):
        of_step = {}
        for training in run.ranks:
            for where, applied in training._applied.items():
                np.testing.assert_array_equal(applied, of_step.setdefault(where, applied))
        before = np.zeros(len(_RANKS), int)
        for (session, step), applied in sorted(of_step.items()):
            change, before = applied - before, applied
            present = np.flatnonzero(change)
            np.testing.assert_array_equal(change[present], _UNIT // len(present))
            for training in run.ranks:
                num_sent = training.sent[session]
                assert training.rank not in present or step < num_sent
                # A push right before its rank left may have been dropped.
                assert training.rank in present or (step >= num_sent - 1 and (session, step) not in training._applied)


def _values(rank, session, step, size):
    random = np.random.default_rng([_SEED, rank, session, step])
    return (_UNIT * random.integers(-9, 10, size)).astype(np.float32)


@functools.cache
def _model(rank, specs):
    """Returns a rank's optimizer and variables for all runs. Only SHAT's exchanges write to them."""
    variables = [keras.Variable(np.zeros(spec.shape), dtype=spec.dtype.name) for spec in specs]
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable for variable, spec in zip(variables, specs, strict=True) if not spec.exact])
    return optimizer, [variable.value for variable in variables]


@dataclasses.dataclass(frozen=True)
class Member:
    """An exchange and its promises.

    Attributes:
      make: Makes the exchange of an `ExchangeContext`.
      training: Class that drives the exchange and knows the expected results.
      step_seconds: Mean computing time of a step. Messages take 0.1 s on average.
      continues: True if the others go on without a lost rank. Otherwise all raise.
      beside: Specs of the metadata that travel with the variables.
      value_beside: Called with a rank; returns its metadata.
      num_servers: Number of parameter servers.
      also_raises: Text of an error that names no lost rank, or that is raised although others go on.
      keeps_means: True if the exchange keeps the last means for other ranks until it is closed.
      tolerances: Of a mean, as for `np.allclose`.
    """

    make: Callable[[ExchangeContext], Exchange]
    training: type[Training] = Averages
    step_seconds: float = 0.5
    continues: bool = False
    beside: Sequence[TensorSpec] = ()
    value_beside: Callable[[int], np.ndarray] | None = None
    num_servers: int = 0
    also_raises: str | None = None
    keeps_means: bool = False
    tolerances: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"rtol": 1e-6})


def _ring(context):
    return AveragingExchange(context, algorithm="ring")


def _pipe_sgd(context):
    settings = PipeSGDSettings(pipeline_width=2, codec=codecs.Identity(), num_segments=2, compensation="none")
    return PipeSGDExchange(context, settings)


class _Factors(codecs.LowRank):
    """Factors of as many columns as the kernel has, so that means of kernels are exact."""

    def factorizes(self, spec):
        return len(spec.shape) == 2


def _pipe_sgd_factors(context):
    settings = PipeSGDSettings(pipeline_width=2, codec=_Factors(rank=2), num_segments=2, compensation="none")
    return PipeSGDExchange(context, settings)


def _dts_factors(context):
    return DTSExchange(context, DTSSettings(delay=2, interval=1, codec=_Factors(rank=2), algorithm="mesh"))


# If communication takes long, the last of three steps uses another algorithm or schedule.
_HASTY = Pace(skipped=0, measured=1, block=1, long_seconds=math.inf)


class _HastyPipeSGDExchange(PipeSGDExchange):
    pace = _HASTY


def _pipe_sgd_auto(context):
    settings = PipeSGDSettings(
        pipeline_width=1, codec=codecs.Identity(), num_segments=2, compensation="none", algorithm="auto"
    )
    return _HastyPipeSGDExchange(context, settings)


def _dts(context):
    return DTSExchange(context, DTSSettings(delay=2, interval=1, codec=codecs.Identity(), algorithm="mesh"))


class _HastyDTSExchange(DTSExchange):
    pace = _HASTY


def _dts_auto(context):
    settings = DTSSettings(delay="auto", interval="auto", codec=codecs.Identity(), algorithm="auto")
    return _HastyDTSExchange(context, settings)


def _hop(**settings):
    settings = HopSettings(max_iteration_gap=2, **settings)
    return functools.partial(HopExchange, topology=resolve("complete", len(_RANKS)), settings=settings)


def _canary(context):
    settings = AsyncSettings(
        network=get_network("mesh"),
        thresholds=Thresholds(16, len(Merges.colayers)),
        codec=codecs.Identity(dtype=np.float64),
        sync_interval=None,
        max_in_flight=2,
    )
    return CanaryExchange(context, Merges.colayers, settings)


def _canary_synchronous(context):
    return GradientExchange(context, [[1], [0, 2, 3]], ways=[Way("mesh", codecs.Identity())])


class _HastyGradientExchange(GradientExchange):
    pace = _HASTY


def _canary_synchronous_auto(context):
    ways = [Way(algorithm, codecs.Identity()) for algorithm in ("mesh", "ring", "bcube:3,1")]
    return _HastyGradientExchange(context, [[1], [0, 2, 3, 4]], ways=ways)


def _shat(consistency):
    settings = ShatSettings(
        mixing="shat",
        pushes="gradients",
        sharding="memory",
        consistency=consistency,
        max_staleness=16,
        min_mixing=None,
        log_base=math.e,
        codec=None,
    )
    return functools.partial(ShatExchange, settings=settings)


def _rates(rank):
    column = np.eye(len(_RANKS))[rank]
    return np.stack([0.5 * column, column])


_GRADIENTS = {
    "training": AveragesGradients,
    "beside": (CommonRate.spec(len(_RANKS)),),
    "value_beside": _rates,
}
_CHOICES = {
    "training": AveragesAndChooses,
    "step_seconds": 0.05,
    "beside": (Autotuner.spec(len(_RANKS)), CommonRate.spec(len(_RANKS))),
    "value_beside": _rates,
}
_WINDOWS = {  # Several windows are in flight at a time.
    "step_seconds": 0.05,
    "beside": (TensorSpec("counts", (1,), tf.float32, exact=True),),
    "value_beside": lambda rank: np.ones(1, np.float32),
}
_CHOSEN_WINDOWS = {
    **_WINDOWS,
    "training": AveragesWindowsAndChooses,
    "beside": (_TIMES_OF_WINDOWS, *_WINDOWS["beside"]),
}
_CONTINUES = {"continues": True, "keeps_means": True}
# Ranks train with a server, which is no rank. Its work is a part of each step.
_SERVED = {
    "continues": True,
    "beside": (TensorSpec("beside", (2,), tf.float32, exact=True),),
    "num_servers": 1,
    "also_raises": "rank 0 left before the servers had its model",
}
MEMBERS = {
    "own": Member(AveragingExchange),
    "averaging_ring": Member(_ring),
    "averaging_ring_continue": Member(_ring, **_CONTINUES),
    "pipe_sgd": Member(_pipe_sgd, **_GRADIENTS),
    "pipe_sgd_continue": Member(_pipe_sgd, **_GRADIENTS, **_CONTINUES),
    "pipe_sgd_auto": Member(_pipe_sgd_auto, **_CHOICES),
    "pipe_sgd_auto_continue": Member(_pipe_sgd_auto, **_CHOICES, **_CONTINUES),
    # Without `_CONTINUES`: if a rank is lost between two factors, a part of the mean comes a step later.
    "pipe_sgd_factors": Member(_pipe_sgd_factors, **_GRADIENTS, tolerances={"rtol": 1e-4, "atol": 1e-3}),
    "dts_factors": Member(_dts_factors, **_WINDOWS, tolerances={"rtol": 1e-4, "atol": 1e-3}),
    "dts": Member(_dts, **_WINDOWS),
    "dts_auto": Member(_dts_auto, **_CHOSEN_WINDOWS),
    "dts_auto_continue": Member(_dts_auto, **_CHOSEN_WINDOWS, **_CONTINUES),
    "dts_continue": Member(_dts, **_WINDOWS, **_CONTINUES),
    "canary_synchronous": Member(_canary_synchronous, **_GRADIENTS),
    "canary_synchronous_continue": Member(_canary_synchronous, **_GRADIENTS, **_CONTINUES),
    "canary_synchronous_auto": Member(_canary_synchronous_auto, **_CHOICES),
    "canary_synchronous_auto_continue": Member(_canary_synchronous_auto, **_CHOICES, **_CONTINUES),
    "hop": Member(_hop(), Mixes),
    "hop_continue": Member(_hop(on_peer_loss="continue"), Mixes, continues=True),
    "hop_backup": Member(_hop(num_backup_workers=1), MixesWithBackup, continues=True),
    "canary": Member(_canary, Merges, continues=True, also_raises="has ended step 3 without this rank"),
    "shat": Member(_shat("async"), Pushes, **_SERVED),
    "shat_synchronous": Member(_shat("bsp"), PushesTogether, **_SERVED),
}


class Run:
    """Ranks that make some steps.

    Args:
      name: Name of the member.
      fate: `fate(run, number, sender, receiver, seconds)` returns a message's travel time. Default: `seconds`.
      has_deadlines: True if the ranks have deadlines.
      num_sessions: Number of sessions.
      num_steps: Number of steps of a session.
      seed: Seed of durations and links.

    Attributes:
      ranks: The `Training` of each rank.
      durations: Computing times, by rank and step.
      num_messages: Number of messages that were sent.
      begun: Ranks that have made their exchange.
      all_had_begun: True if all ranks had begun when one of them was disturbed.
      died: By killed rank, the ranks that its last messages have reached: see `VirtualCluster.kill`.
      cut: The two ranks whose link has failed; or the rank that no longer delivers, and its receiver; or empty.
      lost_at: Time at which the link failed.
      ended_at: By rank, the time of its end.
      live_bytes: Bytes in use after all had ended and before they closed anything, without kept means.
    """

    def __init__(self, name, fate=None, *, has_deadlines=False, num_sessions=1, num_steps=3, seed=0):
        self.member, self.num_steps = MEMBERS[name], num_steps
        self.sessions = range(1, num_sessions + 1)
        random = np.random.default_rng([_SEED, seed])
        self.durations = np.minimum(1.0, random.exponential(self.member.step_seconds, (len(_RANKS), num_steps)))
        links = random.exponential(0.1, (len(_RANKS) + 1, len(_RANKS) + 1))
        self.num_messages = 0
        self.begun, self.died, self.cut, self.ended_at = set(), {}, (), {}
        self.all_had_begun = False
        self._gone = set()
        self._is_over = False

        def link_seconds(sender, receiver, num_bytes):
            number, self.num_messages = self.num_messages, self.num_messages + 1
            seconds = links[sender, receiver] * random.exponential()
            return seconds if fate is None else fate(self, number, sender, receiver, seconds)

        self.cluster = VirtualCluster(
            len(_RANKS),
            link_seconds,
            continue_without_lost=self.member.continues,
            detection_seconds=_DETECTION_SECONDS,
            num_servers=self.member.num_servers,
            **({"options": _OPTIONS, "limit_seconds": _LIMIT_SECONDS} if has_deadlines else {}),
        )
        self._monitor = VirtualMonitor(self.cluster.scheduler)
        self._servers = [
            ParameterServer(transport=transport, num_workers=len(_RANKS), pool=self.cluster.pool)
            for transport in self.cluster.servers
        ]
        self.ranks = [self.member.training(self, rank) for rank in _RANKS]

    def __call__(self):
        self.cluster.run(lambda rank: self.ranks[rank].train())
        return self

    def wait_until_over(self, training):
        """Waits until all ranks have ended, and all messages sent by then have arrived."""
        self._gone.add(training.rank)
        self._end_if_over()
        while not self._is_over:
            self._monitor.wait(0.0)

    def _end_if_over(self):
        if self._gone | self.died.keys() == set(_RANKS):
            self.cluster.scheduler.call_at(self.cluster.scheduler.now + 10, self._end)

    def _end(self):
        for training in self.ranks if self.member.keeps_means else ():
            if training.exchange is not None:
                training.exchange.close()
        self.live_bytes = self.cluster.pool.live_bytes
        self._is_over = True
        self._monitor.notify_all()

    # Disturbances.

    def before_event(self, number, act, *arguments):
        """Schedules a call of `act` between two events; returns the run."""
        self.cluster.scheduler.call_before_event(number, functools.partial(act, *arguments))
        return self

    def interrupt(self, rank):
        self.all_had_begun = len(self.begun) == len(_RANKS)
        self.ranks[rank].interrupt()

    def kill(self, rank, reaches):
        if self.cluster.kill(rank, reaches):
            self.all_had_begun = len(self.begun) == len(_RANKS)
            self.died[rank] = reaches
            self.ranks[rank].note_sent()
            self._tell_servers_later(rank, _DETECTION_SECONDS)
            self._end_if_over()

    def cut_link(self, rank, other):
        self.cluster.cut(rank, other)
        self.note_loss(rank, other)
        if max(rank, other) not in _RANKS:
            self._tell_servers_later(min(rank, other), _OPTIONS.timeout_seconds)

    def note_loss(self, rank, other):
        self.cut, self.lost_at = (rank, other), self.cluster.scheduler.now

    def _tell_servers_later(self, rank, seconds):
        """Lets the servers forget a rank later, because they check only now and then if workers are alive."""
        for server in self._servers:
            forget = functools.partial(server.forget, rank, f"rank {rank} is not there any more")
            self.cluster.scheduler.call_at(self.cluster.scheduler.now + seconds, forget)


@functools.cache
def _undisturbed(name, **arguments):
    """Returns the numbers of messages and events of an undisturbed run."""
    run = Run(name, **arguments)()
    return run.num_messages, run.cluster.scheduler.num_events


def _some(number, part):
    """Returns one of `_NUM_PARTS` random parts of the numbers below `number`. Each number is in exactly one part."""
    first, others = np.split(np.random.default_rng(_SEED).permutation(number), [_NUM_IN_FIRST_PART])
    return (others[part - 1 :: _NUM_PARTS - 1] if part else first).tolist()


_disturbed = parameterized.product(part=list(range(_NUM_PARTS)), name=list(MEMBERS))


class ExchangeContractTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(logging_disabled())  # Otherwise every rank would log each loss.

    def assert_all_end(self, run):
        run.member.training.check(run)
        for training in run.ranks:
            self.assertIsNone(training.error)
            self.assertTrue(training.has_ended)

    def assert_all_end_or_raise(self, run, lost):
        """Checks that each living rank has ended or raised a documented error, or one that names one of `lost`."""
        run.member.training.check(run)
        names = [f"rank {rank} " if rank in _RANKS else f"ps {rank - len(_RANKS)} " for rank in lost]
        for training in run.ranks:
            error = training.error
            self.assertTrue(training.has_ended or error is not None or training.rank in run.died)
            if error is not None and not self.is_documented(run, error):
                self.assertIsInstance(error, PeerLostError | DeadlineExceededError)
                self.assertTrue(any(name in str(error) for name in names), error)

    def is_documented(self, run, error):
        return run.member.also_raises is not None and run.member.also_raises in str(error)

    # Undisturbed runs.

    @parameterized.product(seed=list(range(8)), name=list(MEMBERS))
    @pytest.mark.stress(but=9)
    def test_steps_of_two_sessions(self, seed, name):
        """After the sessions, no array is in use, and no message or queue is left."""
        run = Run(name, num_sessions=2, seed=seed)()
        self.assert_all_end(run)
        run.member.training.check_undisturbed(run)
        self.assertEqual(run.live_bytes, 0)
        for training in run.ranks:
            transport = training.membership.transport
            self.assertEqual(transport.num_held, 0)
            self.assertEmpty([queue for queue in transport.queues if _GROUP in queue])

    # A message comes late, or never.

    @_disturbed
    @pytest.mark.stress(after=3)
    @pytest.mark.slow(after=8)
    def test_a_message_is_late(self, name, part):
        """The delay is shorter than others wait. It changes times of steps, and only results that depend on times."""
        for late in _some(_undisturbed(name)[0], part):
            with self.subTest(message=late):

                def fate(run, number, sender, receiver, seconds, late=late):
                    return seconds + _DELAY_SECONDS * (number == late)

                self.assert_all_end(Run(name, fate, has_deadlines=True)())

    @_disturbed
    @pytest.mark.stress(after=4)
    def test_a_link_goes_down(self, name, part):
        """Two ranks are silent to each other. When that is noticed, ranks raise, or go on without one of the two."""
        for first in _some(_undisturbed(name)[0], part):
            with self.subTest(message=first):

                def fate(run, number, sender, receiver, seconds, first=first):
                    if number == first:
                        run.cut_link(sender, receiver)
                    return seconds

                run = Run(name, fate, has_deadlines=True)()
                self.assert_all_end_or_raise(run, run.cut)
                self._assert_in_time(run, _OPTIONS.timeout_seconds)

    @_disturbed
    @pytest.mark.stress(after=4)
    def test_a_rank_delivers_nothing_more_to_another_one(self, name, part):
        """The sender lives. Ranks that wait too long raise an error, which may name any rank."""
        for first in _some(_undisturbed(name)[0], part):
            with self.subTest(message=first):

                def fate(run, number, sender, receiver, seconds, first=first):
                    if number == first:
                        run.note_loss(sender, receiver)
                    return math.inf if run.cut == (sender, receiver) else seconds

                run = Run(name, fate, has_deadlines=True)()
                self.assert_all_end_or_raise(run, [*_RANKS, len(_RANKS)])
                self._assert_in_time(run, _OPTIONS.progress_timeout_seconds)

    def _assert_in_time(self, run, deadline):
        for training in run.ranks:
            if training.error is not None:
                self.assertLess(run.ended_at[training.rank], run.lost_at + deadline + 5)

    # A rank dies or leaves.

    @_disturbed
    @pytest.mark.stress(after=4)
    def test_a_rank_dies(self, name, part):
        for event in _some(_undisturbed(name)[1], part):
            # The rank's last messages reach all, none, or one of the others.
            rank, turn = event % len(_RANKS), event // len(_RANKS) % 3
            reaches = (None, (), ((rank + 1) % len(_RANKS),))[turn]
            with self.subTest(event=event, rank=rank, reaches=reaches):
                run = Run(name)
                run.before_event(event, run.kill, rank, reaches)()
                self.assert_all_end_or_raise(run, [rank])
                if run.member.continues and run.all_had_begun:
                    errors = [training.error for training in run.ranks if training.error is not None]
                    self.assertTrue(all(self.is_documented(run, error) for error in errors), errors)

    @_disturbed
    @pytest.mark.stress(after=3)
    @pytest.mark.slow(after=7)
    def test_a_rank_leaves(self, name, part):
        """The others go on. All take part again in the next session, which keeps nothing of the previous one.

        If the rank leaves while ranks meet for the first session, others may wait for it until their deadline.
        """
        arguments = {"num_sessions": 2, "num_steps": 2, "has_deadlines": True}
        for event in _some(_undisturbed(name, **arguments)[1], part):
            with self.subTest(event=event):
                run = Run(name, **arguments)
                run.before_event(event, run.interrupt, event % len(_RANKS))()
                errors = [training.error for training in run.ranks]
                if run.all_had_begun or not any(errors):
                    self.assert_all_end(run)
                    if not any(2 in training.left for training in run.ranks):
                        self.assertEqual(run.live_bytes, 0)
                else:
                    self.assert_all_end_or_raise(run, _RANKS)


if __name__ == "__main__":
    absltest.main()
