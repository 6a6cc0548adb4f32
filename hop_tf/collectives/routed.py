"""`RoutedAllReduce`: all-reduce on the routes of a network. See `hop_tf.collectives.networks`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from hop_tf.collectives.all_reduce import ALGORITHMS, AllReduce
from hop_tf.collectives.networks import Network, Route, get_network
from hop_tf.collectives.operation import Data, Operation
from hop_tf.collectives.vectors import Arrays, Vectors, Where
from hop_tf.transport.base import BULK_LANE

_UP, _DOWN = 0, 1


class RoutedAllReduce(AllReduce):
    """An all-reduce in which every chunk travels on its route as soon as it can: all interfaces are busy at once.

    A value is encoded once on each edge of its way up, and once more for all of its way down.

    A mesh has an algorithm of its own, `MeshAllReduce`, in which each step waits for known messages of all others. This
    class takes any awaited message that comes, and keeps a state for each chunk. On a mesh of three ranks or more, both
    classes send the same messages. When ranks have left, this class uses a mesh.

    Args:
      *args: See `AllReduce`.
      network: The network. When ranks have left, a mesh of the others replaces it.
      **kwargs: See `AllReduce`.
    """

    def __init__(self, *args, network: Network, **kwargs):
        super().__init__(*args, **kwargs)
        self._network = network

    def _reduce(self, operation: Operation, vectors: Vectors, values: Arrays, results: Arrays) -> None:
        flows = self._flows(operation, vectors)
        for flow in flows:
            self._go_up(operation, vectors, values, results, flow)
        waiting = {key: flow for flow in flows for key in self._awaited(operation, flow)}
        while waiting:
            key, data = operation.receive_any(waiting)
            flow = waiting.pop(key)
            if flow.is_going_down:
                self._go_down(operation, vectors, results, flow, data)
                continue
            flow.parts.append((key, data))
            if len(flow.parts) == flow.num_children:
                self._go_up(operation, vectors, values, results, flow)
                if flow.is_going_down:
                    waiting.update(dict.fromkeys(self._awaited(operation, flow), flow))

    def _flows(self, operation: Operation, vectors: Vectors) -> list[_Flow]:
        """All chunks. The first chunks of all pieces come first, and among these the longest routes."""
        num_ranks, mine = len(operation.ranks), operation.index
        routes = self._network.routes_among(num_ranks)
        pieces = vectors.pieces(len(routes))
        flows = [
            _Flow(route, mine, turn=2 * number, chunk=chunk, where=where)
            for number, route in enumerate(routes)
            for chunk, where in enumerate(pieces[number])
        ]
        # Each rank begins with the next root, so that not all ranks send to the same one at once.
        return sorted(
            flows, key=lambda flow: (flow.chunk, -flow.route.num_hops(mine), (flow.route.root - mine - 1) % num_ranks)
        )

    def _awaited(self, operation: Operation, flow: _Flow) -> list[tuple]:
        """The keys of the chunks to receive next."""
        if flow.is_going_down:
            return [] if flow.parent is None else [operation.key(flow.parent, flow.turn + _DOWN, flow.chunk)]
        return [operation.key(child, flow.turn + _UP, flow.chunk) for child in flow.children]

    def _go_up(self, operation: Operation, vectors: Vectors, values: Arrays, results: Arrays, flow: _Flow) -> None:
        """Passes on the sum of this rank's subtree, or at the root the mean, once all parts have come."""
        if len(flow.parts) < flow.num_children:
            return
        parts = [data for _, data in sorted(flow.parts, key=lambda part: part[0])]  # All ranks sum in the same order.
        flow.parts.clear()
        flow.is_going_down = True
        if flow.parent is None:
            data = vectors.encode_mean(values, flow.where, parts, len(operation.ranks))
            operation.commit()
            self._go_down(operation, vectors, results, flow, data)
            return
        data = vectors.encode_sum(values, flow.where, parts) if parts else vectors.encode(values, flow.where)
        lane = BULK_LANE + flow.route.levels[operation.index]
        operation.send(operation.ranks[flow.parent], flow.turn + _UP, flow.chunk, data, lane)

    def _go_down(self, operation: Operation, vectors: Vectors, results: Arrays, flow: _Flow, data: Data) -> None:
        """Passes a mean on to the children, and decodes it."""
        for child in flow.children:
            lane = BULK_LANE + flow.route.levels[child]
            operation.send(operation.ranks[child], flow.turn + _DOWN, flow.chunk, data, lane)
        vectors.decode(data, results, flow.where)


@dataclasses.dataclass
class _Flow:
    """The state of a chunk on one rank. Ranks are numbered as in the route.

    Attributes:
      route: The chunk's route.
      rank: The rank.
      turn: A number that distinguishes the route in messages.
      chunk: Number of the chunk in its piece.
      where: The chunk's place in the vectors.
      parts: The data that have come from children.
      is_going_down: True if this rank's part of the way up is done.
    """

    route: Route
    rank: int
    turn: int
    chunk: int
    where: Where
    parts: list = dataclasses.field(default_factory=list)
    is_going_down: bool = False

    @property
    def parent(self) -> int | None:
        return self.route.parents[self.rank]

    @property
    def children(self) -> tuple[int, ...]:
        return self.route.children[self.rank]

    @property
    def num_children(self) -> int:
        return len(self.children)


def get_algorithm(name: str) -> Callable[..., AllReduce]:
    """The constructor of the all-reduce with that name: one of `ALGORITHMS`, or a network as for `get_network`."""
    return ALGORITHMS.get(name) or functools.partial(RoutedAllReduce, network=get_network(name))
