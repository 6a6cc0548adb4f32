"""Other libraries for comparison: checks for their packages, setups of their ranks, and PyTorch's training.

PyTorch is the package `torch`. MultiWorkerMirroredStrategy trains only under the package `tf_keras`, because Keras 3
does not support it.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil


def is_installed(package: str) -> bool:
    """True if a package can be imported."""
    return importlib.util.find_spec(package) is not None


def preload(package: str | None) -> None:
    """Imports what a package needs, so that ranks that are forked later need not. Those of hivemind import itself."""
    if package is not None:
        importlib.import_module("tf_keras" if package == "tf_keras" else "torch.distributed")


def set_cluster(rank: int, workers: Sequence[str], servers: Sequence[str] = ()) -> None:
    """Sets TF_CONFIG for a rank: ranks behind the workers are parameter servers."""
    is_worker = rank < len(workers)
    task = {"type": "worker", "index": rank} if is_worker else {"type": "ps", "index": rank - len(workers)}
    cluster = {"worker": list(workers), **({"ps": list(servers)} if servers else {})}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})


def mirrored_strategy(rank: int, workers: Sequence[str]) -> Any:
    """MultiWorkerMirroredStrategy with CommunicationImplementation.RING, made before TensorFlow has done anything."""
    import tensorflow as tf

    set_cluster(rank, workers)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def join_gloo(rank: int, addresses: Sequence[str]) -> Any:
    """Makes torch.distributed's default group of all ranks, each with one thread to compute; returns the package."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    host, port = _split(addresses[0])
    os.environ["GLOO_SOCKET_IFNAME"] = _interface(_split(addresses[rank])[0])
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=len(addresses)
    )
    return torch


def dense(torch: Any, *sizes: int) -> Any:
    """Returns PyTorch's module of dense layers between vectors of these sizes, the last without an activation."""
    pairs = itertools.pairwise(sizes)
    return torch.nn.Sequential(*[layer for pair in pairs for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())][:-1])


def train_torch(
    model: Any,
    optimizer: Any,
    batches: Iterable[tuple[Any, Any]],
    ended: Callable[[], None],
    *,
    durations: Iterable[float] = (),
    average: Callable[[], None] = lambda: None,
) -> None:
    """Trains a classifier with PyTorch.

    If computation is emulated, the rank sleeps between the two passes, as if the backward pass took twice as long as
    the forward pass.

    Args:
      model: The module, which returns logits.
      optimizer: Its optimizer.
      batches: Inputs and labels of each step.
      ended: Called when a step has ended.
      durations: Least duration of each step. Default: none.
      average: Called between the backward pass and the optimizer's step.
    """
    import torch

    loss_of = torch.nn.CrossEntropyLoss()
    for (x, y), duration in zip(batches, durations or itertools.repeat(0.0), strict=False):
        begin = time.monotonic()
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        time.sleep(max(0.0, duration - _PASSES * (time.monotonic() - begin)))
        loss.backward()
        average()
        optimizer.step()
        ended()


def join_torchft(rank: int, addresses: Sequence[str], lighthouses: Sequence[str]) -> tuple[Any, Any]:
    """Makes torchft's manager of a rank that is a replica of its own; returns the package `torch`, and the manager.

    Args:
      rank: The rank. The lighthouse runs at rank 0.
      addresses: "host:port" of each rank, for its store.
      lighthouses: The same with other ports. The first one is that of the lighthouse.
    """
    import torch

    torch.set_num_threads(1)
    host, port = _split(addresses[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = _interface(host)
    if rank == 0:
        _KEPT.append(make_lighthouse(len(addresses), _split(lighthouses[0])[1]))
    timeout = datetime.timedelta(minutes=10)
    about = {"lighthouse_addr": f"http://{lighthouses[0]}", "min_replica_size": len(addresses)}
    about |= {"quorum_timeout": timeout, "use_async_quorum": False}
    about |= {"load_state_dict": None, "state_dict": None, "init_sync": False}  # All have the same weights.
    return torch, make_manager(rank, host, port, timeout, **about)


def make_lighthouse(min_replicas: int, port: int = 0, **settings: int) -> Any:
    """Returns the server at which torchft's ranks meet, at any free port if `port` is 0."""
    import torchft.coordination

    about = {"min_replicas": min_replicas, "join_timeout_ms": 1000, **settings}
    return torchft.coordination.LighthouseServer(f"[::]:{port}", **about)


def make_manager(rank: int, host: str, port: int, timeout: datetime.timedelta, **arguments: Any) -> Any:
    """Makes torchft's manager of a rank that is a replica of its own, with further `arguments` of `torchft.Manager`."""
    import torch.distributed
    import torchft

    store = torch.distributed.TCPStore(host, port, is_master=True, wait_for_workers=False)
    _KEPT.append(store)
    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        replica_id=f"replica_{rank}",
        hostname=host,
        **arguments,
    )


def join_hivemind(rank: int, addresses: Sequence[str], stores: Sequence[str]) -> tuple[Any, Any, Any, Any]:
    """Makes hivemind's DHT; returns `torch`, `hivemind`, the DHT, and a function that ends all processes of hivemind.

    Args:
      rank: The rank.
      addresses: "host:port" of each rank.
      stores: The same with other ports. At the first one, ranks learn rank 0's name.
    """
    import hivemind
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    store = torch.distributed.TCPStore(*_split(stores[0]), is_master=rank == 0, wait_for_workers=False)
    first = [store.get("first").decode()] if rank else []
    host, port = _split(addresses[rank])
    dht = hivemind.DHT(initial_peers=first, host_maddrs=[f"/ip4/{host}/tcp/{port}"], start=True)
    if rank == 0:
        store.set("first", str(dht.get_visible_maddrs()[0]))

    def leave() -> None:
        store.set(f"left {rank}", "")
        store.wait([f"left {each}" for each in range(len(addresses))])
        for process in psutil.Process().children(recursive=True):
            process.kill()

    return torch, hivemind, dht, leave


_PASSES = 3  # A backward pass takes as long as two forward passes.
_KEPT: list[Any] = []  # The servers of this process.


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _interface(address: str) -> str:
    """Name of the network interface with an address. Gloo takes that of the host's name otherwise."""
    return next(name for name, parts in psutil.net_if_addrs().items() if any(part.address == address for part in parts))
