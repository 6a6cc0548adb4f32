"""Other libraries that train the tasks of `benchmark_delay.py`: the same weights, the same batches.

If computation is emulated, PyTorch's ranks sleep between the two passes (see `peers.train_torch`). Ranks of tf_keras
sleep for the whole time of a step.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import delay_ranks
import delay_tasks
import keras
import numpy as np
import peers

from hop_tf.tools.emulation import ComputeEmulation

DDP, MIRRORED, DILOCO, HIVEMIND = "ddp", "mirrored", "diloco", "hivemind"
_PACKAGES = {DDP: "torch", MIRRORED: "tf_keras", DILOCO: "torchft", HIVEMIND: "hivemind"}
_MATCHMAKING = {"min_matchmaking_time": 2.0, "request_timeout": 1.5}  # hivemind's defaults are for large steps.


def package_of(kind: str) -> str | None:
    """Returns the package that trains a kind such as "ddp" or "diloco:20:8:2", or None if that is hop_tf."""
    return _PACKAGES.get(kind.partition(":")[0])


def train(case: Mapping, rank: int) -> delay_ranks.Trained:
    """Trains by DistributedDataParallel over gloo, MultiWorkerMirroredStrategy, torchft's DiLoCo, or hivemind."""
    trains = {DDP: _train_ddp, MIRRORED: _train_mirrored, DILOCO: _train_diloco, HIVEMIND: _train_hivemind}
    return trains[case["kind"].partition(":")[0]](case, rank)


def _step_durations(case: Mapping, rank: int) -> Iterator[float]:
    """Returns the least duration of each step of a rank."""
    emulation = ComputeEmulation.from_environment(os.environ)
    return itertools.repeat(0.0) if emulation is None else emulation.step_durations(rank, case["world_size"])


def _own(rows: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """Returns a rank's part of global batches."""
    return np.split(rows, world_size, axis=1)[rank]


def _train_mirrored(case: Mapping, rank: int) -> delay_ranks.Trained:
    import tensorflow as tf
    import tf_keras

    tf.config.threading.set_intra_op_parallelism_threads(1)
    workers, _ = case["addresses"]
    strategy = peers.mirrored_strategy(rank, workers)  # Must be made before TensorFlow has done anything.
    task, data, test, rows, clock = delay_ranks.load(case, rank)
    template = task.make_model(keras, case["seed"])
    with strategy.scope():
        model = task.make_model(tf_keras, case["seed"])
        model.set_weights(template.get_weights())
        model.compile(delay_ranks.make_optimizer(tf_keras, case, len(rows)), "sparse_categorical_crossentropy")
    durations = _step_durations(case, rank)
    note = tf_keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: time.sleep(next(durations)),
        on_train_batch_end=lambda batch, logs: clock.step(model.get_weights),
    )
    own = delay_tasks.batches(data, _own(rows, rank, len(workers)))
    model.fit(
        strategy.distribute_datasets_from_function(lambda context: own),
        epochs=case["epochs"],
        steps_per_epoch=len(rows) // case["epochs"],
        verbose=0,
        callbacks=[note],
    )
    return delay_ranks.evaluated(template, model.get_weights(), clock, test, rank)


# PyTorch. Parameters have the shapes that Keras gives them, so that weights go from one to the other as they are.


def _train_ddp(case: Mapping, rank: int) -> delay_ranks.Trained:
    """Trains `ddp`, or with a hook: `ddp:fp16`, or `ddp:powersgd:rank:start`, by default of rank 4 after 2 steps."""
    torch = peers.join_gloo(rank, case["addresses"][0])
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    _, *hook = case["kind"].split(":")

    def distribute(network: Any, optimizer: Any) -> Any:
        model = torch.nn.parallel.DistributedDataParallel(network)
        if hook[:1] == ["powersgd"]:
            state = powerSGD_hook.PowerSGDState(None, *_given(hook[1:], 4, 2))
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif hook:
            model.register_comm_hook(None, getattr(default_hooks, f"{hook[0]}_compress_hook"))
        return model

    return _train_torch(torch, case, rank, distribute)


def _given(texts: Sequence[str], *defaults: int) -> tuple[int, ...]:
    """Returns the numbers of a label, and the defaults of those that are left out."""
    return (*map(int, texts), *defaults[len(texts) :])


