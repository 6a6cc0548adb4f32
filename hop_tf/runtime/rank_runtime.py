"""`RankRuntime`: one rank at run time. It owns the transport, the membership and the exchange groups.

A strategy creates a runtime, and `FitLoop` calls its methods. A scheme is plugged in through `make_exchange` and
`make_algorithm`. Nothing here depends on Keras.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf
from absl import logging

from hop_tf.cluster import Cluster
from hop_tf.collectives.routed import get_algorithm
from hop_tf.errors import HopError, PeerFailedError, PeerLostError
from hop_tf.keras_hook.roster import Roster
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.keras_hook.shuffling import draw_seed
from hop_tf.membership.monitor import ThreadMonitor
from hop_tf.membership.rounds import Rounds
from hop_tf.membership.session import Membership
from hop_tf.options import CommunicationOptions
from hop_tf.records import Recorder
from hop_tf.runtime.algorithm import Algorithm
from hop_tf.runtime.deltas import DeltaTracker
from hop_tf.runtime.epoch_ends import EpochEnds
from hop_tf.runtime.exchange import Exchange
from hop_tf.runtime.exchange_runner import ExchangeRunner
from hop_tf.runtime.finite import FiniteCheck
from hop_tf.runtime.first_batches import FirstBatches
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.runtime.joining import Joining
from hop_tf.runtime.rank_collectives import RankCollectives, all_ranks_call
from hop_tf.runtime.replica_state import ReplicaState, describe_optimizer, sign, spec_of
from hop_tf.runtime.report import StepStatistics
from hop_tf.runtime.stalls import StallReport
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tensors.page_lock import PageLock
from hop_tf.transport.base import Transport
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.tcp_transport import TcpTransport

_TRANSPORTS = {"tcp": TcpTransport, "grpc": GrpcTransport}


def make_transport(cluster: Cluster, options: CommunicationOptions, **arguments) -> Transport:
    """Makes the transport of this process, and does not start it. For the other arguments, see `TcpTransport`."""
    make = cluster.make_transport or _TRANSPORTS[options.data_plane]
    return make(cluster.number, cluster.all_addresses, options=options, num_ranks=cluster.world_size, **arguments)


def _is_asked_for(error: BaseException) -> bool:
    """True if the user or the program has asked the rank to end, which is no failure."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in (None, 0))


