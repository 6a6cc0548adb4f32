"""Measures the speedup of Hop's mechanisms: the paper's Figures 12 to 20 in the small, in processes of one machine.

    KERAS_HOME=... python benchmarks/benchmark_hop.py
    python benchmarks/benchmark_hop.py --experiments=straggler --task=svm --a9a=a9a --num_workers=8 --num_steps=60

Workers train under `model.fit` with emulated compute: every step takes `--step_seconds` at least, and more if it is
slowed down, without using the processor. So 16 workers fit on few cores, if the cores are idle most of the time. The
busy share is printed: figures from a machine that was busy all the time mean little.

random     Every rank is 6 times slower with probability 1/n in each step (Figures 12 and 14 to 17): standard, one
           backup worker, staleness 5, both, both with jumps; on ring_based, and with --topologies on other graphs.
straggler  One rank is always 4 times slower (Figures 18 and 19): standard, one backup worker, jumps of up to 2 and 10.
death      One of 8 workers is killed and restarted, with one backup worker: the others' speed from the death on,
           relative to a run without; the time that the worker takes to join; and the final accuracy of its own model.

Printed for each run: iterations per second (mean over ranks, jumps included, the first 5 left out), the same by
`hop_tf.simulate` from the same slowdowns, and the ratio of both; both relative to the standard form; the time of an
iteration on ranks that are not slow themselves; the loss when the fastest run had ended, mean and standard error
over ranks; and the accuracy of the averaged model at the end. Times count from the first 5 steps of the first rank:
before, graphs are traced.

speedups   Iterations per second of all mechanisms over those of the standard form, on the virtual clock of
           `hop_tf.simulate`, with the slowdowns of `random` and `straggler`; with those of `random` also in the paper's
           serial order.

Task cnn: a small convolutional network on Fashion-MNIST, from `keras.datasets` (which KERAS_HOME may hold already).
Task svm: a linear model with log loss on a9a, a LIBSVM file.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import keras
import numpy as np
import psutil
import results
import tensorflow as tf
from absl import app, flags, logging

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation, Slowdown
from hop_tf.tools.testing import MultiProcessRunner
from hop_tf.topology import Topology, resolve

_EXPERIMENTS = flags.DEFINE_list("experiments", ["random", "straggler", "death", "speedups"], "What to run.")
_TOPOLOGIES = flags.DEFINE_list("topologies", ["ring_based"], "Graphs of `random` and `speedups`.")
_RUNS = flags.DEFINE_list("runs", None, "Only these of each experiment, by their labels: homogeneous,standard.")
_TASK = flags.DEFINE_enum("task", "cnn", ["cnn", "svm"], "What is trained.")
_NUM_WORKERS = flags.DEFINE_integer("num_workers", 16, "Ranks, except in `death`.", lower_bound=4)
_NUM_STEPS = flags.DEFINE_integer("num_steps", 120, "Iterations of each rank; a multiple of 5.", lower_bound=20)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Rows that a rank takes in a step.", lower_bound=1)
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.3, "Least duration of a step.", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random slowdowns.")
_NUM_SEEDS = flags.DEFINE_integer("num_seeds", 3, "Seeds of the slowdowns in `speedups`.", lower_bound=1)
_A9A = flags.DEFINE_string("a9a", None, "The file a9a, for --task=svm.")

_NAMES = ("random", "straggler", "death", "speedups")
_HOMOGENEOUS = "homogeneous"
_STANDARD = "standard"  # The reference for an experiment's other runs.
_STEPS_PER_POINT = 5  # Steps between two points of a curve.
_TIMEOUT_SECONDS = 3600.0

_SKIP = hop_tf.SkipIterations
_MECHANISMS = {
    "standard": {},
    "backup 1": {"num_backup_workers": 1},
    "staleness 5": {"max_staleness": 5},
    "hybrid": {"num_backup_workers": 1, "max_staleness": 5},
    "hybrid, skip": {"num_backup_workers": 1, "max_staleness": 5, "skip": _SKIP()},
}
_FOR_A_STRAGGLER = {
    "standard": {},
    "backup 1": {"num_backup_workers": 1},
    "backup 1, skip 2": {"num_backup_workers": 1, "skip": _SKIP(max_jump=2)},
    "backup 1, skip 10": {"num_backup_workers": 1, "skip": _SKIP(max_jump=10)},
}
_VICTIM = 3


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
      experiment: Experiment of the run.
      label: The difference to other runs.
      topology: The graph.
      slowdowns: Slowdowns of ranks.
      settings: Arguments of `HopStrategy`.
    """

    experiment: str
    label: str
    topology: Topology
    slowdowns: tuple[Slowdown, ...]
    settings: Mapping

    @property
    def compute(self) -> ComputeEmulation:
        return ComputeEmulation(step_seconds=_STEP_SECONDS.value, slowdowns=self.slowdowns, seed=_SEED.value)