def _train_diloco(case: Mapping, rank: int) -> delay_ranks.Trained:
    """Trains `diloco:interval:delay:fragments`, by default 20, 0, 1, with the outer optimizer of DiLoCo's authors.

    A fragment is sent every `interval` steps, and takes effect `delay` steps later, which is the end of its interval.
    """
    torch, manager = peers.join_torchft(rank, *case["addresses"])
    from torchft.local_sgd import DiLoCo

    interval, delay, num_fragments = _given(case["kind"].split(":")[1:], 20, 0, 1)

    def distribute(network: Any, optimizer: Any) -> Any:
        values = list(network.parameters())
        bounds = np.linspace(0, len(values), num_fragments + 1).astype(int)
        fragments = [torch.nn.ParameterList(values[begin:end]) for begin, end in itertools.pairwise(bounds)]
        outer = [torch.optim.SGD(each.parameters(), 0.7, momentum=0.9, nesterov=True) for each in fragments]
        DiLoCo(manager, fragments, optimizer, outer, interval, fragment_sync_delay=delay).__enter__()
        return network

    return _train_torch(torch, case, rank, distribute)


def _train_hivemind(case: Mapping, rank: int) -> delay_ranks.Trained:
    """Trains `hivemind:interval`, by default 20: local SGD, whose parameters hivemind averages every `interval` steps.

    The ranks look for each other before, while they compute.
    """
    torch, hivemind, dht, leave = peers.join_hivemind(rank, *case["addresses"])
    (interval,) = _given(case["kind"].split(":")[1:], 20)

    def distribute(network: Any, optimizer: Any) -> Any:
        values = [parameter.data for parameter in network.parameters()]
        sizes = dict.fromkeys(("min_group_size", "target_group_size"), case["world_size"])
        averager = hivemind.DecentralizedAverager(values, dht, start=True, prefix="values", **sizes, **_MATCHMAKING)
        steps, groups = itertools.count(1), []

        def average(*_: Any) -> None:
            step = next(steps)
            if step % interval == 1:
                groups.append(averager.step(wait=False, require_trigger=True))
            elif step % interval == 0:
                with averager.get_tensors() as averaged:
                    torch._foreach_copy_(averaged, values)
                group = groups.pop()
                group.allow_allreduce()
                group.result()
                with averager.get_tensors() as averaged:
                    torch._foreach_copy_(values, averaged)

        optimizer.register_step_post_hook(average)
        return network

    trained = _train_torch(torch, case, rank, distribute)
    leave()
    return trained


def _train_torch(torch: Any, case: Mapping, rank: int, distribute: Callable[[Any, Any], Any]) -> delay_ranks.Trained:
    """Trains with PyTorch.

    Args:
      torch: The package.
      case: The case.
      rank: The rank.
      distribute: `distribute(network, optimizer)` returns the module that ranks train together.
    """
    task, (x, y), test, rows, clock = delay_ranks.load(case, rank)
    template = task.make_model(keras, case["seed"])
    network = _make_network(torch, template.get_weights())
    optimizer = _make_optimizer(torch, network.parameters(), case["optimizer"])
    model = distribute(network, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / len(rows))) / 2)
    x, y = torch.from_numpy(x), torch.from_numpy(y).long()

    def get_weights() -> list[np.ndarray]:
        return [parameter.detach().numpy().copy() for parameter in network.parameters()]

    def ended() -> None:
        schedule.step()
        clock.step(get_weights)

    batches = ((x[chosen], y[chosen]) for chosen in torch.from_numpy(_own(rows, rank, case["world_size"])))
    peers.train_torch(model, optimizer, batches, ended, durations=_step_durations(case, rank))
    return delay_ranks.evaluated(template, get_weights(), clock, test, rank)


def _make_network(torch: Any, weights: Sequence[np.ndarray]) -> Any:
    """Returns a module with these parameters, in this order: convolutions, and dense layers."""
    functional = torch.nn.functional

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.values = torch.nn.ParameterList(torch.nn.Parameter(torch.from_numpy(each)) for each in weights)

        def forward(self, x):
            pairs = list(zip(self.values[::2], self.values[1::2], strict=True))
            for kernel, bias in pairs[:-1]:
                if kernel.ndim == 4:
                    x = functional.conv2d(x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), bias)
                    x = functional.max_pool2d(functional.relu(x), 2).permute(0, 2, 3, 1)
                else:
                    x = functional.relu(x.flatten(1) @ kernel + bias)
            kernel, bias = pairs[-1]
            return x @ kernel + bias

    return Network()


def _make_optimizer(torch: Any, parameters: Any, name: str) -> Any:
    """Returns an optimizer with the defaults of Keras's."""
    options = {"eps": 1e-7, "weight_decay": 0.004} if name == "AdamW" else delay_ranks.OPTIMIZERS[name]
    return getattr(torch.optim, name)(parameters, delay_ranks.RATES[name], **options)
