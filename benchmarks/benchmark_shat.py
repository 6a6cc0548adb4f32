"""SHAT: the paper's Table 2, and its Figures 4 to 6, in the small.

    python benchmarks/benchmark_shat.py --experiments=accuracy,stragglers
    python benchmarks/benchmark_shat.py --experiments=accuracy --dataset=cifar10 --cifar10=cifar10.npz
    python benchmarks/benchmark_shat.py --experiments=sharding --links=1e9
    python benchmarks/benchmark_shat.py --quick

accuracy    Table 2: ENSEMBLE, ASP, SHAT-Root and SHAT with 2 to 16 workers, on a virtual clock (`shat_accuracy.py`).
            Each with the one of --learning_rates that is best on held-out data, and the largest stable one.
            Figure 4: with that rate, the accuracy of the server's model after each eighth of the training.
rates       The learning rate and momentum that training alone stands, with 2 to 16 workers: Algorithm 1 beside what
            `SHATParameterServerStrategy` does by default (`shat_rates.py`).
stragglers  Figure 5: one worker is 2, 10 or 100 times slower than the others, on the same clock.
sharding    Figure 6: the throughput of workers with --num_servers servers, without sharding, by layers and by values.
            Workers and servers are processes, hosts of an emulated network (`network.py`, which needs root). --links
            are those of the servers; workers' are --num_servers times as fast. The model has the proportions of VGG:
            one layer has nine tenths of its parameters; with --equal_layers those of ResNet: none is much larger than
            the others. Required: at least 2.5 times the throughput of one server with four, at 1 Gbit/s.
death       One of --num_workers workers, with emulated computation of --step_seconds, is killed (SIGKILL) after a third
            of --num_steps steps: the others' speed from then on, over that before. Loopback. Required: at least 0.95.
memory      How far the memory of one server grows while --num_workers train, in vectors of --num_values parameters:
            what it keeps are 1 for SGD, and 3 for Adam. Loopback.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import time
from collections.abc import Mapping

import keras
import numpy as np
import ranks
import results
import shat_accuracy
import shat_rates
from absl import app, flags, logging

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation
from hop_tf.tools.testing import network

_EXPERIMENTS = flags.DEFINE_list(
    "experiments", ["accuracy", "rates", "stragglers", "sharding", "death", "memory"], "What to run."
)
_QUICK = flags.DEFINE_bool("quick", False, "Small sizes for all that is not given: whether it works, in a minute.")
_NUM_WORKERS = flags.DEFINE_integer("num_workers", 4, "Workers of what runs in processes.", lower_bound=2)
_NUM_SERVERS = flags.DEFINE_integer("num_servers", 4, "Servers of `sharding` and `death`.", lower_bound=1)
_LINKS = flags.DEFINE_list("links", ["1e9"], "Rates of the servers' links, in bits per second.")
_NUM_VALUES = flags.DEFINE_integer("num_values", 8_000_000, "Parameters of the models there.", lower_bound=20000)
_EQUAL_LAYERS = flags.DEFINE_bool("equal_layers", False, "Whether the layers of `sharding` are equally large.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 8, "Timed steps, of `death` at least 30.", lower_bound=1)
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.3, "Least duration of a step of `death`.", lower_bound=0.0)

_SMALL = {
    "models": ["small"],
    "methods": ["asp", "shat"],
    "world_sizes": ["2", "4"],
    "slowdowns": ["1", "10"],
    "num_samples": 2000,
    "epochs": 1.0,
    "seeds": 1,
    "num_workers": 2,
    "num_servers": 2,
    "num_values": 200_000,
    "num_steps": 3,
    "links": ["1e8"],
}
_SHARDINGS = ("none", "layer", "memory")
_SKIPPED_STEPS = 3
# The inputs of the layer with most of the parameters, and the number of the other layers.
_WIDTH, _NUM_SMALL_LAYERS = 500, 7


class _Clock(keras.callbacks.Callback):
    """Records the end of each step. Kills the process after `dies_after` steps, unless that is None."""

    def __init__(self, dies_after: int | None):
        super().__init__()
        self.times: list[float] = []
        self._dies_after = dies_after

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter())
        if len(self.times) == self._dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


def _model(num_values: int, equal_layers: bool) -> keras.Model:
    dense = keras.layers.Dense
    if equal_layers:
        width = round((num_values / (_NUM_SMALL_LAYERS + 1)) ** 0.5)
        return keras.Sequential([keras.Input((width,)), *(dense(width, "relu") for _ in range(_NUM_SMALL_LAYERS + 1))])
    small = round((0.1 * num_values / _NUM_SMALL_LAYERS) ** 0.5)
    layers = [dense(small, "relu") for _ in range(_NUM_SMALL_LAYERS)]
    return keras.Sequential(
        [keras.Input((small,)), *layers, dense(_WIDTH, "relu"), dense(round(0.9 * num_values / _WIDTH))]
    )


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _serve_case(case: Mapping, rank: int) -> list[float] | int:
    """Runs a process; returns the end times of a worker's steps, or the bytes by which a server has grown."""
    (addresses,) = case["addresses"]
    num_workers = case["num_workers"]
    cluster = {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}
    is_worker = rank < num_workers
    task = {"type": "worker", "index": rank} if is_worker else {"type": "ps", "index": rank - num_workers}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    before = _peak_bytes()
    try:
        # The paper's rule: servers that run the optimizer have most to do, and to keep.
        strategy = hop_tf.SHATParameterServerStrategy(pushes="gradients", sharding=case["sharding"])
    except SystemExit:
        return _peak_bytes() - before
    with strategy.scope():
        model = _model(case["num_values"], case["equal_layers"])
        model.compile(case["optimizer"], "mse")
    num_rows = num_workers * (_SKIPPED_STEPS + case["num_steps"])
    x = np.zeros((num_rows, model.input_shape[-1]), np.float32)
    y = np.zeros((num_rows, model.output_shape[-1]), np.float32)
    clock = _Clock(case["dies_after"] if rank == num_workers - 1 else None)
    model.fit(x, y, batch_size=num_workers, verbose=0, callbacks=[clock])
    strategy.shutdown()
    return clock.times