def _runs(experiments: Collection[str]) -> Iterator[Run]:
    num_workers = _NUM_WORKERS.value
    if "random" in experiments:
        for name in _TOPOLOGIES.value:
            topology = resolve(name, num_workers)
            yield Run(f"random {name}", "homogeneous", topology, (), {})
            for label, settings in _MECHANISMS.items():
                yield Run(f"random {name}", label, topology, (Slowdown(None, 6.0),), settings)
    if "straggler" in experiments:
        topology = resolve("ring_based", num_workers)
        yield Run("straggler", "homogeneous", topology, (), {})
        for label, settings in _FOR_A_STRAGGLER.items():
            yield Run("straggler", label, topology, (Slowdown(num_workers // 3, 4.0),), settings)


def _grouped(experiments: Collection[str]) -> Iterator[list[Run]]:
    chosen = (run for run in _runs(experiments) if _RUNS.value is None or run.label in _RUNS.value)
    for _, runs in itertools.groupby(chosen, key=lambda run: run.experiment):
        yield list(runs)


# In the processes.


def _train(
    task: str,
    a9a: str | None,
    matrix: np.ndarray,
    settings: Mapping,
    environment: Mapping,
    num_steps: int,
    batch_size: int,
) -> tuple[np.ndarray, float | None, float | None]:
    """Trains one rank.

    Returns:
      The rank's curve [points, (seconds since the epoch, steps, loss)]; the accuracy of its own model, on the chief and
      on a rank that may have been restarted; and that of the averaged model, on the chief. Other values are None.
    """
    os.environ.update(environment)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    strategy = hop_tf.HopStrategy(topology=matrix, **settings)
    (x, y), test = _load(task, a9a)
    with strategy.scope():
        model = _MODELS[task]()
    curve = []

    def add_point(epoch, logs):
        curve.append((time.time(), (epoch + 1) * _STEPS_PER_POINT, logs["loss"]))
        print("point", epoch + 1, flush=True)

    record = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: curve or curve.append((time.time(), 0, np.nan)), on_epoch_end=add_point
    )
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).repeat()
    data = data.batch(batch_size * strategy.world_size)
    num_points = num_steps // _STEPS_PER_POINT
    model.fit(data, epochs=num_points, steps_per_epoch=_STEPS_PER_POINT, verbose=0, callbacks=[record])

    def accuracy(*ranks: int) -> float | None:
        return model.evaluate(*test, batch_size=512, verbose=0)[1] if strategy.rank in ranks else None

    own = accuracy(0, _VICTIM)
    strategy.synchronize(model)
    averaged = accuracy(0)
    strategy.synchronize(model)  # No rank leaves before the chief has evaluated.
    strategy.shutdown()
    return np.array(curve), own, averaged


def _load(task: str, a9a: str | None):
    if task == "cnn":
        train, test = keras.datasets.fashion_mnist.load_data()
        return [((x[..., None] / 255).astype("float32"), y.astype("int32")) for x, y in (train, test)]
    from sklearn.datasets import load_svmlight_file

    x, y = load_svmlight_file(a9a, n_features=123)
    x, y = x.toarray().astype("float32"), (y > 0).astype("float32")[:, None]
    return (x[:-4000], y[:-4000]), (x[-4000:], y[-4000:])


def _cnn() -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([
        layers.Input((28, 28, 1)),
        layers.Conv2D(8, 5, strides=2, activation="relu"),
        layers.Conv2D(16, 3, strides=2, activation="relu"),
        layers.Flatten(),
        layers.Dense(10),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


def _svm() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((123,)), keras.layers.Dense(1)])
    metric = keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")
    model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True), metrics=[metric])
    return model


_MODELS = {"cnn": _cnn, "svm": _svm}


