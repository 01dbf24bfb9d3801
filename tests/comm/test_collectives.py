"""Every collective of the core, compared with one process: all types, reductions and sizes.

The reference is torch on one process: values of all ranks are made from a seed, and reduced from rank 0 to
rank n-1 (16-bit floats in fp32, rounded once), so results must be equal to the bit.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from farandole.comm import Communicator
from tests.pool import Ranks

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
REDUCIBLE = [*FLOATS, *INTEGERS, torch.bool]
OTHERS = [torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.uint32]
ON_FLOATS = ["sum", "avg", "product", "min", "max"]
ON_INTEGERS = [*ON_FLOATS, "and", "or", "xor"]
ON_BOOLS = ["sum", "product", "min", "max", "and", "or", "xor"]

# around every threshold of the algorithms: no element, one element, a cache line, a phase, one or more windows
COUNTS = st.one_of(
    st.integers(0, 300),
    st.sampled_from([4095, 4096, 4097, 8191, 16384, 65536, 65537]),
    st.integers(10_000, 400_000),
)
PROPERTY = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def values(seed: int, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the input of rank `rank`: integers from the whole range of their type, or normally distributed floats."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (count,), generator=generator, dtype=dtype)
    if dtype in FLOATS:
        return (torch.randn(count, generator=generator) * 3).to(dtype)
    return (
        torch.randint(0, 100, (count, dtype.itemsize), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .view(-1)
    )


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """Return the reduction of all ranks' values, computed by torch."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        op = {"sum": "or", "product": "and", "min": "and", "max": "or"}.get(op, op)
    if dtype in (torch.bfloat16, torch.float16):
        return reduced([part.float() for part in parts], op).to(dtype)
    if op == "avg":
        if dtype in INTEGERS:
            total = sum(part.long() for part in parts)
            return torch.div(total, len(parts), rounding_mode="trunc").to(dtype)
        return reduced(parts, "sum") / len(parts)
    binary: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": operator.add,
        "product": operator.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "and": operator.and_,
        "or": operator.or_,
        "xor": operator.xor,
    }
    return functools.reduce(binary[op], parts)


def same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is expected.dtype and found.shape == expected.shape
    if not torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def check_all_reduce(
    rank: int, size: int, seed: int, count: int, dtype: torch.dtype, op: str, shared: bool
) -> None:
    comm = Communicator(dist.group.WORLD)
    parts = [values(seed, r, count, dtype) for r in range(size)]
    tensor = comm.empty(count, dtype=dtype).copy_(parts[rank]) if shared else parts[rank].clone()
    comm.all_reduce(tensor, op)
    same_bits(tensor, reduced(parts, op))


def check_rooted_reduce(rank: int, size: int, seed: int, count: int, dtype: torch.dtype, root: int) -> None:
    parts = [values(seed, r, count, dtype) for r in range(size)]
    tensor = parts[rank].clone()
    Communicator(dist.group.WORLD).reduce(tensor, root, "max")
    same_bits(tensor, reduced(parts, "max") if rank == root else parts[rank])


def check_reduce_scatter(
    rank: int, size: int, seed: int, counts: list[int], dtype: torch.dtype, op: str
) -> None:
    comm = Communicator(dist.group.WORLD)
    parts = [values(seed, r, sum(counts), dtype) for r in range(size)]
    expected = reduced(parts, op).split(counts)[rank]
    output = torch.empty_like(expected)
    dist.reduce_scatter(output, list(parts[rank].split(counts)), _torch_op(op))
    same_bits(output, expected)

    count = len(parts[0]) // size  # the even form, on ordinary and on shared memory
    expected = reduced(parts, op)
    for shared in (False, True):
        whole = parts[rank][: count * size].clone()
        if shared:
            whole = comm.empty(count * size, dtype=dtype).copy_(whole)
        output = torch.empty(count, dtype=dtype)
        comm.reduce_scatter(output, whole, op)
        same_bits(output, expected[rank * count : (rank + 1) * count])


def check_reduce_scatter_over_gloo(rank: int, size: int) -> None:
    comm = Communicator(dist.group.WORLD)
    for dtype, op, count in itertools.product(
        [*FLOATS, torch.int8, torch.int32, torch.int64], ["sum", "avg", "min"], [0, 1, 1000]
    ):
        parts = [values(0, r, count * size, dtype) for r in range(size)]
        expected = reduced(parts, op)[rank * count : (rank + 1) * count]
        output = torch.empty(count, dtype=dtype)
        comm.reduce_scatter(output, parts[rank].clone(), op)
        same_bits(output, expected)
        work = comm.reduce_scatter(output.zero_(), parts[rank].clone(), op, async_op=True)
        assert work is not None
        assert work.get_future().wait()[0] is output
        assert work.is_completed()
        work.wait(timedelta(seconds=60))
        same_bits(output, expected)
    with torch.inference_mode():
        output = torch.empty(2)
        comm.reduce_scatter(output, torch.ones(2 * size))
        assert output.tolist() == [size, size]


