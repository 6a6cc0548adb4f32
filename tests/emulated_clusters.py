"""Emulated clusters whose faults are known: strategies' own protocols on a virtual clock, recorded as real jobs are.

Ranks, links, sizes, strategies and noise are drawn from a seed: computing varies by 10 % from step to step (lognormal),
links by some 10 % from each other. `run` makes the job again with a change, on the same ranks and links.
"""

import dataclasses
import pathlib

import numpy as np

from hop_tf.records import Recorder, make_recorder
from hop_tf.tools.simulate.rank_loops import OwnSeconds
from hop_tf.tools.simulate.training import Links, simulate_training
from hop_tf.topology import resolve

_FIRST_TIME = 1.7e9
_JITTER = 0.1
_PIPE_SGD, _DTS, _HOP = "PipeSGDStrategy", "DTSStrategy", "HopStrategy"
# Settings that hide no communication, and settings that hide a message behind one step's computing.
_OPEN = (
    (_PIPE_SGD, {"pipeline_width": 1}),
    (_PIPE_SGD, {"pipeline_width": 1, "algorithm": "ring"}),
    (_HOP, {"topology": "ring", "update_order": "serial"}),
    (_HOP, {"topology": "complete", "update_order": "serial"}),
)
_HIDING = (
    (_PIPE_SGD, {"pipeline_width": 2}),
    (_PIPE_SGD, {"pipeline_width": 2, "codec": "int8"}),
    (_HOP, {"topology": "ring"}),
)
# Late links delay no rank: DTS has long delays, and in a directed graph, the rank behind a slow link falls behind.
_PATIENT = (
    (_HOP, {"topology": "exponential"}),
    (_DTS, {"delay": 4, "interval": 2}),
)


@dataclasses.dataclass(kw_only=True)
class EmulatedCluster:
    """A job. Times are seconds, sizes are bytes.

    Attributes:
      seed: Seed of the noise.
      strategy: Name of the strategy: "PipeSGDStrategy", "DTSStrategy" or "HopStrategy".
      settings: Arguments of the strategy.
      world_size: Number of ranks.
      num_values: Number of float32 values that are exchanged.
      compute: Mean computing time of a step, by rank.
      input: Time for which a rank waits for its batch, by rank.
      callbacks: Time of callbacks, by rank.
      now_and_then: By rank, the probability that a step computes longer, and the factor for such a step.
      latency: One-way latencies, array [n, n].
      rate: Bytes per second of links, array [n, n].
      card: Bytes per second of all that a rank sends, array [n]; None: links are independent.
      num_steps: Number of steps of each rank.
    """

    seed: int
    strategy: str
    settings: dict
    world_size: int
    num_values: int
    compute: np.ndarray
    input: np.ndarray
    callbacks: np.ndarray
    latency: np.ndarray
    rate: np.ndarray
    card: np.ndarray | None = None
    now_and_then: dict = dataclasses.field(default_factory=dict)
    num_steps: int = 60

    @classmethod
    def draw(cls, seed, *, hides=None, shares_cards=False, wire_share=(0.01, 0.04), latency_share=(0.002, 0.01)):
        """Returns a random cluster without a fault.

        Args:
          seed: Seed of all random choices.
          hides: True if communication hides behind computing. Default: either.
          shares_cards: True if simultaneous messages of a rank share its card. Together they take as long as without.
          wire_share: Range of the time for the bytes of a step's messages, sent in turn, as a part of its computing.
          latency_share: Range of the time for the latencies of links, as a part of a step's computing.
        """
        generator = np.random.default_rng([seed, 1])
        choices = {None: _OPEN + _HIDING + _PATIENT, False: _OPEN, True: _HIDING}[hides]
        strategy, settings = choices[generator.integers(len(choices))]
        world_size, num_values = int(generator.integers(4, 9)), int(generator.integers(200_000, 4_000_000))
        compute = generator.uniform(0.03, 0.3)
        # Messages after each other, and the bytes of one.
        num_messages, num_bytes = 1, num_values * 4
        if strategy != _HOP:
            num_messages = 2 * (world_size - 1) if settings.get("algorithm") == "ring" else 2
            num_bytes /= world_size * (4 if settings.get("codec") == "int8" else 1)
        rate = num_messages * num_bytes / (compute * generator.uniform(*wire_share))
        latency = compute * generator.uniform(*latency_share) / num_messages
        shape = (world_size, world_size)
        cluster = cls(
            seed=seed,
            strategy=strategy,
            settings=dict(settings),
            world_size=world_size,
            num_values=num_values,
            compute=np.full(world_size, compute) * generator.uniform(0.99, 1.01, world_size),
            input=np.full(world_size, compute * generator.uniform(0.002, 0.01)),
            callbacks=np.full(world_size, compute * generator.uniform(0.001, 0.01)),
            latency=_symmetric(latency * generator.uniform(0.9, 1.1, shape)),
            rate=_symmetric(rate * generator.uniform(0.9, 1.1, shape)),
        )
        if shares_cards:
            cluster.rate *= cluster.num_at_once
            cluster.card = cluster.rate.mean(axis=1)
        return cluster

    @property
    def num_at_once(self):
        """Number of other ranks to which a rank sends at the same time."""
        return 1 if self.settings.get("algorithm") == "ring" else len(self.receivers(0))

    def receivers(self, rank):
        """Returns the ranks to which a rank sends."""
        if self.settings.get("algorithm") == "ring":
            return [(rank + 1) % self.world_size]
        if self.strategy == _HOP:
            return sorted({*resolve(self.settings["topology"], self.world_size).out_neighbors(rank)} - {rank})
        return [other for other in range(self.world_size) if other != rank]

    def run(self, log_dir=None, change=None):
        """Trains, and writes records if there is a directory; returns the seconds of a step.

        Args:
          log_dir: Directory of the records, or None to write none.
          change: A `hop_tf.tools.diagnosis.Change`. Default: none.
        """
        recorders = []
        first = 4 * self.settings["delay"] + self.settings["interval"] if self.strategy == _DTS else 3

        def make(rank, scheduler):
            about = {"number": rank, "rank": rank, "num_ranks": self.world_size, "num_servers": 0}
            settings = {name: repr(value) for name, value in self.settings.items()}
            recorder = make_recorder(
                pathlib.Path(log_dir) / f"rank_{rank}",
                now=lambda: _FIRST_TIME + scheduler.now,
                strategy=self.strategy,
                settings=settings,
                **about,
            )
            recorders.append(recorder)
            # A rank that has made its steps trains on until all have. Of the steps that simulations leave out, readers
            # of the records leave out three themselves.
            steps = range(first - 3, first + self.num_steps + 1)
            recorder.records = lambda step: (step < 0 or step in steps) and Recorder.records(recorder, step)
            return recorder

        shares = np.ones(self.world_size)
        strategy, settings = self.strategy, self.settings
        if change is not None:
            strategy, settings = change.strategy, change.settings
            shares = np.array(change.batch_shares or shares) / np.mean(change.batch_shares or shares)
        try:
            return simulate_training(
                strategy,
                settings,
                world_size=self.world_size,
                num_steps=self.num_steps,
                own=lambda rank: self._own(rank, shares[rank]),
                links=Links(self.latency, self.rate, self.card),
                num_values=self.num_values,
                **({} if log_dir is None else {"recorders": make}),
            ).step_seconds
        finally:
            for recorder in recorders:
                recorder.close()

    def _own(self, rank, share):
        generator = np.random.default_rng([self.seed, 2, rank])
        often, factor = self.now_and_then.get(rank, (0.0, 1.0))
        while True:
            noise, draw = generator.lognormal(0, _JITTER, 3), generator.random()
            yield OwnSeconds(
                compute=self.compute[rank] * share * noise[0] * (factor if draw < often else 1.0),
                input=self.input[rank] * noise[1],
                update=0.005 * self.compute.min(),
                callbacks=self.callbacks[rank] * noise[2],
            )


