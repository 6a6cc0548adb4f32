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

The local step is in Equation 2. Algorithm 1 leaves it out, but without it a worker with alpha = 0 would not train at
all. With `pushes="gradients"` the server's line 21 is a step of the user's optimizer. So n workers make n full steps in
the time of one, which does not work with the learning rate and momentum of synchronous training. By default a worker
sends its own step in line 5 instead, and the server adds it, divided by n. Each server's part of the model has its own
c and alpha. For the paper's Equation 4 see `mixing_weight`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.arguments import checked_batch_shares, describe_batch_shares
from hop_tf.cluster import Cluster
from hop_tf.errors import ClusterConfigError
from hop_tf.keras_hook.updates import as_own_updates
from hop_tf.options import CommunicationOptions
from hop_tf.runtime.choices import NO_TIMES, refuse_late_determinism, settings_to_use, tell_choice
from hop_tf.runtime.choosing import AUTO
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.runtime.ways import Way
from hop_tf.strategies.shat.algorithm import ShatAlgorithm
from hop_tf.strategies.shat.exchange import ShatExchange
from hop_tf.strategies.shat.pushes import num_beside
from hop_tf.strategies.shat.server.service import serve
from hop_tf.strategies.shat.server.snapshots import SnapshotOptions
from hop_tf.strategies.shat.settings import ShatSettings, mixing_weight
from hop_tf.strategies.shat.state import announce_offers
from hop_tf.strategy import ExchangeStrategy
from hop_tf.tensors.packing import TensorSpec

__all__ = ["SHATParameterServerStrategy", "ShatExchange", "mixing_weight"]