def _torch_op(op: str) -> dist.ReduceOp.RedOpType:
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN}[op]


def check_gathers(rank: int, size: int, seed: int, counts: list[int], dtype: torch.dtype, root: int) -> None:
    comm = Communicator(dist.group.WORLD)
    parts = [values(seed, r, count, dtype) for r, count in enumerate(counts)]
    outputs = [torch.empty_like(part) for part in parts]
    dist.all_gather(outputs, parts[rank])
    for output, part in zip(outputs, parts, strict=True):
        same_bits(output, part)

    even = [values(seed, r, counts[0], dtype) for r in range(size)]
    for shared in (False, True):
        whole = (
            comm.empty(counts[0] * size, dtype=dtype)
            if shared
            else torch.empty(counts[0] * size, dtype=dtype)
        )
        comm.all_gather(whole, even[rank])
        same_bits(whole, torch.cat(even))

    outputs = [torch.empty_like(part) for part in even]
    comm.gather(even[rank], outputs if rank == root else None, root)
    if rank == root:
        for output, part in zip(outputs, even, strict=True):
            same_bits(output, part)


def check_broadcast_and_scatter(
    rank: int, size: int, seed: int, count: int, dtype: torch.dtype, root: int
) -> None:
    comm = Communicator(dist.group.WORLD)
    parts = [values(seed, r, count, dtype) for r in range(size)]
    for shared in (False, True):
        tensor = comm.empty(count, dtype=dtype).copy_(parts[rank]) if shared else parts[rank].clone()
        comm.broadcast(tensor, root)
        same_bits(tensor, parts[root])
    output = torch.empty(count, dtype=dtype)
    comm.scatter(output, [part.clone() for part in parts] if rank == root else None, root)
    same_bits(output, parts[rank])


def check_all_to_all(
    rank: int,
    size: int,
    seed: int,
    table: list[list[int]],
    dtype: torch.dtype,
    shared: Sequence[tuple[bool, bool]] = (),
) -> None:
    comm = Communicator(dist.group.WORLD)
    sent = [[values(seed * 7 + a, b, table[a][b], dtype) for b in range(size)] for a in range(size)]
    received = [row[rank] for row in sent]
    input = torch.cat(sent[rank])
    output = torch.empty(sum(len(part) for part in received), dtype=dtype)
    input_is_shared, output_is_shared = shared[rank] if shared else (False, False)
    if input_is_shared:
        input = comm.dispatcher.receive_buffer(input.shape, input).copy_(input)
    if output_is_shared:
        output = comm.dispatcher.receive_buffer(output.shape, output)
    comm.all_to_all(output, input, [len(part) for part in received], [len(part) for part in sent[rank]])
    same_bits(output, torch.cat(received))
    outputs = [torch.empty_like(part) for part in received]
    dist.all_to_all(outputs, sent[rank])
    for found, part in zip(outputs, received, strict=True):
        same_bits(found, part)


Borrow = Callable[[int], Ranks]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@PROPERTY
@given(data=st.data(), seed=st.integers(0, 1 << 16), count=COUNTS, shared=st.booleans())
def test_all_reduce(
    ranks: Borrow, size: int, data: st.DataObject, seed: int, count: int, shared: bool
) -> None:
    dtype = data.draw(st.sampled_from(REDUCIBLE))
    ops = ON_FLOATS if dtype in FLOATS else ON_BOOLS if dtype is torch.bool else ON_INTEGERS
    op = data.draw(st.sampled_from(ops))
    ranks(size).run(check_all_reduce, seed, count, dtype, op, shared)


@pytest.mark.parametrize("size", [2, 4])
@PROPERTY
@given(data=st.data(), seed=st.integers(0, 1 << 16), count=COUNTS, dtype=st.sampled_from(REDUCIBLE))
def test_reduce(
    ranks: Borrow, size: int, data: st.DataObject, seed: int, count: int, dtype: torch.dtype
) -> None:
    ranks(size).run(check_rooted_reduce, seed, count, dtype, data.draw(st.integers(0, size - 1)))


