"""SHAT: asynchronous training with parameter servers, whose workers keep a part of their own model.

Ko and Kim. SHAT: A Novel Asynchronous Training Algorithm That Provides Fast Model Convergence in Distributed Deep
Learning. Applied Sciences 12(1), 2022. Algorithm 1:

    worker i                                                 parameter server
     3  takes a batch                                        14  receives g from worker i
     4  g = gradient at w                                    16  for all workers k but i:
     5  sends g to the server                                18      c[k] = c[k] + 1
     -  w = w - lr g                                         21  w_server = w_server - lr g
     6  receives w_server and c                              22  sends w_server and c[i] to worker i
     7  alpha = 1 - s / log n,  s = n / c    (Equation 4)    23  c[i] = 0
     8  w = (1 - alpha) w + alpha w_server   (Equation 3)

The local step is in Equation 2; Algorithm 1 leaves it out, but without it training alone (alpha = 0) would not train.
The server's line 21 is a step of the user's optimizer. The part of a model that a server keeps has its own c and alpha.
What is said of the paper's Equation 4 stands at `mixing_weight`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.cluster import Cluster
from hop_tf.errors import ClusterConfigError
from hop_tf.keras_hook.optimizers import (
    averages_of,
    clipped,
    descent_of,
    ema_overwrite_frequency,
    learning_rate,
    loss_scale,
    unscaled,
    weight_decays,
)
from hop_tf.options import CommunicationOptions
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.strategies.shat.exchange import NUM_BESIDE, ShatExchange
from hop_tf.strategies.shat.server.service import serve
from hop_tf.strategies.shat.server.snapshots import SnapshotOptions
from hop_tf.strategies.shat.settings import ShatSettings, mixing_weight
from hop_tf.strategies.shat.state import announce_offers
from hop_tf.strategy import ExchangeStrategy
from hop_tf.tensors.finite import are_finite
from hop_tf.tensors.packing import TensorSpec

__all__ = ["SHATParameterServerStrategy", "ShatExchange", "mixing_weight"]


class SHATParameterServerStrategy(ExchangeStrategy):
    """Training with parameter servers: the tasks of type `ps`.

    Each worker pushes its gradient to the servers, makes a step of its own, and mixes what they answer into its model:

        w = (1 - alpha) (w - local step)  +  alpha w_server

    At the learning rate and momentum that synchronous training stands, it loses accuracy, by several points with a
    momentum of 0.9: n workers make n updates in the time of one step, each with a gradient of an older model. With
    momentum take a rate that is n times smaller, or less momentum. `consistency="bsp"` is synchronous and loses
    nothing.

    The servers run the user's own Keras optimizer, with weight decay and `use_ema`, once for every push, with the
    learning rate of the worker. Gradients are clipped and accumulated on the worker; those that loss scaling leaves out
    are not applied. The local step is that of the worker's optimizer; where that is SGD with momentum m, it is
    lr / (1 - m) times the gradient. Constraints apply to the worker's model, not to the servers'. `mixing=1/n`, a
    constant, is the robust choice with momentum, and for 16 workers and more.

    A script that is started on a task of type `ps` serves where it makes this strategy, and ends there, with exit code
    0, when the workers are done; so does `python -m hop_tf serve`. The others do not wait for a worker that dies. One
    that is started again takes the servers' model (with `fit` and one optimizer). A server that writes snapshots and is
    lost is waited for: started again within `timeout_seconds`, it goes on from the last one, and what it had learned
    since is lost. Otherwise a server that is lost is an error on all workers. Started again together with the workers,
    servers go on from their snapshots, too.

    When `fit` ends on a rank, its model, moving statistics and optimizer slots become those of the servers at that
    moment. `synchronize(model)`, which all ranks call, gives all of them the servers' final model. Where rank 0's model
    was changed before a `fit`, or by a callback in `on_train_begin`, the servers and the other ranks take it.

    Args:
      mixing: The weight alpha of the servers' model: "shat" or "shat_root" (see `mixing_weight` in this module), "asp"
        (1), "ensemble" (0), or a number from 0 to 1. Default "shat".
      sharding: "memory": each server keeps equally many values, and large layers are divided; "layer": equally many
        layers; "none": the first server keeps everything. Default "memory".
      consistency: "async": no worker waits; "ssp": a worker waits if it is more than `max_staleness` pushes ahead of
        the slowest one; "bsp": the mean of all workers' gradients is applied, then all are answered, and take that
        model (alpha = 1): synchronous training with a parameter server, with the learning rate of the lowest rank that
        has pushed. Default "async".
      max_staleness: s, in pushes, at least 0. Of no matter unless `consistency` is "ssp". Default 16.
      min_mixing: Least alpha of "shat" and "shat_root", from 0 to 1; None for 1 / n, without which two workers would
        never hear of each other. Default None.
      log_base: The base of the logarithm in Equation 4. Default e.
      codec: What gradients are encoded with on their way to the servers: a `hop_tf.codecs.Codec` that is not sparse, or
        a name ("truncate16", "int8", "sketch"). Default None.
      snapshots: When and where servers write snapshots: a `hop_tf.SnapshotOptions`. Of no matter to workers. Default
        None: nowhere.
      cluster_resolver: Where the cluster is described. Default: `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.

    Raises:
      SystemExit: On a task of type `ps`, with code 0, when the workers are done.
      TypeError: If `codec` or `snapshots` is something else.
      ValueError: If an argument is out of range.
      ClusterConfigError: If the cluster description is not valid, or has several workers and no `ps` task.
      HopError: If this rank's address cannot be bound.
      PeerLostError: On a task of type `ps`, if all workers were lost.

    Blocks: on a task of type `ps`, until the workers are done.

    References:
      Ko and Kim. SHAT: A Novel Asynchronous Training Algorithm That Provides Fast Model Convergence in Distributed Deep
      Learning. Applied Sciences 12(1), 2022. Algorithm 1, Equations 2 to 4. Ho et al. More Effective Distributed ML via
      a Stale Synchronous Parallel Parameter Server. NIPS 2013.
    """

    keeps_assignments = False

    def __init__(
        self,
        *,
        mixing: str | float = "shat",
        sharding: str = "memory",
        consistency: str = "async",
        max_staleness: int = 16,
        min_mixing: float | None = None,
        log_base: float = math.e,
        codec: codecs.Codec | str | None = None,
        snapshots: SnapshotOptions | None = None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        self._settings = ShatSettings(
            mixing=mixing,
            sharding=sharding,
            consistency=consistency,
            max_staleness=max_staleness,
            min_mixing=min_mixing,
            log_base=log_base,
            codec=codec,
        )
        if not isinstance(snapshots, SnapshotOptions | None):
            raise TypeError(
                "`snapshots` must be a hop_tf.SnapshotOptions, as SnapshotOptions(directory=...), or None. "
                f"Received: snapshots={snapshots!r}."
            )
        cluster = Cluster.from_resolver(cluster_resolver)
        if cluster.task_type == "ps":
            serve(cluster, options=communication_options, snapshots=snapshots)
            raise SystemExit(0)
        if cluster.world_size > 1 and not cluster.servers:
            raise ClusterConfigError(
                "SHATParameterServerStrategy needs tasks of type 'ps' in TF_CONFIG (--num_ps of the launcher). "
                f"Received: {cluster.world_size} workers and no 'ps'."
            )
        self.in_lock_step = consistency == "bsp"
        self.mixes_weights = not self.in_lock_step
        self._num_servers = len(cluster.servers)
        self._joined_session: int | None = None  # That which this process joined after it was started again.
        super().__init__(
            cluster=cluster,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
            identity={},  # The servers compare the settings, which they need not be given.
            neighbors=(),
            continue_without_lost=True,
            servers=cluster.servers,
            joins_at_once=True,
        )

    def synchronize(self, model: keras.Model) -> None:
        """Gives `model` the servers' weights and its optimizer their slots; equal to the bit on all ranks afterwards.

        With `use_ema`, the weights are the servers' averages, as at the end of `fit`.

        A collective: every rank calls it, between calls of `fit`. Floating-point weights that are not trained under
        this strategy are averaged.

        Args:
          model: The built model.

        Blocks: until all ranks call it.

        Raises:
          RuntimeError: If it is called within `fit`, as in a callback.
          ValueError: If the model is not built.
          MismatchError: If rank 0 has another model.
          HopError: If a rank or a server was lost or has ended.
        """
        super().synchronize(model)
        weights = {id(weight.value) for weight in model.weights}
        for group in self.training.groups:
            if weights.issuperset(map(id, group.trained)) and self._is_current(group):
                group.exchange.state.pull(finalizes=True)

    def _is_current(self, group: Group) -> bool:
        """Whether no other group has trained variables of this one since."""
        own = set(map(id, group.trained))
        return all(
            other.exchange.last_session <= group.exchange.last_session or own.isdisjoint(map(id, other.trained))
            for other in self.training.groups
        )

    def report(self) -> dict[str, float]:
        """Counters of this rank, as of the other strategies; `mixing_weight` and `pushes_by_others` beside.

        Returns:
          Beside what `ExchangeStrategy.report` returns: alpha and c of the latest push, the means over all shards;
          `communicate_seconds`, and for each server with a shard `shard_<s>_bytes_sent` and `shard_<s>_bytes_received`;
          `snapshot_failures`, how often servers could not write a snapshot; `server_restarts`, how often one was
          started again and went on from a snapshot; `pushes_lost`, how many pushes that this rank knows of were lost
          thereby.
        """
        latest = [each for group in self.training.groups for each in group.exchange.latest]
        others, weight = np.mean(latest, axis=0) if latest else (0.0, 0.0)
        return {**super().report(), "pushes_by_others": float(others), "mixing_weight": float(weight)}

    def make_exchange(self, context: ExchangeContext) -> ShatExchange:
        return ShatExchange(context, self._settings)

    def specs_beside(self) -> Sequence[TensorSpec]:
        size = max(NUM_BESIDE, self._num_servers)
        return [TensorSpec("hop_tf/beside", (size,), tf.float32, exact=True)]

    def begin_group(self, group: Group) -> None:
        joins = self.training.worker.joining
        group.exchange.state.configure(joins=joins)
        if joins:
            self.training.worker.join_at_once(group)
            self._joined_session = self.training.worker.membership.session

    def check_new_group(self) -> None:
        if self.training.worker.membership.session == self._joined_session:
            raise ValueError(
                "to join a running job after a restart, a step must update by one optimizer only: what makes a second "
                "one alike on all ranks, the others have done already. Start the whole job again."
            )

    def before_update(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> tuple[list, _Step]:
        optimizer = group.optimizer()
        del values
        own = unscaled(optimizer, gradients)
        is_applied = tf.constant(True)
        if loss_scale(optimizer) is not None:
            is_applied = are_finite(own)
            own = clipped(optimizer, own)  # Else they have been clipped.
        rate = learning_rate(optimizer)
        beside = tf.stack([tf.cast(rate, tf.float32), tf.cast(is_applied, tf.float32)])
        outgoing = [*own, *(variable.read_value() for variable in group.carried), self._padded(beside)]
        group.submit(outgoing)  # Line 5.
        before = [variable.read_value() for variable in group.trained]  # Weight decay was there.
        return gradients, _Step(before, own, rate, is_applied, outgoing)

    def _padded(self, beside: tf.Tensor) -> tf.Tensor:
        return tf.pad(beside, [[0, max(NUM_BESIDE, self._num_servers) - NUM_BESIDE]])

    def after_update(self, group: Group, state: _Step) -> tf.Tensor:
        received, _ = group.collect(state.outgoing)  # Line 6.
        weights = received[-1]
        local = self._local_model(group, state)
        for index, variable in enumerate(group.trained):
            weight = group.exchange.spread(weights, index)
            mixed = _mix(local[index], received[index], weight)
            variable.assign(mixed)  # Line 8.
        for variable, change in zip(group.carried, received[group.num_trained : -1], strict=True):
            variable.assign_add(change)
        if ema_overwrite_frequency(group.optimizer()):
            # The servers put averages in the place of weights. The worker's optimizer does it next, to no effect.
            for average, variable in zip(averages_of(group.optimizer(), group.trained), group.trained, strict=True):
                average.assign(variable)
        return tf.constant(0, tf.int64)

    def _local_model(self, group: Group, step: _Step) -> list[tf.Tensor]:
        """The worker's model after its own step (Equation 2)."""
        optimizer = group.optimizer()
        descent = descent_of(optimizer, group.trained)
        if descent is None or not descent.momentum:
            return [variable.read_value() for variable in group.trained]
        # In the long run, what a gradient does to the server's weights.
        rate = tf.cast(step.rate, tf.float32)
        scales = [tf.cast(rate / (1.0 - descent.momentum), before.dtype) for before in step.before]
        # Under loss scaling, weight decay comes after the exchange.
        decays = weight_decays(optimizer, group.trained) if loss_scale(optimizer) is not None else [0.0] * len(scales)
        return [
            tf.where(step.is_applied, before * tf.cast(1 - rate * decay, before.dtype) - scale * gradient, before)
            for before, decay, scale, gradient in zip(step.before, decays, scales, step.gradients, strict=True)
        ]

    def break_off(self, group: Group) -> None:
        if group.exchange.sent_rounds:
            group.exchange.state.keep_model()  # A mixture, in which what others have pushed counts in part.

    def begin_training(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.exchange.state.offer()
        if self.training.worker is None:
            return
        if self.is_chief:
            announce_offers(self.training.worker.membership)
            return
        # Groups that have variables in common: the one that was trained last has their values.
        for group in sorted(groups, key=lambda group: group.exchange.last_session):
            if group.exchange.is_configured:  # It is not where its first `fit` was broken off early.
                group.exchange.state.pull(after_offers=True)

    def finish_training(self, group: Group) -> None:
        if group.exchange.sent_rounds:  # Others may keep older values of the same variables.
            group.exchange.state.pull()


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is known of a step before its update.

    Attributes:
      before: The variables that are trained.
      gradients: Theirs.
      rate: The learning rate.
      is_applied: bool scalar: whether the gradients are used.
      outgoing: What was handed out.
    """

    before: Sequence[tf.Tensor]
    gradients: Sequence[tf.Tensor]
    rate: tf.Tensor
    is_applied: tf.Tensor
    outgoing: Sequence[tf.Tensor]


def _mix(local: tf.Tensor, server: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Equation 3; the server's model to the bit where the weight is 1."""
    dtype = tf.float64 if local.dtype == tf.float64 else tf.float32
    weight = tf.cast(weight, dtype)
    return tf.cast((1 - weight) * tf.cast(local, dtype) + weight * tf.cast(server, dtype), local.dtype)
