"""`FitLoop`: the work of a strategy while a model trains, `fit` by `fit` and step by step."""

from __future__ import annotations

import contextlib
import enum
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hop_tf.callbacks import MetricAverage
from hop_tf.errors import HopError, PeerLostError
from hop_tf.keras_hook.adapted import AdaptedLayers
from hop_tf.keras_hook.backup_agreement import BackupAgreement
from hop_tf.keras_hook.context import refuse_xla
from hop_tf.keras_hook.data import DataSharding
from hop_tf.keras_hook.determinism import refuse_times
from hop_tf.keras_hook.hooks import TrainingHooks
from hop_tf.keras_hook.interrupts import on_keyboard_interrupt
from hop_tf.keras_hook.optimizers import gradient_accumulation_steps, tf_variables, use_ema
from hop_tf.keras_hook.replicas import Replicas
from hop_tf.keras_hook.roster import Roster
from hop_tf.keras_hook.shared_paths import CallbackPaths, has_callback
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.keras_hook.trace import StepTrace, is_built
from hop_tf.keras_hook.tuners import Trial, ending_search
from hop_tf.keras_hook.updates import as_own_updates
from hop_tf.membership.waiting import LeftBehind
from hop_tf.records import Recorder
from hop_tf.runtime.agreed_states import AgreedStates
from hop_tf.runtime.algorithm import Algorithm, Scheme
from hop_tf.runtime.assignments import Assignments, refusal_in, refuse_assignments
from hop_tf.runtime.epoch_ends import EPOCH_END, VALIDATION
from hop_tf.runtime.final_weights import FinalWeights
from hop_tf.runtime.group import Group, tensors_of
from hop_tf.runtime.missed_steps import MissedSteps
from hop_tf.runtime.passed_steps import PassedSteps
from hop_tf.runtime.plugins import Plugin
from hop_tf.runtime.profiling import StepProfiler
from hop_tf.runtime.rank_runtime import RankRuntime
from hop_tf.runtime.refusals import (
    check_optimizer,
    refuse_to_restore,
    refuse_update,
    require_lock_step,
)
from hop_tf.runtime.report import StepStatistics
from hop_tf.runtime.step_records import StepRecords
from hop_tf.runtime.weighing import RowWeighing


class Phase(enum.Enum):
    """The phases of training. The session of a custom loop begins with its first step, and has no end of its own."""

    OUTSIDE = "outside of `fit`, also within a custom loop"
    FITTING = "`fit` makes steps"
    FINISHED = "`fit` has made its last step"


