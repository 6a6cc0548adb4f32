"""`ExchangeStrategy`: the base class of the strategies."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import numbers
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hop_tf.arguments import check_integer, checked_batch_shares, describe_batch_shares
from hop_tf.cluster import Cluster
from hop_tf.collectives.mean import Mean
from hop_tf.collectives.routed import get_algorithm
from hop_tf.errors import ClusterConfigError
from hop_tf.keras_hook.adapted import watch_tables
from hop_tf.keras_hook.devices import find_devices, make_extended
from hop_tf.keras_hook.optimizers import iterations_variable
from hop_tf.keras_hook.ownership import states_of
from hop_tf.keras_hook.roster import Roster
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.keras_hook.trace import is_built
from hop_tf.keras_hook.trainer import forget_cluster, register_cluster, wrap_trainer
from hop_tf.options import CommunicationOptions, checked_options, rank_folder
from hop_tf.records import make_recorder
from hop_tf.runtime.algorithm import Scheme
from hop_tf.runtime.fit_loop import FitLoop
from hop_tf.runtime.plugins import requested_plugins
from hop_tf.runtime.profiling import StepProfiler
from hop_tf.runtime.rank_runtime import RankRuntime
from hop_tf.runtime.report import ReportWriter, static_identity
from hop_tf.transport.own_name import check_own_name


class ExchangeStrategy(tf.distribute.Strategy, Scheme):
    """Base class of the strategies: this process is a rank, which exchanges messages with other processes.

    For each group of variables, subclasses make two halves: an `Algorithm` in the training graph (`make_algorithm`),
    and an `Exchange` on a communication thread (`make_exchange`).

    Use as any `tf.distribute.Strategy`: build and compile the model in `scope()`, then call `fit`. In a world of one
    (no `TF_CONFIG`), models train as they do without a strategy.

    Args:
      identity: The scheme's settings; must be equal on all ranks.
      cluster: The cluster. Default: read from `cluster_resolver`.
      cluster_resolver: The resolver that the cluster was read from, for `Strategy.cluster_resolver`. Default:
        `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.
      neighbors: Ranks that the scheme exchanges messages with. Default: all.
      skips_steps: For a scheme that may skip training steps (`Result.num_skipped`): a sentence for error texts. It says
        that steps may be skipped, and how users can avoid this. Default "": the scheme skips no steps.
      continue_without_lost: True if the other ranks continue when a rank is lost. In `fit`, they then share the lost
        rank's rows. See `Scheme.agrees_on_roster`.
      min_ranks: For `continue_without_lost`: the minimum number of ranks, including this rank, that are neither lost
        nor failed. With fewer, a rank raises `PeerLostError`: the network may have cut it off from other ranks, which
        continue. At most the number of ranks; equal on all ranks. Default None: more than half of the ranks, so that at
        most one side of a cut network continues. The default is 1 for two ranks, because neither can tell which rank
        was cut off. It is also 1 with servers, because no rank trains without the servers.
      patience_seconds: For `continue_without_lost`: silence after which the others leave a rank behind. The rank joins
        the others again when it wakes. At least 0.5, and less than `timeout_seconds`; equal on all ranks. Default None:
        a silent rank is lost after `timeout_seconds`, and raises an error when it wakes.
      servers: The parameter servers, by their indices in `Cluster.all_addresses`.
      joins_at_once: True if a restarted rank trains from its first step on, with the state from `Algorithm.begin`.
        Otherwise the rank skips the steps that the others have made, and takes the state of one of the others.
      batch_shares: The part of each global batch that each rank takes: a list with a positive number for each rank, or
        "auto", in proportion to measured speeds. A scheme weights its averages by `training.shares.rows`. Default None:
        all parts are equal, and averages are not weighted.
      devices: The devices of this process. Default: all GPUs that the process sees, or one CPU.

    Raises:
      ValueError: If `min_ranks`, `patience_seconds` or `batch_shares` is not as above, or a device does not exist.
      ClusterConfigError: If the description of the cluster is not valid, or if this rank's own name resolves to a
        loopback address, which other machines cannot reach.
      HopError: If this rank's address cannot be bound.
      RuntimeError: If Keras does not run on TensorFlow.
    """

    def __init__(
        self,
        *,
        identity: Mapping[str, str],
        cluster: Cluster | None = None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        neighbors: Iterable[int] | None = None,
        skips_steps: str = "",
        continue_without_lost: bool = False,
        min_ranks: int | None = None,
        patience_seconds: float | None = None,
        servers: Sequence[int] = (),
        joins_at_once: bool = False,
        batch_shares: Sequence[float] | str | None = None,
        devices: Sequence[str] | None = None,
    ):
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(
                f"hop_tf needs Keras on the TensorFlow backend. Received: KERAS_BACKEND={keras.backend.backend()}."
            )
        cluster = cluster or training_cluster(cluster_resolver, type(self).__name__)
        min_ranks = _checked_min_ranks(min_ranks, 1 if servers else cluster.world_size, continue_without_lost)
        batch_shares = checked_batch_shares(batch_shares, cluster.world_size)
        shares = None if batch_shares is None else BatchShares(batch_shares, cluster.rank, cluster.world_size)
        roster = Roster(cluster.rank, cluster.world_size, shares) if continue_without_lost else None
        wrap_trainer()
        watch_tables()
        self._cluster = cluster
        self._resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
        self._options = checked_options(communication_options)
        patience_seconds = _checked_patience(patience_seconds, self._options.timeout_seconds, continue_without_lost)
        if cluster.world_size > 1 and cluster.make_transport is None:
            check_own_name(cluster.all_addresses, cluster.number, self._options.timeout_seconds)
        devices = find_devices(devices)
        has_others = cluster.world_size > 1 or servers
        with contextlib.ExitStack() as on_error:  # Closes what is open if an error is raised.
            self._recorder = None
            if has_others:
                self._recorder = make_recorder(
                    rank_folder(self._options, self.rank),
                    rank=self.rank,
                    number=cluster.number,
                    num_ranks=cluster.world_size,
                    num_servers=len(servers),
                    strategy=type(self).__name__,
                    settings={**identity, "batch_shares": describe_batch_shares(batch_shares)},
                )
            on_error.callback(self._close_records)
            self.training = FitLoop(
                self,
                rank=cluster.rank,
                world_size=cluster.world_size,
                skips_steps=skips_steps,
                joins_at_once=joins_at_once,
                write_report=lambda: self._writer.write(),
                shares=shares,
                roster=roster,
                may_fall_behind=patience_seconds is not None,
                plugins=requested_plugins(cluster.rank, cluster.world_size),
                num_devices=len(devices),
                recorder=self._recorder,
                profiler=StepProfiler.from_environment(self._options, self.rank),
            )
            on_error.callback(self.training.close)
            super().__init__(make_extended(self, self.training, devices))
            self._writer = ReportWriter(self.report, self._options, self.rank, self._recorder)
            on_error.callback(self._writer.close)
            if not servers:  # Servers compare the identity, too, but do not know these settings.
                shares_text = describe_batch_shares(batch_shares)
                identity = {**identity, "min_ranks": str(min_ranks), "batch_shares": shares_text}
                if continue_without_lost:
                    identity["patience_seconds"] = str(patience_seconds)
            if has_others:
                self.training.runtime = RankRuntime(
                    cluster=cluster,
                    options=self._options,
                    identity=static_identity(type(self).__name__, cluster, identity),
                    neighbors=neighbors,
                    make_exchange=self.make_exchange,
                    make_algorithm=self.make_algorithm,
                    continue_without_lost=continue_without_lost,
                    min_ranks=min_ranks,
                    servers=servers,
                    patience_seconds=patience_seconds,
                    shares=shares,
                    roster=self.training.roster,
                    recorder=self._recorder,
                    on_state_taken=self.training.states.begin_here,
                )
            on_error.pop_all()
        if has_others:
            register_cluster(self)
            report = weakref.WeakMethod(self.report)
            self._runtime.serve_reports(lambda: _call_weakly(report) or {})
        atexit.register(_shut_down_at_exit, weakref.WeakMethod(self._shut_down))

    @property
    def _runtime(self) -> RankRuntime | None:
        return self.training.runtime

    # For users.

    @property
    def cluster_resolver(self):
        """The resolver that the cluster was read from."""
        return self._resolver

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._cluster.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that train together. `num_replicas_in_sync` is their number of devices, or 1 within `fit`."""
        return self._cluster.world_size

    @property
    def is_chief(self) -> bool:
        """True for rank 0, which writes the files that only one rank should write."""
        return self.rank == 0

    @property
    def batch_shares(self) -> tuple[float, ...]:
        """The part of each global batch that each rank takes. The parts sum to 1.

        With "auto", these are the parts that ranks last agreed on. If the others share the rows of a lost rank, the
        lost rank's part is 0.
        """
        shares = [1] * self.world_size if self.training.shares is None else self.training.shares.of_ranks
        if self.training.roster is not None and self.training.roster.is_in_use:
            shares = [share * part for share, part in zip(shares, self.training.roster.present, strict=True)]
        return tuple(share / sum(shares) for share in shares)

    def synchronize(self, model: keras.Model) -> None:
        """Averages the floating-point weights of `model` over all ranks. They are then equal to the bit on all ranks.

        A state marked by `hop_tf.state` becomes the sum, the maximum or rank 0's value, or stays the rank's own, as its
        mark says. An untrained state without a mark stays the rank's own, too.

        A collective: every rank calls this method, between calls of `fit`. If a rank has made less than 90 % of the
        other ranks' steps in the last training, its weights do not count. It gets the weights of the others, and rank 0
        logs a warning.

        Under strategies whose ranks have equal optimizer states after `fit` (Pipe-SGD, synchronous Canary, DTS with
        `compensation="momentum"`), these states and the optimizers' numbers of steps are averaged, too. Otherwise the
        next `fit` would continue differently on a rank that has ended the last `fit` early. Under other strategies,
        optimizers do not change.

        Args:
          model: The built model.

        Blocks: until all ranks call it.

        Raises:
          RuntimeError: If this method is called within `fit`, as in a callback.
          ValueError: If the model is not built, or the strategy would lose weights that were assigned after the last
            step of a custom loop.
          MismatchError: If rank 0 has another model.
          HopError: If a rank was lost or has ended.
        """
        if not is_built(model):
            raise ValueError(
                "`model` must be built: train it first, or call `model.build(input_shape)`. "
                f"Received: model={model.name!r}, which has no weights yet."
            )
        if self._runtime is not None:
            self.training.require_outside_fit("synchronize")
            self.training.settle_sums()
            with self.training.outside_loop():
                states = states_of(model)
                share = self._runtime.collectives.share
                for weights in self.training.states.averaged(states, share):
                    self._average_over_ranks(weights)
                self.training.states.agree(states, share)

    def _average_over_ranks(self, weights: Sequence[tf.Variable]) -> None:
        known = {weight.ref() for weight in weights}
        present = [each for each in self.training.algorithms if any(v.ref() in known for v in each.group.trained)]
        common = [optimizer for algorithm in present for optimizer in algorithm.common_optimizers()]
        counts = [iterations_variable(optimizer) for optimizer, _ in common]
        means = [tf.Variable(tf.cast(count, tf.float64)) for count in counts]
        self._runtime.collectives.average([*weights, *(slot for _, slots in common for slot in slots), *means])
        for count, mean in zip(counts, means, strict=True):
            count.assign(tf.cast(tf.round(mean), count.dtype))

    def report(self) -> dict[str, float]:
        """Counters of this rank since the strategy was made.

        Returns:
          A dict. It has these entries, and the scheme's own.

          - `rank`, `steps` (optimizer updates), `iteration` (the scheme's, in the running or last `fit`);
          - `wait_seconds`: time for which steps had their gradients and still waited for other ranks;
          - `compute_seconds`: the median duration of the latest steps, without waiting. This entry and `wait_seconds`
            stay 0 with `run_eagerly`, and with TensorFlow's op determinism;
          - `wait_seconds_for_rank_<r>` and `wait_seconds_for_ps_<s>`: time for which communication within steps has
            waited for rank r or server s. Ranks and servers without waits have no entry;
          - `ranks_lost` and `ranks_left`: number of times that another rank was lost, or left by an exception, and this
            rank continued;
          - `ranks_joined`: number of times that another rank joined again;
          - `times_left_behind`: number of times that this rank was silent for `patience_seconds`, the others continued
            without it, and it joined them again;
          - `nonfinite_steps`: see `CommunicationOptions.on_nonfinite`;
          - `batch_share`: the part of each batch that this rank takes, only with `batch_shares`;
          - `bytes_sent`, `bytes_received`, `messages_sent`, `messages_received`, `connections_refused`;
          - `bytes_sent_on_lane_<k>`: small messages are on lane 0, arrays on lane 1, and on one more lane for each
            further interface.
        """
        totals = {"rank": self.rank, **self.training.statistics.counters()}
        if self.training.shares is not None:
            totals["batch_share"] = self.batch_shares[self.rank]
        return {**totals, **(self._runtime.counters() if self._runtime else {})}

    def gather_reports(self, **extra) -> list[dict] | None:
        """Brings every rank's `report()` to rank 0.

        A collective: every rank calls this method, between calls of `fit`.

        Args:
          **extra: Further entries of this rank's report: values that JSON can hold (`float(x)`, not a NumPy scalar).

        Returns:
          On rank 0, the reports in the order of the ranks. On other ranks, None.

        Blocks: until all ranks call it.

        Raises:
          RuntimeError: If this method is called within `fit`, as in a callback.
          TypeError: If JSON cannot hold an entry.
          HopError: If a rank was lost or has ended.
        """
        for name, value in extra.items():
            _check_json(name, value)
        report = {**self.report(), **extra}
        if self._runtime is None:
            return [report]
        self.training.require_outside_fit("gather_reports")
        return self._runtime.collectives.gather(report)

    def make_all_reduce(self, algorithm: str, num_values: int) -> Mean:
        """Makes an all-reduce of a float32 vector over the job's own links, for `hop_tf.timing.measure`. A collective.

        Args:
          algorithm: As for `hop_tf.collectives.get_algorithm`.
          num_values: Length of the vector.

        Returns:
          The all-reduce. The caller closes it.

        Raises:
          RuntimeError: If this method is called within `fit`, or there is only one rank.
          HopError: If a rank was lost or has ended.
        """
        if self._runtime is None:
            raise RuntimeError("one rank alone has no all-reduce to measure. Start the script once for each rank.")
        self.training.require_outside_fit("measure")
        return self._runtime.collectives.make_vector_mean(get_algorithm(algorithm), num_values)

    def latest_step_seconds(self) -> np.ndarray:
        """The durations of this rank's latest steps, at most 64, without waiting. The last step is at the end.

        A duration is from the start of a step to the start of the next step, so callbacks count. Empty with
        `run_eagerly`, and with TensorFlow's op determinism.
        """
        return self.training.statistics.latest_seconds()

    @property
    def num_exchanged_bytes(self) -> int:
        """Bytes of the variables that are exchanged in a step, summed over all optimizers that still exist."""
        return self._runtime.num_bytes if self._runtime else 0

    @property
    def num_exchanged_values(self) -> int:
        """Number of values of the variables that are exchanged in a step."""
        return self._runtime.num_values if self._runtime else 0

    def shutdown(self) -> None:
        """Leaves the cluster for good and releases the port and all threads. Idempotent; also runs at exit.

        Another strategy can then be made on the same addresses. It trains when all ranks have made a new strategy.

        Blocks: until all sent messages, and in a custom loop the messages that others still need, have arrived at the
          ranks that still listen. Gives up messages that take longer than `progress_timeout_seconds`.
        """
        self._shut_down(None)

    def _shut_down(self, error: BaseException | None) -> None:
        self._writer.close()
        if self._runtime is not None:
            forget_cluster(self)
        self.training.close(error)
        self._close_records()

    def _close_records(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def distribute_datasets_from_function(self, dataset_fn, options=None):
        """Returns the dataset that `dataset_fn(input_context)` makes for this rank. `fit` uses the dataset unchanged.

        Args:
          dataset_fn: Function of a `tf.distribute.InputContext`, which holds the number of ranks, this rank, and the
            batch size of a rank: `get_per_replica_batch_size(global_batch_size)`, in proportion to `batch_shares` if
            given.
          options: Ignored.

        Returns:
          The dataset.

        Raises:
          ValueError: With `batch_shares="auto"`, because the function is called once, but shares change.
        """
        if self.training.shares is not None and self.training.shares.is_automatic:
            raise ValueError(
                "`batch_shares` must be a list or None if a function makes the data of each rank: the program calls it "
                "once, and hop_tf does not divide its batches. Received: batch_shares='auto'."
            )
        dataset = super().distribute_datasets_from_function(dataset_fn, options)
        self.training.data.take_whole(dataset)
        return dataset

    def reduce(self, reduce_op, value, axis):
        """Combines the ranks' values, as `strategy.run` returns them; see `tf.distribute.Strategy.reduce`.

        A collective: all ranks make the same calls in the same order, inside or outside of a tf.function.

        Args:
          reduce_op: "SUM" or "MEAN", or a `tf.distribute.ReduceOp`.
          value: A tensor, or a structure of tensors, of the same shape on all ranks except for `axis`.
          axis: The axis along which each rank reduces its tensor first, such as 0 for the rows of a batch; None to
            combine the ranks' tensors only.

        Returns:
          The sum or mean; equal on all ranks, to the bit. A mean of integers is a float, as under TensorFlow's own
          strategies.

        Blocks: until all ranks call it.

        Raises:
          ValueError: Under a strategy whose ranks do not wait for each other (`Scheme.in_lock_step` is False).
          tf.errors.InvalidArgumentError: If a rank was lost, or has left. The error names the rank.
        """
        return super().reduce(reduce_op, value, axis)

    def gather(self, value, axis):
        """Concatenates a tensor of all ranks along `axis`, in the order of the ranks; see `reduce`."""
        return super().gather(value, axis)


def training_cluster(resolver: tf.distribute.cluster_resolver.ClusterResolver | None, strategy: str) -> Cluster:
    """Returns the cluster of a strategy that has no parameter servers.

    Args:
      resolver: The resolver that describes the cluster; None for `TF_CONFIG`.
      strategy: Name of the strategy, for the error.

    Raises:
      ClusterConfigError: If the description is not valid, or this task is no rank.
    """
    cluster = Cluster.from_resolver(resolver)
    if cluster.rank is None:
        raise ClusterConfigError(
            f"{strategy} runs in tasks of type 'chief' and 'worker'; it has no parameter servers. "
            "Received: a task of another type in TF_CONFIG (or --num_ps of the launcher)."
        )
    return cluster


def _checked_min_ranks(min_ranks: int | None, world_size: int, continue_without_lost: bool) -> int:
    if min_ranks is None:
        return world_size // 2 + 1 if world_size > 2 else 1
    if not continue_without_lost:
        raise ValueError(
            "`min_ranks` must be None unless on_peer_loss='continue': otherwise all ranks raise if one is lost. "
            f"Received: min_ranks={min_ranks!r}."
        )
    check_integer("min_ranks", min_ranks, at_least=1, at_most=world_size if world_size > 1 else math.inf)
    return min_ranks


# An import, for instance, can delay the threads that answer other ranks, by some tenths of a second.
_LEAST_PATIENCE = 0.5


def _checked_patience(patience: object, timeout_seconds: float, continue_without_lost: bool) -> float | None:
    if patience is None:
        return None
    if not continue_without_lost:
        raise ValueError(
            "`patience_seconds` must be None unless on_peer_loss='continue': otherwise all ranks raise if one is lost. "
            f"Received: patience_seconds={patience!r}."
        )
    is_number = isinstance(patience, numbers.Real) and not isinstance(patience, bool)
    if not is_number or not _LEAST_PATIENCE <= patience < timeout_seconds:
        raise ValueError(
            f"`patience_seconds` must be a number of seconds, at least {_LEAST_PATIENCE:g}, and less than the "
            f"`timeout_seconds` of the communication options, {timeout_seconds:g}, or None. "
            f"Received: patience_seconds={patience!r}."
        )
    return float(patience)


def _check_json(name: str, value: object) -> None:
    try:
        json.dumps(value)
    except TypeError as error:
        raise TypeError(
            f"`{name}` must be a value that JSON can hold, such as float(x). Received: {name}={value!r}."
        ) from error


def _shut_down_at_exit(method: weakref.WeakMethod) -> None:
    """Shuts a strategy down. Passes on the exception that ends the program, because it may have ended a custom loop."""
    shut_down, is_interactive = method(), hasattr(sys, "ps1")  # In an interactive session, `last_value` may be old.
    if shut_down is not None:
        shut_down(None if is_interactive else getattr(sys, "last_value", None))


def _call_weakly(method: weakref.WeakMethod) -> Any:
    bound = method()
    return None if bound is None else bound()
