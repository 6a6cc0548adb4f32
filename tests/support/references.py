"""References for tests, in NumPy, written from definitions: all-reduces, codecs, optimizers, and windows of changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

_INT8_BLOCK = 512


def plain_mean(gradients: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of all ranks' gradients."""
    return np.mean(gradients, axis=0)


def mesh_mean(
    codec: Callable[[np.ndarray], np.ndarray], encodes_own: bool = False
) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """Returns the mean of a mesh: each rank encodes its values, and the owner of a part encodes the sum.

    Args:
      codec: Encodes and decodes a vector.
      encodes_own: True if the owner of a part adds its own values as others would get them. Default False.

    Returns:
      A function of all ranks' gradients that returns their mean.
    """

    def mean(gradients: Sequence[np.ndarray]) -> np.ndarray:
        size = gradients[0].size
        total = np.empty(size)
        num_blocks, world_size = -(-size // _INT8_BLOCK), len(gradients)
        ends = [min(size, num_blocks * i // world_size * _INT8_BLOCK) for i in range(world_size + 1)]
        for owner in range(world_size):
            where = slice(ends[owner], ends[owner + 1])
            parts = [g.ravel()[where] for g in gradients]
            parts = [part if rank == owner and not encodes_own else codec(part) for rank, part in enumerate(parts)]
            total[where] = codec(np.mean(parts, axis=0))
        return total.reshape(gradients[0].shape)

    return mean


def truncate16(values: np.ndarray) -> np.ndarray:
    """Keeps the upper half of each float32."""
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)


def int8(values: np.ndarray) -> np.ndarray:
    """Rounds values to multiples of a 127th of their block's largest magnitude."""
    blocks = np.pad(values, (0, -values.size % _INT8_BLOCK)).reshape(-1, _INT8_BLOCK)
    scales = np.maximum(np.abs(blocks).max(1, keepdims=True), 1e-30) / 127
    return (np.rint(blocks / scales) * scales).ravel()[: values.size]


@dataclasses.dataclass(frozen=True)
class State:
    """Weights, with the slots of an optimizer."""

    w: np.ndarray
    m: np.ndarray
    v: np.ndarray
    count: int = 0

    @classmethod
    def of(cls, w: np.ndarray) -> State:
        """The state of weights before the first update."""
        w = w.astype(np.float64)
        return cls(w, np.zeros_like(w), np.zeros_like(w))


Update = Callable[[State, np.ndarray], State]


def sgd(rate: float, momentum: float = 0.0, nesterov: bool = False, decay: float = 0.0) -> Update:
    """The update of Keras's SGD."""

    def update(state: State, g: np.ndarray) -> State:
        w = state.w * (1 - rate * decay)
        m = momentum * state.m - rate * g
        return State(w + (momentum * m - rate * g if nesterov else m), m, state.v)

    return update


def adam(rate: float, epsilon: float, decay: float = 0.0, beta_1: float = 0.9, beta_2: float = 0.999) -> Update:
    """The update of Keras's Adam and AdamW."""

    def update(state: State, g: np.ndarray) -> State:
        count = state.count + 1
        m = state.m + (g - state.m) * (1 - beta_1)
        v = state.v + (g * g - state.v) * (1 - beta_2)
        corrected = rate * np.sqrt(1 - beta_2**count) / (1 - beta_1**count)
        w = state.w * (1 - rate * decay) - corrected * m / (np.sqrt(v) + epsilon)
        return State(w, m, v, count)

    return update


class Lengths:
    """Measures what ranks multiply their changes by: as much as the mean is shorter than these.

    Args:
      world_size: Number of ranks.
      are_changed: False: by 1.
    """

    def __init__(self, world_size: int, are_changed: bool):
        self._are_changed = are_changed
        self.factors = [1.0] * world_size

    def note(self, mean: np.ndarray, own: Sequence[np.ndarray]) -> None:
        """Notes the changes in a window that was merged."""
        if self._are_changed:
            ratios = [np.sqrt(np.sum(np.square(each)) / np.sum(np.square(mean))) for each in own]
            self.factors = np.clip(ratios, 1, np.sqrt(len(own)))


def late_windows(
    w: np.ndarray,
    update: Update,
    gradient: Callable[[int, int, np.ndarray], np.ndarray],
    *,
    world_size: int,
    delay: int,
    interval: int,
    num_steps: int,
    mean: Callable[[Sequence[np.ndarray]], np.ndarray] = plain_mean,
    outer: Update | None = None,
    adaptive: bool = False,
) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """Trains ranks whose weights are the merged weights plus their own steps that are not merged yet, at full size.

    A step is the change that the rank's own optimizer adds to the weights. The mean of `interval` steps of all ranks is
    merged at a time, `delay` steps late. The remaining steps are merged at the end.

    Args:
      w: The initial weights.
      update: The update of the ranks' optimizers.
      gradient: `gradient(rank, step, w)`.
      world_size: Number of ranks.
      delay: D.
      interval: p.
      num_steps: Steps of each rank.
      mean: The mean of all ranks' changes.
      outer: The update of the outer optimizer. None: the mean is added.
      adaptive: True: changes are made longer when a window ends; see `Lengths`.

    Returns:
      Each rank's weights after each step, and the final weights of all.
    """
    merged, num_merged = State.of(w), 0
    lengths = Lengths(world_size, adaptive)
    states, steps, history = [merged] * world_size, [[] for _ in range(world_size)], []

    def lengthen(number: int) -> None:
        for factor, own in zip(lengths.factors, steps, strict=True):
            own[-1] = own[-1] + (factor - 1) * np.sum(own[-number:], axis=0)

    def merge(stop: int) -> None:
        nonlocal merged, num_merged
        changes = [np.sum(own[num_merged:stop], axis=0) for own in steps]
        change = mean(changes)
        lengths.note(change, changes)
        merged = outer(merged, -change) if outer else dataclasses.replace(merged, w=merged.w + change)
        num_merged = stop

    for step in range(num_steps):
        for rank, state in enumerate(states):
            states[rank] = update(state, gradient(rank, step, state.w))
            steps[rank].append(states[rank].w - state.w)
        due = step + 1 - delay
        if (step + 1) % interval == 0:
            lengthen(interval)
        if due > 0 and due % interval == 0:
            merge(due)
        for rank, own in enumerate(steps):
            w = merged.w + np.sum(own[num_merged:], axis=0)
            states[rank] = dataclasses.replace(states[rank], w=w)
        history.append([state.w for state in states])
    if rest := num_steps % interval:
        lengthen(rest)
    while num_merged < num_steps:
        merge(min(num_merged + interval, num_steps))
    return history, merged.w


def momentum_windows(
    w: np.ndarray,
    rate: Callable[[int], float],
    gradient: Callable[[int, int, np.ndarray], np.ndarray],
    *,
    momentum: float,
    nesterov: bool = False,
    world_size: int,
    delay: int,
    interval: int,
    num_steps: int,
    mean: Callable[[Sequence[np.ndarray]], np.ndarray] = plain_mean,
    warmup_steps: int = 0,
) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """Trains ranks by SGD with momentum, in which late means take the place of what a rank's own gradients have moved.

    In the last of n steps, the gradient of step i counts m^(n-i) in the velocity, and the sum of m^0 to m^(n-i) in the
    weights (Equation 6). With Nesterov's momentum that is the sum of m^0 to m^(n-i+1). What a window has moved is the
    sum over its gradients, in its last step. A difference of the velocity there counts in weights ever after, too.

    Args:
      w: The initial weights.
      rate: The learning rate of a step.
      gradient: `gradient(rank, step, w)`.
      momentum: m.
      nesterov: True for Nesterov's momentum.
      world_size: Number of ranks.
      delay: D.
      interval: p.
      num_steps: Steps of each rank.
      mean: The mean of all ranks' moves, of shape [2, ...]: of weights and of the velocity.
      warmup_steps: The first steps, each a window that is merged at once.

    Returns:
      See `late_windows`.
    """
    own, differences, history = [[] for _ in range(world_size)], [[] for _ in range(world_size)], []

    def powers(number: int) -> float:
        return sum(momentum**k for k in range(number))

    def moved(rank: int, steps: range) -> np.ndarray:
        moves = [(steps[-1] - step, -rate(step) * own[rank][step]) for step in steps]
        return np.sum([[powers(age + 1 + nesterov) * move, momentum**age * move] for age, move in moves], axis=0)

    def weights_of(rank: int, num_done: int) -> np.ndarray:
        total = w + moved(rank, range(num_done))[0] if num_done else w.astype(np.float64)
        for end, (of_weights, of_velocity) in differences[rank]:
            total = total + of_weights + (powers(num_done - end + 1 + nesterov) - powers(1 + nesterov)) * of_velocity
        return total

    def merge(steps: range) -> None:
        moves = [moved(rank, steps) for rank in range(world_size)]
        common = mean(moves)
        for rank, move in enumerate(moves):
            differences[rank].append((steps.stop, common - move))

    for step in range(num_steps):
        for rank in range(world_size):
            own[rank].append(gradient(rank, step, weights_of(rank, step)))
        due = step + 1 - delay
        if step < warmup_steps:
            merge(range(step, step + 1))
        elif due > warmup_steps and (due - warmup_steps) % interval == 0:
            merge(range(due - interval, due))
        history.append([weights_of(rank, step + 1) for rank in range(world_size)])
    while (begin := differences[0][-1][0] if differences[0] else 0) < num_steps:
        merge(range(begin, min(begin + interval, num_steps)))
    return history, weights_of(0, num_steps)


def gentle_windows(
    w: np.ndarray,
    update: Update,
    gradient: Callable[[int, int, np.ndarray], np.ndarray],
    *,
    world_size: int,
    delay: int,
    interval: int,
    num_steps: int,
    mean: Callable[[Sequence[np.ndarray]], np.ndarray] = plain_mean,
    kappa: float = 0.5,
    t_1: float = 10,
    t_2: float = 40,
    momentum: float | None = None,
    warmup_steps: int = 0,
    adaptive: bool = False,
) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """Trains ranks that are given what has arrived bit by bit, and whose own changes in flight count kappa.

    Ranks lack two parts of what has arrived: `apart` differs by rank, and `behind` is the same for all.
    Arguments and results are those of `late_windows`, without an outer optimizer. With a `momentum`, velocities take
    part in what a mean changes. In the first `warmup_steps` steps, each mean is merged at once.
    """
    merged, behind, history = w.astype(np.float64), 0.0, []
    states, known, apart = [State.of(w)] * world_size, [merged] * world_size, [0.0] * world_size
    in_flight: list[tuple[int, list[np.ndarray]]] = []
    lengths = Lengths(world_size, adaptive)

    def changes(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        together = zip(lengths.factors, weights, known, strict=True)
        return [factor * (after - before) for factor, after, before in together]

    covered, covered_behind = (1 - (1 - 1 / t) ** interval for t in (t_1, t_2))

    def merge() -> None:
        nonlocal merged, behind
        _, own = in_flight.pop(0)
        change = mean(own)
        lengths.note(change, own)
        merged, behind = merged + change, behind + (1 - kappa) * change
        for rank in range(world_size):
            apart[rank] = apart[rank] + kappa * (change - own[rank])
            if momentum is not None:
                m = states[rank].m + momentum**delay / interval * (change - own[rank])
                states[rank] = dataclasses.replace(states[rank], m=m)

    for step in range(1, num_steps + 1):
        states = [update(state, gradient(rank, step - 1, state.w)) for rank, state in enumerate(states)]
        weights = [state.w for state in states]
        if step <= warmup_steps:
            own = changes(weights)
            merged = merged + mean(own)
            lengths.note(mean(own), own)
            moves = [0.0 if momentum is None else mean(own) - each for each in own]
            states = [
                State(merged, state.m + move, state.v, state.count) for state, move in zip(states, moves, strict=True)
            ]
            known = [merged] * world_size
            history.append(known)
            continue
        has_ended = (step - warmup_steps) % interval == 0
        if has_ended:
            own = changes(weights)
            in_flight.append((step, own))
            weights = [before + kappa * each for before, each in zip(known, own, strict=True)]
        while in_flight and in_flight[0][0] + delay <= step:
            merge()
        if has_ended:
            weights = [each + covered * apart[rank] + covered_behind * behind for rank, each in enumerate(weights)]
            apart, behind = [(1 - covered) * each for each in apart], (1 - covered_behind) * behind
            known = weights
        states = [dataclasses.replace(state, w=each) for state, each in zip(states, weights, strict=True)]
        history.append(weights)
    if max(0, num_steps - warmup_steps) % interval:
        in_flight.append((num_steps, changes([state.w for state in states])))
    while in_flight:
        merge()
    return history, merged