class FitLoop(TrainingHooks):
    """Sessions, groups and steps of one strategy: the same for every scheme.

    Args:
      scheme: The scheme to call.
      rank: This rank.
      world_size: Number of ranks.
      skips_steps: See `ExchangeStrategy`.
      joins_at_once: See `ExchangeStrategy`.
      write_report: Called when a `fit` has ended, even by an error.
      shares: The part of a batch that each rank takes. Default: equal parts, and rows are not counted as weights.
      roster: The ranks that share each batch, if others take over the rows of a lost rank. Default: all ranks share it.
      may_fall_behind: True if the others may continue without this rank, and let it join them again. Default False.
      plugins: Tools that take part. Default: none.
      num_devices: Number of devices of this rank. Default 1.
      recorder: Records steps. Default: steps are not recorded.
      profiler: Profiles some steps. Default: steps are not profiled.

    Attributes:
      runtime: This rank's runtime; None for a single rank without servers, whose steps stay as they are.
      data: Divides the training data among ranks.
      states: The states of programs that ranks agree on.
      statistics: Steps and waiting times.
      shares: The part of a batch that each rank takes; None if all parts are equal.
      roster: The ranks that share each batch; None if all ranks share it, even lost ones.
      records: Records and profiles steps.
    """

    def __init__(
        self,
        scheme: Scheme,
        *,
        rank: int,
        world_size: int,
        skips_steps: str,
        joins_at_once: bool,
        write_report: Callable[[], None],
        shares: BatchShares | None = None,
        roster: Roster | None = None,
        may_fall_behind: bool = False,
        plugins: Sequence[Plugin] = (),
        num_devices: int = 1,
        recorder: Recorder | None = None,
        profiler: StepProfiler | None = None,
    ):
        self._scheme = scheme
        self._plugins = plugins
        self._write_report = write_report
        self._rank = rank
        self._world_size = world_size
        self._joins_at_once = joins_at_once
        self.runtime: RankRuntime | None = None
        self.shares = shares if world_size > 1 else None
        self._replicas = Replicas(rank, world_size, num_devices)
        self.roster = roster if world_size > 1 else None
        self.data = DataSharding(
            rank,
            world_size,
            lambda digest: self.runtime.first_batches.note(digest),
            self.shares,
            seed=lambda: self.runtime.membership.seed,
            roster=self.roster,
            slices_in_step=scheme.agrees_on_roster,
        )
        self.states = AgreedStates(rank)
        self._settled_at = -1  # The number of steps when sums were last settled in a custom loop.
        self.statistics = StepStatistics(recorder)
        self.records = StepRecords(recorder, profiler)
        # For each optimizer, by the identities of the variables that it updates together.
        self._algorithms: weakref.WeakKeyDictionary[object, dict[tuple[int, ...], Algorithm]] = (
            weakref.WeakKeyDictionary()
        )
        self._phase = Phase.OUTSIDE
        self._passed_steps = PassedSteps(
            rank=rank,
            why=skips_steps if world_size > 1 else "",
            takes_count=scheme.in_lock_step,
            must_catch_up=lambda: self.runtime is not None and self.runtime.joining and not joins_at_once,
            may_fall_behind=may_fall_behind and world_size > 1,
            catch_up=self._catch_up,
        )
        self._missed_steps = MissedSteps()
        self._rows = None if self.shares is None else RowWeighing(self.shares)
        self._assignments = Assignments(scheme)
        self._final_weights = FinalWeights(None)

    @property
    def algorithms(self) -> list[Algorithm]:
        """The algorithms of the groups of variables that are exchanged."""
        return [algorithm for algorithms in self._algorithms.values() for algorithm in algorithms.values()]

    @property
    def groups(self) -> list[Group]:
        """The groups of variables that are exchanged."""
        return [algorithm.group for algorithm in self.algorithms]

    def require_outside_fit(self, what: str) -> None:
        """Raises RuntimeError within a `fit`."""
        if self._phase is not Phase.OUTSIDE:
            raise RuntimeError(
                f"`{what}` was called while a `fit` under this strategy runs, as in a callback. Other ranks are at "
                "other steps of that `fit` and cannot take part. Call it after `fit`. To train another model on this "
                "rank alone, create it in the scope of another strategy, such as tf.distribute.OneDeviceStrategy."
            )

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the cluster for good. `error` is the error that has ended a custom loop, if any."""
        for plugin in self._plugins:
            plugin.close()
        self.records.close()
        if self.runtime is not None:
            self.runtime.close("its process ended", error)

    # Sessions.

    @contextlib.contextmanager
    def fit_session(self, x, callbacks=None) -> Iterator[None]:
        """Surrounds `model.fit`: enters the session, leaves it in any case, and raises the real cause of a failure."""
        if self.runtime is None:
            yield
        else:
            with ending_search(callbacks):
                yield from self._fit_session(x, callbacks)
        for plugin in self._plugins:
            plugin.after_fit(self._scheme)

    def _fit_session(self, x, callbacks) -> Iterator[None]:
        self.require_outside_fit("fit")
        self.data.begin_fit(x)
        self._phase = Phase.FITTING
        try:
            with self._naming_causes(), on_keyboard_interrupt(self.runtime.membership.interrupt):
                self._end_loop()
                agrees = self._scheme.in_lock_step or has_callback(callbacks, MetricAverage)
                paths, backups, trial = CallbackPaths(callbacks), BackupAgreement(callbacks), Trial(callbacks)
                self._final_weights = FinalWeights(callbacks)
                claims = [*paths.places, *backups.claims, *trial.claims, *self._final_weights.claims]
                self._begin_session([*claims, EPOCH_END] if agrees else claims)
                if trial.is_needed(self.runtime.membership.owners) and not self.runtime.joining:
                    trial.compare(self.runtime.membership.owners, self.runtime.collectives.share)
                paths.divide(self._rank, self.runtime.membership.owners)
                if backups.is_needed(self.runtime.membership.owners) and not self.runtime.joining:
                    backups.agree(self._rank, self.runtime.collectives.share, in_lock_step=self._scheme.in_lock_step)
                if self._rows is not None:
                    self._rows.begin_fit(self.runtime.share_rounds)
                # A process that was started again skips the epochs that are over.
                agrees = agrees and not self.runtime.joining
                self.runtime.epoch_ends.begin_fit(agrees=agrees, in_lock_step=self._scheme.in_lock_step)
                self._passed_steps.begin_session()
                if self.runtime.joining and not self._joins_at_once:
                    refuse_to_restore(callbacks)
                yield
                self.finish_training()  # Keras does not call this for a model without an optimizer of its own.
                if self.runtime.membership.is_left_behind:
                    raise LeftBehind(str(self.runtime.membership.failure))
                if self.is_behind:
                    raise HopError(
                        f"rank {self._rank} was restarted or left behind, and its `fit` ended before it had caught up "
                        "with the others. So it has not trained. Give all ranks the same number of epochs and steps."
                    )
        except BaseException as error:
            self.states.count_own()
            try:
                self._abort()
            finally:
                self.runtime.end_session(error)
            raise
        else:
            self.runtime.end_session(None)
            self._agree_on_final_weights()
        finally:
            self._phase = Phase.OUTSIDE
            self.runtime.epoch_ends.end_fit()
            self._assignments.end_fit()
            if self.shares is not None:
                self.shares.note_departed(())
            self.data.end_fit()
            self._write_report()

    @contextlib.contextmanager
    def _naming_causes(self) -> Iterator[None]:
        """Raises the real cause if an operation fails because the job is broken."""
        try:
            yield
        except LeftBehind as error:
            raise PeerLostError(f"{error} This rank could not rejoin them: restart it.") from None
        except tf.errors.OpError as error:
            if (refusal := refusal_in(error)) is not None:
                raise ValueError(refusal) from None
            failure = self.runtime.membership.failure
            if failure is None or self.runtime.membership.is_left_behind:
                raise
            # If the operation has failed with this text, its error adds only a long description of the graph.
            raise failure from (None if type(failure).__name__ in error.message else error)

    @as_own_updates()
    def _abort(self) -> None:
        for algorithm in self.algorithms:
            algorithm.abort()

    @as_own_updates()
    def _end_loop(self) -> None:
        """Ends the session of a custom loop, if there is one, because the loop itself does not end it."""
        if self.runtime.in_session:
            self.settle_sums()
            if self._scheme.settles_loops:
                with self._naming_causes():
                    self._assignments.end_loop()
                    for algorithm in self.algorithms:
                        algorithm.finish()
            self.runtime.end_session(None)

    def settle_sums(self) -> None:
        """Adds the changes by a custom loop's steps to the sums. If no step has run, assigned sums start again."""
        num_steps = self.statistics.counters()["steps"]
        if self.runtime.in_session and num_steps != self._settled_at:
            self.states.count_own()
        else:
            self.states.begin_anew()
        self._settled_at = num_steps

    @contextlib.contextmanager
    def outside_loop(self) -> Iterator[None]:
        """Surrounds common operations of all ranks between two steps of a custom loop."""
        loops = self.runtime.in_session and self._scheme.settles_loops
        if loops:
            self._end_loop()
        elif self.runtime.in_session:
            self._assignments.end_loop()
        yield
        if loops:
            self._begin_session()
            self.begin_training()

    def _require_session(self) -> None:
        """Enters the session of a custom loop at its first step."""
        if not self.runtime.in_session:
            self.states.begin_anew()
            self._begin_session()

    def _begin_session(self, claims: Sequence[str] = ()) -> None:
        """Enters a session. Ranks compare the tables of their layers, and tell each other their devices."""
        layers = AdaptedLayers()
        self.runtime.begin_session([*claims, *layers.claims, *self._replicas.claims])
        if not self.runtime.joining:
            self.runtime.epoch_ends.check(self.runtime.membership.owners, agrees=EPOCH_END in claims)
        self._begin_algorithms()
        self._replicas.learn(self.runtime.membership.owners)
        if self.roster is not None:
            self.roster.begin_session()
        if layers.is_needed(self.runtime.membership.owners) and not self.runtime.joining:
            layers.compare(self.runtime.collectives.share)

    @as_own_updates()
    def _begin_algorithms(self) -> None:
        for algorithm in self.algorithms:
            algorithm.begin_session()

    # Called by Keras while it trains.

    @as_own_updates()
    def begin_training(self, model: keras.Model | None = None) -> None:
        """Lets algorithms take over changes that were made before `fit`, or by callbacks."""
        if self.runtime is not None:
            self.runtime.epoch_ends.begin_training(model)
        self._missed_steps.begin_training()
        self._scheme.begin_training(self.algorithms)
        self._assignments.begin_training()
        self.states.begin_anew()

    @as_own_updates()
    def begin_epoch(self) -> None:
        """Lets ranks agree on shares, and lets algorithms take changes by callbacks since the last epoch."""
        if self._rows is not None:
            self._rows.begin_epoch(agrees=not self.is_behind)
        if self.runtime is not None:
            self.runtime.epoch_ends.begin_epoch()
        self._missed_steps.begin_epoch()
        for algorithm in () if self.is_behind else self.algorithms:
            algorithm.begin_epoch()
        self._assignments.leave_epoch_end()
        self.states.begin_anew()

    def begin_steps(self, number: int) -> bool:
        """See `EpochEnds`. A rank that was left behind begins to skip steps."""
        if self.may_fall_behind and self.runtime.membership.is_left_behind:
            self.runtime.begin_again()
            self._begin_algorithms()
            self._passed_steps.fall_behind()
        return self.runtime is None or self.runtime.epoch_ends.begin_steps(number)

    def pass_over(self, number: int, take: Callable[[], object]) -> bool:
        """See `MissedSteps`."""
        return self._missed_steps.pass_over(self.groups, number, take)

    @property
    def may_fall_behind(self) -> bool:
        """See `PassedSteps`."""
        return self._passed_steps.may_fall_behind

    def ask_to_stop(self) -> None:
        """See `EpochEnds`."""
        if self.runtime is not None:
            self.runtime.epoch_ends.ask_to_stop()

    def agree_to_stop(self) -> None:
        """See `EpochEnds`."""
        if self.runtime is not None:
            self.runtime.epoch_ends.agree_to_stop()

    @as_own_updates()
    def end_epoch(self, model: keras.Model) -> None:
        """Lets algorithms prepare for validation and callbacks. Keeps the metrics, which validation resets."""
        if self.runtime is not None:
            self.runtime.epoch_ends.note_metrics(model)
        if not self.is_behind:
            self._assignments.end_epoch()
            for algorithm in self.algorithms:
                algorithm.end_epoch()
        self.states.count_own()

    @as_own_updates()
    def change_graph(self) -> tuple[Hashable, Hashable] | None:
        """Lets algorithms change the graph of the next step; see `TrainingHooks`."""
        algorithms = () if self.is_behind else self.algorithms
        before = tuple(algorithm.graph_key() for algorithm in algorithms)
        have_changed = [algorithm.change_graph() for algorithm in algorithms]
        return (before, tuple(algorithm.graph_key() for algorithm in algorithms)) if any(have_changed) else None

    def begin_batch(self) -> None:
        """See `StepRecords`. The weights of a step follow the shares of the present ranks, which divide the batch."""
        if not self.is_behind:
            self._assignments.begin_batch()
        if self.shares is not None:
            self.shares.note_departed(self.runtime.membership.departed())
        if self.roster is not None and not self._scheme.agrees_on_roster:
            self.roster.note_missing(self.runtime.membership.missing())
        self.records.begin_batch()

    def end_batch(self, num_steps: int) -> None:
        """Records the step. Lets ranks agree on shares when they have made the first steps of a `fit`."""
        self.records.end_batch()
        if self._rows is not None:
            self._rows.end_batch(num_steps, agrees=not self.is_behind)

    def validation(self) -> contextlib.AbstractContextManager:
        """See `StepRecords`."""
        return self.records.validation()

    def average_metrics(self, logs: dict, num_steps: int) -> None:
        """Replaces this rank's metrics by those over all ranks, if ranks agree on them. Records the metrics."""
        has_step = not (self._passed_steps.has_no_metrics or self._missed_steps.are_all)
        num_steps += self._missed_steps.num_at_end
        if not has_step:
            logs.update({name: math.nan for name in logs if not name.startswith(VALIDATION)})
        if self.runtime is not None:
            weight = 1.0 if self._rows is None else self._rows.take_weight()
            self.runtime.epoch_ends.end_epoch(logs, num_steps, weight=weight, has_step=has_step)
            self.runtime.epoch_ends.agree_on_states(self.states)
        self.records.end_epoch(logs)

    @as_own_updates()
    def finish_training(self) -> None:
        """Lets algorithms complete their work, once in a `fit`, when the last step has been made."""
        if self._phase is not Phase.FITTING:
            return
        self._phase = Phase.FINISHED
        averaged = [group for group in self.groups if use_ema(group.optimizer())]  # Keras assigns averages now.
        self._assignments.leave_epoch_end([variable for group in averaged for variable in group.trained])
        self.runtime.epoch_ends.finish_training()
        if self._rows is not None:
            self._rows.end_fit()
        for algorithm in () if self.is_behind and self._scheme.in_lock_step else self.algorithms:
            algorithm.finish()
        if self._final_weights.is_needed(self.runtime.membership.owners):
            self._final_weights.note([variable for group in self.groups for variable in group.variables])

    def _agree_on_final_weights(self) -> None:
        """Handles weights that callbacks changed after the last step. Others have left the session, or are about to."""
        if not self._final_weights.is_needed(self.runtime.membership.owners):
            return
        if self._scheme.in_lock_step:
            num_steps = sum(int(group.step) for group in self.groups)
            self._final_weights.agree(self.runtime.membership, num_steps, self.runtime.collectives)
        elif self._final_weights.take_changed():
            self._final_weights.warn(self._rank)

    # Data.

    def keras_call(self) -> contextlib.AbstractContextManager:
        """See `DataSharding`."""
        return self.data.keras_call()

    def shard(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """This rank's part of the training data; all data for validation or prediction."""
        return self.data.part_of(dataset)

    def own_rows(self, batch: Any) -> Any:
        """See `DataSharding`."""
        return self.data.own_rows(batch)

    def take_whole(self, dataset: tf.data.Dataset) -> None:
        """See `DataSharding`."""
        self.data.take_whole(dataset)

    @property
    def is_inside_keras(self) -> bool:
        """See `DataSharding`."""
        return self.data.is_inside_keras

    def count_batches(self, number: int | None) -> bool:
        """See `DataSharding`."""
        return self.data.count_batches(number)

    @property
    def num_loss_parts(self) -> int:
        """In a custom loop, the number of ranks: the loop divides losses by it, as under any `tf.distribute.Strategy`.

        In Keras's own loops, 1: user code for these, such as a `train_step` or a callback, does not divide losses.
        """
        return 1 if self.data.is_inside_keras else self._world_size

    @property
    def replicas(self) -> Replicas:
        """The replicas of all ranks."""
        return self._replicas

    @property
    def shuffle_seed(self) -> int | None:
        """The seed of the running session; None for a single rank."""
        return self.runtime.membership.seed if self._world_size > 1 else None

    @property
    def input_context(self) -> tf.distribute.InputContext:
        """This rank's input context, for `distribute_datasets_from_function`."""
        return _InputContext(
            shares=self.shares,
            num_input_pipelines=self._world_size,
            input_pipeline_id=self._rank,
            num_replicas_in_sync=self._world_size,
        )

    # One training step.

    def enter_step(self, trace: StepTrace) -> None:
        """Gives the model rank 0's initial values, before its first step."""
        refuse_times(
            emulates=self._delays_gradients,
            measures=self.shares is not None and self.shares.is_automatic and trace.model is not None,
        )
        if self._rows is not None:
            self._rows.begin_step(trace)
        if self.runtime is not None and trace.model is not None and is_built(trace.model):
            refuse_xla()  # Before any message to other ranks.
            optimizer = getattr(trace.model, "optimizer", None)
            slots = optimizer.variables if optimizer is not None and optimizer.built else ()
            with tf.init_scope():
                self._require_session()
                self.runtime.collectives.broadcast_initial_values(
                    tf_variables(trace.model.weights, slots, self._state_beside())
                )
            with trace.when_data_is_here():
                self.statistics.count_start()
        if self.runtime is not None:
            trace.read_states()
            self._assignments.begin_step(trace, in_fit=self._is_in_fit(trace))
        if self._delays_gradients:
            with trace.when_data_is_here():
                trace.started_at = tf.timestamp()
        if tf.executing_eagerly():
            for algorithm in self.algorithms:
                algorithm.begin_eager_step()

    def _is_in_fit(self, trace: StepTrace) -> bool:
        return self._phase is not Phase.OUTSIDE and trace.model is not None

    def _state_beside(self) -> list[tf.Variable]:
        """Variables that a restarted process takes over in addition to a model's."""
        shares = [self.shares.variable] if self.shares is not None and self.shares.is_automatic else []
        has_roster = self.roster is not None and self._scheme.agrees_on_roster
        return [*shares, *([self.roster.variable] if has_roster else [])]

    def leave_step(self, trace: StepTrace) -> None:
        """Raises if a step trained a model, but no update was seen: ranks would silently exchange nothing."""
        trains = self.runtime is not None and trace.model is not None and trace.model.trainable_weights
        optimizer = getattr(trace.model, "optimizer", None)
        if tf.executing_eagerly() and optimizer is not None and gradient_accumulation_steps(optimizer) > 1:
            return  # This batch may be one without an update. A graph includes the update for other batches.
        if trains and not trace.num_updates:
            raise HopError(
                "a training step ran, but hop_tf saw no optimizer update in it, so ranks would exchange nothing. Check "
                f"that train_step calls optimizer.apply. Keras {keras.__version__}, TensorFlow {tf.__version__}."
            )
        updated = [algorithm for algorithm in self.algorithms if algorithm in trace.updated]
        assigned = [] if self._scheme.keeps_assignments else trace.assigned_after_update()
        if assigned and not all(algorithm.makes_way() for algorithm in updated):
            refuse_assignments(self._scheme, assigned)
        if self.runtime is not None:
            self.states.note_assigned(trace.assigned_states())
        with trace.when_data_is_here():
            for algorithm in updated:
                algorithm.end_step()

    @property
    def num_rows(self) -> tf.Tensor | None:
        """The step's `BatchShares.rows`; None if ranks do not weigh by rows."""
        return None if self.shares is None else self.shares.rows

    @property
    def replaces_gradients(self) -> bool:
        """True if a step exchanges its gradients, or delays them. Otherwise, the step stays as it is."""
        return self.runtime is not None or self._delays_gradients

    @property
    def _delays_gradients(self) -> bool:
        return any(plugin.delays_gradients for plugin in self._plugins)

    def exchange(self, optimizer, trace: StepTrace, gradients: list, variables: list[tf.Variable]) -> list:
        """Emits the first part of an algorithm's half of the graph. Returns the gradients to apply."""
        if self.replaces_gradients:
            refuse_xla()
        trace.refuse_nested_function()
        with trace.when_data_is_here():
            return self._exchange(optimizer, trace, gradients, variables)

    def _exchange(self, optimizer, trace: StepTrace, gradients: list, variables: list[tf.Variable]) -> list:
        if trace.num_updates == 0:  # With several optimizers, one step has several updates.
            self.statistics.count_step()
        trace.num_updates += 1
        if trace.started_at is not None:
            times = 1.0 if self.shares is None else self.shares.times_equal
            times *= 1.0 if self.roster is None else self.roster.growth()
            for plugin in self._plugins:
                gradients = plugin.delay(trace.started_at, gradients, times)
        if self.runtime is None:
            return gradients
        if self._rows is not None and trace.num_updates == 1:
            self._rows.end_step(trace, gradients)
        in_fit = self._is_in_fit(trace)
        self._passed_steps.note_update(optimizer, in_fit=in_fit)
        algorithm = self._algorithm_of(optimizer, trace, variables)
        others = [other for other in self.algorithms if other in trace.updated]
        if others:
            algorithm.check_further(others)
        group = algorithm.group
        trace.claim(group.variables)
        self._assignments.check_step(algorithm, trace, in_fit=in_fit)
        values = [trace.value_at_start(variable) for variable in group.variables]
        self.statistics.count_gradients(tensors_of(gradients), group.read_step())
        trace.updated.add(algorithm)
        return algorithm.before_update(values, gradients)

    def reduce(self, reduce_op: tf.distribute.ReduceOp, value):
        """The sum or mean over the ranks; see `ExchangeStrategy.reduce`."""
        if self._world_size == 1:
            return value
        require_lock_step(self._scheme, f"a {reduce_op.name} over the ranks")
        return tf.nest.map_structure(lambda each: _reduced(reduce_op, self.runtime.collectives.all_gather(each)), value)

    def gather(self, value, axis):
        """The values of all ranks, concatenated along `axis`."""
        if self._world_size == 1:
            return value
        require_lock_step(self._scheme, "the values of all ranks")
        return tf.nest.map_structure(lambda each: tf.concat(self.runtime.collectives.all_gather(each), axis), value)

    def note_created(self, variable: tf.Variable) -> None:
        """See `Assignments`."""
        if self._world_size > 1:
            self._assignments.note_created(variable)

    def refuse_update(self, optimizer) -> None:
        """Raises ValueError for an update outside of `strategy.run`: the custom loop would train this rank alone."""
        if self.runtime is not None:
            refuse_update(self._scheme, optimizer)

    def after_update(self, optimizer, trace: StepTrace, variables: list[tf.Variable]) -> None:
        """Emits the algorithm's operations after the update, and ends the group's step."""
        if self.runtime is None:
            return
        algorithm = self._algorithms[optimizer][_key(variables)]
        with trace.when_data_is_here():
            num_skipped = algorithm.after_update()
            algorithm.group.end_step(num_skipped)
            self._passed_steps.skip(num_skipped)
        if not self._scheme.keeps_assignments:
            trace.note_update(variables)

    def _algorithm_of(self, optimizer, trace: StepTrace, variables: list[tf.Variable]) -> Algorithm:
        algorithms = self._algorithms.setdefault(optimizer, {})
        key = _key(variables)
        if key not in algorithms:
            self._scheme.check_new_group()
            check_optimizer(self._scheme, optimizer, refuses_nonfinite=self.runtime.finite_check.raises)
            carried = trace.unclaimed_means(variables)
            begun = tf.executing_eagerly()  # Otherwise the step is only traced.
            with tf.init_scope():
                values = [trace.value_at_start(each) if begun else each.read_value() for each in carried]
                self._require_session()
                self.runtime.collectives.broadcast_initial_values([*variables, *tf_variables(optimizer.variables)])
                algorithms[key] = self.runtime.add_group(
                    optimizer=optimizer,
                    trained=variables,
                    carried=carried,
                    carried_values=values,
                    statistics=self.statistics,
                    beside=self._scheme.specs_beside(variables),
                    num_batches=self.data.num_batches,
                )
                self.states.begin(trace.states_of_model, trained=variables, joins=self.runtime.joining)
                with as_own_updates():
                    algorithms[key].begin()
                self._assignments.add(algorithms[key])
        return algorithms[key]

    # Skipped steps.

    def around_step(self, step: Callable[[], object], arguments: object, model: keras.Model) -> object:
        """See `PassedSteps`."""
        return self._passed_steps.around_step(step, arguments, model)

    @property
    def leaves_out_validation(self) -> bool:
        """See `TrainingHooks`."""
        return self.is_behind or self._missed_steps.are_all

    @property
    def is_behind(self) -> bool:
        """See `PassedSteps`."""
        return self._passed_steps.is_behind

    def _catch_up(self, optimizer) -> tf.Tensor:
        (algorithm,) = self._algorithms[optimizer].values()
        return algorithm.group.catch_up()


class _InputContext(tf.distribute.InputContext):
    """An input context that knows the ranks' shares of a batch."""

    def __init__(self, *, shares: BatchShares | None, **arguments):
        super().__init__(**arguments)
        self._shares = shares

    def get_per_replica_batch_size(self, global_batch_size):
        """The number of rows of this rank in a global batch."""
        if self._shares is None:
            return super().get_per_replica_batch_size(global_batch_size)
        start, end = self._shares.slice_of(tf.constant(global_batch_size, tf.int64))
        return int(end - start)


def _reduced(reduce_op: tf.distribute.ReduceOp, values: Sequence[tf.Tensor]) -> tf.Tensor:
    total = tf.add_n(values)
    return total if reduce_op is tf.distribute.ReduceOp.SUM else total / tf.cast(len(values), total.dtype)


def _key(variables: Sequence[tf.Variable]) -> tuple[int, ...]:
    return tuple(id(variable) for variable in variables)
