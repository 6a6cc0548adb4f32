"""Measures the speedup of Hop's mechanisms: the paper's Figures 12 to 20 in the small, in processes of one machine.

    KERAS_HOME=... python benchmarks/benchmark_hop.py
    python benchmarks/benchmark_hop.py --experiments=straggler --task=svm --a9a=a9a --num_workers=8 --num_steps=60

Workers train under `model.fit` with emulated compute: every step takes `--step_seconds` at least, and more if it is
slowed down, without using the processor. So 16 workers fit on few cores, if the cores are idle most of the time. The
busy share is printed: figures from a machine that was busy all the time mean little.

random     Every rank is 6 times slower with probability 1/n in each step (Figures 12 and 14 to 17): standard, one
           backup worker, staleness 5, both, both with jumps; on ring_based, and with --topologies on other graphs.
server     A synchronous parameter server, `SHATParameterServerStrategy(consistency="bsp")`, and the standard form on
           ring_based, with and without these slowdowns (Figure 13).
straggler  One rank is always 4 times slower (Figures 18 and 19): standard, one backup worker, jumps of up to 2 and 10.
death      One of 8 workers is killed and restarted, with one backup worker: the others' speed from the death on,
           relative to a run without; the time that the worker takes to join; and the final accuracy of its own model.

Printed for each run: iterations per second (mean over ranks, jumps included, the first 5 left out), the same by
`hop_tf.simulate` from the same slowdowns, and the ratio of both; both relative to the standard form; the time of an
iteration on ranks that are not slow themselves; the loss when the fastest run had ended, mean and standard error
over ranks; and the accuracy of the averaged model at the end. Times count from the first 5 steps of the first rank:
before, graphs are traced.

The following experiments run on the virtual clock of `hop_tf.simulate`, and only on request:

accuracy   `random` and `straggler` with real gradients in simulated ranks, so that there is time for --num_steps=1500;
           the accuracy of the averaged model, means over --num_seeds seeds, and the difference to the homogeneous
           runs.
learning   `random`, on --topologies, with an unchanged learning rate: loss and accuracy of the averaged model on the
           test data when the fastest run has ended, and when a quarter and half of that time are over.
machines   The same for 8 workers on 3 machines (Figures 20 and 21), standard form: all-to-all inside a machine and a
           ring between machines, of one rank each, or of as many as possible; and ring_based over all. An update keeps
           a machine's link busy for each of --update_shares of a step. All edges that leave or enter the machine share
           the link.
speedups   Iterations per second of all mechanisms over those of the standard form, with the slowdowns of `random` and
           `straggler`; with those of `random` also in the paper's serial order.
slow_link  A slow link instead of a slow rank: from rank 0 to rank 1 an update takes each of --slow_links steps.
           Iterations per second of all mechanisms, compared with those with one rank that is 4 times slower.

Task cnn: a small convolutional network on Fashion-MNIST, from `keras.datasets` (which KERAS_HOME may hold already).
Task svm: a linear model with log loss on a9a, a LIBSVM file.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import hop_accuracy
import keras
import networkx as nx
import numpy as np
import psutil
import results
import tensorflow as tf
from absl import app, flags, logging

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation, Slowdown
from hop_tf.tools.testing import MultiProcessRunner
from hop_tf.topology import Topology, resolve

_EXPERIMENTS = flags.DEFINE_list("experiments", ["random", "server", "straggler", "death"], "What to run.")
_TOPOLOGIES = flags.DEFINE_list("topologies", ["ring_based"], "Graphs of `random`, `learning` and `slow_link`.")
_RUNS = flags.DEFINE_list("runs", None, "Only these of each experiment, by their labels: homogeneous,standard.")
_TASK = flags.DEFINE_enum("task", "cnn", ["cnn", "svm"], "What is trained.")
_NUM_WORKERS = flags.DEFINE_integer("num_workers", 16, "Ranks, except in `machines` and `death`.", lower_bound=4)
_NUM_STEPS = flags.DEFINE_integer("num_steps", 120, "Iterations of each rank; a multiple of 5.", lower_bound=20)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Rows that a rank takes in a step.", lower_bound=1)
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.3, "Least duration of a step.", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random slowdowns.")
_NUM_SEEDS = flags.DEFINE_integer("num_seeds", 3, "Trainings of each kind in `accuracy`.", lower_bound=1)
_UPDATE_SHARES = flags.DEFINE_list("update_shares", ["0", "0.3", "1"], "Of `machines`.")
_SLOW_LINKS = flags.DEFINE_list("slow_links", ["1", "2", "4", "8"], "Of `slow_link`.")
_A9A = flags.DEFINE_string("a9a", None, "The file a9a, for --task=svm.")

_NAMES = ("random", "server", "straggler", "death", "accuracy", "learning", "machines", "speedups", "slow_link")
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
_NOTIFY_ACK = {"synchronization": "notify_ack"}
_MACHINES = tuple("aaaabbcc")  # Of Figure 21: 8 workers on 3 machines. Only so do its spectral gaps come out.
_INSIDE = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (4, 5), (6, 7)]
_GRAPHS = {
    "(a) ring_based": Topology.ring_based(len(_MACHINES)),
    "(b) ring of one each": Topology.from_networkx(nx.Graph([*_INSIDE, (0, 4), (0, 6), (4, 6)])),
    "(c) hierarchical": Topology.hierarchical(_MACHINES),
}
_HEADER_BYTES = 24  # Longer messages are updates.


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
      experiment: Experiment of the run.
      label: The difference to other runs.
      topology: The graph.
      slowdowns: Slowdowns of ranks.
      settings: Arguments of `HopStrategy`.
      has_server: True if a parameter server replaces the graph, except in the simulation.
      sending_seconds: Argument of `hop_tf.simulate.hop`.
    """

    experiment: str
    label: str
    topology: Topology
    slowdowns: tuple[Slowdown, ...]
    settings: Mapping
    has_server: bool = False
    sending_seconds: Callable[[int, int, int], float] | None = None

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
    if "server" in experiments:
        ring_based, everybody = resolve("ring_based", num_workers), resolve("complete", num_workers)
        for label, slowdowns in {"homogeneous": (), "standard": (Slowdown(None, 6.0),)}.items():
            yield Run("server", label, ring_based, slowdowns, {})
            # The simulation replaces a server by ranks that all wait for the steps of all.
            yield Run("server", f"server, {label}", everybody, slowdowns, {"update_order": "serial"}, has_server=True)
    if "straggler" in experiments:
        topology = resolve("ring_based", num_workers)
        yield Run("straggler", "homogeneous", topology, (), {})
        for label, settings in _FOR_A_STRAGGLER.items():
            yield Run("straggler", label, topology, (Slowdown(num_workers // 3, 4.0),), settings)
    if "machines" in experiments:
        for share in map(float, _UPDATE_SHARES.value):
            for label, topology in _GRAPHS.items():
                busy = _shared_links(topology, share * _STEP_SECONDS.value)
                yield Run(f"machines, updates of {share:g} steps", label, topology, (), {}, sending_seconds=busy)


def _shared_links(topology: Topology, update_seconds: float) -> Callable[[int, int, int], float]:
    """Returns `sending_seconds` of machines whose links carry one update after the other, in `update_seconds` each."""
    crossing = [(a, b) for a, b in topology.to_networkx().edges if _MACHINES[a] != _MACHINES[b]]
    num_leaving = collections.Counter(_MACHINES[a] for a, _ in crossing)  # As many enter.

    def sending_seconds(sender: int, receiver: int, num_bytes: int) -> float:
        a, b = _MACHINES[sender], _MACHINES[receiver]
        is_free = a == b or num_bytes <= _HEADER_BYTES
        return 0.0 if is_free else update_seconds * max(num_leaving[a], num_leaving[b])

    return sending_seconds


def _grouped(experiments: Collection[str]) -> Iterator[list[Run]]:
    chosen = (run for run in _runs(experiments) if _RUNS.value is None or run.label in _RUNS.value)
    for _, runs in itertools.groupby(chosen, key=lambda run: run.experiment):
        yield list(runs)


# In the processes.


def _train(
    task: str,
    a9a: str | None,
    matrix: np.ndarray | None,
    settings: Mapping,
    environment: Mapping,
    num_steps: int,
    batch_size: int,
) -> tuple[np.ndarray, float | None, float | None]:
    """Trains one rank, with a parameter server if there is no matrix.

    Returns:
      The rank's curve [points, (seconds since the epoch, steps, loss)]; the accuracy of its own model, on the chief and
      on a rank that may have been restarted; and that of the averaged model, on the chief. Other values are None.
    """
    os.environ.update(environment)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    if matrix is None:
        strategy = hop_tf.SHATParameterServerStrategy(consistency="bsp")
    else:
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
        None if run.has_server else run.topology.mixing_matrix,
        run.settings,
        run.compute.to_environment(),
        _NUM_STEPS.value,
        _BATCH_SIZE.value,
    )
    return MultiProcessRunner(
        _train,
        num_workers=run.topology.world_size,
        num_ps=int(run.has_server),
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


def _measure_accuracy(runs: Sequence[Run]) -> None:
    data, test = _load(_TASK.value, _A9A.value)
    print(f"\n{runs[0].experiment}, {runs[0].topology.describe()}, {_NUM_STEPS.value} iterations")
    of_homogeneous = np.nan
    for run in runs:
        accuracies = []
        for seed in range(_NUM_SEEDS.value):
            model, training = _train_simulated(run, data, seed)
            model.set_weights(training.weights())
            accuracies.append(model.evaluate(*test, batch_size=512, verbose=0)[1])
        if run.label == "homogeneous":
            of_homogeneous = np.mean(accuracies)
        difference = np.mean(accuracies) - of_homogeneous
        print(f"{run.label:20} {np.mean(accuracies):8.4f} {difference:+8.4f}   of seeds:", *np.round(accuracies, 4))


def _train_simulated(run: Run, data, seed: int, decays: bool = True) -> tuple[keras.Model, hop_accuracy.Training]:
    keras.utils.set_random_seed(seed)
    model = _MODELS[_TASK.value]()
    training = hop_accuracy.train(
        model,
        data,
        topology=run.topology,
        compute=dataclasses.replace(run.compute, seed=seed),
        settings=run.settings,
        num_steps=_NUM_STEPS.value,
        batch_size=_BATCH_SIZE.value,
        seed=seed,
        decays=decays,
        sending_seconds=run.sending_seconds,
    )
    return model, training


def _measure_learning(runs: Sequence[Run]) -> None:
    """Prints loss and accuracy against time, on the virtual clock, at parts of the fastest run's time."""
    data, test = _load(_TASK.value, _A9A.value)
    trained = [_train_simulated(run, data, _SEED.value, decays=False) for run in runs]
    end = min(training.seconds for _, training in trained)
    compared = next((index for index, run in enumerate(runs) if run.label == _STANDARD), 0)
    moments = [end / 4, end / 2, end]
    print(f"\n{runs[0].experiment}; {_NUM_STEPS.value} iterations; loss and accuracy after so many seconds")
    print(f"{'':20} {'gap':>7} {'it/s':>8} {'speed':>6}" + "".join(f"{moment:16.1f}" for moment in moments))
    for run, (model, training) in zip(runs, trained, strict=True):
        shown = []
        for moment in moments:
            model.set_weights(training.weights_at(moment))
            shown.append("{:8.3f} {:7.4f}".format(*model.evaluate(*test, batch_size=512, verbose=0)))
        speed = np.mean(training.simulation.iterations_per_second)
        over = trained[compared][1].seconds / training.seconds
        print(
            f"{run.label:20} {run.topology.spectral_gap:7.4f} {speed:8.3f} {over:6.2f}",
            *shown,
            flush=True,
        )


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


def _measure_slow_link(name: str) -> None:
    """Prints iterations per second of ranks whose steps take one second, on the virtual clock."""
    topology = resolve(name, _NUM_WORKERS.value)
    kinds = {**_MECHANISMS, "NOTIFY-ACK": _NOTIFY_ACK}
    print(f"\nslow_link, {topology.describe()}: iterations in the time of a step, mean over ranks")
    titles = [f"link {steps}" for steps in _SLOW_LINKS.value] + ["rank 4x"]
    print(f"{'':20}" + "".join(f"{title:>10}" for title in titles))
    for label, settings in kinds.items():
        cases = [((), float(steps)) for steps in _SLOW_LINKS.value] + [((Slowdown(0, 4.0),), 0.0)]
        speeds = []
        for slowdowns, steps in cases:
            result = hop_tf.simulate.hop(
                topology=topology,
                world_size=topology.world_size,
                num_steps=_NUM_STEPS.value,
                compute=ComputeEmulation(step_seconds=1.0, slowdowns=slowdowns),
                sending_seconds=lambda sender, receiver, num_bytes, steps=steps: (
                    steps if (sender, receiver) == (0, 1) and num_bytes > _HEADER_BYTES else 0.0
                ),
                **settings,
            )
            speeds.append(np.mean(result.iterations_per_second))
        print(f"{label:20}" + "".join(f"{speed:10.2f}" for speed in speeds), flush=True)


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
    for runs in _grouped({"random", "server", "straggler"}.intersection(_EXPERIMENTS.value)):
        measured = [_measure(run) for run in runs]
        _print(measured)
    if "death" in _EXPERIMENTS.value:
        _measure_death()
    if "accuracy" in _EXPERIMENTS.value:
        for runs in _grouped(["random", "straggler"]):
            _measure_accuracy(runs)
    for experiment, runs_of in (("learning", "random"), ("machines", "machines")):
        for runs in _grouped([runs_of] if experiment in _EXPERIMENTS.value else []):
            _measure_learning(runs)
    for name in _TOPOLOGIES.value if "speedups" in _EXPERIMENTS.value else ():
        _measure_speedups(name)
    if "slow_link" in _EXPERIMENTS.value:
        for name in _TOPOLOGIES.value:
            _measure_slow_link(name)


if __name__ == "__main__":
    app.run(main)