class RankRuntime:
    """Joins a cluster and runs exchange groups session by session.

    Args:
      cluster: The cluster; more than one rank.
      options: Deadlines and credentials.
      identity: Fields that must be equal on all ranks.
      neighbors: Ranks that the scheme exchanges messages with; None for all, on all ranks.
      make_exchange: Makes the exchange of a new group.
      make_algorithm: Makes the algorithm of a new group, whose exchange exists.
      continue_without_lost: See `Membership`.
      min_ranks: See `Membership`.
      servers: See `Membership`.
      patience_seconds: See `Membership`.
      shares: The part of a batch that each rank takes. If shares change, ranks agree on them. Default: equal parts.
      roster: The ranks that share each batch. Default: all ranks share it, even lost ones.
      recorder: Records events on this rank, or None.
      on_state_taken: Called when this rank, which joins the others, has taken over the variables of one of them.

    Attributes:
      membership: The ranks that take part.
      collectives: Operations that all ranks call together.
      epoch_ends: Agrees on metrics and stops at the end of an epoch.
      share_rounds: The rounds in which rank 0 decides on shares of a batch; None if shares do not change.
      first_batches: Checks that ranks train on the same data.
      finite_check: Checks that this rank sends finite values.

    Raises:
      HopError: If this rank's address cannot be bound.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        options: CommunicationOptions,
        identity: Mapping[str, str],
        neighbors: Iterable[int] | None,
        make_exchange: Callable[[ExchangeContext], Exchange],
        make_algorithm: Callable[[Group], Algorithm],
        continue_without_lost: bool = False,
        min_ranks: int = 1,
        servers: Sequence[int] = (),
        patience_seconds: float | None = None,
        shares: BatchShares | None = None,
        roster: Roster | None = None,
        recorder: Recorder | None = None,
        on_state_taken: Callable[[], None] = lambda: None,
    ):
        self._options = options
        self._roster = roster
        self._recorder = recorder
        self._make_exchange, self._make_algorithm = make_exchange, make_algorithm
        self._pool = BufferPool(PageLock.find())
        self._transport = make_transport(
            cluster,
            options,
            identity=identity,
            pool=self._pool,
            on_error=self._on_error,
            on_restart=self._on_restart if continue_without_lost else None,
            recorder=recorder,
        )
        self.membership = Membership(
            transport=self._transport,
            monitor=ThreadMonitor(),
            options=options,
            world_size=cluster.world_size,
            peers=neighbors,
            continue_without_lost=continue_without_lost,
            min_ranks=min_ranks,
            servers=servers,
            patience_seconds=patience_seconds,
            recorder=recorder,
            on_stall=StallReport(options, cluster.rank),
            divides_anew=lambda: roster is not None and roster.is_in_use,
        )
        self._groups: list[Group] = []
        self._num_groups = 0
        self._joined_session: int | None = None
        self._retired_counters = collections.Counter()
        state = ReplicaState(on_state_taken)
        self._joining = Joining(self.membership, state, options.timeout_seconds)
        self.collectives = RankCollectives(self.membership, self._joining, state, self._pool)
        self.epoch_ends = EpochEnds(self.membership, progress=self._rounds_made, has_passed=self._has_begun)
        is_automatic = shares is not None and shares.is_automatic
        self.share_rounds = Rounds(self.membership, "batch shares", root=0) if is_automatic else None
        self.first_batches = FirstBatches(self.membership)
        self.finite_check = FiniteCheck(self.membership, raises=options.on_nonfinite == "raise")
        self._in_session = False
        self._closed = False
        self._transport.start()
        for server in servers:
            self._transport.connect(server)

    # Sessions.

    @property
    def in_session(self) -> bool:
        """True if this rank takes part in a session."""
        return self._in_session

    @property
    def joining(self) -> bool:
        """True if this process was started again, and does not take part in the running session yet."""
        return self.membership.joining

    def begin_session(self, claims: Iterable[str] = ()) -> None:
        """Enters the next session. See `Membership.begin_session`.

        Args:
          claims: Names that this rank claims for itself. `membership.owners` maps each name to the rank that gets it.
        """
        self.membership.check()
        self.membership.require_all("to begin")
        if self._closed:
            raise HopError("the strategy was shut down. Create a new one to train again.")
        self._retire_groups()
        session = self.membership.session + 1
        if self._recorder is not None:
            self._recorder.begin_session(session)
        for group in self._groups:
            group.exchange.reset(session)
            group.step.assign(0)
        self.first_batches.reset()
        self._reset_rounds(session)
        self.collectives.begin_session()
        self._in_session = True  # Others wait for this rank from now on, even if it fails to enter.
        with all_ranks_call("`fit`, or a custom loop's first step"):
            self.membership.begin_session(draw_seed(session), claims)
        if self.membership.session != session:  # This rank joins a later session.
            self._reset_rounds(self.membership.session)
            if self._recorder is not None:
                self._recorder.begin_session(self.membership.session)

    def _reset_rounds(self, session: int) -> None:
        self.epoch_ends.reset(session)
        if self.share_rounds is not None:
            self.share_rounds.reset(session)

    def _retire_groups(self) -> None:
        """Ends the groups of optimizers that are gone, as after a new `compile`, when no rank needs them any longer."""
        for group in [group for group in self._groups if group.optimizer() is None]:
            self._groups.remove(group)
            group.exchange.settle(self.membership.monitor.now() + self._options.progress_timeout_seconds)
            self._joining.detach(group.name)
            self._retired_counters.update(group.exchange.counters())
            group.close()

    def end_session(self, error: BaseException | None) -> None:
        """Leaves the session: normally (`error` None), or because of `error`.

        The others continue without this rank if they would continue without a lost rank. They also continue if this
        rank was asked to end (Ctrl-C, `sys.exit()`). Otherwise they raise `PeerFailedError` when they begin a step that
        this rank has not made. If `error` is a `HopError` other than `PeerFailedError`, the job itself is broken, and
        all ranks raise for good.

        Blocks: until the groups' threads have come to rest, at most `progress_timeout_seconds`: others may need the
          messages that these threads are about to send.

        Raises:
          HopError: If a group's thread does not come to rest, and `error` is None.
          KeyboardInterrupt: On Ctrl-C during this wait, which ends the job.
        """
        if not self._in_session:
            return
        self._in_session = False
        self.collectives.end_session()
        if error is None:
            self._warn_of_what_is_missed()
        self.membership.interrupt()
        self._joining.end_session()
        deadline = self.membership.monitor.now() + self._options.progress_timeout_seconds
        stuck = None
        try:
            for group in self._groups:
                group.runner.drain(max(0.0, deadline - self.membership.monitor.now()))
        except (HopError, KeyboardInterrupt) as failure:
            logging.error("rank %d: %s: %s", self.membership.rank, type(failure).__name__, failure)
            stuck = failure
        error = error or stuck
        # Includes failures of this rank's other threads: other ranks may wait for messages that were not sent.
        is_of_job = isinstance(error, HopError) and not isinstance(error, PeerFailedError)
        broken = stuck is not None or is_of_job or not isinstance(self.membership.failure, PeerFailedError | None)
        self.membership.leave(
            sent_rounds={
                **self.epoch_ends.sent_rounds,
                **({} if self.share_rounds is None else {self.share_rounds.name: self.share_rounds.sent_rounds}),
                **self.collectives.sent_rounds,
                **{group.name: group.exchange.sent_rounds for group in self._groups},
            },
            reason="" if error is None else f"{type(error).__name__}: {error}",
            failed=error is not None and not _is_asked_for(error),
            abort=broken and not self.membership.is_given_up,
        )
        if stuck is not None and (error is stuck or isinstance(stuck, KeyboardInterrupt)):
            raise stuck

    def begin_again(self) -> None:
        """Makes this rank, which was left behind, join the others again. Called between two steps.

        The rank skips the steps that follow, until `Group.catch_up` has brought it to the others' position.

        Blocks: until the groups' threads have come to rest.

        Raises:
          HopError: If a thread does not come to rest within `progress_timeout_seconds`.
        """
        for group in self._groups:
            group.runner.drain(self._options.progress_timeout_seconds)
        self._joining.begin_again()
        self._reset_rounds(self.membership.session)
        for group in self._groups:
            group.step.assign_add(1)  # Like a new process, skip one step, then ask for the others' position.

    def _warn_of_what_is_missed(self) -> None:
        """Logs the ranks that have not made all of the session's rounds, and the fate of their share of the data."""
        missed = self.membership.missed_share()
        if missed:
            became = "were left out"
            if self.membership.divides_anew():
                became = "went to other ranks, except in the steps in which ranks were lost"
            logging.warning(
                "rank %d: %.3g %% of the data of this training %s, because ranks have missed steps: %s.",
                self.membership.rank,
                100 * sum(missed.values()) / self.membership.world_size,
                became,
                ", ".join(f"rank {rank} {100 * share:.3g} %" for rank, share in missed.items()),
            )

    def close(self, reason: str, error: BaseException | None = None) -> None:
        """Leaves the cluster for good, and releases the port and all threads. Idempotent.

        Args:
          reason: The reason, for the others' errors.
          error: The error that has ended the session of a custom loop; None if the session was complete.

        Blocks: in a session, as `end_session` does. Then until all messages have arrived at the peers that still
          listen, at most `progress_timeout_seconds`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.end_session(self.membership.failure or error)
            deadline = self.membership.monitor.now() + self._options.progress_timeout_seconds
            for group in self._groups:
                group.exchange.settle(deadline)
            # A peer that gets the farewell has all earlier messages, on all lanes.
            self.membership.flush(deadline)
            self.membership.leave(sent_rounds={}, reason=reason, final=True)
            self.membership.flush(deadline)
        finally:
            for group in self._groups:
                group.close()
            self.collectives.close()
            self._transport.close()

    def _on_error(self, error: BaseException) -> None:
        """Called with an error of a thread of the transport or an exchange. The next wait of this rank raises it."""
        self.membership.fail(error)

    def _on_restart(self, peer: int) -> None:
        if peer in self.membership.servers:
            if not all(group.exchange.goes_on_with(peer) for group in self._groups):
                address = self._transport.status(peer).address
                self.membership.fail(
                    PeerLostError(
                        f"the parameter server at {address} was restarted, and has lost its state. Start the job "
                        "again: servers resume from their last snapshots, if they write any."
                    )
                )
        else:
            self.membership.on_restart(peer)

    # Groups.

    def add_group(
        self,
        *,
        optimizer: object,
        trained: Sequence[tf.Variable],
        carried: Sequence[tf.Variable],
        carried_values: Sequence[tf.Tensor],
        statistics: StepStatistics,
        beside: Sequence[TensorSpec] = (),
        num_batches: int = 0,
    ) -> Algorithm:
        """Makes the exchange group of an optimizer at its first step. A collective: every rank makes the same groups.

        Args:
          optimizer: The optimizer. When it is garbage collected, the group ends before the next session.
          trained: The variables that the optimizer updates.
          carried: Variables that are exchanged too, and never pass through a lossy codec.
          carried_values: The values of `carried` before the session's first step changed them.
          statistics: Counts the time that steps wait.
          beside: Specs of further tensors, which are no variables, in each step's buckets.
          num_batches: Number of batches in an epoch of the training data that ranks share; 0 if not known.

        Returns:
          The algorithm of the group, which is ready for its first step in the running session.

        Raises:
          MismatchError: If rank 0 has other variables, another optimizer, or an optimizer with other settings.
        """
        specs = [spec_of(variable) for variable in trained]
        specs += [dataclasses.replace(spec_of(variable), exact=True) for variable in carried]
        specs += beside
        packing = Packing(specs)
        digest = zlib.crc32("\n".join(spec.name for spec in specs).encode())
        name = f"{self._num_groups}-{digest:08x}"
        self._num_groups += 1
        signature = sign(name, describe_optimizer(optimizer), specs, num_batches)
        self.collectives.compare(signature)
        context = ExchangeContext(
            name,
            self.membership.session,
            packing,
            self.membership,
            self._pool,
            optimizer=weakref.ref(optimizer),
            trained=trained,
            carried=DeltaTracker(carried, carried_values),
            roster=self._roster,
            get_algorithm=get_algorithm,
        )
        exchange = self._joining.attach(name, lambda: self._make_exchange(context))
        runner = ExchangeRunner(
            name=name,
            packing=packing,
            exchange=exchange,
            on_error=self._on_error,
            joining=self._joining,
            on_nonfinite=self.finite_check.note,
            recorder=self._recorder,
            rounds=self.epoch_ends.rounds,
        )
        with tf.init_scope(), tf.device("/cpu:0"):
            # A rank that is joining skips one step before it asks for the others' position.
            step = tf.Variable(int(self.joining), dtype=tf.int64, trainable=False, name="hop_tf_step")
        group = Group(context, exchange, runner, step, statistics)
        try:
            algorithm = self._make_algorithm(group)
        except BaseException:
            self._joining.detach(name)
            group.close()
            raise
        self._joining.connect(name, algorithm)
        self._groups.append(group)
        if self._recorder is not None:
            of_variables = group.packing_of_variables
            num_values = sum(of_variables.sizes)
            self._recorder.add_line("group", name=name, num_bytes=of_variables.num_bytes, num_values=num_values)
        return algorithm

    def join_at_once(self, group: Group) -> None:
        """Makes this restarted process take part in the running session, from the group's step 0 on.

        Blocks: until the others have answered.
        """
        self._joining.join_at_once(group.name)
        group.step.assign(0)
        self._joined_session = self.membership.session

    @property
    def has_joined_at_once(self) -> bool:
        """True if this process has joined the running session by `join_at_once`."""
        return self._joined_session == self.membership.session

    def _rounds_made(self) -> dict[str, int]:
        return {group.name: group.exchange.number_of(int(group.step)) for group in self._groups}

    def _has_begun(self, rounds: Mapping[str, int]) -> bool:
        """See `Rounds`."""
        # Iterates over a copy, because another thread may add a group meanwhile.
        return any(group.runner.begun_step >= rounds.get(group.name, math.inf) for group in list(self._groups))

    @property
    def num_bytes(self) -> int:
        """Bytes of the variables that are exchanged in a step."""
        return sum(group.packing_of_variables.num_bytes for group in self._groups)

    @property
    def num_values(self) -> int:
        """The number of values that are exchanged in a step."""
        return sum(sum(group.packing_of_variables.sizes) for group in self._groups)

    # Records.

    def serve_reports(self, report: Callable[[], Mapping[str, object]]) -> None:
        """See `Transport.serve_reports`. Adds the processes that this rank waits for at that moment."""
        num_ranks = self.membership.world_size
        self._transport.serve_reports(
            lambda: {"num_ranks": num_ranks, **report(), "waits_for": self.membership.awaited}
        )

    def counters(self) -> dict[str, float]:
        """Totals and gauges for `strategy.report()`. See `Exchange.counters` and `Exchange.gauges`."""
        totals, gauges = collections.Counter(self._retired_counters), {}
        for group in self._groups:
            totals.update(group.exchange.counters())
            for name, value in group.exchange.gauges().items():
                gauges[name] = max(value, gauges.get(name, value))
        iteration = max((int(group.step) for group in self._groups), default=0)
        lanes = self._transport.bytes_by_lane()
        by_lane = {f"bytes_sent_on_lane_{lane}": num_bytes for lane, num_bytes in sorted(lanes.items())}
        waits = self.membership.wait_seconds_by_peer()
        by_peer = {f"wait_seconds_for_{peer}": seconds for peer, seconds in waits.items()}
        counts = {
            "iteration": iteration,
            "ranks_lost": self.membership.num_lost,
            "ranks_left": self.membership.num_left,
            "ranks_joined": self.membership.num_joined,
            "times_left_behind": self.membership.num_left_behind,
            "nonfinite_steps": self.finite_check.num_steps,
        }
        return {**counts, **by_peer, **self._transport.counters(), **by_lane, **totals, **gauges}
