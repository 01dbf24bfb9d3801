"""Calls that torch.distributed allows or other backends refuse: each gives Gloo's result or an error that names the
mistake."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from farandole.comm import CallMismatch, Communicator, RankLate
from tests.comm.jobs import Job
from tests.comm.next_to_gloo import gloo_group, same_on_both

# ---- keywords of torch's own methods ----


def keyword_calls(group: dist.ProcessGroup, rank: int, size: int) -> list[object]:
    """Call every method with the keywords that torch documents, and return the results."""
    own = torch.arange(4.0) + rank
    parts = [torch.arange(3.0) + 10 * rank + r for r in range(size)]
    a, b, c, d = (own.clone() for _ in range(4))
    group.broadcast(tensor=a, root=size - 1).wait()
    group.broadcast(tensors=[b], opts=dist.BroadcastOptions()).wait()
    group.allreduce(tensor=c, op=dist.ReduceOp.MAX, timeout=timedelta(seconds=60)).wait()
    group.allreduce(tensors=[d], op=dist.ReduceOp.PRODUCT).wait()
    reduced = own.clone()
    group.reduce(tensor=reduced, root=0, op=dist.ReduceOp.MIN).wait()
    gathered, collected = ([torch.zeros(4) for _ in range(size)] for _ in range(2))
    group.allgather(output_tensors=gathered, input_tensor=own).wait()
    group.gather(output_tensors=collected if rank == 0 else [], input_tensor=own, root=0).wait()
    scattered, summed = torch.zeros(3), torch.zeros(3)
    group.scatter(output_tensor=scattered, input_tensors=parts if rank == 0 else [], root=0).wait()
    group.reduce_scatter(output=summed, input=[p.clone() for p in parts], op=dist.ReduceOp.SUM).wait()
    exchanged = torch.zeros(2 * size)
    group.alltoall_base(
        output=exchanged,
        input=torch.arange(2.0 * size) + rank,
        output_split_sizes=[2] * size,
        input_split_sizes=[2] * size,
    ).wait()
    token = torch.full((1,), float(rank))
    if rank == 0:
        group.send(tensors=[token], dstRank=1, tag=3).wait()
    elif rank == 1:
        group.recv(tensors=[token], srcRank=0, tag=3).wait()
    group.barrier(timeout=timedelta(seconds=60)).wait()
    return [
        a,
        b,
        c,
        d,
        reduced if rank == 0 else None,
        gathered,
        collected,
        scattered,
        summed,
        exchanged,
        token,
    ]


def check_keywords(rank: int, size: int) -> None:
    same_on_both(gloo_group(), lambda group: keyword_calls(group or dist.group.WORLD, rank, size))
    with pytest.raises(TypeError, match="unexpected keyword argument 'rooot'"):
        dist.group.WORLD.broadcast(tensor=torch.zeros(1), rooot=0)
    with pytest.raises(TypeError, match=r"broadcast\(\) got .*'tensor'"):
        dist.group.WORLD.broadcast([torch.zeros(1)], tensor=torch.zeros(1))


@pytest.mark.parametrize("size", [2, 3])
def test_keywords_of_torch(ranks, size):
    ranks(size).run(check_keywords)


# ---- lists of the wrong length ----


def check_lists(rank: int, size: int) -> None:
    group, t = dist.group.WORLD, torch.ones(2)
    empty = {
        "all_reduce": lambda: group.allreduce([]),
        "all_reduce_coalesced": lambda: group.allreduce_coalesced([]),
        "broadcast": lambda: group.broadcast([], 0),
        "reduce": lambda: group.reduce([], 0),
        "all_gather": lambda: group.allgather([], []),
        "gather": lambda: group.gather([[t] * size], [], 0),
        "scatter": lambda: group.scatter([], [[t] * size], 0),
        "reduce_scatter": lambda: group.reduce_scatter([], []),
        "all_to_all": lambda: group.alltoall([], []),
        "send": lambda: group.send([], 1 - rank, 0),
        "recv": lambda: group.recv([], 1 - rank, 0),
        "recv_anysource": lambda: group.recv_anysource([], 0),
    }
    several = {
        "all_reduce": lambda: group.allreduce([t, t.clone()]),
        "broadcast": lambda: group.broadcast([t, t.clone()], 0),
        "reduce": lambda: group.reduce([t, t.clone()], 0),
        "all_gather": lambda: group.allgather([[t] * size] * 2, [t, t.clone()]),
        "gather": lambda: group.gather([[t] * size], [t, t], rank),
        "scatter": lambda: group.scatter([t, t.clone()], [[t] * size], rank),
        "reduce_scatter": lambda: group.reduce_scatter([t, t.clone()], [[t] * size] * 2),
        "send": lambda: group.send([t, t], 1 - rank, 0),
        "recv": lambda: group.recv([t, t.clone()], 1 - rank, 0),
    }
    for count, calls in ((0, empty), (2, several)):
        for name, call in calls.items():
            with pytest.raises(ValueError, match=rf"{name}: expected .*, got {count or 'an empty list'}"):
                call()
    parts: list[tuple[Callable[[], object], str]] = [
        (lambda: dist.all_gather([], t), "0 for the output"),
        (lambda: dist.all_gather([], t, async_op=True), "0 for the output"),
        (lambda: dist.reduce_scatter(t.clone(), []), "0 for the input"),
        (lambda: dist.all_to_all([t.clone() for _ in range(size)], [t]), "1 for the input"),
        (lambda: dist.all_to_all([t.clone()], [t] * size), "1 for the output"),
    ]
    for call, wrong in parts:
        with pytest.raises(ValueError, match=f"got {wrong} list and {size} for the group"):
            call()
    dist.barrier()


def test_lists_of_the_wrong_length_are_refused(ranks):
    ranks(2).run(check_lists)


# ---- memory that overlaps ----


def coalesced(group: dist.ProcessGroup | None, rank: int) -> list[torch.Tensor]:
    same, other = torch.arange(3.0) + rank, torch.ones(2) * (rank + 1)
    dist.all_reduce_coalesced([same, other, same], group=group)
    whole = torch.arange(6.0) + rank
    dist.all_reduce_coalesced([whole[:4], whole[2:]], group=group)
    later = torch.arange(5.0) * (rank + 1)
    dist.all_reduce_coalesced([later, later], group=group, async_op=True).wait()
    return [same, other, whole, later]


def check_overlaps(rank: int, size: int) -> None:
    same_on_both(gloo_group(), lambda group: coalesced(group, rank))
    comm, t = Communicator(dist.group.WORLD), torch.ones(4)
    calls = {
        "all_reduce": lambda out: dist.all_reduce(out),
        "all_gather": lambda out: dist.all_gather([out] + [torch.zeros(4)] * (size - 1), t),
        "scatter": lambda out: dist.scatter(out, [t] * size if rank == 0 else None, 0),
        "reduce_scatter": lambda out: dist.reduce_scatter(out, [t] * size),
        "scan": lambda out: comm.scan(t, output=out),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}: .* do not overlap.*contiguous"):
            call(torch.zeros(1).expand(4))
    if rank != 0:
        with pytest.raises(ValueError, match="recv: expected an output whose elements do not overlap"):
            comm.recv(torch.zeros(1).expand(4), 0)
    expanded = torch.full((1,), rank + 1.0).expand(4)  # may be read
    gathered = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(gathered, expanded)
    assert [part.tolist() for part in gathered] == [[r + 1.0] * 4 for r in range(size)]
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_overlapping_memory(ranks, size):
    ranks(size).run(check_overlaps)


def fake_tensors(rank: int, size: int) -> None:
    """Tensors of a dry run have a shape but no memory."""
    comm = Communicator(dist.group.WORLD)
    with FakeTensorMode():
        fake, output, parts = torch.empty(4), torch.empty(4), [torch.empty(2) for _ in range(size)]
    calls = [
        lambda: comm.all_reduce(fake),
        lambda: comm.all_reduce(fake, output=output),
        lambda: comm.all_reduce(fake, async_op=True),
        lambda: comm.all_gather(parts, parts[0]),
        lambda: comm.reduce_scatter(parts[0], parts),
        lambda: comm.all_to_all(parts, parts),
        lambda: comm.broadcast(fake),
        lambda: comm.isend(fake, (rank + 1) % size),
        lambda: comm.irecv(fake, (rank - 1) % size),
        lambda: comm.all_reduce_init(fake),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="got a fake tensor"):
            call()
    real = torch.ones(4)
    comm.all_reduce(real)
    assert real.tolist() == [size] * 4


def test_fake_tensors_are_refused(ranks):
    ranks(2).run(fake_tensors)


def unsupported_dtypes(rank: int, size: int) -> None:
    comm = Communicator(dist.group.WORLD)
    with warnings.catch_warnings(action="ignore"):  # torch will remove quantized tensors
        quantized = torch.quantize_per_tensor(torch.ones(size), 0.1, 0, torch.qint8)
    for tensor in (quantized, torch.empty(size, dtype=torch.bits8)):
        calls: list[Callable[[], object]] = [
            lambda t=tensor: dist.broadcast(t, 0),
            lambda t=tensor: dist.broadcast(t, 0, async_op=True).wait(),
            lambda t=tensor: dist.all_gather([t.clone() for _ in range(size)], t),
            lambda t=tensor: dist.all_to_all_single(t.clone(), t),
            lambda t=tensor: dist.send(t, 1) if rank == 0 else dist.recv(t, 0),
            lambda t=tensor: comm.broadcast_init(t),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=rf"can be communicated, got {tensor.dtype}; .*int_repr\(\)"):
                call()
        with pytest.raises(ValueError, match=f"sum does not support {tensor.dtype}; convert the tensor"):
            dist.all_reduce(tensor)
    dist.barrier()


def test_dtypes_that_cannot_be_communicated_are_refused(ranks):
    ranks(2).run(unsupported_dtypes)


# ---- sparse and dense ----


def sparse_against_dense(rank: int, size: int) -> None:
    group = dist.new_group()
    tensor = torch.ones(5)
    if rank == size - 1:
        tensor = tensor.to_sparse()
    with pytest.raises(CallMismatch, match="one tensor is sparse and the other is dense") as caught:
        dist.all_reduce(tensor, group=group)
    assert f"rank {size - 1 if size > 2 else 1} " in str(caught.value)


@pytest.mark.parametrize("size", [2, 3])
def test_sparse_against_dense_is_a_mismatch(ranks, size):
    ranks(size).run(sparse_against_dense)


# ---- monitored_barrier ----


def check_monitored_barrier(rank: int, size: int) -> None:
    group = dist.new_group()
    for _ in range(2):
        dist.monitored_barrier(group, timedelta(seconds=30))
        group.monitored_barrier()
        group.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
    dist.monitored_barrier(gloo_group())
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RankLate, match="rank 1 .* timeout of 1 s") as caught:
            dist.monitored_barrier(group, timedelta(seconds=1), wait_all_ranks=True)
        assert time.monotonic() - start < 3
        assert all(f"rank {other} " in str(caught.value) for other in range(1, size))
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_monitored_barrier(ranks, size):
    ranks(size).run(check_monitored_barrier)


# ---- what the others read ----


def different_waits(rank: int, size: int, tell: object) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(2), group=group)
    if rank == size - 1:
        time.sleep(2.5)
        dist.broadcast(torch.ones(7), 0, group=group)
    dist.barrier(group=group)


def test_the_error_contains_the_call_of_this_rank():
    with Job(2, different_waits) as job:
        waiting, late = job.end(0), job.end(1)
    assert waiting.kind == late.kind == "RankLate"
    assert "within the timeout of 1 s" in waiting.text
    assert "within the timeout of 1 s" in late.text
    assert "this rank called broadcast(7 x float32, from rank 0)" in late.text
