"""Other libraries for comparison: checks for their packages, and setups of their ranks.

PyTorch is the package `torch`. MultiWorkerMirroredStrategy trains only under the package `tf_keras`, because Keras 3
does not support it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from typing import Any

import psutil


def is_installed(package: str) -> bool:
    """True if a package can be imported."""
    return importlib.util.find_spec(package) is not None


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
    host, _, port = addresses[0].rpartition(":")
    os.environ["GLOO_SOCKET_IFNAME"] = _interface(addresses[rank].rpartition(":")[0])
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=len(addresses)
    )
    return torch


def _interface(address: str) -> str:
    """Name of the network interface with an address. Gloo takes that of the host's name otherwise."""
    return next(name for name, parts in psutil.net_if_addrs().items() if any(part.address == address for part in parts))
