"""DTS: synchronous training over links of hundreds of milliseconds, by delayed and temporally sparse updates.

Distributed Training across the World. 2019. With D for the delay (the paper's t) and p for the interval, in step n each
worker

    computes its gradient and updates w and v with it at once                                    (Equation 2)
    if p steps are complete (a window): sends what they have contributed, A and S                 (Equation 11)
    if the window that ended with step n - D is there:
        corrects w and v by what the mean of A and S says they should have contributed            (Equation 13)

so that a window's messages have D steps' time, and one synchronization serves p steps. D = 0, p = 1 is synchronous
training. The paper's Equation 13 is not what its derivation asks for where D > 0: at p = 1 it contradicts Equation 8,
and without momentum it vanishes. We take the derivation at its word: after a window's correction, weights and velocity
are what they would be if the mean gradient had been used in each of its steps. `hop_tf.strategies.dts_windows` has the
lines; `compensation="paper"` computes Equation 13 as it is printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hop_tf import codecs
from hop_tf.arguments import check_choice, check_integer, identity_of
from hop_tf.collectives import ALGORITHMS
from hop_tf.group import ExchangeContext, Group
from hop_tf.keras_hook import StepTrace, gradient_accumulation_steps, iterations_variable, loss_scale, tf_variables
from hop_tf.options import CommunicationOptions
from hop_tf.replica_state import describe_optimizer
from hop_tf.strategies.dts_exchange import DTSExchange, DTSSettings
from hop_tf.strategies.dts_windows import largest
from hop_tf.strategy import ExchangeStrategy, training_cluster
from hop_tf.timing.dts import MAX_WINDOWS

_MAX_STEPS = 2**31 - 1


class DTSStrategy(ExchangeStrategy):
    """Training with delayed and temporally sparse updates.

    Each rank applies its own gradient at once. Windows of `interval` steps are averaged over all ranks, and after
    another `delay` steps each rank replaces what it has done in the window by what the mean would have done: with
    SGD, with or without (Nesterov) momentum, changing learning rates and weight decay, weights and velocity are then
    what synchronous training would have made of these gradients. (The gradients themselves are those of each rank's own
    weights, which differ by what is under way.) At the end of `fit` all windows, a last shorter one included, are
    applied: all ranks end with the same weights, up to rounding. They do not where a rank changes its weights in a way
    that is not linear, or not the others': by constraints, `use_ema`, callbacks that restore weights, or learning rates
    that differ; nor where `compensation` is not "exact", with momentum and a delay. `synchronize(model)` averages
    such weights, and velocities.

    What ranks differ by feeds back through their own gradients until it is corrected. With windows of one step and a
    loss of curvature h it grows where the learning rate times h is more than 1 without momentum, whatever the delay,
    but with a momentum of 0.9 where that is more than 0.2 (D = 4), 0.069 (D = 8) or 0.019 (D = 20); synchronous
    training bears 3.8. Models bound it, and it vanishes with the learning rate, but until then training is slower. If
    that tells with a large delay, use less momentum, at the same learning rate / (1 - momentum).

    Traffic: one all-reduce of the model per window, two with momentum where windows have several steps, or hand out
    the largest values only.

    For other optimizers (Adam, ...) the same is done with the changes of the weights: they become the mean of what the
    ranks' optimizers have changed in the window. Optimizer slots stay the rank's own.

    Of floating-point variables that are not trained but assigned in the training step before its update (moving
    statistics) the changes are averaged along, and never pass through a codec. Gradients are clipped, where the
    optimizer clips, before they are used or averaged. A step that loss scaling leaves out on one rank counts as a
    gradient of zero.

    When a rank ends early, as by a callback of its own, its last window is averaged with the others' next one, and they
    go on without it. When one is lost, all raise. After a `fit` that was broken off, ranks differ by what was under
    way, and after one that has ended early on a rank, by what that has missed: `synchronize(model)` averages weights,
    velocities, and numbers of steps. In a custom training loop ranks differ by what is under way after every step;
    there `synchronize` first applies all windows, of all models, as the end of `fit` does. A step after it begins a
    window, and `warmup_steps` anew.

    Refused are variables of less than 32 bits, and, within a `LossScaleOptimizer`, clipping, gradient accumulation, and
    weight decay of optimizers other than SGD. `compensation="paper"` is refused for what Equation 13 does not say
    anything about: other optimizers than SGD, Nesterov's momentum, weight decay, and `codecs.TopK`, which takes no
    variables of float64 either.

    Args:
      delay: D, the number of steps that a window's messages may take without anybody waiting; at least 0. Up to
        ceil(D / p) + 1 windows are under way, each with a thread and memory for what it hands out; at most 100.
        Default 4.
      interval: p, the number of steps of a window; at least 1. Default 4.
      codec: What windows are encoded with: a `hop_tf.codecs.Codec`, or a name ("truncate16", "int8", "sketch",
        "top_k"). With `codecs.TopK(ratio)` a window hands out the values of largest magnitude only; for the others the
        window goes on until they are among them (deep gradient compression: local accumulation, momentum correction
        and factor masking), or `fit` ends, which sends as much as a window without a codec. All values as large as the
        least of these go along: with optimizers whose steps have few magnitudes (Lion) that may be all. `warmup_steps`
        of such codecs are windows here. With `error_feedback` what a window's values lose is added to those of a later
        one as if it had been done there: an approximation, where there is momentum or weight decay; each of the windows
        that may be under way keeps what it has lost, a vector as long as what it hands out. Default None.
      compensation: "exact", as above; "paper": Equation 13 as printed; "none": a window's differences are applied as if
        it had ended with the present step. Default "exact".
      algorithm: "mesh" (few messages after each other) or "ring" (few connections). Default "mesh".
      cluster_resolver: Where the cluster is described. Default: `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.

    Raises:
      TypeError: If `codec` is something else.
      ValueError: If an argument is out of range, or too many windows would be under way.
      ClusterConfigError: If the cluster description is not valid.
      HopError: If this rank's address cannot be bound.

    References:
      Distributed Training across the World. 2019. Equations 1 to 13, Table 1. Lin, Han, Mao, Wang, Dally. Deep Gradient
      Compression: Reducing the Communication Bandwidth for Distributed Training. ICLR 2018.
    """

    _settles_loops = True

    def __init__(
        self,
        *,
        delay: int = 4,
        interval: int = 4,
        codec: codecs.Codec | str | None = None,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
        algorithm: str = "mesh",
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        check_integer("delay", delay, at_least=0, at_most=_MAX_STEPS)
        check_integer("interval", interval, at_least=1, at_most=_MAX_STEPS)
        check_choice("algorithm", algorithm, sorted(ALGORITHMS))
        self._settings = DTSSettings(
            delay=int(delay),
            interval=int(interval),
            codec=codecs.get(codec),
            algorithm=algorithm,
            outer_optimizer=_checked_outer_optimizer(outer_optimizer),
        )
        num_windows = self._settings.schedule.num_slots
        if num_windows > MAX_WINDOWS:
            raise ValueError(
                f"`delay` and `interval` must leave at most {MAX_WINDOWS} windows under way, which are "
                "ceil(delay / interval) + 1: each has a thread, and memory for what it hands out. "
                f"Received: delay={delay!r} and interval={interval!r}, which make {num_windows}."
            )
        cluster = training_cluster(cluster_resolver, "DTSStrategy")
        super().__init__(
            cluster=cluster,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
            identity=identity_of(self._settings),
            neighbors=range(cluster.world_size),
        )
        self._outer_optimizer = None if outer_optimizer is None else self._copy(outer_optimizer)

    @property
    def outer_optimizer(self) -> keras.optimizers.Optimizer | None:
        """The outer optimizer of the model that is trained; None without one. It has slots after the first step.

        It is a copy of what the strategy was given. `tf.train.Checkpoint(model=model, outer=strategy.outer_optimizer)`
        stores it, and restores it before the first step, too.
        """
        return self._outer_optimizer

    def _make_exchange(self, context: ExchangeContext) -> DTSExchange:
        for variable in context.trained:
            if variable.dtype == tf.float64 and self._settings.selection is not None:
                raise ValueError(
                    "variables that are trained must not be float64 with a codec that selects values: float64 passes "
                    f"through no codec. Received: {variable.name} of float64, codec={self._settings.codec!r}."
                )
        if self._outer_optimizer is not None and self._outer_optimizer.built:
            self._outer_optimizer = self._copy(self._outer_optimizer)
        return DTSExchange(context, self._settings, self._outer_optimizer)

    def _copy(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """A new one with the same settings, and a name that is the same on all ranks."""
        is_within = tf.distribute.get_strategy() is self  # A step is being traced.
        with contextlib.nullcontext() if is_within else self.scope():
            return type(optimizer).from_config({**optimizer.get_config(), "name": "outer_optimizer"})

    def _average_over_ranks(self, weights: Sequence[tf.Variable]) -> None:
        outer = self._outer_optimizer
        if outer is None or not outer.built:
            super()._average_over_ranks(weights)
            return
        # A rank that has ended early has missed some of its updates.
        count = iterations_variable(outer)
        mean = tf.Variable(tf.cast(count, tf.float64))
        super()._average_over_ranks([*weights, *tf_variables(outer.variables), mean])
        count.assign(tf.cast(tf.round(mean), count.dtype))

    def leave_step(self, trace: StepTrace) -> None:
        super().leave_step(trace)
        if self._outer_optimizer is not None and len(trace.states) > 1:
            raise ValueError(
                "`outer_optimizer` must be None where a step trains with several optimizers. "
                f"Received: {len(trace.states)} of them, and an outer {type(self._outer_optimizer).__name__}."
            )

    def _begin_group(self, group: Group) -> None:
        if self._outer_optimizer is not None:
            self._worker.broadcast_initial_values(tf_variables(self._outer_optimizer.variables))
        group.exchange.first_iteration = int(iterations_variable(group.optimizer()))

    def _begin_training(self, group: Group) -> None:
        group.exchange.first_iteration = int(iterations_variable(group.optimizer()))
        group.exchange.outer.begin()  # Callbacks may have changed weights.

    def _before_update(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> tuple[list, None]:
        return gradients, None

    def _after_update(self, group: Group, state: None) -> tf.Tensor:
        num_steps, schedule = group.step.read_value() + 1, self._settings.schedule
        has_ended, ended = schedule.ended(num_steps)
        _when(has_ended, lambda: self._hand_out(group, ended))
        is_due, due = schedule.due(num_steps)
        _when(is_due, lambda: self._merge(group, due, schedule.num_newer))
        return tf.constant(0, tf.int64)

    def _hand_out(self, group: Group, window: tf.Tensor, everything: bool = False) -> None:
        selection = None if everything else self._settings.selection

        def choose(changes: list[tf.Tensor]) -> list:
            trained, carried = changes[: group.num_trained], changes[group.num_trained :]
            return [*largest(selection, window, trained), *(None for _ in carried)]

        group.submit(group.exchange.outer.take(choose if selection else None), step=window)

    def _merge(self, group: Group, window: tf.Tensor, num_newer: int) -> None:
        means, _ = group.collect([], take=lambda _, segment: group.take(window, segment))
        group.exchange.outer.merge(means, num_newer)

    def _finish_training(self, group: Group) -> None:
        num_steps = int(group.step)
        windows = self._settings.schedule.under_way(num_steps)
        is_open = num_steps % self._settings.interval > 0
        has_unsent = num_steps > 0 and self._settings.selection is not None
        if is_open or has_unsent or self._has_changes_left(group):
            self._hand_out(group, tf.constant(windows.stop, tf.int64), everything=True)
            windows = range(windows.start, windows.stop + 1)
        for window in windows:
            self._merge(group, tf.constant(window, tf.int64), windows.stop - window - 1)

    def _has_changes_left(self, group: Group) -> bool:
        """Whether batches after the last update, whose gradients wait for more, have changed moving statistics."""
        optimizer = group.optimizer()
        if not group.carried or loss_scale(optimizer) is not None:  # There each batch is a step.
            return False
        num_iterations = int(iterations_variable(optimizer))
        is_trained = num_iterations > group.exchange.first_iteration  # Others may have dropped one that is not.
        return is_trained and num_iterations % gradient_accumulation_steps(optimizer) > 0


def _checked_outer_optimizer(optimizer: object) -> str:
    """What ranks compare of an outer optimizer. Raises ValueError unless it can be one."""
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
                f"`{name}` must not be set in `outer_optimizer`: what it makes is what ranks compute with, at once. "
                f"Received: {name}={value!r} in {type(optimizer).__name__}."
            )
    return describe_optimizer(optimizer)


def _when(condition: tf.Tensor, emit: Callable[[], None]) -> None:
    """Emits ops that run where `condition` holds."""

    def run() -> tf.Tensor:
        emit()
        return condition

    tf.cond(condition, run, lambda: condition)