class SHATParameterServerStrategy(ExchangeStrategy):
    """Training with parameter servers: the tasks of type `ps`.

    Each worker makes a step of its own optimizer, pushes it to the servers, and mixes their answers into its model:

        w_server = w_server - local step / n
        w        = (1 - alpha) (w - local step)  +  alpha w_server

    No worker waits for another one. With the learning rate and momentum of synchronous training, n workers together
    move the servers' model as far as a synchronous step does. n counts all workers except lost ones. Each worker keeps
    its own optimizer slots.

    With `pushes="gradients"`, the paper's rule, a worker pushes its gradient. The servers make a step of the user's
    Keras optimizer for every push, with weight decay and `use_ema`, and with the learning rate of the worker. n workers
    then make n full steps in the time of one: use a learning rate that is n times smaller, or less momentum. With
    momentum, also use `mixing=1/n`. Gradients are clipped and accumulated on the worker. Gradients of steps that loss
    scaling skips are not applied. The local step is that of the worker's optimizer, but with SGD and momentum m it is
    lr / (1 - m) times the gradient. Constraints apply to the worker's model, not to the servers'.

    On a task of type `ps`, a script that creates this strategy runs a server. The script exits there with code 0 when
    the workers are done. `python -m hop_tf serve` does the same. If a worker dies, the others do not wait for it. A
    worker that is started again takes the servers' model (with `fit` and one optimizer). If a server that writes
    snapshots is lost, the workers wait for it. If the server is started again within `timeout_seconds`, it goes on from
    its last snapshot, and later pushes are lost. The loss of a server without snapshots is an error on all workers.
    Servers that are started again together with the workers also go on from their snapshots.

    When `fit` ends on a rank, the rank's model, moving statistics and (if gradients are pushed) optimizer slots become
    those of the servers at that moment. With `mixing="ensemble"` the rank keeps its own model. `synchronize(model)`,
    which all ranks call, gives all of them the servers' final model. A later `fit` begins with that model. If rank 0's
    model was changed before a `fit`, or by a callback in `on_train_begin`, the servers and the other ranks take over
    the changed model.

    Args:
      mixing: The weight alpha of the servers' model: "shat" or "shat_root" (see `mixing_weight` in this module), "asp"
        (1), "ensemble" (0), or a number from 0 to 1. Default "shat".
      pushes: "steps": the steps of the worker's optimizer; "gradients": see above. Default None: "gradients" with
        `consistency="bsp"`, which is then exactly synchronous training, and with an optimizer that has `use_ema`;
        otherwise "steps".
      sharding: "memory": each server keeps equally many values, and large layers are divided; "layer": equally many
        layers; "none": the first server keeps everything. Default "memory".
      consistency: "async": no worker waits. "ssp": a worker waits if it is more than `max_staleness` pushes ahead of
        the slowest one. "bsp": synchronous training. The servers apply the mean of all workers' gradients, with the
        learning rate of the lowest rank that has pushed. All workers then take the servers' model (alpha = 1). Default
        "async".
      max_staleness: s, in pushes (of `interval` steps), at least 0. Used only if `consistency` is "ssp". Default 16.
      min_mixing: The least alpha of "shat" and "shat_root", from 0 to 1. Default None: 1 / n. Without a minimum, two
        workers would never learn from each other.
      log_base: The base of the logarithm in Equation 4. Default e.
      codec: Encodes pushes on their way to the servers: a `hop_tf.codecs.Codec` that is not sparse, a name
        ("truncate16", "int8", "sketch", "bits4"), or None: values are sent unencoded. Default "auto": each worker makes
        a few steps without a codec. If pushes and answers take at least 15 % of a step, it makes a few with "int8", and
        keeps "int8" if that saves at least 15 % of a step. A worker chooses alone, and chooses again if its times
        change. Rank 0 prints its choice on stderr. Under `tf.config.experimental.enable_op_determinism()` "auto" is
        None.
      interval: p: a worker pushes the sum of its steps in every p-th step, and when `fit` ends (a custom loop: in
        `synchronize`). So it sends p times less, and waits p times less often for an answer. With "shat" and
        "shat_root", the weight is then 1 - (1 - alpha)^p: in p steps, a worker takes over as much as with p pushes of
        single steps. Costs a copy of the model. Needs `pushes="steps"`, and excludes "bsp". Default 1.
      snapshots: The directory and the times of the servers' snapshots: a `hop_tf.SnapshotOptions`. Workers ignore it.
        Default None: no snapshots.
      batch_shares: The part of each global batch that a rank takes: a list with a positive number for each rank, such
        as [3, 1], or "auto": in proportion to speeds, which ranks measure and agree on (see `docs/data.md`). A push
        counts in proportion: the servers add a step times the worker's part, instead of 1 / n. For a pushed gradient,
        they multiply the learning rate by n times the worker's part. With "bsp", the servers' means weight each worker
        by its number of rows. Workers make their own steps at full size. Default None: all parts are equal.
      devices: Names of this process's devices, as for `tf.distribute.MirroredStrategy`: a rank's batch is divided among
        them. Ranks may have different numbers of devices. Default: all GPUs that the process sees, or one CPU.
      cluster_resolver: The description of the cluster. Default: `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.

    Raises:
      SystemExit: On a task of type `ps`, with code 0, when the workers are done.
      TypeError: If `codec` or `snapshots` is of another type.
      ValueError: If an argument is out of range; in the first step, if the optimizer does not support `pushes`.
      ClusterConfigError: If the cluster description is not valid, or has several workers and no `ps` task.
      HopError: If this rank's address cannot be bound.
      PeerLostError: On a task of type `ps`, if all workers were lost.

    Blocks: on a task of type `ps`, until the workers are done.

    References:
      Ko and Kim. SHAT: A Novel Asynchronous Training Algorithm That Provides Fast Model Convergence in Distributed Deep
      Learning. Applied Sciences 12(1), 2022. Algorithm 1, Equations 2 to 4. Ho et al. More Effective Distributed ML via
      a Stale Synchronous Parallel Parameter Server. NIPS 2013.
    """

    keeps_assignments = takes_assignments = takes_between_epochs = False

    def __init__(
        self,
        *,
        mixing: str | float = "shat",
        pushes: str | None = None,
        sharding: str = "memory",
        consistency: str = "async",
        max_staleness: int = 16,
        min_mixing: float | None = None,
        log_base: float = math.e,
        codec: codecs.Codec | str | None = AUTO,
        interval: int = 1,
        snapshots: SnapshotOptions | None = None,
        batch_shares: Sequence[float] | str | None = None,
        devices: Sequence[str] | None = None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        cluster = Cluster.from_resolver(cluster_resolver)
        given = ShatSettings(
            mixing=mixing,
            pushes=pushes,
            sharding=sharding,
            consistency=consistency,
            max_staleness=max_staleness,
            min_mixing=min_mixing,
            log_base=log_base,
            codec=codec,
            interval=interval,
            batch_shares=describe_batch_shares(checked_batch_shares(batch_shares, cluster.world_size)),
        )
        self._settings = settings_to_use(given)
        if not isinstance(snapshots, SnapshotOptions | None):
            raise TypeError(
                "`snapshots` must be a hop_tf.SnapshotOptions, as SnapshotOptions(directory=...), or None. "
                f"Received: snapshots={snapshots!r}."
            )
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
        self.settles_loops = interval > 1
        self._num_servers = len(cluster.servers)
        super().__init__(
            cluster=cluster,
            devices=devices,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
            batch_shares=batch_shares,
            identity={},  # The servers compare the workers' settings, and need none themselves.
            neighbors=(),
            continue_without_lost=True,
            servers=cluster.servers,
            joins_at_once=True,
        )
        if self._settings != given:
            (way,) = self._settings.ways()
            self._tell(way, 1, NO_TIMES)

    def _tell(self, way: Way, width: int, text: str) -> None:
        """Reports the choice of this worker."""
        tell_choice(self._recorder, way, text, arguments={"codec": way.codec}, is_chief=self.is_chief)

    @as_own_updates()
    def synchronize(self, model: keras.Model) -> None:
        """Gives `model` the servers' weights. Weights and the servers' slots are then equal to the bit on all ranks.

        With `use_ema`, the weights are the servers' averages, as at the end of `fit`.

        A collective: every rank must call it, between calls of `fit`. Floating-point weights that are not trained under
        this strategy are averaged.

        Args:
          model: The built model.

        Blocks: until all ranks call it.

        Raises:
          RuntimeError: If it is called within `fit`, as in a callback.
          ValueError: If the model is not built, or weights were assigned after the last step of a custom loop.
          MismatchError: If rank 0 has another model.
          HopError: If a rank or a server was lost or has ended.
        """
        super().synchronize(model)
        weights = {id(weight.value) for weight in model.weights}
        for algorithm in self.training.algorithms:
            if weights.issuperset(map(id, algorithm.group.trained)) and self._is_current(algorithm):
                algorithm.served.pull(finalizes=True)

    def _average_over_ranks(self, weights: Sequence[tf.Variable]) -> None:
        super()._average_over_ranks(weights)
        known = set(map(id, weights))
        for algorithm in self.training.algorithms:
            # Next, the servers' model, which has all pushes, replaces the mean. Without this call, rank 0 would first
            # offer its mean to the servers, in a custom loop.
            if known.issuperset(map(id, algorithm.group.trained)) and self._is_current(algorithm):
                algorithm.served.keep_model()

    def _is_current(self, algorithm: ShatAlgorithm) -> bool:
        """True if no other group has since trained variables of this group."""
        own = set(map(id, algorithm.group.trained))
        return all(
            other.last_session <= algorithm.last_session or own.isdisjoint(map(id, other.group.trained))
            for other in self.training.algorithms
        )

    def report(self) -> dict[str, float]:
        """Counters of this rank, as for the other strategies, with the latest alpha and c.

        Returns:
          The values of `ExchangeStrategy.report`, and the following.
          `mixing_weight` and `pushes_by_others`: alpha and c of the latest push, as means over all shards.
          `communicate_seconds`: the time from a push to its answer.
          `shard_<s>_bytes_sent` and `shard_<s>_bytes_received`, for each server with a shard: bytes without headers.
          `snapshot_failures`: the number of snapshots that servers could not write.
          `server_restarts`: the number of times that a server was started again and went on from a snapshot.
          `pushes_lost`: the number of pushes that these restarts have lost, as far as this rank knows.
        """
        latest = [each for group in self.training.groups for each in group.exchange.latest]
        others, weight = np.mean(latest, axis=0) if latest else (0.0, 0.0)
        return {**super().report(), "pushes_by_others": float(others), "mixing_weight": float(weight)}

    def make_exchange(self, context: ExchangeContext) -> ShatExchange:
        refuse_late_determinism(self._settings, chooses=self._settings.chooses)
        return ShatExchange(context, self._settings, self.training.shares, self._tell)

    def make_algorithm(self, group: Group) -> ShatAlgorithm:
        return ShatAlgorithm(group, self._settings, self.training.runtime, self.training.shares)

    def specs_beside(self, trained: Sequence[tf.Variable]) -> Sequence[TensorSpec]:
        del trained
        size = num_beside(self._num_servers, weighs_rows=self.training.shares is not None)
        return [TensorSpec("hop_tf/beside", (size,), tf.float32, exact=True)]

    def check_new_group(self) -> None:
        if self.training.runtime.has_joined_at_once:
            raise ValueError(
                "to join a running job after a restart, a step must use one optimizer only, because the others have "
                "synchronized the second one already. Start the whole job again."
            )

    def begin_training(self, algorithms: Sequence[ShatAlgorithm]) -> None:
        for algorithm in algorithms:
            algorithm.served.offer()
        if self.training.runtime is None:
            return
        if self.is_chief:
            announce_offers(self.training.runtime.membership)
            if not self._settings.keeps_own_models:  # With "ensemble", rank 0's model is not the servers' yet.
                return
        # If groups have variables in common, the group that was trained last has their values.
        for algorithm in sorted(algorithms, key=lambda algorithm: algorithm.last_session):
            if algorithm.is_configured:  # Not if the group's first `fit` was aborted early.
                algorithm.served.pull(after_offers=True)
