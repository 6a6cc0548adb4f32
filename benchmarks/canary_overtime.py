"""The experiment `overtime` of `benchmark_canary.py`: a rank so slow that the thresholds s and p come into play.

Ranks are simulated: Canary's own exchange on a virtual clock, real gradients of ten dense layers, which are ten
colayers. A step takes a second; its first third is the forward pass, and in the other two thirds colayers leave one
after the other, as in the paper. The slow rank may hold all images of a class: no other rank can replace its drops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence

import gradients
import images
import keras
import numpy as np
import results
import tensorflow as tf
from absl import flags

from hop_tf import codecs
from hop_tf.collectives import get_network
from hop_tf.runtime.exchange import Request
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.canary import colayers
from hop_tf.strategies.canary.exchange import AsyncSettings, CanaryExchange
from hop_tf.strategies.canary.gei import Thresholds
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate import VirtualCluster

_SLOWDOWNS = flags.DEFINE_list("slowdowns", ["10", "22", "30"], "How much slower the last rank is, in `overtime`.")
_THRESHOLDS = flags.DEFINE_list("thresholds", ["0:0", "16:10", "18:6", "4:10"], "s:p of `overtime`; 0:0 drops nothing.")
_SHARDS = flags.DEFINE_list("shards", ["alike", "own_class"], "Of `overtime`; all images of a class may be one rank's.")
_ITERATIONS = flags.DEFINE_integer("iterations", 400, "Of the fast ranks in `overtime`.", lower_bound=1)
_RANK_BATCH = flags.DEFINE_integer("rank_batch", 16, "Rows of a rank's step in `overtime`.", lower_bound=1)

_NUM_LAYERS = 10
_UNITS = 96
_FORWARD = 1 / 3
_LINK_SECONDS = 0.01
_OWN_CLASS = 9
_TITLES = ("shards", "slower", "s:p", "steps made", "colayers left", "dropped", "pulls", "own class", "accuracy")


def run(world_size: int, learning_rate: float, momentum: float, num_rows: int, num_seeds: int, folder: str | None):
    """Prints and writes the fate of the slow rank's steps, and the accuracy. Values are means over the seeds.

    Args:
      world_size: Number of ranks.
      learning_rate: The initial learning rate, which falls to 0 along a cosine.
      momentum: Momentum of SGD.
      num_rows: Number of images to train with.
      num_seeds: Number of trainings of each kind.
      folder: Folder for the results, or None to write nothing.
    """
    data = images.load("fashion_mnist", num_rows=num_rows)
    print(f"\novertime: {world_size} ranks, {_ITERATIONS.value} iterations, {num_seeds} seeds")
    print("  " + "".join(f"{title:>15s}" for title in _TITLES), flush=True)
    with results.table(folder, "canary_overtime", _TITLES) as add:
        for shards in _SHARDS.value:
            for slower in _SLOWDOWNS.value:
                for thresholds in _THRESHOLDS.value:
                    of_seeds = [
                        _Job(data, world_size, shards, float(slower), thresholds, learning_rate, momentum, seed).run()
                        for seed in range(num_seeds)
                    ]
                    row = (shards, slower, thresholds, *np.mean(of_seeds, axis=0))
                    add(row)
                    print("  " + "".join(f"{_shown(cell):>15s}" for cell in row), flush=True)


def _shown(cell: str | float) -> str:
    return cell if isinstance(cell, str) else f"{cell:.4f}" if 0 < cell < 1 else f"{cell:.1f}"


@dataclasses.dataclass
class _Job:
    """One training; see `run`."""

    data: tuple[images.Part, images.Part]
    world_size: int
    shards: str
    slower: float
    thresholds: str
    learning_rate: float
    momentum: float
    seed: int

    def __post_init__(self):
        keras.backend.clear_session()
        keras.utils.set_random_seed(self.seed)
        (self._x, self._y), self._test = self.data
        layers, units = keras.layers, [_UNITS] * (_NUM_LAYERS - 1)
        hidden = [layers.Dense(each, "relu", kernel_initializer="he_normal") for each in units]
        inputs = keras.Input(self._x.shape[1:])
        self._model = keras.Sequential([inputs, layers.Flatten(), *hidden, layers.Dense(10)])
        self._model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        weights = self._model.trainable_variables
        specs = [TensorSpec(weight.path, tuple(weight.shape), tf.float32) for weight in weights]
        self._packing, self._members = Packing(specs), colayers.bundle(specs, _NUM_LAYERS)
        order = [index for colayer in self._members for index in colayer]
        self._whole = self._packing.part(order)
        self._ends = np.cumsum([self._packing.part(members).sizes[0] for members in self._members])
        self._weights = [weights[index] for index in order]
        self._gradient_at = gradients.flat_gradient(self._model, self._weights, self._whole)
        self._cluster = VirtualCluster(self.world_size, lambda *message: _LINK_SECONDS)
        self._num_made = self._num_left = 0
        self._counters = {}

    def run(self) -> tuple[float, ...]:
        """Trains; returns the values of `_TITLES` for the slow rank and the model."""
        (initial,) = self._whole.pack(self._weights)
        self._initial = initial.numpy()
        self._cluster.run(self._train)
        for weight, value in zip(self._weights, self._whole.unpack([self._final]), strict=True):
            weight.assign(value)
        (x, y), counters = self._test, self._counters
        own = y == _OWN_CLASS
        accuracies = images.accuracy(self._model, (x[own], y[own])), images.accuracy(self._model, (x, y))
        return self._num_made, self._num_left, counters["overtime_drops"], counters["pulls"], *accuracies

    @property
    def _slow_rank(self) -> int:
        return self.world_size - 1

    def _train(self, rank: int) -> None:
        membership = self._cluster.memberships[rank]
        membership.begin_session()
        s, p = map(int, self.thresholds.split(":"))
        settings = AsyncSettings(
            network=get_network("mesh"),
            thresholds=Thresholds(s, p),
            codec=codecs.get("sketch"),
            sync_interval=50,
            max_in_flight=4,
        )
        context = ExchangeContext(
            "overtime",
            1,
            self._packing,
            membership,
            BufferPool(),
            start_thread=functools.partial(self._cluster.start_thread, rank),
            trained=[variable.value for variable in self._model.trainable_variables],
        )
        with contextlib.closing(CanaryExchange(context, self._members, settings)) as exchange:
            self._take_steps(rank, exchange)
            membership.leave(sent_rounds={"overtime": exchange.sent_rounds}, reason="done")

    def _take_steps(self, rank: int, exchange: CanaryExchange) -> None:
        empty, step_seconds = (np.empty(0, np.float32),), self.slower if rank == self._slow_rank else 1.0
        rows, sleep = self._rows_of(rank), self._cluster.scheduler.sleep
        weights, velocity, step = self._initial, np.zeros_like(self._initial), 0
        exchange.step(Request(0, exchange.start_segment, (weights,)))
        while step < _ITERATIONS.value:
            chosen = rows[np.random.default_rng([self.seed, rank, step]).choice(len(rows), _RANK_BATCH.value)]
            _, gradient = self._gradient_at(weights, self._x[chosen], self._y[chosen])
            rate = self.learning_rate * (1 + math.cos(math.pi * step / _ITERATIONS.value)) / 2
            before, velocity = velocity, self.momentum * velocity - rate * gradient
            sleep(step_seconds * _FORWARD)
            for colayer, values in enumerate(np.split(velocity, self._ends[:-1])):
                sleep(step_seconds * (1 - _FORWARD) / _NUM_LAYERS)
                buckets = exchange.emit_encode(colayer, [tf.constant(values)])
                result = exchange.step(Request(step, colayer, tuple(bucket.numpy() for bucket in buckets)))
            weights, num_left = np.array(result.buckets[0]), int(exchange.num_left)
            if num_left < _NUM_LAYERS:  # The optimizer forgets dropped steps.
                end = self._ends[num_left - 1] if num_left else 0
                velocity[end:] = before[end:]
            if rank == self._slow_rank:
                self._num_made, self._num_left = self._num_made + 1, self._num_left + num_left
            step += 1 + result.num_skipped
        self._final = exchange.step(Request(step, exchange.finish_segment, empty)).buckets[0]
        if rank == self._slow_rank:
            self._counters = exchange.counters()

    def _rows_of(self, rank: int) -> Sequence[int]:
        if self.shards == "alike":
            return np.arange(len(self._y))
        return np.flatnonzero((self._y == _OWN_CLASS) == (rank == self._slow_rank))