def _run_sharding() -> None:
    reason = network.available()
    if reason is not None:
        print(f"\nsharding: left out, as it needs an emulated network ({reason})")
        return
    num_workers, num_servers = _NUM_WORKERS.value, _NUM_SERVERS.value
    print(
        f"\nsharding: {num_workers} workers, {num_servers} servers, {_NUM_VALUES.value} parameters; pushes a second of "
        "all workers [times that of one server]"
    )
    print(f"  {'link':>10} " + " ".join(f"{sharding:>18}" for sharding in _SHARDINGS))
    for link in _LINKS.value:
        speeds = {sharding: _throughput(sharding, link) for sharding in _SHARDINGS}
        shown = [f"{speed:8.2f} [{speed / speeds['none']:.2f}]".rjust(18) for speed in speeds.values()]
        print(f"  {float(link):10.2g} " + " ".join(shown), flush=True)
        for sharding, speed in speeds.items():
            results.note("pushes per second", f"{sharding}, {link}", speed)


def _throughput(sharding: str, link: str) -> float:
    """Returns the pushes per second of all workers."""
    rates = [float(link) * _NUM_SERVERS.value] * _NUM_WORKERS.value + [float(link)] * _NUM_SERVERS.value
    found = _run(_NUM_SERVERS.value, link, sharding=sharding, bandwidth_bits_per_second=rates)
    durations = [np.diff(times)[_SKIPPED_STEPS - 1 :] for times in found[: _NUM_WORKERS.value]]
    return sum(1 / statistics.median(each) for each in durations)


def _run_death() -> None:
    num_steps = max(30, _NUM_STEPS.value)
    dies_after, victim = _SKIPPED_STEPS + num_steps // 3, _NUM_WORKERS.value - 1
    emulation = ComputeEmulation(step_seconds=_STEP_SECONDS.value).to_environment()
    found = _run(_NUM_SERVERS.value, num_steps=num_steps, dies_after=dies_after, killed=[victim], environment=emulation)
    print(f"\ndeath: one of {_NUM_WORKERS.value} workers is killed after {dies_after} of its steps; steps a second")
    print(f"  {'worker':>6} {'before':>8} {'after':>8} {'ratio':>6}")
    for rank, times in enumerate(found[:victim]):
        parts = times[_SKIPPED_STEPS:dies_after], times[dies_after - 1 :]
        before, after = (1 / np.diff(part).mean() for part in parts)
        print(f"  {rank:6} {before:8.3f} {after:8.3f} {after / before:6.3f}", flush=True)
        results.note("death: speed kept", f"worker {rank}", after / before)


def _run_memory() -> None:
    print(f"\nmemory: one server of {_NUM_WORKERS.value} workers, vectors of {_NUM_VALUES.value} float32")
    for optimizer in ("sgd", "adam"):
        growth = _run(1, optimizer=optimizer)[-1] / (4 * _NUM_VALUES.value)
        print(f"  {optimizer:5} {growth:6.2f}", flush=True)
        results.note("memory: vectors", optimizer, growth)


def _run(
    num_servers: int,
    link: str = ranks.LOOPBACK,
    *,
    num_steps: int | None = None,
    optimizer: str = "sgd",
    sharding: str = "memory",
    dies_after: int | None = None,
    environment: Mapping[str, str] | None = None,
    **arguments,
) -> list:
    """Runs the processes; returns their results, workers first. `arguments` are those of `ranks.run`."""
    case = {
        "sharding": sharding,
        "optimizer": optimizer,
        "num_workers": _NUM_WORKERS.value,
        "num_values": _NUM_VALUES.value,
        "equal_layers": _EQUAL_LAYERS.value,
        "num_steps": num_steps or _NUM_STEPS.value,
        "dies_after": dies_after,
    }
    environment = {"TF_NUM_INTRAOP_THREADS": "1", **(environment or {})}
    num_hosts = _NUM_WORKERS.value + num_servers
    return ranks.run(__file__, case, num_hosts, link, num_ports=1, environment=environment, **arguments)


def main(argv: list[str]) -> None:
    """Runs the requested experiments."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    logging.set_verbosity(logging.ERROR)
    if _QUICK.value:
        for name, value in _SMALL.items():
            if not flags.FLAGS[name].present:
                flags.FLAGS[name].value = value
    experiments = {
        "accuracy": shat_accuracy.run_accuracy,
        "rates": shat_rates.run_rates,
        "stragglers": shat_accuracy.run_stragglers,
        "sharding": _run_sharding,
        "death": _run_death,
        "memory": _run_memory,
    }
    for name in _EXPERIMENTS.value:
        if name not in experiments:
            raise app.UsageError(f"--experiments must be among {', '.join(experiments)}. Received: {name!r}.")
        experiments[name]()


if __name__ == "__main__":
    ranks.serve(_serve_case)
    app.run(main)
