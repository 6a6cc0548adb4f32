"""Hop's accuracy after many iterations: real gradients in simulated ranks, which take no time but their computation."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import gradients
import keras
import numpy as np
import tensorflow as tf

import hop_tf
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.emulation import ComputeEmulation
from hop_tf.topology import Topology

_STEPS_PER_RECORD = 5


@dataclasses.dataclass(frozen=True)
class Training:
    """The results of a training.

    Attributes:
      simulation: Times of the ranks' iterations, and final parameters.
      recorded: By rank, the weights in every fifth iteration, unless the rank has jumped over it.
      packing: Places of the weights in these vectors.
    """

    simulation: hop_tf.tools.simulate.HopSimulation
    recorded: Sequence[Mapping[int, np.ndarray]]
    packing: Packing

    @property
    def seconds(self) -> float:
        """Virtual time at which ranks had made all iterations, mean over ranks."""
        return float(np.mean(self.simulation.finished_seconds))

    def weights_at(self, seconds: float) -> list[np.ndarray]:
        """Returns the mean of the weights that ranks had recorded last at that time."""
        entered = self.simulation.entered_seconds
        latest = [
            values[max((step for step in values if entered[rank, step] <= seconds), default=0)]
            for rank, values in enumerate(self.recorded)
        ]
        return self._unpack(np.mean(latest, axis=0))

    def weights(self) -> list[np.ndarray]:
        """Returns the mean of the ranks' final weights."""
        return self._unpack(self.simulation.parameters.mean(0))

    def _unpack(self, values: np.ndarray) -> list[np.ndarray]:
        return [weight.numpy() for weight in self.packing.unpack([values])]


def train(
    model: keras.Model,
    data: tuple[np.ndarray, np.ndarray],
    *,
    topology: Topology,
    compute: ComputeEmulation,
    settings: Mapping,
    num_steps: int,
    batch_size: int,
    seed: int,
    decays: bool = True,
    sending_seconds: Callable[[int, int, int], float] | None = None,
) -> Training:
    """Trains at all ranks.

    Args:
      model: A compiled model with which all ranks begin. All its weights are trained, and its optimizer is SGD.
      data: Inputs and targets. Every rank draws from all of them.
      topology: The ranks.
      compute: Emulation that gives the durations of steps.
      settings: Settings of HopStrategy.
      num_steps: Number of iterations of each rank.
      batch_size: Batch size of a rank.
      seed: Seed of the draws.
      decays: True if the learning rate falls to 0 along a cosine. Default True.
      sending_seconds: Argument of `hop_tf.simulate.hop`. Default: no time.

    Returns:
      The training.
    """
    x, y = data
    weights = model.trainable_variables
    packing = Packing([TensorSpec(weight.path, tuple(weight.shape), tf.float32) for weight in weights])
    gradient_at = gradients.flat_gradient(model, weights, packing)
    rate, momentum = float(model.optimizer.learning_rate), model.optimizer.momentum
    velocities = np.zeros((topology.world_size, packing.sizes[0]), np.float32)
    recorded = collections.defaultdict(dict)

    def change(rank: int, step: int, values: np.ndarray) -> np.ndarray:
        if step % _STEPS_PER_RECORD == 0:
            recorded[rank][step] = values
        rows = np.random.default_rng([seed, rank, step]).choice(len(x), batch_size)
        _, gradient = gradient_at(values, x[rows], y[rows])
        rate_now = rate * (1 + math.cos(math.pi * step / num_steps)) / 2 if decays else rate
        velocities[rank] = momentum * velocities[rank] - rate_now * gradient
        return velocities[rank].copy()

    (initial,) = packing.pack(weights)
    result = hop_tf.simulate.hop(
        topology=topology,
        world_size=topology.world_size,
        num_steps=num_steps,
        compute=compute,
        problem=hop_tf.tools.simulate.Problem(initial.numpy(), change),
        sending_seconds=sending_seconds,
        **settings,
    )
    return Training(result, [recorded[rank] for rank in range(topology.world_size)], packing)
