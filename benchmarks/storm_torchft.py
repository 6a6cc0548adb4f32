"""torchft in the storm of `benchmark_storm.py`: its manager averages gradients among ranks that come and go.

A rank that has lost a peer discards the step, and goes on with the others. A new process takes the weights of a peer.
Ranks notice a loss after a second of silence. A lost rank's rows are left out: each rank has its own part of a batch.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import peers
from sklearn.datasets import load_digits

SILENCE_MS = 1000


def train(folder: str, num_steps: int, batch_size: int, step_seconds: float) -> tuple[float, str]:
    """Trains a rank, as `_train` of `benchmark_storm.py` does, and writes its steps to the same file."""
    import torch
    import torchft

    torch.set_num_threads(1)
    torch.manual_seed(0)
    cluster = json.loads(os.environ["TF_CONFIG"])
    rank, world_size = cluster["task"]["index"], len(cluster["cluster"]["worker"])
    model = peers.dense(torch, 64, 64, 10)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def save() -> dict:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    silence = datetime.timedelta(milliseconds=SILENCE_MS)
    states = {"load_state_dict": load, "state_dict": save}
    manager = peers.make_manager(rank, "127.0.0.1", 0, silence, min_replica_size=1, **states)
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy((x / 16).astype(np.float32)), torch.from_numpy(y)
    rows, step = batch_size // world_size, 0

    def batches() -> Iterator[tuple[Any, Any]]:
        nonlocal step
        while (step := manager.current_step()) < num_steps:
            first = (step * batch_size + rank * rows) % (len(x) - rows)
            yield x[first : first + rows], y[first : first + rows]

    def average() -> None:
        # torchft's DistributedDataParallel (0.2.0) ends with an AssertionError if a peer is lost.
        gradients = [parameter.grad for parameter in model.parameters()]
        mean = torch.nn.utils.parameters_to_vector(gradients)
        manager.allreduce(mean).wait()
        torch.nn.utils.vector_to_parameters(mean, gradients)

    def ended() -> None:
        if manager.current_step() > step:
            with open(pathlib.Path(folder, f"rank_{rank}"), "a") as file:
                file.write(f"{time.time()} {rows}\n")

    durations = itertools.repeat(step_seconds)
    optimizer = torchft.Optimizer(manager, inner)
    peers.train_torch(model, optimizer, batches(), ended, durations=durations, average=average)
    accuracy = float((model(x).argmax(1) == y).float().mean())
    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    manager.shutdown()
    return accuracy, hashlib.sha256(weights).hexdigest()
