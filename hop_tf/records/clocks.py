"""How far the clocks of machines are apart, by the round trips that ranks make anyhow.

Who sends a heartbeat at t0 by its own clock, and has the answer at t1 with the other's reading s, knows that s was made
between the two. NTP's formula takes the middle, and is wrong by half of the round trip at most:

    offset  =  s - (t0 + t1) / 2

Of many, the shortest round trips tell most. Clocks drift apart by some millionths, so that the offset at a time is
interpolated. Processes of one system share its clock.

Reference: D. Mills, "Internet Time Synchronization: the Network Time Protocol", IEEE Transactions on Communications 39
(1991), section 4.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import networkx as nx
import numpy as np

# Of the samples of two clocks those count whose round trip is at most so many times the shortest one.
_MOST_TIMES_SHORTEST = 2.0


def offset_of(there: float, received_at: float, round_trip_seconds: float) -> float:
    """The other's clock less this one's: that one has answered with `there`, which came at `received_at`."""
    return there - (received_at - round_trip_seconds / 2)


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one heartbeat has told.

    Attributes:
      time: On the clock of who has sent it.
      offset_seconds: See above.
      round_trip_seconds: How long the answer took.
    """

    time: float
    offset_seconds: float
    round_trip_seconds: float

    @property
    def there(self) -> float:
        """The same time on the other's clock."""
        return self.time + self.offset_seconds


class Clocks:
    """Brings the times of several clocks to one of them.

    Args:
      names: Of each process (by any key), the name of its clock.
      samples: Of pairs of processes, what the first one's heartbeats to the second one have told.

    Attributes:
      errors: Of each clock, by its name, by how much its times may be wrong, in seconds: half of the shortest round
        trips on the way to the first one. A clock that no samples lead to is as it is, and has infinity.
    """

    def __init__(self, names: Mapping[object, str], samples: Mapping[tuple[object, object], Sequence[Sample]]):
        self._names = dict(names)
        self._pairs: dict[tuple[str, str], list[Sample]] = {}
        for (one, other), of_pair in samples.items():
            if one in names and other in names and names[one] != names[other]:
                self._pairs.setdefault((names[one], names[other]), []).extend(of_pair)
        graph = nx.Graph()
        graph.add_nodes_from(self._names.values())
        for (one, other), of_pair in self._pairs.items():
            shortest = min(sample.round_trip_seconds for sample in of_pair)
            known = graph.get_edge_data(one, other, {"weight": np.inf})["weight"]
            graph.add_edge(one, other, weight=min(shortest, known))
        self._first = next(iter(self._names.values()), "")
        lengths, self._paths = nx.single_source_dijkstra(graph, self._first) if self._names else ({}, {})
        self.errors = {name: lengths.get(name, np.inf) / 2 for name in self._names.values()}

    def align(self, process: object, times: np.ndarray) -> np.ndarray:
        """Times on a process's clock as times on the first process's clock."""
        path = self._paths.get(self._names[process], ())[::-1]
        aligned = np.asarray(times, np.float64)
        for here, there in itertools.pairwise(path):
            aligned = aligned + self._offsets(here, there, aligned)
        return aligned

    def _offsets(self, here: str, there: str, times: np.ndarray) -> np.ndarray:
        """What clock `there` is ahead of clock `here`, at times on the latter."""
        samples = [(s.time, s.offset_seconds, s.round_trip_seconds) for s in self._pairs.get((here, there), ())]
        for sample in self._pairs.get((there, here), ()):
            samples.append((sample.there, -sample.offset_seconds, sample.round_trip_seconds))
        samples.sort()
        when, offsets, round_trips = np.array(samples).T
        good = round_trips <= _MOST_TIMES_SHORTEST * round_trips.min()
        return np.interp(times, when[good], offsets[good])
