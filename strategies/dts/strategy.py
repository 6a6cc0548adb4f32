"""DTS: training over links of hundreds of milliseconds, by delayed and temporally sparse averaging.

Distributed Training across the World. 2019. With D for the delay (the paper's t) and p for the interval, in step n each
worker

    computes its gradient, and updates weights and velocity with it at once               (Equation 2)
    if p steps are complete (a window): sends its changes of the weights in these steps
    if a window ended with step n - D: replaces its own change by the mean change

So a window's messages may take D steps, and one synchronization serves p steps. The paper sends sums of gradients, and
corrects the velocity, too (Equations 11 and 13). With momentum such a correction feeds back through the gradients that
it changes. At delays that are harmless without the correction, the correction costs accuracy. It takes twice the bytes,
and is defined for SGD only. So it is an option (`hop_tf.strategies.dts.momentum`). By default we average changes of
weights. With D of 3 steps or more, means are merged gently, as `hop_tf.runtime.outer_optimizer` describes. Replacing a
rank's own change by the mean at once would undo a part that later gradients have already undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import keras
import tensorflow as tf

from hop_tf import codecs
from hop_tf.arguments import check_boolean, check_choice, check_integer, check_on_peer_loss, identity_of
from hop_tf.collectives.all_reduce import ALGORITHMS
from hop_tf.options import CommunicationOptions
from hop_tf.runtime.admissions import Admissions
from hop_tf.runtime.autotuning import Autotuner
from hop_tf.runtime.choices import NO_TIMES, refuse_late_determinism, settings_to_use, tell_choice
from hop_tf.runtime.choosing import AUTO
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.runtime.replica_state import describe_optimizer
from hop_tf.runtime.shares import refuse_float16
from hop_tf.runtime.ways import Way
from hop_tf.strategies.dts.algorithm import DTSAlgorithm
from hop_tf.strategies.dts.exchange import DTSExchange, DTSSettings
from hop_tf.strategies.dts.momentum import MomentumAlgorithm, velocity_specs
from hop_tf.strategies.dts.windows import MAX_WINDOWS
from hop_tf.strategy import ExchangeStrategy, training_cluster
from hop_tf.tensors.packing import TensorSpec

_MAX_STEPS = 2**31 - 1


class DTSStrategy(ExchangeStrategy):
    """Training with delayed and temporally sparse averaging of changes.

    Each rank makes steps of its own optimizer. Its changes in a window of `interval` steps are averaged over all ranks.
    `delay` steps after the window's end, the mean is merged. In runs of a few hundred steps, with the settings of
    synchronous training, this costs 0 to 1.1 points of accuracy with D = 4, p = 4. With D = 20, p = 12 it costs 0.5 to
    4 points. If each rank has data of different classes, the two settings cost 4 and 7 points; with
    `skewed_shards=True`, 2 and 6. After 2,000 steps, the benchmarks' perceptron and convolutional network lose nothing.
    The residual network and the transformer, which are still learning then, lose 1 point with D = 4, p = 4, and 3 with
    D = 20, p = 12.

    Without arguments, ranks choose the delay, the interval, a codec and an algorithm. First, they try each way to
    average, with windows of one step that are merged at once. (A given `interval` or `delay` is used instead.) Then
    ranks take the smallest delay, up to 20 steps, that hides communication: a longer one would save less than 5 %. They
    use a delay only if it saves 15 % of a step. Windows are as long as the delay. All ranks make the same choice, from
    the measurements of all. They choose again when steps take longer or shorter than before, or other ranks take part.
    Rank 0 prints the choice, and how to keep it, on stderr. A given argument is kept. Under
    `tf.config.experimental.enable_op_determinism()` no choice depends on time: D = 4, p = 4, no codec, a mesh.

    A rank computes with

        weights  =  merged weights, equal on all ranks  +  its own changes that are not merged yet

    If the delay is below 3 steps or below the interval, own changes count in full, and a mean replaces them at once.
    Otherwise a rank's own changes count half once their window has ended, and the weights approach the merged ones
    within about 40 steps. So ranks stay near each other (see `compensation`). Weights that the program assigns between
    two steps stay, if all ranks assign the same.

    Keras's adaptive optimizers (Adam, Muon and their like) make steps of about the same length for any gradients. Noise
    cancels in the mean of the ranks' steps, so the mean is shorter than a step of synchronous training. Ranks therefore
    make their changes longer when a window ends. The factor is the length of the rank's own change divided by the
    length of the mean, in the window that was merged last. It is at least 1, and at most the square root of the number
    of ranks. `compensation="eager"`, `TopK`, an `outer_optimizer` and `ema_overwrite_frequency` leave changes as they
    are.

    When `fit` ends, all windows are merged. Weights and moving statistics are then equal to the bit on all ranks,
    except weights that `use_ema` has replaced (`synchronize(model)` averages these). Each rank has its own optimizer
    slots, and may have its own learning rate. Callbacks and validation within `fit` see the weights that a rank
    computes with. If means are merged gently, these weights lag by about 20 steps. So do checkpoints that callbacks
    write.

    `delay=0` is local SGD. With an `outer_optimizer`, `delay=0` is DiLoCo, and a longer delay is the eager form of
    DiLoCo. `delay=0, interval=1` with SGD is synchronous training.

    Traffic: one all-reduce of the model per window, with any optimizer. Memory, in copies of the model: the merged
    weights, the weights at the end of the last window, and up to ceil(D / p) copies for windows in flight, in addition
    to their messages. With `compensation="gentle"`, there is one copy more if the delay is "auto", or 3 steps or more.

    Changes of moving statistics are averaged, too, never through a codec. Steps that only accumulate gradients do not
    count as steps of a window. A step that loss scaling skips counts as a change of zero. If a rank ends early, the
    others go on without it. Its last window is averaged with their next one. `on_peer_loss` says what happens when a
    rank is lost. In a custom loop `synchronize` first merges all windows, of all models. The next step begins a window,
    and the `warmup_steps` of `TopK` anew.

    Args:
      delay: D, the number of steps that a window's messages may take before a rank waits for them; at least 0. Up to
        ceil(D / p) + 1 windows are in flight, at most 100. Each has a thread, and memory for the changes that it sends.
        Default "auto": from 0 to 20, as above; with an `interval`, 0 or the interval; with an `outer_optimizer` 4.
      interval: p, the number of steps of a window; at least 1. Default "auto": as long as the delay, and at least 1.
      warmup_steps: The number of an optimizer's first steps that are synchronous: windows of one step, merged at once.
        Weights change most in early steps, so a late mean costs most there. Synchronous steps end with the optimizer's
        first `fit`, in a custom loop at `synchronize`, and if a rank joins. A job that is started again would repeat
        them, so pass 0 then. `warmup_steps` needs a `delay`, and excludes `outer_optimizer` and `TopK`. Default 0.
      codec: Encodes windows: a `hop_tf.codecs.Codec`, or a name ("truncate16", "int8", "sketch", "bits4", "top_k").
        None: windows are sent unencoded. `codecs.LowRank` sends large kernels as factors. With it, changes by adaptive
        optimizers are not made longer. With `codecs.TopK(ratio)` a rank sends only the changes of largest magnitude in
        a window. It keeps the others until they are among the largest (deep gradient compression: local accumulation),
        or until `fit` ends. The end of `fit` sends as much as a window without a codec. All changes as large as the
        smallest selected one are sent, too: with optimizers whose steps have few magnitudes (Lion) that may be all.
        `warmup_steps` of `TopK` are windows here. `TopK` cannot send variables of float64. With other codecs, the loss
        of encoding is the same on all ranks. With `error_feedback` the loss is added to a later window's change. A rank
        keeps a vector of losses for each window that may be in flight. Default "auto": "int8" if that saves at least
        15 % of a step, otherwise None.
      outer_optimizer: A Keras optimizer that moves the merged weights, with minus the mean change as its gradient.
        Without one, the mean is added. The mean is always added to moving statistics. DiLoCo uses
        `keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`. The optimizer is copied, once for each optimizer that
        trains: see `outer_optimizer` below. It must not have loss scaling, `use_ema` or gradient accumulation, and does
        nothing in a world of one. Default None.
      compensation: The weights that a rank computes with while means are in flight. "gentle": as above. Means are
        merged at once with a delay below 3 or an interval above the delay, for variables of 16 bits, and with an
        `outer_optimizer`. "eager": means are always merged at once, and own changes count in full, and are not made
        longer. In short trainings with longer delays, and with adaptive optimizers, that costs more accuracy.
        "momentum": the paper's rule, for comparison: as "eager", and the velocity is averaged, too. If gradients did
        not depend on weights, that would be synchronous SGD. It needs SGD with momentum and without weight decay, and
        twice the bytes and the memory. It excludes `skewed_shards`, `outer_optimizer`, `TopK` and `LowRank`. When `fit`
        ends, velocities are equal on all ranks, too, unless a rank has ended early: `synchronize(model)` averages them.
        Default "gentle".
      skewed_shards: True: for ranks with different kinds of data, such as other classes. When a mean is merged, D steps
        after its window's end, the velocity is corrected, too. The correction is (mean change - own change) m^D / p,
        with momentum m. Windows that are merged together, as when `fit` ends, correct weights only. No further bytes
        are sent. It needs `keras.optimizers.SGD` with momentum, and memory for one more window. It excludes
        `batch_shares`, `outer_optimizer`, `TopK` and `LowRank`. Default False.
      algorithm: "mesh" (few messages after each other) or "ring" (few connections). Default "auto": the faster one.
      on_peer_loss: "raise": when a rank dies or cannot be reached, all ranks raise `PeerLostError`. "continue": from
        the first step on, the others train on without the rank, and share its rows of each batch. In each window in
        flight, the lost rank then counts on all of the others or on none. So merged weights stay equal to the bit. For
        that a rank keeps copies of the last means, one for each window that may be in flight and each way that was
        tried. A second `fit`, `synchronize`, `gather_reports`, and in a custom loop `strategy.reduce` and `gather` need
        all ranks, and raise an error. So does everything before the first step. If the same script is started again as
        that rank, its first `fit` skips the steps that it has missed. It joins the others at the end of a window, when
        all windows are merged. It then has the merged weights, and another rank's optimizer slots. Joining needs a
        single optimizer, and no `run_eagerly`. Default None: "raise".
      min_ranks: With on_peer_loss="continue": the number of ranks that must be left, neither lost nor failed. With
        fewer, a rank raises `PeerLostError`, because the others may be training on, behind a network cut. Default None:
        more than half of the ranks; 1 if there are two.
      patience_seconds: With on_peer_loss="continue": the silence, in seconds, after which the others train on without a
        rank, as if it were lost. For example, a rank is silent while its process is stopped. When the rank wakes, it
        skips the steps that it has missed. It joins the others in the same `fit`, like a rank that is started again. At
        least 0.5, and less than `CommunicationOptions.timeout_seconds`. It needs `fit` with a single optimizer, without
        `run_eagerly`. Default None: a silent rank is lost after `timeout_seconds`, and raises when it wakes.
      batch_shares: The part of each global batch that a rank takes: a list with a positive number for each rank, such
        as [3, 1], or "auto": in proportion to speeds, which ranks measure and agree on (see `docs/data.md`). The mean
        weights each rank's change by its number of rows in the window. A change is about minus the learning rate times
        a sum of mean gradients. So each row counts the same, except with adaptive optimizers. With delay 0, interval 1
        and SGD that is synchronous training. Default None: all parts are equal.
      devices: Names of this process's devices, as for `tf.distribute.MirroredStrategy`: a rank's batch is divided among
        them. Ranks may have different numbers of devices. Default: all GPUs that the process sees, or one CPU.
      cluster_resolver: The description of the cluster. Default: `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.

    Raises:
      TypeError: If `codec` is of another type.
      ValueError: If an argument is out of range, too many windows would be in flight, or `outer_optimizer` cannot be
        used as one.
      ClusterConfigError: If the cluster description is not valid.
      HopError: If this rank's address cannot be bound.

    References:
      Distributed Training across the World. 2019. Equations 1 to 13, Table 1. Lin, Han, Mao, Wang, Dally. Deep Gradient
      Compression: Reducing the Communication Bandwidth for Distributed Training. ICLR 2018. See
      `hop_tf.runtime.outer_optimizer` for local SGD and DiLoCo.
    """

    in_lock_step = True
    agrees_on_roster = True
    settles_loops = True

    def __init__(
        self,
        *,
        delay: int | str = AUTO,
        interval: int | str = AUTO,
        warmup_steps: int = 0,
        codec: codecs.Codec | codecs.LowRank | str | None = AUTO,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
        compensation: str = "gentle",
        skewed_shards: bool = False,
        algorithm: str = AUTO,
        on_peer_loss: str | None = None,
        min_ranks: int | None = None,
        patience_seconds: float | None = None,
        batch_shares: Sequence[float] | str | None = None,
        devices: Sequence[str] | None = None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        if delay != AUTO:
            check_integer("delay", delay, at_least=0, at_most=_MAX_STEPS)
        if interval != AUTO:
            check_integer("interval", interval, at_least=1, at_most=_MAX_STEPS)
        check_integer("warmup_steps", warmup_steps, at_least=0, at_most=_MAX_STEPS)
        check_choice("algorithm", algorithm, [AUTO, *sorted(ALGORITHMS)])
        check_choice("compensation", compensation, ("gentle", "eager", "momentum"))
        check_on_peer_loss(on_peer_loss)
        check_boolean("skewed_shards", skewed_shards)
        codec = AUTO if codec == AUTO else codecs.get_for_means(codec)
        given = DTSSettings(
            delay=delay if delay == AUTO else int(delay),
            interval=interval if interval == AUTO else int(interval),
            codec=codec,
            algorithm=algorithm,
            outer_optimizer=_checked_outer_optimizer(outer_optimizer),
            compensation=compensation,
            skewed_shards=skewed_shards,
            warmup_steps=int(warmup_steps),
            on_peer_loss=on_peer_loss or "raise",
        )
        _refuse_combinations(given, batch_shares, outer_optimizer)
        given = given.with_schedule() if outer_optimizer is not None else given
        self._settings = settings_to_use(given)
        self.hears_of_assignments = self._settings.may_merge_gently or self._settings.may_lengthen
        num_windows = self._settings.num_slots
        if num_windows > MAX_WINDOWS:
            raise ValueError(
                f"`delay` and `interval` must leave at most {MAX_WINDOWS} windows in flight, because each window takes "
                f"a thread and memory. Their number is ceil(delay / interval) + 1. Received: delay={delay!r} and "
                f"interval={interval!r}, which make {num_windows}."
            )
        cluster = training_cluster(cluster_resolver, "DTSStrategy")
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
        self._outer_optimizer = None if outer_optimizer is None else self._copy(outer_optimizer)
        if self._settings != given and given.chooses(self.world_size):
            (way,), (delay,) = self._settings.ways(self.world_size), self._settings.delays
            self._tell(way, delay + 1, NO_TIMES)

    def _tell(self, way: Way, width: int, text: str) -> None:
        """Reports the ranks' choice."""
        schedule = self._settings.schedule_of(width)
        chosen = {"delay": schedule.delay, "interval": schedule.interval}
        arguments = {**chosen, "codec": way.codec, "algorithm": way.algorithm}
        tell_choice(self._recorder, way, text, arguments=arguments, is_chief=self.is_chief, **chosen)

    @property
    def outer_optimizer(self) -> keras.optimizers.Optimizer | None:
        """The outer optimizer, a copy of the strategy's argument, or None. The first step creates its slots.

        `tf.train.Checkpoint(model=model, outer=strategy.outer_optimizer)` stores it, and restores it, even before the
        first step. If another model or optimizer is trained later under this strategy, this property is a new copy from
        then on.
        """
        return self._outer_optimizer

    def specs_beside(self, trained: Sequence[tf.Variable]) -> Sequence[TensorSpec]:
        velocities = velocity_specs(trained) if self._settings.corrects_momentum else []
        admits, chooses = self._settings.on_peer_loss == "continue", self._settings.chooses(self.world_size)
        newcomers = [Admissions.spec(self.world_size, tf.float32, exact=True)] * admits
        times = [Autotuner.spec(self.world_size, tf.float32, exact=True)] * chooses
        return [*velocities, *newcomers, *times, TensorSpec("hop_tf_counts", (1,), tf.float32, exact=True)]

    def make_exchange(self, context: ExchangeContext) -> DTSExchange:
        for variable in context.trained:
            if variable.dtype == tf.float64 and self._settings.selection is not None:
                raise ValueError(
                    "trained variables must not be float64 with a codec that selects values: hop_tf does not encode "
                    f"float64. Received: {variable.name} of float64, codec={self._settings.codec!r}."
                )
        if self.training.shares is not None:
            refuse_float16(context.packing.specs, self._settings.codec)
        refuse_late_determinism(self._settings, chooses=self._settings.chooses(self.world_size))
        return DTSExchange(context, self._settings, self._tell)

    def _copy(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Returns a new optimizer with the same settings, and a name that is the same on all ranks."""
        is_within = tf.distribute.get_strategy() is self  # A step is being traced.
        with contextlib.nullcontext() if is_within else self.scope():
            return type(optimizer).from_config({**optimizer.get_config(), "name": "outer_optimizer"})

    def make_algorithm(self, group: Group) -> DTSAlgorithm:
        if self._outer_optimizer is not None and self._outer_optimizer.built:
            self._outer_optimizer = self._copy(self._outer_optimizer)
        algorithm = MomentumAlgorithm if self._settings.corrects_momentum else DTSAlgorithm
        return algorithm(
            group,
            self.training.shares,
            outer_optimizer=lambda: self._outer_optimizer,
            broadcast=self.training.runtime.collectives.broadcast_initial_values,
        )


def _refuse_combinations(given: DTSSettings, batch_shares: object, outer_optimizer: object) -> None:
    """Raises ValueError if arguments exclude each other."""
    codec, selects_or_steps = given.codec, given.selection is not None or outer_optimizer is not None
    is_partial = selects_or_steps or isinstance(codec, codecs.LowRank)  # Means lack a part of the changes.
    if given.skewed_shards and (is_partial or batch_shares is not None):
        raise ValueError(
            "`skewed_shards` must be False with `batch_shares`, an `outer_optimizer`, or a codec that sends a part: "
            "correcting velocities takes the mean of all changes, with equal weights of ranks. Received: "
            f"skewed_shards=True, {batch_shares=}, {outer_optimizer=}, {codec=}."
        )
    if given.corrects_momentum and (is_partial or given.skewed_shards):
        raise ValueError(
            "`compensation` must not be 'momentum' with `skewed_shards`, an `outer_optimizer`, or a codec that sends a "
            "part: correcting velocities takes the plain mean of all changes. Received: compensation='momentum', "
            f"skewed_shards={given.skewed_shards}, {outer_optimizer=}, {codec=}."
        )
    if given.warmup_steps and (selects_or_steps or given.delay == AUTO):
        raise ValueError(
            "`warmup_steps` must be 0 unless a `delay` is given. It must be 0 with an `outer_optimizer` or a codec "
            "that selects values, too: with these, steps are not those of synchronous training. (`TopK` has "
            f"`warmup_steps` of its own.) Received: warmup_steps={given.warmup_steps}, delay={given.delay!r}, "
            f"{outer_optimizer=}, {codec=}."
        )


def _checked_outer_optimizer(optimizer: object) -> str:
    """Returns a description of an outer optimizer, for ranks to compare. Raises ValueError if it cannot be used."""
    if optimizer is None:
        return "None"
    is_optimizer = isinstance(optimizer, keras.optimizers.Optimizer)
    if not is_optimizer or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`outer_optimizer` must be a keras.optimizers.Optimizer that scales no loss, such as "
            "SGD(0.7, momentum=0.9, nesterov=True), or None. "
            f"Received: outer_optimizer={optimizer!r}."
        )
    for name in ("use_ema", "gradient_accumulation_steps"):
        if value := getattr(optimizer, name):
            raise ValueError(
                f"`{name}` must not be set in `outer_optimizer`, because ranks compute with its results at once. "
                f"Received: {name}={value!r} in {type(optimizer).__name__}."
            )
    return describe_optimizer(optimizer)
