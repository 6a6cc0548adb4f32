"""Operations in which all ranks take part."""

from hop_tf.collectives.all_reduce import ALGORITHMS, AllReduce, MeshAllReduce, RingAllReduce
from hop_tf.collectives.alternatives import Alternatives
from hop_tf.collectives.networks import BCube, Mesh, Network, Route, Tree, get_network
from hop_tf.collectives.routed import RoutedAllReduce, get_algorithm
from hop_tf.collectives.tree import TreeCollectives

__all__ = [
    "ALGORITHMS",
    "AllReduce",
    "Alternatives",
    "BCube",
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
