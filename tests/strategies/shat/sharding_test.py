"""Tests of dividing a model among servers."""

import itertools
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.strategies.shat.server import sharding as sharding_module
from hop_tf.strategies.shat.server.sharding import SHARDINGS, ShardPacking, divide, plan_shards
from hop_tf.tensors.packing import Packing, TensorSpec

_SHAPES = [(3, 7), (7,), (1000, 3), (3,), (0, 4), (5, 5, 2), (), (4096,)]
_LAYERS = ["a", "a", "b", "b", "c", "d", "e", "e"]


def _specs(dtypes=(tf.float32,)):
    return [TensorSpec(f"tensor {i}", shape, dtypes[i % len(dtypes)], exact=False) for i, shape in enumerate(_SHAPES)]


def _num_values(shard):
    return sum(piece.stop - piece.start for piece in shard)


class PlanShardsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(sharding=SHARDINGS, num_servers=(1, 2, 3, 4, 7, 40))
    def test_every_value_has_one_server_in_order(self, sharding, num_servers):
        shards = plan_shards(_specs(), _LAYERS, num_servers, sharding)
        self.assertLen(shards, num_servers)
        pieces = [piece for shard in shards for piece in shard]
        covered = [(piece.index, value) for piece in pieces for value in range(piece.start, piece.stop)]
        expected = [(index, value) for index, spec in enumerate(_specs()) for value in range(spec.num_elements)]
        self.assertEqual(covered, expected)
        self.assertTrue(all(piece.start < piece.stop for piece in pieces))

    @parameterized.product(num_servers=(2, 3, 4, 7), dtype=(tf.float32, tf.bfloat16, tf.float64))
    def test_memory_divides_values_evenly(self, num_servers, dtype):
        specs = _specs((dtype,))
        shards = plan_shards(specs, _LAYERS, num_servers, "memory")
        share = sum(spec.num_elements for spec in specs) / num_servers
        for shard in shards:
            self.assertLess(abs(_num_values(shard) - share), 2 * 64 / dtype.size)

    def test_layer_divides_layers_evenly_and_no_tensor(self):
        shards = plan_shards(_specs(), _LAYERS, 2, "layer")
        self.assertEqual([sorted({_LAYERS[p.index] for p in shard}) for shard in shards], [["a", "b"], ["d", "e"]])

    def test_none_gives_all_to_the_first(self):
        shards = plan_shards(_specs(), _LAYERS, 3, "none")
        self.assertEqual([bool(shard) for shard in shards], [True, False, False])

    @parameterized.product(num_servers=(1, 3), piece_values=(16, 32))
    def test_divided_pieces_are_small_and_hold_the_same(self, num_servers, piece_values):
        self.enterContext(mock.patch.object(sharding_module, "_MAX_PIECE_VALUES", piece_values))
        for pieces in plan_shards(_specs(), _LAYERS, num_servers, "memory"):
            divided = divide(pieces)
            self.assertLessEqual(max(piece.stop - piece.start for piece in divided), piece_values)
            for one, next_one in itertools.pairwise(divided):
                self.assertEqual(next_one.start, one.stop if next_one.index == one.index else 0)
            whole, place = Packing(_specs()), ShardPacking
            self.assertEqual(place(whole, divided).ranges, place(whole, pieces).ranges)


class ShardPackingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        sharding=SHARDINGS,
        num_servers=(1, 3, 4),
        dtypes=((tf.float32,), (tf.float32, tf.bfloat16), (tf.float64, tf.float32)),
    )
    def test_shards_are_ranges_of_the_buckets(self, sharding, num_servers, dtypes):
        specs = _specs(dtypes)
        whole = Packing([*specs, TensorSpec("carried", (3,), tf.float32, exact=True)])
        generator = np.random.default_rng(0)
        tensors = [generator.integers(-99, 99, spec.shape).astype(spec.dtype.as_numpy_dtype) for spec in specs]
        buckets = [bucket.numpy() for bucket in whole.pack([*map(tf.constant, tensors), tf.zeros([3])])]
        found = [[] for _ in specs]
        for pieces in plan_shards(specs, _LAYERS, num_servers, sharding):
            if not pieces:
                continue
            shard = ShardPacking(whole, pieces)
            parts = shard.packing.unpack(list(map(tf.constant, shard.cut(buckets))))
            for piece, part in zip(pieces, parts, strict=True):
                found[piece.index].extend(part.numpy().ravel())
        for tensor, values in zip(tensors, found, strict=True):
            self.assertAllEqual(tensor.ravel(), np.array(values, tensor.dtype))


if __name__ == "__main__":
    tf.test.main()
