"""Tests of `GraphEncoding`: when the graph encodes, and that ranks with and without a GPU train alike."""

import types
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.runtime import gradients, graph_encoding
from hop_tf.runtime.ways import Way, list_ways
from hop_tf.tensors.packing import Packing, TensorSpec
from support import in_process

_INT8, _TRUNCATE16 = codecs.Int8(), codecs.Truncate16()
_GPU, _CPU = "/job:localhost/replica:0/task:0/device:GPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"
# With kernels for bytes, if bytes are among their arguments here.
_ON_GPUS = {"AddV2", "Bitcast", "Cast", "ConcatV2", "Const", "Mul", "Reshape", "StridedSlice"}
_PARTS = [Packing([TensorSpec("kernel", (600,), tf.float32), TensorSpec("mean", (5,), tf.float32, exact=True)])]


def _find(
    codec, algorithm="mesh", world_size=3, ways=None, continues=False, device=_GPU, has_kernels=True, parts=_PARTS
):
    membership = types.SimpleNamespace(world_size=world_size, continue_without_lost=continues)
    context = types.SimpleNamespace(membership=membership, trained=[types.SimpleNamespace(device=device)])
    with mock.patch.object(graph_encoding, "build_info", lambda: {"cuda": has_kernels}):
        return graph_encoding.find_encoding(context, parts, ways or list_ways(algorithm, codec, world_size))


class GraphEncodingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (_INT8, 608 + 4 * 2),
        (_TRUNCATE16, 2 * 608),
        (_TRUNCATE16, 2 * 608, {"algorithm": "auto"}),
        (_INT8, 2 * (608 + 4 * 2), {"world_size": 2}),
        (_INT8, 608 + 4 * 2, {"world_size": 2, "algorithm": "ring"}),
    )
    def test_encodes(self, codec, num_bytes, settings=None):
        """Only what need not stay exact; 600 values are padded to 608."""
        encoding = _find(codec, **(settings or {}))
        self.assertEqual(encoding.result_sizes(0), [num_bytes // 4, 16])
        buckets = [tf.random.normal([size]) for size in _PARTS[0].sizes]
        encoded, exact = encoding.emit_encode(0, buckets)
        self.assertAllEqual(exact, buckets[1])
        copies = num_bytes // encoded.shape[0] // 4
        decoded, exact = encoding.emit_decode(0, [tf.tile(encoded, [copies]), exact])
        self.assertAllEqual(exact, buckets[1])
        self.assertAllClose(decoded, buckets[0], atol=0.02)

    @parameterized.product(codec=(_INT8, _TRUNCATE16), world_size=(2, 3))
    def test_all_operations_have_kernels_for_gpus(self, codec, world_size):
        """TensorFlow would run others on the host, without a word. `tf.split` of bytes is one of them."""
        encoding = _find(codec, world_size=world_size)
        with tf.Graph().as_default() as graph:
            part, sizes = _PARTS[0], encoding.result_sizes(0)
            encoding.emit_encode(0, [tf.zeros([size]) for size in part.sizes])
            encoding.emit_decode(0, [tf.zeros([size]) for size in sizes])
        found = {operation.type for operation in graph.get_operations()}
        self.assertLessEqual({each for each in found if not each.startswith("HopTf")}, _ON_GPUS)

    @parameterized.parameters(
        (codecs.Identity(),),
        (codecs.QuantileSketch(),),
        (codecs.Int8(block_size=None),),
        (codecs.Int8(error_feedback=True),),
        (codecs.TopK(ratio=0.1, error_feedback=True),),
        (codecs.LowRank(),),
        ("auto",),
        (_INT8, {"ways": [Way("mesh", _INT8), Way("mesh", _TRUNCATE16)]}),
        (_INT8, {"world_size": 1}),
        (_INT8, {"continues": True}),
        (_INT8, {"device": _CPU}),
        (_INT8, {"has_kernels": False}),
        (_INT8, {"parts": [Packing([TensorSpec("large", (1 << 31,), tf.float32)])]}),
    )
    def test_leaves_it_to_the_host(self, codec, settings=None):
        self.assertIsNone(_find(codec, **(settings or {})))

    @parameterized.product(
        settings=(
            {"codec": "int8", "pipeline_width": 2, "num_segments": 2},
            {"codec": "truncate16", "pipeline_width": 1, "algorithm": "ring"},
        ),
        world_size=(3, 2),
    )
    @pytest.mark.stress(after=1)
    def test_one_rank_has_a_gpu(self, settings, world_size):
        """All ranks get the same weights, of any type, beside variables that are not trained."""
        cluster = in_process(hop_tf.PipeSGDStrategy, world_size, **settings)
        with (
            mock.patch.object(graph_encoding, "runs_on_gpu", lambda variables: True),
            mock.patch.object(gradients, "find_encoding", _find_at_rank_0),
        ):
            weights = cluster.run(_train)
        for mine in weights:
            self.assertAllEqual(mine, weights[0])
        without, *_ = in_process(hop_tf.PipeSGDStrategy, world_size, **settings).run(_train)
        self.assertAllClose(weights[0], without, atol=0.02)


def _find_at_rank_0(context, parts, ways):
    return graph_encoding.find_encoding(context, parts, ways) if context.membership.rank == 0 else None


def _dense(num_units, dtype):
    return keras.layers.Dense(num_units, kernel_initializer=keras.initializers.GlorotUniform(seed=1), dtype=dtype)


def _train(strategy):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(120, 8)).astype(np.float32), random.normal(size=(120, 3)).astype(np.float32)
    with strategy.scope():
        layers = [
            _dense(200, "bfloat16"),
            keras.layers.BatchNormalization(),
            _dense(70, "float16"),
            _dense(3, "float32"),
        ]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse")
    model.fit(x, y, batch_size=30, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([variable.numpy().astype(np.float32).ravel() for variable in model.trainable_variables])


if __name__ == "__main__":
    absltest.main()