# Results.


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of a run.

    Attributes:
      run: The run.
      speed: Iterations per second, mean over ranks.
      simulated: Iterations per second on a virtual clock.
      healthy_seconds: Duration of an iteration, mean over the ranks that are not always slow.
      curves: Array [ranks, points, 3]: seconds, steps, loss.
      accuracy: Accuracy of the averaged model.
      busy: Share of this machine's cores that was busy, from 0 to 1.
    """

    run: Run
    speed: float
    simulated: float
    healthy_seconds: float
    curves: np.ndarray
    accuracy: float
    busy: float

    @property
    def curve(self) -> np.ndarray:
        """Array [points, 3]: means over ranks."""
        return self.curves.mean(0)

    def losses(self, seconds: float) -> np.ndarray:
        """Returns the loss of each rank at that time, interpolated."""
        return np.array([np.interp(seconds, curve[1:, 0], curve[1:, 2]) for curve in self.curves])


def _start(run: Run) -> MultiProcessRunner:
    arguments = (
        _TASK.value,
        _A9A.value,
        run.topology.mixing_matrix,
        run.settings,
        run.compute.to_environment(),
        _NUM_STEPS.value,
        _BATCH_SIZE.value,
    )
    return MultiProcessRunner(
        _train,
        num_workers=run.topology.world_size,
        args=arguments,
        timeout_seconds=_TIMEOUT_SECONDS,
    )


def _measure(run: Run) -> Result:
    world_size = run.topology.world_size
    psutil.cpu_percent()
    with _start(run) as runner:
        values = runner.join().raise_for_errors().values
    busy = psutil.cpu_percent() / 100
    curves = np.stack([curve for curve, _, _ in values])
    # From the first point on: before, the graph was traced.
    seconds = curves[:, -1, 0] - curves[:, 1, 0]
    curves[..., 0] -= curves[:, 1, 0].min()
    slow = {slowdown.rank for slowdown in run.slowdowns}
    is_healthy = [rank not in slow for rank in range(world_size)]
    simulated = hop_tf.simulate.hop(
        topology=run.topology, world_size=world_size, num_steps=_NUM_STEPS.value, compute=run.compute, **run.settings
    )
    num_steps = _NUM_STEPS.value - _STEPS_PER_POINT
    entered = np.fmin.accumulate(simulated.entered_seconds[:, ::-1], axis=1)[:, ::-1]  # Or jumped over until then.
    simulated_seconds = simulated.finished_seconds - entered[:, _STEPS_PER_POINT]
    return Result(
        run=run,
        speed=float(np.mean(num_steps / seconds)),
        simulated=float(np.mean(num_steps / simulated_seconds)),
        healthy_seconds=float(np.mean(seconds[is_healthy] / num_steps)),
        curves=curves,
        accuracy=values[0][2],
        busy=busy,
    )


def _measure_death() -> None:
    topology = resolve("ring_based", 8)
    run = Run("death", "killed", topology, (), {"num_backup_workers": 1})
    undisturbed = _measure(run)
    num_points = _NUM_STEPS.value // _STEPS_PER_POINT
    with _start(run) as runner:
        runner.wait_for_output(_VICTIM, f"point {num_points // 4}$")
        runner.kill(_VICTIM)
        killed_at = time.time()
        runner.wait_for_output(0, f"point {num_points // 2}$")
        restarted_at = time.time()
        runner.restart(_VICTIM)
        values = runner.join().raise_for_errors().values
    speeds = []
    for rank, (curve, _, _) in enumerate(values):
        first = np.searchsorted(curve[:, 0], killed_at) - 1  # The last point before.
        seconds, steps, _ = curve[first:].T
        if rank != _VICTIM:
            speeds.append((steps[-1] - steps[0]) / (seconds[-1] - seconds[0]))
    seconds, steps, losses = values[_VICTIM][0].T
    joined = np.flatnonzero(np.isfinite(losses))[0]
    print(f"\ndeath, {topology.describe()}, one backup worker")
    print(f"the others' speed from the death on: {np.mean(speeds) / undisturbed.speed:.1%} of that without")
    print(
        f"first {_STEPS_PER_POINT} steps made together again: {seconds[joined] - restarted_at:.1f} s after the start of"
    )
    print(f"  the new process, at step {steps[joined]:.0f} of {_NUM_STEPS.value}")
    print(f"accuracy of its own model: {values[_VICTIM][1]:.4f}, of rank 0's: {values[0][1]:.4f}, of the average:")
    print(f"  {values[0][2]:.4f}, of the average without a death: {undisturbed.accuracy:.4f}", flush=True)
    results.note("death: speed kept", "others", np.divide(speeds, undisturbed.speed))


def _measure_speedups(name: str) -> None:
    """Prints speeds on the virtual clock, without training."""
    topology = resolve(name, _NUM_WORKERS.value)
    cases = {
        "random": (Slowdown(None, 6.0), _MECHANISMS, ("parallel", "serial")),
        "straggler": (Slowdown(topology.world_size // 3, 4.0), _FOR_A_STRAGGLER, ("parallel",)),
    }
    print(f"\nspeedups, {topology.describe()}, {_NUM_STEPS.value} iterations: iterations per second over standard")
    for case, (slowdown, mechanisms, orders) in cases.items():
        for order in orders:
            speeds = {
                label: _simulated_speeds(topology, slowdowns, update_order=order, **settings)
                for label, slowdowns, settings in [
                    (_HOMOGENEOUS, (), {}),
                    *((label, (slowdown,), settings) for label, settings in mechanisms.items()),
                ]
            }
            for label, of_seeds in speeds.items():
                ratios = of_seeds / speeds[_STANDARD]
                results.note("speedup", f"{name}, {case}, {order}, {label}", ratios)
                shown = f"{case}, {order}, {label}"
                print(f"{shown:40} {np.mean(ratios):6.2f}   of seeds:", *np.round(ratios, 2), flush=True)


def _simulated_speeds(topology: Topology, slowdowns: tuple[Slowdown, ...], **settings) -> np.ndarray:
    """Returns the iterations per second of each seed, mean over ranks, for steps of a second."""
    return np.array([
        np.mean(
            hop_tf.simulate.hop(
                topology=topology,
                world_size=topology.world_size,
                num_steps=_NUM_STEPS.value,
                compute=ComputeEmulation(step_seconds=1.0, slowdowns=slowdowns, seed=seed),
                **settings,
            ).iterations_per_second
        )
        for seed in range(_NUM_SEEDS.value)
    ])  # fmt: skip


def _print(measured: Sequence[Result]) -> None:
    standard = next((each for each in measured if each.run.label == _STANDARD), None)
    end = min(each.curve[-1, 0] for each in measured)
    print(f"\n{measured[0].run.experiment}, {measured[0].run.topology.describe()}; loss after {end:.1f} s")
    print(
        f"{'':20} {'it/s':>8} {'simulated':>10} {'ratio':>6} {'/ standard':>11} {'simulated':>10} {'healthy ms':>11} "
        f"{'loss':>16} {'accuracy':>9} {'busy':>6}"
    )
    for each in measured:
        losses = each.losses(end)
        error = results.standard_error(losses)
        over = (each.speed / standard.speed, each.simulated / standard.simulated) if standard else (np.nan, np.nan)
        print(
            f"{each.run.label:20} {each.speed:8.3f} {each.simulated:10.3f} {each.speed / each.simulated:6.2f} "
            f"{over[0]:11.2f} {over[1]:10.2f} {each.healthy_seconds * 1e3:11.0f} {losses.mean():8.4f} ±{error:.4f} "
            f"{each.accuracy:9.4f} {each.busy:6.0%}",
            flush=True,
        )
        results.note("iterations per second", f"{each.run.experiment}, {each.run.label}", each.speed)
        results.note("loss", f"{each.run.experiment}, {each.run.label}", float(losses.mean()))


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.ERROR)  # Otherwise simulated ranks would log that they leave.
    if _NUM_STEPS.value % _STEPS_PER_POINT:
        raise app.UsageError(f"--num_steps must be a multiple of {_STEPS_PER_POINT}. Received: {_NUM_STEPS.value}.")
    if _TASK.value == "svm" and not (_A9A.value and os.path.exists(_A9A.value)):
        raise app.UsageError(f"--a9a must name the file for --task=svm. Received: --a9a={_A9A.value}.")
    for name in _EXPERIMENTS.value:
        if name not in _NAMES:
            raise app.UsageError(f"--experiments must be among {', '.join(_NAMES)}. Received: {name!r}.")
    for runs in _grouped({"random", "straggler"}.intersection(_EXPERIMENTS.value)):
        measured = [_measure(run) for run in runs]
        _print(measured)
    if "death" in _EXPERIMENTS.value:
        _measure_death()
    for name in _TOPOLOGIES.value if "speedups" in _EXPERIMENTS.value else ():
        _measure_speedups(name)


if __name__ == "__main__":
    app.run(main)
