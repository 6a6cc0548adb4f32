"""Canary beside synchronous training: traffic, ranks of unequal speed, networks, and accuracy.

    python benchmarks/benchmark_canary.py --experiments=traffic,straggler,networks --output=results
    python benchmarks/benchmark_canary.py --experiments=accuracy --seeds=3

traffic     Bytes that a rank sends in a step, headers and bucket values included, and their share of the bytes of
            float32; the peak of a step over the mean. With more than 50 --traffic_steps a resync is included.
            The model has two dense layers of --width, by default 10.6 million parameters. Required: 27% with the
            sketch, 10% with low rank.
straggler   One rank is ten times slower: steps per second of the others, over those without a slow rank. Required: 95%.
networks    Steps per second with an emulated computation (asleep) on a mesh and on BCubes, synchronous and not, with
            the sketch and without, and the bytes on each lane. (Figures 23 and 24 in the small.)
interfaces  The all-reduce of synchronous training, four ranks, as many values of float32 as the model of `traffic` has:
            on a BCube(2,2) over two interfaces, beside a mesh over one, of --interface_link each (an emulated network:
            root). The bytes that a rank sends a second, and processor seconds a second of all ranks. Required: 1.8
            times the rate.
accuracy    Real training with an emulated computation: accuracy on the test data, and the seconds until `--target` was
            reached, also over those of asynchronous training with the sketch. Beside the kinds of the others there is a
            parameter server (PS), one more process: each step waits for all workers' gradients. Required at a --link
            that is slow enough: 1.6 times for BML, 2.8 times for PS.
equal_time  Real training of --seconds with an emulated computation, where all ranks are as fast, and where one is ten
            times slower: accuracy on the test data of asynchronous training, and how many points it is above that of
            BML. Required: at least -0.5, and at least 5 with the slow one.
convergence Synchronous training in simulated ranks, with gradients sketched in none, half or all of the steps (Figure
            22): accuracy on the test data. Required: within 0.3 points of none. (`canary_accuracy.py`)
ako         Partial gradient exchange as another baseline: accuracy, and how long steps take. (`canary_ako.py`)

BML, the baseline of the paper, is `consistency="bsp", codec=None` on a BCube: of two levels where the number of ranks
is a square, otherwise of one. Steps are those that a rank has made, without skipped ones.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import canary_accuracy
import canary_ako
import keras
import numpy as np
import ranks
import results
import tensorflow as tf
from absl import app, flags

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation, Slowdown

_EXPERIMENTS = flags.DEFINE_list("experiments", ["traffic", "straggler", "networks"], "What to run.")
_LINK = flags.DEFINE_string("link", ranks.LOOPBACK, "Bits per second of a host's link; needs root. Or loopback.")
_QUEUE_BYTES = flags.DEFINE_integer("queue_bytes", None, "What waits in front of a link. Default: 10 ms of it.", 1)
_INTERFACE_LINK = flags.DEFINE_string("interface_link", "500e6", "Bits per second of an interface, in `interfaces`.")
_WORLD_SIZE = flags.DEFINE_integer("world_size", 4, "Ranks, where the network does not say.", lower_bound=2)
_NETWORKS = flags.DEFINE_list("networks", ["mesh", "bcube:2.2", "bcube:3.2"], "A dot stands for the comma.")
_MAX_IN_FLIGHT = flags.DEFINE_integer("max_in_flight", 4, "Of asynchronous training.", lower_bound=2)
_TRAFFIC_STEPS = flags.DEFINE_integer("traffic_steps", 16, "Steps of `traffic`; a quarter is not timed.", lower_bound=8)
_WIDTH = flags.DEFINE_integer("width", 2300, "Of two dense layers, for traffic.")
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.05, "Emulated computation of a step.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 60, "Timed steps.", lower_bound=10)
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Epochs of `accuracy` and `convergence`.", lower_bound=1)
_ACCURACY_ROWS = flags.DEFINE_integer("accuracy_rows", None, "Images of `accuracy` and `equal_time`. Default: all.", 1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.02, "Where accuracy is measured.")
_MOMENTUM = flags.DEFINE_float("momentum", 0.9, "In `accuracy` and `equal_time`.", 0.0, 1.0)
_SECONDS = flags.DEFINE_float("seconds", 120.0, "How long a training of `equal_time` takes, from its first step on.")
_KINDS_USED = flags.DEFINE_list("kinds", None, "Of `accuracy`: BML, PS, BSP sketch, ... Default: all.")
_TARGET = flags.DEFINE_float("target", 0.85, "Accuracy whose time is taken.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Trainings of each kind.")

_NUM_REDUCTIONS = 7
_TIMEOUT_SECONDS = 900.0  # Many ranks on few processors take minutes to start.
_CASES = ("all equal", "one slow")  # Of `_without_and_with_a_slow_rank`.
_MANY_EPOCHS = 1_000_000  # For trainings that end after some time.
_FLOAT32 = {"codec": None}
_RANK = 4  # Rank of the factors of dense layers, in the kinds that send factors.
_PS = {"strategy": "SHATParameterServerStrategy", "consistency": "bsp", "mixing": 1.0}
# For each network, the numbers of the interfaces that it uses.
_INTERFACES = {"mesh": [0], "bcube:2,2": [0, 1]}


# In each rank.


def _run_rank(case: Mapping, rank: int) -> list:
    """Runs all settings in a rank; returns their results."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    return [_run(case, rank, turn, settings) for turn, settings in enumerate(case["settings"])]


