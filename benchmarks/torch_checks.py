"""The CUDA kernels among PyTorch's streams, graphs and allocator: parts of `gpu_with_torch.py`.

A check raises an AssertionError, or returns what it has looked at.
"""

from __future__ import annotations

import torch
from torch_device import BLOCK_SIZE, QUEUE_SECONDS, Kernels, Load, harness, new

_NUM_CHECKED = 3_000_001
_MOST_VALUES = 2**31 - 1
_PERIOD = 2**20


class Case:
    """A kernel with its arguments."""

    def __init__(self, kernels: Kernels, name: str, arguments: tuple, outputs: tuple):
        self.name = name
        self._kernels, self._arguments, self._outputs = kernels, arguments, outputs

    def run(self) -> None:
        """Enqueues the kernel, on outputs that are all ones: what it does not write, or adds to, is known."""
        for output in self._outputs:
            output.fill_(1)
        self._kernels.enqueue(*self._arguments)

    def results(self) -> list:
        """Copies of the outputs, as bytes."""
        return [output.view(torch.uint8).clone() for output in self._outputs]

    def check(self, expected: list, what: str) -> None:
        """Raises an AssertionError unless the outputs are as expected."""
        torch.cuda.synchronize()
        for number, (actual, output) in enumerate(zip(self.results(), expected, strict=True)):
            assert torch.equal(actual, output), f"{self.name}: output {number} differs {what}"


