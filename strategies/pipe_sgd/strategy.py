"""Pipe-SGD: synchronous training whose communication is hidden behind the computation of the next steps.

Li, Yu, Li, Avestimehr, Kim, Schwing. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
Training. NeurIPS 2018. Algorithm 1, with pipeline width K, at each worker:

    computation thread                                      communication thread
     2  for t = 1 ... T:                                     1  g_sum[1 - K ... 0] = 0, ready
     3      wait until g_sum[t - K] is ready                 2  for t = 1 ... T:
     5      w[t] = w[t - 1] - lr g_sum[t - K]                3      wait until g_local[t] is ready
     7      forward pass of a batch                          4      g_sum[t] = AllReduce(g_local[t])
     8      g_local[t] = backward pass at w[t]               5      g_sum[t] is ready
    10      g_local[t] is ready

Keras updates at the end of a step. So the update of line 5 belongs to the previous step. Step t applies the gradient of
step t - (K - 1), after it has submitted its own: K = 1 is synchronous training (the paper's D-Sync). We take the mean
over the ranks instead of the sum. Lines 4 and 9 of the computation thread (the codec) run on the communication thread,
where they are hidden, too. A GPU may run them instead: see `hop_tf.runtime.graph_encoding`.

The paper computes at w[t - 1], which lacks the gradients in flight. With the momentum and rate of synchronous training,
that costs some or all accuracy. So we compute at the weights to which this rank's own gradients would lead from
w[t - 1] (`compensation` is "replay", see `hop_tf.runtime.look_ahead`). w[t] are the merged weights. Only mean gradients
move them, equally on all ranks.

With L segments (pipelined gradient communication, Figure 2 (b)) the gradients of the last layers are submitted while
back-propagation goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hop_tf import codecs
from hop_tf.arguments import check_choice, check_integer, check_on_peer_loss, identity_of
from hop_tf.collectives.all_reduce import ALGORITHMS
from hop_tf.keras_hook.optimizers import gradient_accumulation_steps, loss_scale, use_ema
from hop_tf.options import CommunicationOptions
from hop_tf.runtime.choices import NO_TIMES, refuse_late_determinism, settings_to_use, tell_choice
from hop_tf.runtime.choosing import AUTO
from hop_tf.runtime.gradient_algorithm import GradientAlgorithm
from hop_tf.runtime.gradients import specs_beside
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.runtime.ways import Way
from hop_tf.strategies.pipe_sgd.algorithm import PipelinedAlgorithm
from hop_tf.strategies.pipe_sgd.exchange import PipeSGDExchange, PipeSGDSettings
from hop_tf.strategy import ExchangeStrategy, training_cluster
from hop_tf.tensors.packing import TensorSpec

_COMPENSATIONS = ("replay", "none")


class PipeSGDStrategy(ExchangeStrategy):
    """Synchronous training that adapts to the network: it encodes gradients, or hides communication.

    In step t each rank computes its gradient g_i[t]. Then it applies a mean over all ranks, by an all-reduce:

        w, slots  <-  the optimizer's update with  (1 / n) sum over i of g_i[t - (K - 1)]

    Without arguments, ranks choose K, a codec and an algorithm. First, they make a few steps with each way to average,
    with a codec and without one. They try K = 2 once it would have saved more time than tracing its graph takes. All
    ranks make the same choice, from the measurements of all. They choose again when steps take longer or shorter than
    before, or other ranks take part. Rank 0 prints the choice, and how to keep it, on stderr. A given argument is kept.
    Under `tf.config.experimental.enable_op_determinism()` no choice depends on time: K = 1, no codec, a mesh.

    K = 1 is synchronous training. With K > 1 means are merged K - 1 steps late, equally on all ranks, to the bit. Until
    a mean arrives, the rank's own gradient stands in for it: the rank applies its K - 1 own gradients in flight to a
    copy of the merged weights and slots, and computes with this copy. A step takes max(update + compute, communicate)
    instead of their sum (Equations 2 and 4), and K - 1 further updates. With the learning rate and momentum of
    synchronous training, K = 2 costs less than a point of accuracy, even if each rank has data of different classes.
    K = 3 costs about as little, and K = 4 up to 2 points. In a short training of a transformer K = 3 and K = 4 cost 2
    to 4 points.

    At the end of every epoch, and of `fit`, all means are merged: validation and callbacks there see merged weights.
    Callbacks within an epoch see the weights that a rank computes with. With a given K above 1, `fit` raises an error
    if callbacks assign weights. If ranks choose K, such callbacks keep K at 1, as custom loops do. All ranks use the
    learning rate of rank 0. If a callback has changed another rank's learning rate, there is a warning. The change is
    an error with a learning-rate schedule, with `weight_decay` and K = 1 or "auto", and with `compensation="none"` and
    K above 1.

    Changes of moving statistics are averaged, too, never through a codec. Gradients are clipped before they are
    averaged (under a `LossScaleOptimizer`, after). Sparse gradients are sent as dense ones. If a rank ends early, the
    others go on without it. `synchronize(model)` makes weights, slots and step counts the same before another `fit`.
    `on_peer_loss` says what happens when a rank is lost. In a custom loop `synchronize` first merges all means that are
    in flight.

    Args:
      pipeline_width: K, the number of steps that are in flight at a time; at least 1. Default "auto": 2 if that saves
        at least 15 % of a step, otherwise 1; 1 with `compensation="none"`.
      codec: Encodes gradients in messages: a `hop_tf.codecs.Codec`, or a name ("truncate16", "int8", "sketch", "bits4";
        `codecs.TopK(error_feedback=True)` for the largest only), or a `codecs.LowRank` ("low_rank"), for large kernels
        on slow links. None: gradients are sent unencoded. Gradients other than float32, bfloat16 and float16 are always
        sent unencoded. Default "auto": "int8" if that saves at least 15 % of a step, otherwise None. "low_rank" if that
        saves 15 % more, most values are those of large dense kernels, and the optimizer is SGD.
      num_segments: L, the number of parts in which gradients are sent. Those of the last layers go first, and travel
        while back-propagation goes on. It costs L times the latency of an all-reduce (Equation 6). It is useful with
        K = 1, if computation takes most of a step: a wider pipe already hides communication. Default 1.
      compensation: The weights that a rank computes with while means are in flight. Not used with K = 1. "replay": as
        above. "none": Algorithm 1 as printed: merged weights only. The first K - 1 updates then use gradients of zero,
        and the last K - 1 means are dropped. With "none" and a momentum of 0.9, accuracy is lost at learning rates that
        work in synchronous training. Default "replay".
      warmup_steps: The number of updates of the first `fit` after `compile` that are made with K = 1. It needs
        `compensation="none"`, and a given K: with a replay, early gradients are not late. Default 0.
      algorithm: "mesh" (few messages after each other) or "ring" (few connections). Default "auto": the faster one, if
        that saves at least 5 % of a step, otherwise "mesh".
      on_peer_loss: "raise": when a rank dies or cannot be reached, all ranks raise `PeerLostError`. "continue": from
        the first step on, the others train on without the rank, and share its rows of each batch. The lost rank's last
        gradient is in the mean on all of the others or on none. So merged weights stay equal to the bit. Each rank
        keeps a copy of the last mean for that. A second `fit`, `synchronize`, `gather_reports`, and in a custom loop
        `strategy.reduce` and `gather` need all ranks, and raise an error. So does everything before the first step. If
        the same script is started again as that rank, its first `fit` skips the steps that it has missed. It joins the
        others between two steps, with their weights, slots and step. Joining needs a single optimizer, and no
        `run_eagerly`. With K above 1 and `compensation="none"` the started rank raises an error instead. Default None:
        "raise".
      min_ranks: With on_peer_loss="continue": the number of ranks that must be left, neither lost nor failed. With
        fewer, a rank raises `PeerLostError`, because the others may be training on, behind a network cut. Default None:
        more than half of the ranks; 1 if there are two.
      patience_seconds: With on_peer_loss="continue": the silence, in seconds, after which the others train on without a
        rank, as if it were lost. For example, a rank is silent while its process is stopped. When the rank wakes, it
        skips the steps that it has missed. It joins the others in the same `fit`, like a rank that is started again. At
        least 0.5, and less than `CommunicationOptions.timeout_seconds`. It needs `fit` with a single optimizer, without
        `run_eagerly`. Default None: a silent rank is lost after `timeout_seconds`, and raises when it wakes.
      batch_shares: The part of each global batch that a rank takes: a list with a positive number for each rank, such
        as [3, 1], or "auto": in proportion to speeds, which ranks measure and agree on (see `docs/data.md`). A mean
        weights each rank by its rows in the step, g = sum of n_i g_i / sum of n_i. So it is the mean of the whole
        batch, with any shares. A rank's own gradient stands in for a mean at its full size. Default None: all parts are
        equal.
      devices: Names of this process's devices, as for `tf.distribute.MirroredStrategy`: a rank's batch is divided among
        them. Ranks may have different numbers of devices. Default: all GPUs that the process sees, or one CPU.
      cluster_resolver: The description of the cluster. Default: `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.

    Raises:
      TypeError: If `codec` is of another type.
      ValueError: If an argument is out of range, or `codec` is a `TopK` without error feedback.
      ClusterConfigError: If the cluster description is not valid.
      HopError: If this rank's address cannot be bound.

    References:
      Li, Yu, Li, Avestimehr, Kim, Schwing. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
      Training. NeurIPS 2018. Algorithm 1, Equations 2 to 7.
    """

    in_lock_step = True
    agrees_on_roster = True
    mixes_weights = False
    settles_loops = True

    def __init__(
        self,
        *,
        pipeline_width: int | str = AUTO,
        codec: codecs.Codec | codecs.LowRank | str | None = AUTO,
        num_segments: int = 1,
        compensation: str = "replay",
        warmup_steps: int = 0,
        algorithm: str = AUTO,
        on_peer_loss: str | None = None,
        min_ranks: int | None = None,
        patience_seconds: float | None = None,
        batch_shares: Sequence[float] | str | None = None,
        devices: Sequence[str] | None = None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        if pipeline_width != AUTO:
            check_integer("pipeline_width", pipeline_width, at_least=1)
        check_integer("num_segments", num_segments, at_least=1)
        check_integer("warmup_steps", warmup_steps, at_least=0)
        check_choice("algorithm", algorithm, [AUTO, *sorted(ALGORITHMS)])
        check_choice("compensation", compensation, _COMPENSATIONS)
        check_on_peer_loss(on_peer_loss)
        if warmup_steps and (compensation != "none" or pipeline_width == AUTO):
            raise ValueError(
                "`warmup_steps` must be 0 unless compensation='none', with a `pipeline_width`: a replay makes no "
                f"gradient late. Received: warmup_steps={warmup_steps}, compensation={compensation!r}, "
                f"pipeline_width={pipeline_width!r}."
            )
        codec = AUTO if codec == AUTO else codecs.get_for_means(codec)
        if isinstance(codec, codecs.TopK) and not codec.error_feedback:
            raise ValueError(
                "`codec` must keep the values that it does not send: use hop_tf.codecs.TopK(error_feedback=True). "
                f"Without error feedback, all but {codec.ratio:.3g} of each gradient's values are lost. Received: "
                f"codec={codec!r}."
            )
        given = PipeSGDSettings(
            pipeline_width=pipeline_width,
            codec=codec,
            num_segments=int(num_segments),
            warmup_steps=int(warmup_steps),
            algorithm=algorithm,
            compensation=compensation,
            on_peer_loss=on_peer_loss or "raise",
        )
        self._settings = settings_to_use(given)
        if patience_seconds is not None and on_peer_loss == "continue" and not self._settings.admits:
            raise ValueError(
                "`patience_seconds` must be None with compensation='none' and a `pipeline_width` above 1: no rank can "
                f"join the others again then. Received: patience_seconds={patience_seconds!r}, "
                f"pipeline_width={pipeline_width!r}."
            )
        self.keeps_assignments = self.takes_assignments = not self._settings.looks_ahead
        cluster = training_cluster(cluster_resolver, "PipeSGDStrategy")
        super().__init__(
            cluster=cluster,
            devices=devices,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
            batch_shares=batch_shares,
            identity=identity_of(self._settings),
            continue_without_lost=self._settings.on_peer_loss == "continue",
            min_ranks=min_ranks,
            patience_seconds=patience_seconds,
        )
        if self._settings != given:
            (way,) = self._settings.ways(self.world_size)
            self._tell(way, *self._settings.widths, NO_TIMES)

    def make_exchange(self, context: ExchangeContext) -> PipeSGDExchange:
        settings = self._settings
        refuse_late_determinism(settings, chooses=settings.chooses(self.world_size))
        problem = _why_narrow(context.optimizer()) if settings.looks_ahead else ""
        if problem and settings.pipeline_width == AUTO:
            settings = dataclasses.replace(settings, pipeline_width=1)
        elif problem:
            raise ValueError(problem)
        return PipeSGDExchange(context, settings, self._tell)

    def _tell(self, way: Way, width: int, text: str) -> None:
        """Reports the ranks' choice."""
        chosen = {"pipeline_width": width}
        arguments = {"codec": way.codec, "algorithm": way.algorithm, **chosen}
        tell_choice(self._recorder, way, text, arguments=arguments, is_chief=self.is_chief, **chosen)

    def specs_beside(self, trained: Sequence[tf.Variable]) -> Sequence[TensorSpec]:
        del trained
        return specs_beside(
            self.world_size,
            admits=self._settings.admits,
            weighs_rows=self.training.shares is not None,
            chooses=self._settings.chooses(self.world_size),
        )

    def make_algorithm(self, group: Group) -> GradientAlgorithm:
        is_late = group.exchange.settings.delay > 0
        return (PipelinedAlgorithm if is_late else GradientAlgorithm)(group, self.training.shares)


def _why_narrow(optimizer: Any) -> str:
    """The text of the error for an optimizer that a replay cannot follow. Empty if it can."""
    every = gradient_accumulation_steps(optimizer)
    if every > 1 and loss_scale(optimizer) is not None:
        return (
            "`compensation` must be 'none' if an optimizer within a LossScaleOptimizer (which Keras adds under the "
            "policy 'mixed_float16') accumulates gradients: it can accumulate means only. Or train with "
            f"'mixed_bfloat16'. Received: compensation='replay', gradient_accumulation_steps={every}."
        )
    if every > 1 and use_ema(optimizer):
        return (
            "`compensation` must be 'none' if an optimizer accumulates gradients and averages weights: it averages in "
            "every batch, but a replay repeats updates only. Received: use_ema=True, "
            f"gradient_accumulation_steps={every}."
        )
    return ""
