"""The worker's part of SHAT outside of the training graph: Algorithm 1, lines 5 to 7. See `hop_tf.strategies.shat`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.codecs import Identity
from hop_tf.errors import PeerLostError, ProtocolError
from hop_tf.keras_hook.optimizers import check_loss_scaling
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.records import Kind, recorded
from hop_tf.runtime.autotuning import Autotuner, Times
from hop_tf.runtime.exchange import Exchange, Request, Result
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.joiner import Joiner
from hop_tf.runtime.ways import Way
from hop_tf.strategies.shat.pushes import NUM_BESIDE
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server.server import PUSH
from hop_tf.strategies.shat.servers import Answers, ServerRequest, Servers
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.strategies.shat.shards import ShardView, make_shards
from hop_tf.strategies.shat.state import GroupState
from hop_tf.tensors import payloads


class ShatExchange(Exchange, Joiner):
    """Pushes steps or gradients to the servers, and returns the servers' model and its weight.

    Args:
      context: Membership, packing and buffers of the group.
      settings: The settings of the strategy.
      shares: The part of a batch that each worker takes. Default: all parts are equal.
      tell: As for `Autotuner`. Default: does nothing.

    Attributes:
      shards: The shard of each server that has one.
      state: Exchanges state with the servers between steps.
      last_session: The session of the latest push; 0 before the first push.
      tuner: Chooses the way of each push by the times of this worker alone: no worker has to agree with another.

    Raises:
      ValueError: If the settings do not allow the optimizer.
    """

    def __init__(
        self,
        context: ExchangeContext,
        settings: ShatSettings,
        shares: BatchShares | None = None,
        tell: Callable[[Way, int, str], None] = lambda way, width, text: None,
    ):
        optimizer = context.optimizer()
        settings.check_optimizer(optimizer)
        self._pushes_steps = settings.pushes_steps_of(optimizer)
        if not self._pushes_steps:
            check_loss_scaling(optimizer)
        self._context = context
        self._membership = context.membership
        self._packing = context.packing
        self._settings = settings
        self._shares = shares
        self._workers = list(range(context.membership.world_size))  # Without lost workers, but with ended ones.
        self.shards = make_shards(context, settings)
        self._servers = Servers(context, self.shards)
        self.state = GroupState(context, settings, self._servers)
        ways = settings.ways(context.packing.specs)
        interval = settings.interval
        self.tuner = Autotuner(ways, (1,), rank=0, world_size=1, tell=tell, interval_of=lambda width: interval)
        self._times = Times(0.0, 0.0)  # Of the last push.
        self._begun_at = self._membership.monitor.now()
        self.last_session = 0
        self._sent_rounds = 0
        self._communicate_seconds = 0.0
        self._latest: dict[int, tuple[int, float]] = {}

    def reset(self, session: int) -> None:
        self._servers.begin_session(session)
        self._sent_rounds = 0
        self.tuner.begin(1)
        self._times = Times(0.0, 0.0)

    def close(self) -> None:
        self._servers.close()
        # If the optimizer still exists, only this rank ends. The others may go on, and servers still write snapshots.
        if self._context.optimizer() is None:
            self.state.retire()

    @property
    def is_configured(self) -> bool:
        """True if the servers keep the group."""
        return self._servers.is_configured

    def goes_on_with(self, server: int) -> bool:
        return self._servers.goes_on_with(server)

    # Steps. They are pushed in windows; `Request.step` is the number of the window.

    def steps_of(self, number: int) -> range:
        return range(number * self._settings.interval, (number + 1) * self._settings.interval)

    def number_of(self, step: int) -> int:
        return step // self._settings.interval

    def step(self, request: Request) -> Result:
        start = self._membership.monitor.now()
        times = self._times._replace(period=(start - self._begun_at) / self._settings.interval)
        self.tuner.hear(self.tuner.own(times), self.tuner.setting)
        with self._servers.giving_up_alone():
            result = self._step(request)
        seconds = self._membership.monitor.now() - start
        self._begun_at, self._times = start, Times(0.0, seconds)
        self._communicate_seconds += seconds
        return result

    def _step(self, request: Request) -> Result:
        rate, is_applied, *rows = self._beside(request.buckets)[: NUM_BESIDE + (self._shares is not None)]
        is_plain = self.tuner.ways[self.tuner.setting.way].codec == Identity()
        weight = float(rows[0]) if rows else 0.0
        push = self._make_push(request.step, self._rate(rate), bool(is_applied), weight, is_plain)
        self._servers.reconfigure(push)
        for shard in self.shards:
            with recorded(self._membership.recorder, Kind.ENCODE):
                shard.encode(request.buckets, is_applied=bool(is_applied), is_plain=is_plain)
            self._servers.send(push, shard)  # Line 5.
        self._sent_rounds = request.step + 1
        self.last_session = self._servers.session
        answers = self._servers.receive(push)  # Line 6.
        self._check_accepted(answers)
        self._servers.end_configuration()
        return self._merge(request, answers)

    def _rate(self, rate: float) -> float:
        """The factor by which the servers multiply a push. With shares, the remaining workers' parts sum to 1."""
        if self._pushes_steps:
            rate = float(rate) * self._settings.share(len(self._workers))
        num_all = self._membership.world_size
        if self._shares is not None and len(self._workers) < num_all and self._settings.consistency != "bsp":
            rate = float(rate) * len(self._workers) / (num_all * self._shares.total_part(self._workers))
        return rate

    def _make_push(self, window: int, rate: float, is_applied: bool, weight: float, is_plain: bool) -> ServerRequest:
        push = pb.Push(
            group=self._context.group,
            session=self._servers.session,
            sequence=window + 1,
            rate=rate,
            is_applied=is_applied,
            weight=weight,
            is_plain=is_plain,
        )

        def message(shard: ShardView, is_missing: bool) -> tuple[bytes, Sequence[np.ndarray]]:
            # The encoded push is kept, and sent again only to a server that has not received it.
            push.asks_again = not is_missing
            payload = payloads.join(shard.encoded) if is_missing else ()
            shard.bytes_sent += sum(array.nbytes for array in payload)
            return push.SerializeToString(), payload

        # The text of a long wait names slower workers, so that readers do not look for the cause at the server.
        waits = "" if self._settings.consistency == "async" else " (which comes when slower workers have pushed)"
        return ServerRequest(
            queue=PUSH,
            operation=f"receive model of push {push.sequence}{waits}",
            message=message,
            is_answer=lambda reply: (reply.session, reply.sequence) == (push.session, push.sequence),
            shards=self.shards,
            step=self.steps_of(window)[-1],
            retries=True,
        )

    def _check_accepted(self, answers: Answers) -> None:
        for answer, _ in answers.values():
            if answer.error:
                error = PeerLostError if answer.is_forgotten else ProtocolError
                raise error(f"rank {self._membership.rank}: a parameter server has refused a push: {answer.error}")

    def _merge(self, request: Request, answers: Answers) -> Result:
        """Returns the servers' model and the weight of each server.

        In the place of non-trainable state, the result has the servers' mean minus the value that this rank has pushed.
        """
        buckets = self._packing.take(self._context.pool)  # The servers fill all of it except the metadata.
        self._beside(buckets)[:] = 0
        for shard in self.shards:
            reply, payload = answers[shard.server]
            shard.encoded = []
            shard.bytes_received += payload.nbytes
            with recorded(self._membership.recorder, Kind.ENCODE):
                shard.put(shard.decode(payload), buckets)
            for bucket, where in shard.ranges:
                if self._packing.exact[bucket]:
                    buckets[bucket][where] -= request.buckets[bucket][where]
            weight = self._settings.weight(reply.num_others, reply.num_workers)  # Line 7.
            self._beside(buckets)[shard.index] = weight
            self._latest[shard.index] = (reply.num_others, weight)
            self._workers = [rank for rank in range(self._membership.world_size) if rank not in reply.lost]
            self._note_snapshots(shard, reply)
            self._membership.hear_of_lost(shard.server, reply.lost)
        return Result(request.step, request.segment, tuple(buckets))

    def _note_snapshots(self, shard: ShardView, reply: pb.Reply) -> None:
        """Warns once when a server can no longer write snapshots."""
        if reply.snapshot_error and not shard.snapshot_error:
            logging.warning(
                "rank %d: %s cannot write its snapshot %s. Training continues. If that server is lost, it resumes from "
                "the last complete snapshot, if there is one. Make room, or repair the disk.",
                *(self._membership.rank, self._servers.name(shard.server), reply.snapshot_error),
            )
        shard.num_snapshot_failures, shard.snapshot_error = reply.num_snapshot_failures, reply.snapshot_error

    def no_op(self, request: Request) -> Result:
        buckets = self._packing.take(self._context.pool)
        for bucket in buckets:
            bucket.fill(0)
        return Result(request.step, request.segment, tuple(buckets))

    def _beside(self, buckets: Sequence[np.ndarray]) -> np.ndarray:
        bucket, where = self._packing.place(len(self._packing.specs) - 1)
        return buckets[bucket][where]

    def spread(self, weights: tf.Tensor, index: int) -> tf.Tensor:
        """Emits the ops that give each value of a trained variable the weight of its server.

        Args:
          weights: One weight for each server.
          index: The index of the variable.

        Returns:
          A scalar, or a tensor in the shape of the variable if several servers keep it.
        """
        spec = self._packing.specs[index]
        owners = [(shard.index, size) for shard in self.shards if (size := shard.size_of(index))]
        if len(owners) <= 1:
            return weights[owners[0][0] if owners else 0]
        servers, sizes = zip(*owners, strict=True)
        return tf.reshape(tf.repeat(tf.gather(weights, servers), sizes), spec.shape)

    # Newcomers. A rank's step does not matter to others.

    def begin_at(self, step: int) -> None:
        del step

    def meet(self, rank: int, step: int) -> None:
        del rank, step

    def admit(self, rank: int, step: int) -> int:
        del rank
        return step

    # Records.

    @property
    def sent_rounds(self) -> int:
        return self._sent_rounds

    def outcomes(self) -> Mapping[str, int]:
        return {
            "dropped": sum(shard.num_pushes_lost for shard in self.shards),
            "retried": self._servers.num_retries,
        }

    def counters(self) -> Mapping[str, float]:
        """The traffic with each server, the time of the communication thread, and failures of servers.

        Returns:
          `communicate_seconds`: the time from a push to its answer.
          `snapshot_failures`: the number of snapshots that servers could not write, as far as this rank knows.
          `server_restarts`: the number of times that a server was started again and went on from a snapshot.
          `pushes_lost`: the number of pushes, of all workers, that these restarts have lost, as far as this rank knows.
          `shard_<s>_bytes_sent` and `shard_<s>_bytes_received`, for each server with a shard: bytes without headers.
        """
        totals: dict[str, float] = {
            "communicate_seconds": self._communicate_seconds,
            "snapshot_failures": sum(shard.num_snapshot_failures for shard in self.shards),
            "server_restarts": sum(shard.num_restarts for shard in self.shards),
            "pushes_lost": sum(shard.num_pushes_lost for shard in self.shards),
        }
        for shard in self.shards:
            totals[f"shard_{shard.index}_bytes_sent"] = shard.bytes_sent
            totals[f"shard_{shard.index}_bytes_received"] = shard.bytes_received
        return totals

    def gauges(self) -> Mapping[str, float]:
        """The way of the next push.

        Returns:
          `encoded_bytes_per_value`: 4 for lossless float32. Empty if workers do not choose.
        """
        way = self.tuner.ways[self.tuner.setting.way]
        return {"encoded_bytes_per_value": way.codec.bytes_per_value} if self._settings.chooses else {}

    @property
    def latest(self) -> Iterable[tuple[int, float]]:
        """The values c and alpha of the latest answer, for each shard."""
        return list(self._latest.values())
