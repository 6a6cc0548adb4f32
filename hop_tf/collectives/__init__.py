"""Operations in which all ranks take part."""

from hop_tf.collectives.all_reduce import ALGORITHMS, AllReduce, MeshAllReduce, RingAllReduce
from hop_tf.collectives.tree import BULK_LANE, TreeCollectives

__all__ = ["ALGORITHMS", "BULK_LANE", "AllReduce", "MeshAllReduce", "RingAllReduce", "TreeCollectives"]