@pytest.mark.parametrize("size", [2, 4])
@PROPERTY
@given(data=st.data(), seed=st.integers(0, 1 << 16), dtype=st.sampled_from(FLOATS + INTEGERS))
def test_reduce_scatter(ranks: Borrow, size: int, data: st.DataObject, seed: int, dtype: torch.dtype) -> None:
    counts = data.draw(st.lists(COUNTS, min_size=size, max_size=size))
    op = data.draw(st.sampled_from(["sum", "avg", "min"]))
    ranks(size).run(check_reduce_scatter, seed, counts, dtype, op)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduce_scatter_over_gloo(ranks: Borrow, size: int) -> None:
    ranks(size, "gloo").run(check_reduce_scatter_over_gloo)


@pytest.mark.parametrize("size", [1, 2, 4])
@PROPERTY
@given(data=st.data(), seed=st.integers(0, 1 << 16), dtype=st.sampled_from(REDUCIBLE + OTHERS))
def test_gathers(ranks: Borrow, size: int, data: st.DataObject, seed: int, dtype: torch.dtype) -> None:
    counts = data.draw(st.lists(COUNTS, min_size=size, max_size=size))
    ranks(size).run(check_gathers, seed, counts, dtype, data.draw(st.integers(0, size - 1)))


@pytest.mark.parametrize("size", [2, 4])
@PROPERTY
@given(data=st.data(), seed=st.integers(0, 1 << 16), count=COUNTS, dtype=st.sampled_from(REDUCIBLE + OTHERS))
def test_broadcast_and_scatter(
    ranks: Borrow, size: int, data: st.DataObject, seed: int, count: int, dtype: torch.dtype
) -> None:
    ranks(size).run(check_broadcast_and_scatter, seed, count, dtype, data.draw(st.integers(0, size - 1)))


@pytest.mark.parametrize("size", [2, 4])
@PROPERTY
@given(data=st.data(), seed=st.integers(0, 1 << 16), dtype=st.sampled_from(REDUCIBLE + OTHERS))
def test_all_to_all(ranks: Borrow, size: int, data: st.DataObject, seed: int, dtype: torch.dtype) -> None:
    row = st.lists(COUNTS, min_size=size, max_size=size)
    table = data.draw(st.lists(row, min_size=size, max_size=size))
    # tensors of each rank in shared memory: every combination of pulled, pushed and staged parts
    shared = data.draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=size, max_size=size))
    ranks(size).run(check_all_to_all, seed, table, dtype, shared)


def check_special_floats(rank: int, size: int, dtype: torch.dtype, op: str) -> None:
    special = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-8, 6e4, 3.4e38], dtype=dtype
    )
    parts = [special.roll(r).repeat_interleave(9) for r in range(size)]
    tensor = parts[rank].clone()
    Communicator(dist.group.WORLD).all_reduce(tensor, op)
    torch.testing.assert_close(tensor, reduced(parts, op), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [2, 3])
def test_nan_and_infinity_are_reduced_as_in_torch(ranks: Borrow, size: int) -> None:
    for dtype in FLOATS:
        for op in ON_FLOATS:
            ranks(size).run(check_special_floats, dtype, op)


def check_many_in_a_row(rank: int, size: int) -> None:
    """Run sizes of one, two and many phases back to back, so that the halves of the staging buffer are reused."""
    comm = Communicator(dist.group.WORLD)
    for turn in range(300):
        count = [1, 7000, 40_000, 100][turn % 4]
        tensor = torch.full((count,), float(rank + turn))
        comm.all_reduce(tensor, "sum")
        assert (tensor == sum(r + turn for r in range(size))).all()
        if turn % 3 == 0:
            comm.barrier()
        if turn % 5 == 0:
            comm.broadcast(tensor, turn % size)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_consecutive_calls_under_oversubscription(ranks: Borrow, size: int) -> None:
    ranks(size).run(check_many_in_a_row)


def check_reduction_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="reduction and does not support torch.float32"):
        Communicator(dist.group.WORLD).all_reduce(torch.ones(3), "and")
    with pytest.raises(ValueError, match="avg does not support torch.bool"):
        Communicator(dist.group.WORLD).all_reduce(torch.ones(3, dtype=torch.bool), "avg")


def test_unsupported_reductions_fail_before_any_rank_waits(ranks: Borrow) -> None:
    ranks(2).run(check_reduction_refused)


def check_small_reduce_scatter(rank: int, size: int) -> None:
    parts = [values(3, r, 100 * size, torch.int32) for r in range(size)]
    output = torch.empty(100, dtype=torch.int32)
    Communicator(dist.group.WORLD).reduce_scatter(output, parts[rank])
    same_bits(output, reduced(parts, "sum")[100 * rank : 100 * (rank + 1)])


def test_small_reduce_scatter_on_many_ranks(ranks: Borrow) -> None:
    ranks(8).run(check_small_reduce_scatter)
