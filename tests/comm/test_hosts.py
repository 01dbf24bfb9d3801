"""Collectives of groups on several hosts, compared with one process that has the inputs of all ranks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from farandole.comm import Communicator
from farandole.comm.algorithms.choice import Choice
from tests.comm.hosts import hierarchical_group

LAYOUTS = {
    "2 x 1": [0, 1],
    "2 x 2": [0, 0, 1, 1],
    "in turns": [0, 1, 0, 1],
    "3 + 1": [0, 0, 0, 1],
    "3 x 1": [0, 1, 2],
    "4 x 1": [0, 1, 2, 3],
}
OPS = {
    dist.ReduceOp.SUM: lambda stack: stack.sum(0),
    dist.ReduceOp.AVG: lambda stack: stack.double().mean(0),
    dist.ReduceOp.PRODUCT: lambda stack: stack.prod(0),
    dist.ReduceOp.MIN: lambda stack: stack.amin(0),
    dist.ReduceOp.MAX: lambda stack: stack.amax(0),
}
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def values(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=generator).to(dtype)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def everyones(size: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([values(rank, seed, shape, dtype) for rank in range(size)])


def close(found: torch.Tensor, expected: torch.Tensor, n: int) -> bool:
    if not found.dtype.is_floating_point:
        return torch.equal(found, expected.trunc().to(found.dtype))
    eps = torch.finfo(found.dtype).eps
    error = (found.double() - expected.double()).abs()
    return bool((error <= 4 * n * eps * expected.double().abs().clamp(min=1)).all())


def reductions(rank: int, size: int, host_of: list[int], options: dict, seed: int) -> None:
    group = hierarchical_group(host_of, rank, **options)
    chance = random.Random(seed)
    for turn in range(12):
        dtype = chance.choice(FLOATS + WHOLE)
        op = chance.choice(list(OPS))
        length = chance.choice([0, 1, 3, 17, 1000, 70_000])
        inputs = everyones(size, turn, (length,), dtype)
        expected = OPS[op](inputs.double() if op == dist.ReduceOp.SUM and dtype.is_floating_point else inputs)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, op, group=group)
        assert close(tensor, expected, size), (dtype, op, length)
        copies = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(copies, tensor, group=group)
        assert all(torch.equal(copy, tensor) for copy in copies)  # the same bits on all ranks
        root = chance.randrange(size)
        tensor = inputs[rank].clone()
        dist.reduce(tensor, root, op, group=group)
        if rank == root:
            assert close(tensor, expected, size), (dtype, op, length)
        else:
            assert torch.equal(tensor, inputs[rank])
        width = length // size
        part = torch.empty(width, dtype=dtype)
        dist.reduce_scatter_tensor(part, inputs[rank][: width * size].clone(), op, group=group)
        assert close(part, expected[rank * width : (rank + 1) * width], size)
        bounds = sorted(chance.randrange(length + 1) for _ in range(size - 1))
        splits = [b - a for a, b in zip([0, *bounds], [*bounds, length], strict=True)]
        part = torch.empty(splits[rank], dtype=dtype)
        dist.reduce_scatter(part, list(inputs[rank].split(splits)), op, group=group)
        assert close(part, expected.split(splits)[rank], size)
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.SUM, group=group)
    assert flags.tolist() == [True, True, False]
    bits = torch.tensor([1 << rank, 7], dtype=torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.BXOR, group=group)
    assert bits.tolist() == [(1 << size) - 1, 7 * (size % 2)]
    dist.destroy_process_group(group)


def movements(rank: int, size: int, host_of: list[int], options: dict, seed: int) -> None:
    group = hierarchical_group(host_of, rank, **options)
    chance = random.Random(seed)
    for turn in range(12):
        dtype = chance.choice([*FLOATS, *WHOLE, torch.bool, torch.complex64])
        length = chance.choice([0, 1, 5, 1000, 50_000])
        root = chance.randrange(size)
        inputs = [values(r, turn, (length,), torch.float32).to(dtype) for r in range(size)]
        tensor = inputs[rank].clone()
        dist.broadcast(tensor, root, group=group)
        assert torch.equal(tensor, inputs[root])
        outputs = torch.empty(size * length, dtype=dtype)
        dist.all_gather_into_tensor(outputs, inputs[rank], group=group)
        assert torch.equal(outputs, torch.cat(inputs))
        lengths = [chance.randrange(length + 1) for _ in range(size)]
        parts = [torch.empty(n, dtype=dtype) for n in lengths]
        dist.all_gather(parts, inputs[rank][: lengths[rank]], group=group)
        assert all(torch.equal(part, inputs[r][: lengths[r]]) for r, part in enumerate(parts))
        parts = [torch.empty(length, dtype=dtype) for _ in range(size)] if rank == root else None
        dist.gather(inputs[rank], parts, root, group=group)
        assert rank != root or all(torch.equal(part, inputs[r]) for r, part in enumerate(parts))
        dist.scatter(tensor, inputs if rank == root else None, root, group=group)
        assert torch.equal(tensor, inputs[rank])
        table = [[chance.randrange(length + 1) for _ in range(size)] for _ in range(size)]
        sent = [inputs[rank][: table[rank][r]] for r in range(size)]
        received = torch.empty(sum(table[r][rank] for r in range(size)), dtype=dtype)
        dist.all_to_all_single(
            received, torch.cat(sent), [table[r][rank] for r in range(size)], table[rank], group=group
        )
        assert torch.equal(received, torch.cat([inputs[r][: table[r][rank]] for r in range(size)]))
        dist.barrier(group=group)
    strided = torch.arange(12.0).view(3, 4).t() * (rank + 1)
    dist.all_reduce(strided, group=group)
    assert torch.equal(strided, torch.arange(12.0).view(3, 4).t() * sum(range(1, size + 1)))
    works = [dist.all_reduce(torch.ones(1000) * i, group=group, async_op=True) for i in range(5)]
    for i, work in enumerate(works):
        work.wait()
        assert (work.result()[0] == i * size).all()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reductions(ranks, layout):
    host_of = LAYOUTS[layout]
    ranks(len(host_of)).run(reductions, host_of, {}, hash(layout) % 1000)


@pytest.mark.parametrize(
    "options", [{"leaders": 1}, {"algorithm": "ring"}, {"algorithm": "rabenseifner"}, {"transport": "gloo"}]
)
def test_reductions_by_option(ranks, options):
    ranks(4).run(reductions, LAYOUTS["2 x 2"], options, 7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exchange", ["auto", "aggregated", "direct"])
def test_movements(ranks, layout, exchange):
    host_of = LAYOUTS[layout]
    ranks(len(host_of)).run(movements, host_of, {"exchange": exchange}, 1)


def round_once(rank: int, size: int, host_of: list[int], options: dict) -> None:
    """Sums differ from those of fp64 by no more than `Accumulation` states."""
    group = hierarchical_group(host_of, rank, **options)
    for dtype in (torch.bfloat16, torch.float16):
        for length in (1000, 300_000):
            inputs = [values(r, length, (length,), dtype) for r in range(size)]
            exact, magnitude = sum(x.double() for x in inputs), sum(x.double().abs() for x in inputs)
            u = torch.finfo(dtype).eps / 2
            bound = u * exact.abs() + (1 + u) * (size - 1) * 2.0**-24 * magnitude
            bound += torch.finfo(dtype).smallest_normal * u  # results below the smallest normal number
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, group=group)
            assert ((tensor.double() - exact).abs() <= bound).all()
            tensor = inputs[rank].clone()
            dist.reduce(tensor, size - 1, group=group)
            assert rank < size - 1 or ((tensor.double() - exact).abs() <= bound).all()
            own = slice(rank * (length // size), (rank + 1) * (length // size))
            part = torch.empty(length // size, dtype=dtype)
            dist.reduce_scatter_tensor(part, inputs[rank][: length // size * size], group=group)
            assert ((part.double() - exact[own]).abs() <= bound[own]).all()
    large = torch.full((5,), 60_000.0, dtype=torch.float16)
    dist.all_reduce(large, dist.ReduceOp.AVG, group=group)  # the sum is above the largest fp16
    assert (large == 60_000).all()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "rabenseifner"])
@pytest.mark.parametrize("layout", ["2 x 2", "3 x 1", "4 x 1"])
def test_sums_of_16_bit_floats_are_rounded_once(ranks, layout, algorithm):
    host_of = LAYOUTS[layout]
    ranks(len(host_of)).run(round_once, host_of, {"algorithm": algorithm})


def name_algorithms(rank: int, size: int) -> None:
    for algorithm in ("ring", "doubling", "rabenseifner"):
        comm = Communicator(hierarchical_group([0, 0, 1, 1], rank, algorithm=algorithm, exchange="direct"))
        assert comm.algorithm("all_reduce", 8) == comm.algorithm("all_reduce", 1 << 28) == algorithm
        assert comm.algorithm("all_to_all", 8) == comm.algorithm("gather", 8) == "direct"
        with pytest.raises(ValueError, match="expected the name of a collective"):
            comm.algorithm("all-reduce", 8)
        dist.destroy_process_group(comm.group)
    comm = Communicator(hierarchical_group([0, 0, 1, 1], rank))
    assert comm.algorithm("all_to_all", 8) == "direct" and Choice().exchange("gather", 8, 16) == "aggregated"
    assert comm.algorithm("reduce", 8) == "binomial tree" and comm.algorithm("broadcast", 1 << 28) == "chain"
    assert Communicator(dist.group.WORLD).algorithm("all_reduce", 8) == "shared memory"
    dist.destroy_process_group(comm.group)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="expected a CUDA device.*use transport='tcp'"):
            hierarchical_group([0, 0, 1, 1], rank, transport="nccl")


def test_the_algorithm_can_be_selected_and_queried(ranks):
    ranks(4).run(name_algorithms)


def messages(rank: int, size: int, host_of: list[int]) -> None:
    """Send to every other rank, on this host or another, and receive tags out of order from any sender."""
    group = hierarchical_group(host_of, rank)
    length = 300_000  # more than any buffer holds
    for tag in (1, 2):
        for peer in range(size):
            if peer != rank:
                dist.isend(torch.full((length,), 10.0 * rank + tag), peer, group, tag)
    for tag in (2, 1):
        for _ in range(size - 1):
            tensor = torch.empty(length)
            sender = dist.recv(tensor, None, group, tag)
            assert (tensor == 10.0 * sender + tag).all()
    for tag in (-1, 2**31):
        with pytest.raises(ValueError, match=rf"^send: expected a tag between 0 and 2147483647, got {tag}$"):
            dist.send(torch.ones(1), size - 1 - rank, group, tag)
    dist.barrier(group=group)
    everyone: list[object] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank}, group=group)
    assert everyone == [{"rank": r} for r in range(size)]
    dist.destroy_process_group(group)


@pytest.mark.parametrize("layout", ["2 x 1", "2 x 2", "3 + 1"])
def test_messages(ranks, layout):
    host_of = LAYOUTS[layout]
    ranks(len(host_of)).run(messages, host_of)


def too_many_leaders(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="expected a number of leaders between 1 and 2"):
        hierarchical_group([0, 0, 1, 1], rank, leaders=3)


def test_too_many_leaders_are_refused(ranks):
    ranks(4).run(too_many_leaders)


def large(rank: int, size: int) -> None:
    group = hierarchical_group([0, 0, 1, 1], rank)
    tensor = torch.arange(9_000_000, dtype=torch.float32) % 1000 * (rank + 1)
    expected = torch.arange(9_000_000, dtype=torch.float32) % 1000 * 10
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, expected)
    dist.broadcast(tensor.mul_(rank), 2, group=group)
    assert torch.equal(tensor, expected * 2)
    dist.destroy_process_group(group)


def test_tensors_of_many_windows(ranks):
    ranks(4).run(large)