def _run(case: Mapping, rank: int, turn: int, settings: Mapping) -> dict:
    addresses = case["addresses"][turn]  # New ones for each turn: no strategy meets an earlier one of another rank.
    num_servers = int("strategy" in settings)
    num_workers = len(addresses) - num_servers
    task = {"type": "worker", "index": rank} if rank < num_workers else {"type": "ps", "index": rank - num_workers}
    cluster = {"worker": addresses[:num_workers], **({"ps": addresses[num_workers:]} if num_servers else {})}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    settings = dict(settings)
    if settings.get("interfaces"):
        settings["interfaces"] = [case["interfaces"][rank][level] for level in settings["interfaces"]]
    make_strategy = getattr(hop_tf, settings.pop("strategy", "CanaryStrategy"))
    try:
        options = hop_tf.CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS)
        strategy = make_strategy(communication_options=options, **settings)
    except SystemExit:  # A server, when the workers are done.
        return {}
    try:
        return _MEASURES[case["experiment"]]({**case, "algorithm": settings.get("algorithm", "mesh")}, strategy)
    finally:
        strategy.shutdown()


def _time(case: Mapping, strategy: tf.distribute.Strategy) -> dict:
    width = case["width"]
    with strategy.scope():
        layers = [keras.layers.Dense(width), keras.layers.Dense(width)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    times, sent, steps = [], [], []

    def note(batch, logs):
        report = strategy.report()
        times.append(time.monotonic())
        sent.append(report["bytes_sent"])
        steps.append(report["steps"])

    x = np.random.default_rng(0).normal(size=(case["num_steps"] * strategy.world_size, width)).astype(np.float32)
    record = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(x, x, batch_size=strategy.world_size, shuffle=False, verbose=0, callbacks=[record])
    first = len(times) // 4  # Earlier steps contain tracing and the first messages.
    num_steps = steps[-1] - steps[first]
    return {
        "steps_per_second": num_steps / (times[-1] - times[first]),
        "bytes": (sent[-1] - sent[first]) / num_steps,
        "peak": float(np.max(np.diff(sent[first:]))),
        "num_values": model.count_params(),
        "report": strategy.report(),
    }


def _reduce(case: Mapping, strategy: hop_tf.CanaryStrategy) -> dict:
    """Returns the duration of an all-reduce, and its processor time."""
    values = np.ones(case["num_values"], np.float32)
    reduction = strategy.make_all_reduce(case["algorithm"], values.size)
    seconds, processor_seconds = [], []
    for step in range(1 + _NUM_REDUCTIONS):
        start, processor_start = time.monotonic(), time.process_time()
        reduction.mean(step, [values], lambda rank, step: True)
        seconds.append(time.monotonic() - start)
        processor_seconds.append(time.process_time() - processor_start)
    reduction.close()
    return {"seconds": statistics.median(seconds[1:]), "processor_seconds": statistics.median(processor_seconds[1:])}


class _Weights(keras.callbacks.Callback):
    """Records weights after each epoch, and the seconds since the first step, which traces. Ends after `seconds`.

    The weights are evaluated after training, because other ranks may go on training while one rank evaluates.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.reached: list[tuple[float, list[np.ndarray]]] = []
        self._start: float | None = None
        self._seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        self._start = self._start or time.monotonic()
        if self._passed >= self._seconds:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        self.reached.append((self._passed, self.model.get_weights()))

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._start


def _train(case: Mapping, strategy: tf.distribute.Strategy) -> dict:
    """Returns seconds and test accuracy after each epoch, and the share of iterations that ended on time."""
    keras.utils.set_random_seed(case["seed"])
    (x, y), (x_test, y_test) = keras.datasets.fashion_mnist.load_data()
    x, y = x[: case["num_rows"]], y[: case["num_rows"]]
    x, x_test = (images.reshape(-1, 784).astype(np.float32) / 255 for images in (x, x_test))
    layers = keras.layers
    with strategy.scope():
        hidden = [layers.Dense(300, activation="relu"), layers.Dense(100, activation="relu")]
        model = keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10, activation="softmax")])
        optimizer = keras.optimizers.SGD(case["learning_rate"], momentum=case["momentum"])
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    weights = _Weights(case["seconds"])
    model.fit(x, y, batch_size=case["batch_size"], epochs=case["epochs"], verbose=0, callbacks=[weights])
    reached = []
    for seconds, values in weights.reached:
        model.set_weights(values)
        reached.append((seconds, model.evaluate(x_test, y_test, batch_size=500, verbose=0)[1]))
    return reached


_MEASURES = {"timing": _time, "reduction": _reduce, "accuracy": _train}


# In the parent.


def _measure(
    settings: Sequence[Mapping],
    world_size: int,
    slowdowns: tuple = (),
    step_seconds: float = 0.0,
    link: str | None = None,
    num_interfaces: int = 1,
    **case,
) -> list:
    """Returns for each setting the results of its ranks. By default on --link with one interface."""
    environment = (
        ComputeEmulation(step_seconds=step_seconds, slowdowns=slowdowns).to_environment() if step_seconds else {}
    )
    case = {"experiment": "timing", "width": 256, "num_steps": _NUM_STEPS.value, "settings": settings, **case}
    of_ranks = ranks.run(
        __file__,
        case,
        world_size,
        link or _LINK.value,
        num_ports=len(settings),
        environment=environment,
        timeout_seconds=3600,
        num_interfaces=num_interfaces,
        **({} if _QUEUE_BYTES.value is None else {"queue_bytes": _QUEUE_BYTES.value}),
    )
    return list(zip(*of_ranks, strict=True))


def _kinds() -> dict[str, Mapping]:
    """Returns the settings of the kinds of training, by label."""
    synchronous = {"consistency": "bsp", "algorithm": "mesh"}
    asynchronous = {"consistency": "ssp", "max_in_flight": _MAX_IN_FLIGHT.value}
    return {
        "BSP float32": {**synchronous, **_FLOAT32},
        "BSP sketch": synchronous,
        "SSP float32": {**asynchronous, **_FLOAT32},
        "SSP sketch": asynchronous,
    }


def _bml(world_size: int) -> dict[str, Mapping]:
    """Returns the paper's baseline for `world_size` ranks, by its label."""
    side = math.isqrt(world_size)
    network = f"bcube:{side},2" if side * side == world_size else f"bcube:{world_size},1"
    return {f"BML {network}": {**_kinds()["BSP float32"], "algorithm": network}}


def _beside_bml(world_size: int) -> dict[str, Mapping]:
    """Returns the kinds of training, with BML instead of the same training on a mesh."""
    return {**_bml(world_size), **{label: kind for label, kind in _kinds().items() if label != "BSP float32"}}


def _low_rank() -> dict[str, Mapping]:
    """Returns the kind that sends factors of dense layers, by its label."""
    return {f"BSP sketch rank {_RANK}": {**_kinds()["BSP sketch"], "low_rank": _RANK}}


def _show(name: str, titles: Sequence[str], rows: Sequence[Sequence]) -> None:
    print(f"\n{name}\n  " + "".join(f"{title:>22s}" for title in titles))
    for row in rows:
        print("  " + "".join(f"{cell:22.4g}" if isinstance(cell, float) else f"{cell!s:>22s}" for cell in row))
    for row in rows:
        case = " ".join(cell for cell in row if isinstance(cell, str))
        for title, cell in zip(titles, row, strict=True):
            if isinstance(cell, float):
                results.note(f"{name}: {title}", case, cell)


def _traffic() -> None:
    n, rows = _WORLD_SIZE.value, []
    kinds = {**_beside_bml(n), **_low_rank()}
    measured = _measure(list(kinds.values()), n, width=_WIDTH.value, num_steps=_TRAFFIC_STEPS.value)
    for label, of_ranks in zip(kinds, measured, strict=True):
        sent, peak = (statistics.mean(each[what] for each in of_ranks) for what in ("bytes", "peak"))
        float32 = 2 * (n - 1) / n * 4 * of_ranks[0]["num_values"]
        rows.append((label, sent / 1e6, peak / sent, sent / float32))
    _show("traffic", ("", "MB a step", "peak / mean", "share of float32"), rows)


def _without_and_with_a_slow_rank(kind: Mapping, **case) -> Iterator[list]:
    """Yields the ranks' results with equally fast ranks, and then with the last rank ten times slower."""
    for slowdowns in ((), (Slowdown(rank=_WORLD_SIZE.value - 1, factor=10),)):
        (of_ranks,) = _measure([kind], _WORLD_SIZE.value, slowdowns=slowdowns, step_seconds=_STEP_SECONDS.value, **case)
        yield of_ranks


def _straggler() -> None:
    rows = []
    for label in ("BSP sketch", "SSP sketch"):
        rates = [
            statistics.mean(each["steps_per_second"] for each in of_ranks[:-1])
            for of_ranks in _without_and_with_a_slow_rank(_kinds()[label])
        ]
        rows.append((label, *rates, rates[1] / rates[0]))
    _show("straggler", ("", *(f"steps / s, {case}" for case in _CASES), "ratio"), rows)


def _networks() -> None:
    rows = []
    for network in (name.replace(".", ",") for name in _NETWORKS.value):
        world_size = _WORLD_SIZE.value
        if network.startswith("bcube"):
            alpha, beta = map(int, network.partition(":")[2].split(","))
            world_size = alpha**beta
        kinds = {label: {**kind, "algorithm": network} for label, kind in _kinds().items()}
        measured = _measure(list(kinds.values()), world_size, step_seconds=_STEP_SECONDS.value)
        for label, of_ranks in zip(kinds, measured, strict=True):
            report = of_ranks[0]["report"]
            lanes = [f"{report[name] / 1e6:.1f}" for name in sorted(report) if name.startswith("bytes_sent_on_lane_")][
                1:
            ]
            rate = statistics.mean(each["steps_per_second"] for each in of_ranks)
            rows.append((network, world_size, label, " ".join(lanes), rate))
    _show("networks", ("network", "ranks", "", "MB by lane", "steps / s"), rows)


def _interfaces() -> None:
    kind, rows = _kinds()["BSP float32"], []
    settings = [{**kind, "algorithm": name, "interfaces": used} for name, used in _INTERFACES.items()]
    num_values, world_size = 2 * (_WIDTH.value + 1) * _WIDTH.value, 4
    measured = _measure(
        settings,
        world_size,
        experiment="reduction",
        num_values=num_values,
        link=_INTERFACE_LINK.value,
        num_interfaces=2,
    )
    sent = 2 * (world_size - 1) / world_size * 4 * num_values
    slowest = [max(each["seconds"] for each in of_ranks) for of_ranks in measured]
    for (name, used), seconds, of_ranks in zip(_INTERFACES.items(), slowest, measured, strict=True):
        processors = sum(each["processor_seconds"] for each in of_ranks) / seconds
        rows.append((name, len(used), seconds, sent / seconds / 1e6, processors, slowest[0] / seconds))
    _show("interfaces", ("network", "interfaces", "s", "MB / s", "processors", "over one"), rows)


def _accuracy() -> None:
    n, of_kinds = _WORLD_SIZE.value, {}
    for label, settings in {"PS": _PS, **_beside_bml(n), **_low_rank()}.items():
        if _KINDS_USED.value is not None and label.partition(" bcube")[0] not in _KINDS_USED.value:
            continue
        last, seconds = [], []
        for seed in range(_SEEDS.value):
            num_processes = n + ("strategy" in settings)
            training = _training(seed, _EPOCHS.value, math.inf)
            (of_ranks,) = _measure([settings], num_processes, step_seconds=_STEP_SECONDS.value, **training)
            reached = _print_training(f"{label}, seed {seed}", of_ranks)
            last.append(reached[-1][1])
            seconds.append(next((s for s, accuracy in reached if accuracy >= _TARGET.value), math.inf))
        of_kinds[label] = statistics.mean(seconds), statistics.mean(last)
    fastest, _ = of_kinds.get("SSP sketch", (float("nan"), None))
    rows = [(label, seconds, seconds / fastest, accuracy) for label, (seconds, accuracy) in of_kinds.items()]
    _show("accuracy", ("", f"s to {_TARGET.value}", "over SSP sketch", "accuracy"), rows)


def _print_training(name: str, of_ranks: Sequence[Sequence]) -> list[tuple[float, float]]:
    """Prints and returns the accuracies that rank 0 has reached."""
    reached = of_ranks[0]
    epochs = ", ".join(f"{100 * accuracy:.1f}% {seconds:.0f} s" for seconds, accuracy in reached)
    print(f"{name}: {epochs}", flush=True)
    return reached


def _training(seed: int, epochs: int, seconds: float) -> dict[str, Any]:
    """Returns the case of a training."""
    return {
        "experiment": "accuracy",
        "seed": seed,
        "epochs": epochs,
        "seconds": seconds,
        "learning_rate": _LEARNING_RATE.value,
        "momentum": _MOMENTUM.value,
        "num_rows": _ACCURACY_ROWS.value,
        "batch_size": canary_accuracy.BATCH_SIZE.value,
    }


def _equal_time() -> None:
    kinds = {**_bml(_WORLD_SIZE.value), "SSP sketch": _kinds()["SSP sketch"]}
    accuracies = {label: np.zeros((_SEEDS.value, 2)) for label in kinds}
    for label, seed in itertools.product(kinds, range(_SEEDS.value)):
        found = _without_and_with_a_slow_rank(kinds[label], **_training(seed, _MANY_EPOCHS, _SECONDS.value))
        accuracies[label][seed] = [
            _print_training(f"{label}, seed {seed}, {case}", of_ranks)[-1][1]
            for case, of_ranks in zip(_CASES, found, strict=True)
        ]
    bml, ssp = accuracies.values()
    points = 100 * (ssp - bml)
    rows = [(label, *of_seeds.mean(axis=0)) for label, of_seeds in accuracies.items()]
    _show("equal_time", ("", *_CASES), rows)
    rows = [("mean", *points.mean(axis=0)), ("standard error", *map(results.standard_error, points.T))]
    _show("equal_time_points", ("points above", *_CASES), rows)


def _convergence() -> None:
    canary_accuracy.run(_WORLD_SIZE.value, _EPOCHS.value, _LEARNING_RATE.value, _SEEDS.value)


def _ako() -> None:
    canary_ako.run(_WORLD_SIZE.value, _EPOCHS.value, _SEEDS.value)


_RUN = {
    "traffic": _traffic,
    "straggler": _straggler,
    "networks": _networks,
    "interfaces": _interfaces,
    "accuracy": _accuracy,
    "equal_time": _equal_time,
    "convergence": _convergence,
    "ako": _ako,
}


def main(argv) -> None:
    del argv
    for name in _EXPERIMENTS.value:
        _RUN[name]()


if __name__ == "__main__":
    ranks.serve(_run_rank)
    app.run(main)
