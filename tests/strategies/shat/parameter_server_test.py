"""Tests of a parameter server without a transport: optimizers, Algorithm 1, consistency, files."""

import errno
import gc
import itertools
import json
import os
import pathlib
import tempfile
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from disks import fill, mounted_disk
from hop_tf import codecs
from hop_tf.errors import HopError, MismatchError, ProtocolError
from hop_tf.keras_hook.optimizers import serialized_for_server
from hop_tf.strategies.shat.server import snapshots as snapshots_module
from hop_tf.strategies.shat.server import wire
from hop_tf.strategies.shat.server.consistency import Consistency
from hop_tf.strategies.shat.server.encoding import Encoding
from hop_tf.strategies.shat.server.group import Gradient, ServedGroup
from hop_tf.strategies.shat.server.shard import Shard, is_elementwise
from hop_tf.strategies.shat.server.sharding import ShardPacking, plan_shards
from hop_tf.strategies.shat.server.snapshots import Snapshots
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.tensors import payloads
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec

_RATE = 0.1
_SHAPES = [(5, 16), (16,), (300,), (3, 3)]
_LAYERS = ["a", "a", "b", "c"]

_OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(_RATE),
    "Nesterov": lambda: keras.optimizers.SGD(_RATE, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(_RATE, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(_RATE, weight_decay=0.01),
    "RMSprop": lambda: keras.optimizers.RMSprop(_RATE, momentum=0.5, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(_RATE),
    "Lion": lambda: keras.optimizers.Lion(_RATE, weight_decay=0.01),
    "Nadam": lambda: keras.optimizers.Nadam(_RATE),
    "Adamax": lambda: keras.optimizers.Adamax(_RATE),
    "Adadelta": lambda: keras.optimizers.Adadelta(_RATE),
    "Ftrl": lambda: keras.optimizers.Ftrl(_RATE),
    "average": lambda: keras.optimizers.SGD(_RATE, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
}


def _packing():
    return Packing([TensorSpec(f"layer/{i}", shape, tf.float32) for i, shape in enumerate(_SHAPES)])


def _random_buckets(generator, packing):
    return [
        generator.normal(size=size).astype(dtype.as_numpy_dtype)
        for size, dtype in zip(packing.sizes, packing.dtypes, strict=True)
    ]


def _shards(packing, optimizer, num_servers, sharding="memory", decays=None):
    decays = decays or [True] * len(packing.specs)
    places = [ShardPacking(packing, pieces) for pieces in plan_shards(packing.specs, _LAYERS, num_servers, sharding)]
    text = serialized_for_server(optimizer)
    return [(place, Shard(place.packing, text, [decays[p.index] for p in place.pieces])) for place in places]


def _unpacked(packing, buckets):
    return [tensor.numpy() for tensor in packing.unpack([tf.constant(bucket) for bucket in buckets])]


class ShardTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(sorted(_OPTIMIZERS))
    @pytest.mark.stress(after=2)
    def test_equals_the_optimizer_on_the_whole_model(self, name):
        packing, generator = _packing(), np.random.default_rng(0)
        initial = _random_buckets(generator, packing)
        decays = [True, False, True, True]
        whole = _OPTIMIZERS[name]()
        variables = [keras.Variable(values) for values in _unpacked(packing, initial)]
        whole.exclude_from_weight_decay(var_list=[variables[1]])
        shards = _shards(packing, whole, 2, decays=decays)
        for place, shard in shards:
            shard.assign(place.cut(initial))
        for step in range(4):
            rate, gradients = _RATE / (step + 1), _random_buckets(generator, packing)
            whole.learning_rate = rate
            whole.apply([tf.constant(g) for g in _unpacked(packing, gradients)], variables)
            for place, shard in shards:
                shard.apply(place.cut(gradients), rate)
        found = [np.zeros_like(bucket) for bucket in initial]
        for place, shard in shards:
            for (bucket, where), values in zip(place.ranges, shard.read(), strict=True):
                found[bucket][where] = values
            self.assertEqual(shard.iterations, 4)
        for variable, values in zip(variables, _unpacked(packing, found), strict=True):
            self.assertAllClose(variable, values, rtol=1e-6, atol=1e-6)

    def test_leaves_to_workers_what_is_theirs(self):
        optimizer = keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.1), clipvalue=1e-3, gradient_accumulation_steps=4
        )
        packing = _packing()
        ((place, shard),) = _shards(packing, optimizer, 1)
        gradients = _random_buckets(np.random.default_rng(0), packing)
        for _ in range(2):
            shard.apply(place.cut(gradients), 0.25)
        for tensor, values in zip(_unpacked(packing, gradients), _unpacked(packing, shard.read()), strict=True):
            self.assertAllClose(values, -0.5 * tensor, rtol=1e-6)

    def test_goes_on_with_slots_of_another(self):
        packing, generator = _packing(), np.random.default_rng(0)
        (_, first), *_ = _shards(packing, keras.optimizers.Adam(_RATE), 1)
        gradients = [_random_buckets(generator, packing) for _ in range(6)]
        for each in gradients[:3]:
            first.apply(each, _RATE)
        (_, second), *_ = _shards(packing, keras.optimizers.Adam(_RATE), 1)
        second.assign(first.read())
        second.assign_slots(first.slots())
        second.iterations = first.iterations
        for each in gradients[3:]:
            first.apply(each, _RATE)
            second.apply(each, _RATE)
        self.assertAllEqual(first.read()[0], second.read()[0])

    def test_what_was_read_stays(self):
        packing = Packing([TensorSpec("w", (64,), tf.float32)])
        shard = Shard(packing, serialized_for_server(keras.optimizers.SGD(_RATE)), [True])
        (before,) = shard.read()
        shard.apply([np.ones(64, np.float32)], 1.0)
        self.assertAllEqual(before, np.zeros(64))
        self.assertAllEqual(shard.read()[0], -np.ones(64))

    @parameterized.parameters(sorted(_OPTIMIZERS))
    @pytest.mark.stress(but=11)
    def test_gradients_are_not_written_to(self, name):
        """Others may hold the same arrays, because aligned gradients that are a whole bucket are not copied."""
        packing, pool = Packing([TensorSpec("w", (4096,), tf.float32)]), BufferPool()
        shard = Shard(packing, serialized_for_server(_OPTIMIZERS[name]()), [True])
        gradient = pool.take(4 * 4096).view(np.float32)
        gradient[:] = values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
        for _ in range(3):
            shard.apply([gradient], _RATE)
        self.assertAllEqual(gradient, values)

    @parameterized.parameters(sorted(_OPTIMIZERS))
    @pytest.mark.stress(after=5)
    def test_slots_that_were_read_stay(self, name):
        packing, generator = _packing(), np.random.default_rng(0)
        ((_, shard),) = _shards(packing, _OPTIMIZERS[name](), 1)
        shard.apply(_random_buckets(generator, packing), _RATE)
        slots = shard.slots()
        values = {key: array.copy() for key, array in slots.items()}
        for _ in range(3):
            shard.apply(_random_buckets(generator, packing), _RATE)
        for key, array in slots.items():
            self.assertAllEqual(array, values[key])

    def test_leaves_gpus_to_workers(self):
        """All operations are on the processor, except reading variables, which are there, and returning results."""
        packing, elsewhere = _packing(), ("Placeholder", "NoOp", "ReadVariableOp", "Identity")
        ((_, shard),) = _shards(packing, _OPTIMIZERS["average"](), 1)
        devices = {op.device for op in shard._apply.graph.get_operations() if op.type not in elsewhere}
        self.assertEqual({tf.DeviceSpec.from_string(each).device_type for each in devices}, {"CPU"})

    @parameterized.parameters("Adafactor", "Lamb", "Muon")
    @pytest.mark.stress(but=1)
    def test_knows_optimizers_of_whole_tensors(self, name):
        packing = _packing()
        text = serialized_for_server(getattr(keras.optimizers, name)())
        shard = Shard(packing, text, [True] * len(packing.specs))
        shard.apply(_random_buckets(np.random.default_rng(0), packing), _RATE)
        self.assertEqual(shard.iterations, 1)

    def test_other_optimizers_may_look_at_whole_tensors(self):
        for name in ("Lamb", "Muon", "Adafactor"):
            self.assertFalse(is_elementwise(getattr(keras.optimizers, name)))
        self.assertFalse(is_elementwise(type("Mine", (keras.optimizers.Adam,), {})))
        self.assertTrue(is_elementwise(keras.optimizers.AdamW))


def _group(consistency, num_workers, num_values=4, carried=(), max_staleness=16):
    specs = [TensorSpec("w", (num_values,), tf.float32)]
    specs += [TensorSpec(f"carried {i}", shape, tf.float32, exact=True) for i, shape in enumerate(carried)]
    packing = Packing(specs)
    shard = Shard(packing, serialized_for_server(keras.optimizers.SGD(_RATE)), [True] * len(specs))
    group = ServedGroup(shard, packing, Consistency.make(consistency, max_staleness))
    group.assign(ShardState([np.zeros(size, np.float32) for size in packing.sizes]))
    group.begin_session(range(num_workers))
    return group


def _push(sequence, value, is_applied=True, rate=1.0):
    return Gradient(sequence, [np.full(16, value, np.float32)], rate, is_applied)


class ServedGroupTest(tf.test.TestCase, parameterized.TestCase):
    def test_counts_as_algorithm_1(self):
        """Checks lines 11 to 24, and the state right after each push."""
        num_workers, generator = 5, np.random.default_rng(1)
        group, c, sequences, total = _group("async", num_workers), np.zeros(5, int), np.zeros(5, int), 0.0
        for i in generator.integers(num_workers, size=200):
            sequences[i] += 1
            value = float(generator.integers(-9, 9))
            (answer,) = group.push(i, _push(int(sequences[i]), value))
            c += 1
            c[i] -= 1
            total -= value
            self.assertEqual((answer.worker, answer.num_others, answer.num_workers), (i, c[i], num_workers))
            self.assertEqual(answer.buckets[0][0], total)
            c[i] = 0

    def test_a_push_that_comes_again_is_only_answered_again(self):
        group = _group("async", 2)
        group.push(1, _push(1, 1.0))
        (first,) = group.push(0, _push(1, 2.0))
        (again,) = group.push(0, _push(1, 2.0))
        self.assertAllEqual(first.buckets[0], again.buckets[0])
        self.assertEqual((again.num_others, again.sequence), (1, 1))
        self.assertEqual(group.num_pushes, 2)

    def test_says_which_push_has_not_come(self):
        group = _group("async", 1)
        (answer,) = group.push(0, Gradient(1, None, 1.0))
        self.assertTrue(answer.is_missing)
        group.push(0, _push(1, 1.0))
        (answer,) = group.push(0, Gradient(1, None, 1.0))
        self.assertFalse(answer.is_missing)
        with self.assertRaisesRegex(ProtocolError, "push 3 of rank 0 came after 1"):
            group.push(0, _push(3, 1.0))

    def test_left_out_gradients_count_as_steps_only(self):
        group = _group("async", 2)
        (answer,) = group.push(0, _push(1, np.inf, is_applied=False))
        self.assertAllEqual(answer.buckets[0], np.zeros(16))
        (answer,) = group.push(1, _push(1, 1.0))
        self.assertEqual(answer.num_others, 0)

    def test_bulk_synchronous_applies_the_mean_and_answers_all(self):
        group, total = _group("bsp", 3), 0.0
        generator = np.random.default_rng(2)
        for step in range(1, 20):
            values = generator.integers(-9, 9, 3).astype(float)
            order = generator.permutation(3)
            for i in order[:-1]:
                self.assertEmpty(group.push(i, _push(step, values[i])))
                self.assertEmpty(group.push(i, _push(step, values[i])))
            answers = group.push(order[-1], _push(step, values[order[-1]]))
            total -= values.mean()
            self.assertEqual(sorted(answer.worker for answer in answers), [0, 1, 2])
            for answer in answers:
                self.assertAlmostEqual(answer.buckets[0][0], total, places=4)
                self.assertEqual(answer.num_others, 2)

    def test_bulk_synchronous_goes_on_without_who_leaves(self):
        group = _group("bsp", 3)
        group.push(0, _push(1, 1.0))
        group.push(1, _push(1, 3.0))
        answers = group.remove(2, is_lost=True)
        self.assertEqual(sorted(answer.worker for answer in answers), [0, 1])
        self.assertEqual(answers[0].buckets[0][0], -2.0)
        with self.assertRaisesRegex(ProtocolError, "continues without rank 2"):
            group.push(2, _push(1, 1.0))

    @parameterized.product(staleness=(0, 1, 4), seed=(0, 1, 2))
    @pytest.mark.stress(but=6)
    def test_bounded_staleness_under_random_delays(self, staleness, seed):
        """A worker is answered if and only if it is at most `staleness` pushes ahead of the slowest. None starves."""
        num_workers, num_steps, generator = 4, 25, np.random.default_rng(seed)
        group = _group("ssp", num_workers, max_staleness=staleness)
        pushed, free = np.zeros(num_workers, int), set(range(num_workers))
        largest = 0
        while pushed.min() < num_steps:
            ready = [i for i in sorted(free) if pushed[i] < num_steps]
            i = int(
                generator.choice(ready, p=None if seed else np.arange(1, len(ready) + 1) / sum(range(len(ready) + 1)))
            )
            pushed[i] += 1
            free.discard(i)
            for answer in group.push(i, _push(int(pushed[i]), 1.0)):
                free.add(answer.worker)
            for j in range(num_workers):
                gap = pushed[j] - pushed.min()
                self.assertEqual(j in free, gap <= staleness, (pushed, free))
                largest = max(largest, gap)
        self.assertEqual(largest, staleness + 1)  # One push is sent before a worker waits.

    def test_a_newcomer_holds_nobody_and_begins_anew(self):
        group = _group("ssp", 2, max_staleness=1)
        for step in range(1, 4):
            group.push(0, _push(step, 1.0))
            group.push(1, _push(step, 1.0))
        self.assertEmpty(group.remove(1, is_lost=True))
        group.join(1)
        self.assertLen(group.push(0, _push(4, 1.0)), 1)
        self.assertEmpty(group.push(0, _push(5, 1.0)))
        answers = group.push(1, _push(1, 1.0))
        self.assertEqual(sorted(answer.worker for answer in answers), [0, 1])

    def test_averages_the_latest_of_each_worker(self):
        group = _group("async", 2, carried=[(2,)])

        def push(worker, sequence, value):
            buckets = [np.zeros(16, np.float32), np.full(16, value, np.float32)]
            (answer,) = group.push(worker, Gradient(sequence, buckets, 1.0))
            return answer.buckets[1][0]

        self.assertEqual([push(0, 1, 2.0), push(1, 1, 4.0), push(0, 2, 8.0)], [2.0, 3.0, 6.0])
        group.remove(0, is_lost=False)
        self.assertEqual(push(1, 2, 6.0), 7.0)
        group.remove(0, is_lost=True)
        self.assertEqual(push(1, 3, 6.0), 6.0)
        group.remove(1, is_lost=True)  # No worker is left: the state remains for a snapshot, or a restarted worker.
        self.assertAllEqual(group.state(with_slots=False).buckets[1][:2], [6.0, 6.0])


class ToldStateTest(tf.test.TestCase):
    """Workers that ask for the state at the same time share one copy. Nadam has a slot that is a scalar."""

    def setUp(self):
        super().setUp()
        packing = Packing([TensorSpec("w", (16,), tf.float32), TensorSpec("carried", (2,), tf.float32, exact=True)])
        shard = Shard(packing, serialized_for_server(keras.optimizers.Nadam(_RATE)), [True, True])
        self._group = ServedGroup(shard, packing, Consistency.make("bsp", 0))
        self._group.assign(ShardState(packing.zeros()))
        self._group.begin_session([0, 1])

    def _push(self, worker, sequence):
        buckets = [np.ones(16, np.float32), np.full(16, sequence, np.float32)]
        return self._group.push(worker, Gradient(sequence, buckets, 1.0))

    def test_is_the_same_while_a_message_holds_it(self):
        messages = [payloads.join(self._group.state(with_slots=True).to_parts()) for _ in range(3)]
        places = [{part.ctypes.data for part in message if part.nbytes == 64} for message in messages]
        self.assertLen(places[0], 4)  # The model, non-trainable state, and two slots.
        self.assertLen(set.union(*places), 4)

    def test_is_another_one_when_something_has_changed(self):
        told = [self._group.state(with_slots=True)]
        for change in (
            lambda: self._push(0, 1),  # It waits for the other worker, because the mean of non-trainable state changes.
            lambda: self._push(1, 1),
            lambda: self._group.remove(1, is_lost=True),
            lambda: self._group.begin_session([0, 1], 2),
            lambda: self._group.assign_model([np.full(16, 5, np.float32)] * 2),
        ):
            change()
            told.append(self._group.state(with_slots=True))
            self.assertIsNot(told[-1].buckets[0], told[-2].buckets[0])
        self.assertAllEqual([state.buckets[1][0] for state in told], [0, 1, 1, 1, 1, 5])
        self.assertAllEqual(told[-1].buckets[0], np.full(16, 5))

    @pytest.mark.slow
    def test_is_not_kept_for_who_asks_later(self):
        state = self._group.state(with_slots=True)
        kept = weakref.ref(state.buckets[0])
        del state
        gc.collect()
        self.assertIsNone(kept())
        self.assertAllEqual(self._group.state(with_slots=True).buckets[0], np.zeros(16))


class WireTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        codecs.Int8(block_size=64),
        codecs.Bits4(block_size=32, error_feedback=True),
        codecs.Truncate16(error_feedback=True),
        codecs.QuantileSketch(),
        codecs.Identity(),
    )
    def test_codecs_travel(self, codec):
        self.assertEqual(wire.codec_from_json(wire.codec_to_json(codec)), codec)

    def test_refuses_an_unknown_codec(self):
        with self.assertRaisesRegex(ProtocolError, "describes no codec"):
            wire.codec_from_json(json.dumps({"name": "zip", "settings": {}}))

    def test_only_gradients_pass_through_the_codec(self):
        specs = [TensorSpec(str(i), (256,), t, i == 2) for i, t in enumerate((tf.float32, tf.float64, tf.float32))]
        packing, generator = Packing(specs), np.random.default_rng(0)
        buckets = _random_buckets(generator, packing)
        encoding = Encoding(packing, codecs.Int8(block_size=128))
        sent = encoding.encode(buckets)
        self.assertEqual([part.nbytes for part in sent], [256 + 8, 2048, 1024])
        decoded = encoding.decode([np.asarray(part).view(np.uint8) for part in sent])
        self.assertAllClose(decoded[0], buckets[0], atol=np.abs(buckets[0]).max() / 127)
        self.assertAllEqual(decoded[1], buckets[1])
        self.assertAllEqual(decoded[2], buckets[2])

    def test_what_was_lost_is_not_lost_for_good_with_a_gradient_that_is_left_out(self):
        packing, generator = Packing([TensorSpec("w", (256,), tf.float32)]), np.random.default_rng(0)
        encoding = Encoding(packing, codecs.Int8(error_feedback=True))
        first, left_out, last = (_random_buckets(generator, packing) for _ in range(3))
        total = np.zeros(256, np.float32)
        for buckets, is_applied in ((first, True), (left_out, False), (last, True)):
            (sent,) = encoding.encode(buckets, is_applied=is_applied)
            (decoded,) = encoding.decode([np.asarray(sent).view(np.uint8)])
            total += is_applied * decoded
        lost = first[0] + last[0] - total
        self.assertAllInRange(lost, *(np.array([-0.51, 0.51]) * np.abs(last[0] + lost).max() / 127))


class SnapshotsTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self._directory = self.enterContext(tempfile.TemporaryDirectory())
        self._packing = Packing([TensorSpec("w", (4,), tf.float32)])

    def _snapshots(self, **options):
        return Snapshots(hop_tf.SnapshotOptions(directory=self._directory, **options), index=2)

    def _make_group(self):
        shard = Shard(self._packing, serialized_for_server(keras.optimizers.Adam(_RATE)), [True])
        group = ServedGroup(shard, self._packing, Consistency.make("async", 0))
        group.assign(ShardState([np.zeros(16, np.float32)]))
        group.begin_session([0])
        return group

    def test_another_server_goes_on(self):
        snapshots, group = self._snapshots(every_pushes=3, every_seconds=1e6), self._make_group()
        self.assertIsNone(snapshots.read("g", b"signature", self._packing))
        values = np.random.default_rng(0).normal(size=9)
        for step in range(1, 9):  # Snapshots after 1, 4 and 7 pushes.
            group.push(0, _push(step, values[step]))
            snapshots.write("g", group)
        self.assertEqual(os.listdir(self._directory), ["ps_2_g"])
        state = self._snapshots().read("g", b"signature", self._packing)
        self.assertEqual((state.num_pushes, state.num_steps, state.iterations), (7, 7, 7))
        second = self._make_group()
        second.assign(state)
        second.begin_session([0])
        second.push(0, _push(1, values[8]))
        self.assertAllEqual(second.state(with_slots=True).buckets[0], group.state(with_slots=True).buckets[0])

    def test_the_first_push_and_the_last_are_written_at_once(self):
        snapshots, group = self._snapshots(), self._make_group()
        snapshots.read("g", b"", self._packing)
        snapshots.write("g", group, final=True)
        self.assertEmpty(os.listdir(self._directory))  # Nothing was learned.
        for step, is_final, num_written in ((1, False, 1), (2, False, 1), (3, True, 3)):
            group.push(0, _push(step, 1.0))
            snapshots.write("g", group, final=is_final)
            self.assertEqual(self._snapshots().read("g", b"", self._packing).num_pushes, num_written)

    def test_seconds_count_from_the_last_one(self):
        snapshots, group, clock = self._snapshots(every_seconds=10), self._make_group(), mock.Mock()
        with mock.patch.object(snapshots_module, "time", clock):
            snapshots.read("g", b"", self._packing)
            for step, (now, num_written) in enumerate([(1000, 1), (1009, 1), (1010, 3), (1019, 3), (1020, 5)], 1):
                clock.monotonic.return_value = now
                group.push(0, _push(step, 1.0))
                snapshots.write("g", group)
                self.assertEqual(self._snapshots().read("g", b"", self._packing).num_pushes, num_written)

    def test_a_server_that_dies_while_it_writes_leaves_the_snapshot_before(self):
        snapshots, group = self._snapshots(), self._make_group()
        snapshots.read("g", b"", self._packing)
        group.push(0, _push(1, 1.0))
        snapshots.write("g", group)
        for name in ("fsync", "replace"):  # The file is incomplete; or complete, under its temporary name.
            group.push(0, _push(group.num_pushes + 1, 1.0))
            with mock.patch.object(snapshots_module.os, name, side_effect=KeyError), self.assertRaises(KeyError):
                snapshots.write("g", group, final=True)
            self.assertEqual(self._snapshots().read("g", b"", self._packing).num_pushes, 1)
        snapshots.write("g", group, final=True)
        self.assertEqual(os.listdir(self._directory), ["ps_2_g"])
        self.assertEqual(self._snapshots().read("g", b"", self._packing).num_pushes, 3)

    def test_a_snapshot_that_cannot_be_written_leaves_the_one_before_and_is_tried_again(self):
        self.enterContext(mounted_disk(self._directory))
        snapshots, group = self._snapshots(), self._make_group()
        snapshots.read("g", b"", self._packing)
        group.push(0, _push(1, 1.0))
        snapshots.write("g", group)
        filler = fill(self._directory)
        group.push(0, _push(2, 1.0))
        with self.assertLogs("absl", "ERROR") as logs:
            snapshots.write("g", group, final=True)
        reason = f"{self._directory}/ps_2_g: No space left on device"
        self.assertEqual(snapshots.failures("g"), (1, reason))
        self.assertIn(f"{reason}. Training continues; the one after 1 pushes stays.", logs.output[0])
        self.assertEqual(self._snapshots().read("g", b"", self._packing).num_pushes, 1)
        os.remove(filler)
        self.assertEqual(os.listdir(self._directory), ["ps_2_g"])  # The unfinished file is gone.
        snapshots.write("g", group, final=True)
        self.assertEqual(snapshots.failures("g"), (1, ""))
        self.assertEqual(self._snapshots().read("g", b"", self._packing).num_pushes, 2)

    def test_after_a_failure_the_next_attempt_comes_when_a_snapshot_is_due(self):
        snapshots, group, clock = self._snapshots(every_seconds=10, every_pushes=4), self._make_group(), mock.Mock()
        snapshots.read("g", b"", self._packing)
        no_room = OSError(errno.ENOSPC, "No space left on device")
        with (
            mock.patch.object(snapshots_module, "time", clock),
            mock.patch.object(snapshots_module.os, "fsync", side_effect=no_room),
            self.assertLogs("absl", "ERROR"),
        ):
            for step, (now, num_tried) in enumerate([(0, 1), (9, 1), (10, 2), (11, 2), (12, 2), (13, 2), (14, 3)], 1):
                clock.monotonic.return_value = now
                group.push(0, _push(step, 1.0))
                snapshots.write("g", group)
                self.assertEqual(snapshots.failures("g")[0], num_tried)
        self.assertEmpty(os.listdir(self._directory))

    def test_a_directory_that_cannot_be_written_to_is_an_error_at_once(self):
        with self.assertLogs("absl", "ERROR") as logs:
            snapshots = Snapshots(hop_tf.SnapshotOptions(directory="/proc"), 0)  # Not even root can write there.
        self.assertIn("cannot write snapshots to /proc: ", logs.output[0])
        with self.assertRaisesRegex(HopError, "cannot write snapshots to /proc: "):
            snapshots.read("g", b"", self._packing)

    def test_recognizes_torn_files(self):
        snapshots, group = self._snapshots(), self._make_group()
        snapshots.read("g", b"mine", self._packing)
        group.push(0, _push(1, 1.0))
        snapshots.write("g", group)
        path = pathlib.Path(self._directory) / "ps_2_g"
        whole = path.read_bytes()
        flipped = (whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(len(whole)))
        for torn in itertools.chain((whole[:size] for size in range(len(whole))), flipped, [bytes(len(whole))]):
            path.write_bytes(torn)
            with self.assertRaisesRegex(ProtocolError, f"{path} is damaged.*Restore a copy of it, or remove"):
                self._snapshots().read("g", b"mine", self._packing)
        path.write_bytes(whole)
        self.assertEqual(self._snapshots().read("g", b"mine", self._packing).num_pushes, 1)

    def test_refuses_what_is_no_snapshot_of_the_model(self):
        snapshots, group = self._snapshots(), self._make_group()
        snapshots.read("g", b"mine", self._packing)
        group.push(0, _push(1, 1.0))
        snapshots.write("g", group, final=True)
        with self.assertRaisesRegex(MismatchError, "of another model"):
            self._snapshots().read("g", b"other", self._packing)

    def test_refuses_options(self):
        for options in ({"every_seconds": 0}, {"every_seconds": "1"}, {"every_pushes": 0}):
            with self.assertRaisesRegex(ValueError, f"`{next(iter(options))}` must be .*Received: "):
                hop_tf.SnapshotOptions(directory="d", **options)
        for options in ({"every_seconds": 5.0}, {"every_pushes": 9}):
            with self.assertRaisesRegex(ValueError, "`directory` must be given"):
                hop_tf.SnapshotOptions(**options)


if __name__ == "__main__":
    tf.test.main()
