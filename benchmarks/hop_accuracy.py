"""Hop's accuracy after many iterations: real gradients in simulated ranks, which take no time but their computation."""

from __future__ import annotations

import math
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

import hop_tf
from hop_tf.emulation import ComputeEmulation
from hop_tf.topology import Topology


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
) -> None:
    """Trains at all ranks, and gives `model` the mean of their weights.

    Args:
      model: A compiled model, whose weights are all trained and whose optimizer is SGD. It says where all ranks begin;
        its learning rate falls to 0 along a cosine.
      data: Inputs and targets. Every rank draws from all of them.
      topology: The ranks.
      compute: How long steps take.
      settings: Those of HopStrategy.
      num_steps: Iterations of each rank.
      batch_size: Of a rank.
      seed: Of the draws.
    """
    x, y = data
    weights = model.trainable_variables
    sizes = [int(np.prod(weight.shape)) for weight in weights]
    rate, momentum = float(model.optimizer.learning_rate), model.optimizer.momentum

    @tf.function
    def gradient_at(values: tf.Tensor, rows: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        for weight, part in zip(weights, tf.split(values, sizes), strict=True):
            weight.assign(tf.reshape(part, weight.shape))
        with tf.GradientTape() as tape:
            loss = model.compute_loss(rows, targets, model(rows, training=True))
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        return tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)

    velocities = np.zeros((topology.world_size, sum(sizes)), np.float32)

    def change(rank: int, step: int, values: np.ndarray) -> np.ndarray:
        rows = np.random.default_rng([seed, rank, step]).choice(len(x), batch_size)
        gradient = gradient_at(tf.constant(values), tf.constant(x[rows]), tf.constant(y[rows])).numpy()
        rate_now = rate * (1 + math.cos(math.pi * step / num_steps)) / 2
        velocities[rank] = momentum * velocities[rank] - rate_now * gradient
        return velocities[rank].copy()

    initial = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    result = hop_tf.simulate.hop(
        topology=topology,
        world_size=topology.world_size,
        num_steps=num_steps,
        compute=compute,
        problem=hop_tf.simulate.Problem(initial, change),
        **settings,
    )
    parts = np.split(result.parameters.mean(0), np.cumsum(sizes)[:-1])
    model.set_weights([part.reshape(weight.shape) for part, weight in zip(parts, weights, strict=True)])
