"""Operations in which all ranks take part."""

import functools
from collections.abc import Callable

from hop_tf.collectives.all_reduce import ALGORITHMS, AllReduce, MeshAllReduce, RingAllReduce
from hop_tf.collectives.alternatives import Alternatives
from hop_tf.collectives.low_rank import LowRankMean
from hop_tf.collectives.networks import BCube, Mesh, Network, Route, Tree, get_network
from hop_tf.collectives.routed import RoutedAllReduce
from hop_tf.collectives.tree import BULK_LANE, TreeCollectives

__all__ = [
    "ALGORITHMS",
    "BULK_LANE",
    "AllReduce",
    "Alternatives",
    "BCube",
    "LowRankMean",
    "Mesh",
    "MeshAllReduce",
    "Network",
    "RingAllReduce",
    "Route",
    "RoutedAllReduce",
    "Tree",
    "TreeCollectives",
    "get_algorithm",
    "get_network",
]


def get_algorithm(name: str) -> Callable[..., AllReduce]:
    """The constructor of the all-reduce with that name: one of `ALGORITHMS`, or a network as of `get_network`."""
    return ALGORITHMS.get(name) or functools.partial(RoutedAllReduce, network=get_network(name))