def cases(kernels: Kernels, values) -> list[Case]:
    """All kernels on these values, or on what they are encoded to."""
    size, block = values.numel(), BLOCK_SIZE
    num_blocks = -(-size // block)
    int8, scales = new(size, torch.int8), new(num_blocks)
    codes, buckets = new(size, torch.uint8), new(256)
    kernels.enqueue("Int8Encode", values, 0, size, block, int8, scales, None)
    kernels.enqueue("SketchEncode", values, 0, size, 0.5, codes, buckets, kernels.scratch("Sketch", size))
    halves = values.bfloat16().view(torch.int16)

    def case(name, arguments, *outputs):
        return Case(kernels, name, (name, *arguments), outputs)

    def new_blocks(number=num_blocks):
        return new(size, torch.int8), new(number)

    def new_codes():
        return new(size, torch.uint8), new(256)

    blocks, one_block, sums, out, floats = new_blocks(), new_blocks(1), new_blocks(), new_codes(), new(size)
    others = [new(size) for _ in range(4)]
    out_halves = new(size, torch.int16)
    scratch, sketch_scratch = kernels.scratch("Int8", size, size), kernels.scratch("Sketch", size)
    return [
        case("Int8Encode", (values, 0, size, block, *blocks, None), *blocks),
        case("Int8Encode", (values, 0, size, size, *one_block, scratch), *one_block),
        case("Int8Decode", (int8, scales, size, block, floats), floats),
        case("Int8Accumulate", (int8, scales, size, block, others[0]), others[0]),
        case("Int8Reduce", (int8, scales, values, 0, size, block, *sums, None), *sums),
        case("SketchEncode", (values, 0, size, 0.5, *out, sketch_scratch), *out),
        case("SketchDecode", (codes, buckets, size, others[1]), others[1]),
        case("Truncate16Encode", (values, 0, size, 1, out_halves), out_halves),
        case("Truncate16Decode", (halves, size, others[2]), others[2]),
        case("Copy", (values, 4 * size, others[3]), others[3]),
    ]


def _expected(each: Case) -> list:
    each.run()
    torch.cuda.synchronize()
    return each.results()


def check_graphs(kernels: Kernels) -> str:
    """A graph can hold each kernel: capture fails if a kernel waits, or allocates. Replays give the same results."""
    values, drawn = new(_NUM_CHECKED), [torch.randn(_NUM_CHECKED, device="cuda") for _ in range(2)]
    values.copy_(drawn[0])
    all_cases = cases(kernels, values)
    for each in all_cases:
        each.run()  # Loads code.
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            each.run()
        for others in drawn:
            values.copy_(others)
            expected = _expected(each)
            graph.replay()
            each.check(expected, "when a graph is replayed")
    return f"{len(all_cases)} kernels"


def check_order(kernels: Kernels) -> str:
    """Each kernel waits for what is before it on its stream."""
    load, stream = Load(), torch.cuda.Stream()
    values, drawn = torch.zeros(_NUM_CHECKED, device="cuda"), torch.randn(_NUM_CHECKED, device="cuda")
    values.copy_(drawn)
    all_cases = cases(kernels, values)
    for each in all_cases:
        values.copy_(drawn)
        expected = _expected(each)
        values.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            busy = load.enqueue(QUEUE_SECONDS)
            values.copy_(drawn)
            each.run()
            assert not busy.query(), f"{each.name}: the call waits for the device"
        each.check(expected, "behind other work")
    return f"{len(all_cases)} kernels"


def check_scratch(kernels: Kernels) -> str:
    """Scratch memory goes back to the allocator as soon as a kernel is enqueued, and gets other values at once."""
    rounds = 30
    values = torch.randn(_NUM_CHECKED, device="cuda")
    codes, buckets = new(_NUM_CHECKED, torch.uint8), new(256)
    all_results = []
    for _ in range(rounds):
        scratch = kernels.scratch("Sketch", _NUM_CHECKED)
        kernels.enqueue("SketchEncode", values, 0, _NUM_CHECKED, 0.5, codes, buckets, scratch)
        del scratch
        kernels.scratch("Sketch", _NUM_CHECKED).fill_(0xEE)
        all_results.append((codes.clone(), buckets.clone()))
    torch.cuda.synchronize()
    for number, results in enumerate(all_results):
        same = all(torch.equal(one, other) for one, other in zip(results, all_results[0], strict=True))
        assert same, f"round {number} differs from round 0"
    return f"{rounds} rounds"


def check_streams(kernels: Kernels) -> str:
    """Kernels of two streams run at a time."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    sets = [cases(kernels, torch.randn(_NUM_CHECKED, device="cuda")) for _ in streams]
    expected = [[_expected(each) for each in one] for one in sets]
    torch.cuda.synchronize()
    for _ in range(10):
        for pair in zip(*sets, strict=True):
            for each, stream in zip(pair, streams, strict=True):
                with torch.cuda.stream(stream):
                    each.run()
        for one, results in zip(sets, expected, strict=True):
            for each, result in zip(one, results, strict=True):
                each.check(result, "beside another stream")
    return "10 rounds"


def check_most_values(kernels: Kernels) -> str:
    """2^31 - 1 values, which repeat every 2^20: so do their codes, and the last ones are those of a slice alone."""
    size, start = _MOST_VALUES, (_MOST_VALUES - _PERIOD) // _PERIOD * _PERIOD
    base = torch.randn(_PERIOD, device="cuda")
    values = base.repeat(-(-size // _PERIOD))[:size]
    tail, tail_size = values[start:], size - start
    floats, out = new(size), new(tail_size)

    codes, scales = new(size, torch.int8), new(-(-size // BLOCK_SIZE))
    tail_codes, tail_scales = new(tail_size, torch.int8), new(-(-tail_size // BLOCK_SIZE))
    kernels.enqueue("Int8Encode", values, 0, size, BLOCK_SIZE, codes, scales, None)
    kernels.enqueue("Int8Encode", tail, 0, tail_size, BLOCK_SIZE, tail_codes, tail_scales, None)
    _check_repeats("int8 codes", codes, tail_codes)
    assert torch.equal(scales[start // BLOCK_SIZE :], tail_scales), "int8 scales"
    kernels.enqueue("Int8Decode", codes, scales, size, BLOCK_SIZE, floats)
    kernels.enqueue("Int8Decode", tail_codes, tail_scales, tail_size, BLOCK_SIZE, out)
    _check_repeats("int8 values", floats, out)
    too_many = kernels.status("Int8Encode", values, 0, size + 1, BLOCK_SIZE, codes, scales, None)
    assert too_many == harness.INVALID_ARGUMENT or size != 2**31 - 1, "2^31 values are not refused"

    sketch, buckets, part_buckets = codes.view(torch.uint8), new(256), new(256)
    part = new(_PERIOD, torch.uint8)
    kernels.enqueue("SketchEncode", values, 0, size, 0.5, sketch, buckets, kernels.scratch("Sketch", size))
    kernels.enqueue("SketchEncode", base, 0, _PERIOD, 0.5, part, part_buckets, kernels.scratch("Sketch", _PERIOD))
    _check_repeats("sketch codes", sketch, sketch[:_PERIOD].repeat(2)[:tail_size])
    differences = (sketch[:_PERIOD].int() - part.int()).abs()
    assert differences.max() <= 1 and differences.float().mean() < 0.01, "sketch codes against those of a period"
    kernels.enqueue("SketchDecode", sketch, buckets, size, floats)
    _check_repeats("sketch values", floats, buckets[sketch[start:].int()])

    del codes, sketch
    halves = new(size, torch.int16)
    kernels.enqueue("Truncate16Encode", values, 0, size, 1, halves)
    _check_repeats("truncate16 halves", halves, tail.bfloat16().view(torch.int16))
    kernels.enqueue("Truncate16Decode", halves, size, floats)
    _check_repeats("truncate16 values", floats, tail.bfloat16().float())
    return f"{size} values"


def _check_repeats(what: str, actual, tail) -> None:
    """All whole periods are alike, and the rest is `tail`."""
    rows = actual[: actual.numel() // _PERIOD * _PERIOD].view(-1, _PERIOD)
    for first in range(0, rows.shape[0], 256):
        assert bool((rows[first : first + 256] == rows[0]).all()), f"{what} differ in rows from {first} on"
    assert torch.equal(actual[actual.numel() - tail.numel() :], tail), f"{what} at the end"
