"""Records of jobs that never ran: each rank sends its update to all others in every step, and waits for theirs.

A step of rank r begins at b(r). With what it computes c, the one-way latency L and rate R of a link, and B bytes,

    ready(r)  =  b(r) + c(r)
    done(r)   =  max over q of  ready(q) + L(q, r) + B / R(q, r),  and ready(r)
    next b(r) =  done(r) + update + callbacks(r) + input(r)
"""

import dataclasses
import itertools
import pathlib

import numpy as np

from hop_tf.records import Kind, make_recorder

_SMALL_BYTES = 64
_FIRST_TIME = 1.7e9


@dataclasses.dataclass(kw_only=True)
class SyntheticJob:
    """Writes the records of a job that never ran. Times are seconds, sizes are bytes.

    Attributes:
      seed: Seed of random variations.
      num_ranks: Number of ranks.
      num_steps: Number of steps of each rank.
      compute: Computing time of a step, by rank. Random variations span 5 %.
      input: Time for which a rank waits for its batch, by rank.
      callbacks: Time between two steps, by rank.
      now_and_then: By rank, the probability that a step computes longer, and the factor for such a step.
      latency: One-way latency, by the link's two ends, of links that are not usual.
      rate: Bytes per second, by the link's two ends, of links that are not usual.
      num_bytes: Size of an update.
      num_values: Number of values that ranks record for their variables, or 0 to record none.
      restarts: By rank, the step before which its process ends and another process takes over.
      usual_compute: Computing time of other ranks.
      usual_latency: Latency of other links.
      usual_rate: Rate of other links.
    """

    seed: int
    num_ranks: int = 4
    num_steps: int = 80
    compute: dict = dataclasses.field(default_factory=dict)
    input: dict = dataclasses.field(default_factory=dict)
    callbacks: dict = dataclasses.field(default_factory=dict)
    now_and_then: dict = dataclasses.field(default_factory=dict)
    latency: dict = dataclasses.field(default_factory=dict)
    rate: dict = dataclasses.field(default_factory=dict)
    num_bytes: int = 1_000_000
    num_values: int = 0
    restarts: dict = dataclasses.field(default_factory=dict)
    usual_compute: float = 0.05
    usual_latency: float = 1e-3
    usual_rate: float = 200e6

    def write(self, log_dir):
        """Writes the records; returns the mean time of a step."""
        ranks = range(self.num_ranks)
        recorders = [self._start(log_dir, rank, _FIRST_TIME) for rank in ranks]
        generator = np.random.default_rng(self.seed)
        begins = [_FIRST_TIME + self._input(rank) for rank in ranks]
        for step in range(self.num_steps):
            for rank in (rank for rank, at in self.restarts.items() if at == step):
                recorders[rank].close()
                recorders[rank] = self._start(log_dir, rank, begins[rank] - self._input(rank))
            computes = [self._compute(rank, generator) for rank in ranks]
            begins = self._step(recorders, step, begins, computes)
        for recorder in recorders:
            recorder.close()
        return (begins[0] - _FIRST_TIME) / self.num_steps

    def _start(self, log_dir, rank, now):
        """Makes the recorder of a rank's process that starts."""
        about = {"number": rank, "num_ranks": self.num_ranks, "num_servers": 0, "strategy": "S"}
        recorder = make_recorder(pathlib.Path(log_dir) / f"rank_{rank}", now=lambda: now, **about)
        recorder.session = 1
        if self.num_values:
            recorder.add_line("group", num_values=self.num_values)
        return recorder

    def _compute(self, rank, generator):
        often, factor = self.now_and_then.get(rank, (0.0, 1.0))
        usual = self.compute.get(rank, self.usual_compute) * generator.uniform(0.975, 1.025)
        return usual * (factor if generator.random() < often else 1.0)

    def _input(self, rank):
        return self.input.get(rank, 2e-4)

    def _step(self, recorders, step, begins, computes):
        ranks = range(self.num_ranks)
        ready = [begin + compute for begin, compute in zip(begins, computes, strict=True)]
        come = {}
        for sender, receiver in itertools.permutations(ranks, 2):
            link = frozenset((sender, receiver))
            latency = self.latency.get(link, self.usual_latency)
            way = {"lane": 1, "num_bytes": self.num_bytes, "number": step + 1, "step": step, "name": "update"}
            small = {**way, "lane": 0, "num_bytes": _SMALL_BYTES}
            come[sender, receiver] = ready[sender] + latency + self.num_bytes / self.rate.get(link, self.usual_rate)
            for message, when in ((small, ready[sender] + latency), (way, come[sender, receiver])):
                recorders[sender].add(Kind.SEND, ready[sender], 1e-5, peer=receiver, **message)
                recorders[receiver].add(Kind.RECEIVE, when, 1e-5, peer=sender, **message)
        following = []
        for rank, recorder in enumerate(recorders):
            last = max((other for other in ranks if other != rank), key=lambda other, rank=rank: come[other, rank])
            done = max(ready[rank], come[last, rank])
            ended = done + 5e-4
            called = begins[rank] - self._input(rank)
            waited = {"begin": ready[rank], "seconds": done - ready[rank], "step": step}
            recorder.add(Kind.STEP, called, ended - called, step=step)
            recorder.add(Kind.COMPUTE, begins[rank], computes[rank], step=step)
            recorder.add(Kind.EXCHANGE, **waited)
            if done > ready[rank]:
                recorder.add(Kind.RESULT, **waited)
                recorder.add(Kind.WAIT, **waited, peer=last, name="receive update")
            following.append(ended + self.callbacks.get(rank, 1e-4) + self._input(rank))
        return following