def draw(kind, seed):
    """Returns a random cluster with a fault.

    Args:
      kind: "slow", "now and then", "bandwidth", "latency", "input", "callbacks", or "nothing".
      seed: Seed of all random choices.

    Returns:
      The cluster; the kind, place, and always or now and then, that a diagnosis must name, or None; and the same
      cluster without the fault.
    """
    generator = np.random.default_rng([seed, 3])
    hides = bool(generator.integers(2)) if kind in ("bandwidth", "latency") else None
    # With a tenth of the bandwidth, communication must take longer than computing hides. Otherwise there is no fault.
    shares = {}
    if kind == "bandwidth":
        shares = {"wire_share": (0.2, 0.35) if hides else (0.02, 0.05)}
    if kind == "latency":
        shares = {"latency_share": (0.15, 0.25) if hides else (0.02, 0.05)}
    shares["shares_cards"] = bool(np.random.default_rng([seed, 4]).integers(2))
    well, cluster = (EmulatedCluster.draw(seed, hides=hides, **shares) for _ in range(2))
    rank = int(generator.integers(cluster.world_size))
    where, is_always = f"rank {rank}", True
    if kind == "slow":
        cluster.compute[rank] *= 3
    elif kind == "now and then":
        cluster.now_and_then[rank] = (generator.uniform(0.1, 0.2), generator.uniform(4, 8))
        is_always = False
    elif kind in ("bandwidth", "latency"):
        where = _spoil_link(kind, cluster, rank, generator)
    elif kind in ("input", "callbacks"):
        getattr(cluster, kind)[rank] += cluster.compute[rank] * generator.uniform(0.5, 2)
    expected = (
        None if kind == "nothing" else ("compute" if kind in ("slow", "now and then") else kind, where, is_always)
    )
    return cluster, expected, well


def _spoil_link(kind, cluster, rank, generator):
    """Makes a link ten times worse that is used; returns its name."""
    others = cluster.receivers(rank)
    if cluster.strategy == _HOP:
        topology = resolve(cluster.settings["topology"], cluster.world_size)
        others = sorted({*topology.in_neighbors(rank), *others} - {rank})
    other = int(generator.choice(others))
    matrix, factor = (cluster.rate, 0.1) if kind == "bandwidth" else (cluster.latency, 10)
    if kind == "bandwidth" and cluster.card is not None:
        factor /= cluster.num_at_once  # Of what it gets of a card.
    matrix[[rank, other], [other, rank]] *= factor
    return " - ".join(f"rank {end}" for end in sorted((rank, other)))


def _symmetric(values):
    return np.triu(values, 1) + np.triu(values, 1).T + np.diag(np.diag(values))
