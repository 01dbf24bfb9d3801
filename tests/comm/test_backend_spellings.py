"""Every collective through each of torch's functions for it, old and new, compared with Gloo's result."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.comm.next_to_gloo import gloo_group, same_on_both

# each of torch's functions for a collective, on one group; the default arguments work for old and new functions


def all_reduce_spellings(group, rank, size):
    a, b, c, d = (torch.arange(10.0) + rank + i for i in range(4))
    dist.all_reduce(a, dist.ReduceOp.MAX, group=group)
    group.allreduce(b).wait()
    group.allreduce(c, dist.ReduceOp.PRODUCT).wait()
    group.allreduce_coalesced([d]).wait()
    return [a, b, c, d]


def reduce_spellings(group, rank, size):
    a, b = torch.arange(10.0) + rank, torch.arange(10.0) * rank
    dist.reduce(a, dist.get_world_size() - 1, group=group)
    group.reduce(b, 0, dist.ReduceOp.MIN).wait()
    # with Gloo, the result on ranks other than the root is undefined
    return [a if rank == size - 1 else None, b if rank == 0 else None]


def broadcast_spellings(group, rank, size):
    a, b = torch.arange(5) + rank, torch.arange(5) * rank
    dist.broadcast(a, 0, group=group)
    group.broadcast(b, size - 1).wait()
    return [a, b]


def gather_spellings(group, rank, size):
    own = torch.arange(6.0).view(2, 3) + rank
    out = {name: [torch.zeros(2, 3) for _ in range(size)] for name in "abcd"}
    dist.all_gather(out["a"], own, group=group)
    group.allgather([out["b"]], [own]).wait()
    group.allgather(out["c"], own).wait()
    dist.gather(own, out["d"] if rank == 0 else None, 0, group=group)
    coalesced = [[torch.zeros(2, 3), torch.zeros(4)] for _ in range(size)]
    group.allgather_coalesced(coalesced, [own, torch.full((4,), float(rank))]).wait()
    return [list(out.values()), coalesced]


def gather_single_spellings(group, rank, size):
    own = torch.arange(6.0).view(2, 3) + rank
    results = []
    for spelling in ("all_gather_into_tensor", "all_gather_single"):
        call = getattr(dist, spelling, None)
        output = torch.zeros(2 * size, 3)
        if call is not None:
            call(output, own, group=group)
            results.append(output)
    for spelling in ("_allgather_base", "all_gather_single"):
        method = getattr(group, spelling, None)
        output = torch.zeros(2 * size, 3)
        if method is not None:
            method(output, own).wait()
            results.append(output)
    for spelling in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
        method = getattr(group, spelling, None)
        outputs = [torch.zeros(2 * size, 3), torch.zeros(6 * size)]
        if method is not None:
            method(outputs, [own, own.view(-1) * 2]).wait()
            results.append(outputs)
    return results


def reduce_scatter_spellings(group, rank, size):
    whole = torch.arange(6.0 * size).view(2 * size, 3) + rank
    results = []
    for spelling in ("reduce_scatter_tensor", "reduce_scatter_single"):
        call = getattr(dist, spelling, None)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            output = torch.zeros(2, 3)
            if call is not None:
                call(output, whole, op, group=group)
                results.append(output)
    for spelling in ("_reduce_scatter_base", "reduce_scatter_single"):
        method = getattr(group, spelling, None)
        output = torch.zeros(2, 3)
        if method is not None:
            method(output, whole, dist.ReduceScatterOptions()).wait()
            results.append(output)
    for spelling in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
        method = getattr(group, spelling, None)
        outputs = [torch.zeros(2, 3), torch.zeros(6)]
        if method is not None:
            method(outputs, [whole, whole.view(-1) * 2], dist.ReduceScatterOptions()).wait()
            results.append(outputs)
    output = torch.zeros(2, 3)
    group.reduce_scatter(output, list(whole.chunk(size)), dist.ReduceOp.SUM).wait()
    return [*results, output]


def all_to_all_spellings(group, rank, size):
    whole = torch.arange(2.0 * size * 3).view(2 * size, 3) + 100 * rank
    results = []
    for spelling in ("all_to_all_single",):
        output = torch.zeros(2 * size, 3)
        getattr(dist, spelling)(output, whole, group=group)
        results.append(output)
    # rank r sends r + 1 rows to every rank
    uneven = torch.arange(3.0 * size * (rank + 1)).view(-1, 3) + 100 * rank
    received, sent = [r + 1 for r in range(size)], [rank + 1] * size
    output = torch.zeros(sum(received), 3)
    dist.all_to_all_single(output, uneven, received, sent, group=group)
    results.append(output)
    for spelling in ("alltoall_base", "all_to_all_single"):
        method = getattr(group, spelling, None)
        output = torch.zeros(sum(received), 3)
        if method is not None:
            method(output, uneven, received, sent).wait()
            results.append(output)
    # some ranks send nothing to some other ranks
    received, sent = [2 * ((r + rank) % 2) for r in range(size)], [2 * ((r + rank) % 2) for r in range(size)]
    output = torch.zeros(sum(received), 3)
    dist.all_to_all_single(output, whole[: sum(sent)], received, sent, group=group)
    return [*results, output]


def scatter_spellings(group, rank, size):
    a, b = torch.zeros(3), torch.zeros(3)
    parts = [torch.full((3,), float(r)) for r in range(size)]
    dist.scatter(a, parts if rank == size - 1 else None, size - 1, group=group)
    group.scatter(b, parts if rank == 0 else [], 0).wait()
    return [a, b]


def coalesced(group, rank, size):
    tensors = [torch.full((n,), float(rank + n)) for n in (1, 5, 70_000)]
    with _coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    outputs = [torch.zeros(n * size) for n in (1, 5, 7)]
    with _coalescing_manager(group=group, async_ops=True) as works:
        for n, output in zip((1, 5, 7), outputs, strict=True):
            dist.all_gather_into_tensor(output, torch.full((n,), float(rank)), group=group)
    works.wait()
    parts = [torch.zeros(n) for n in (1, 5, 7)]
    with _coalescing_manager(group=group):
        for n, part in zip((1, 5, 7), parts, strict=True):
            dist.reduce_scatter_tensor(part, torch.arange(float(n * size)) + rank, group=group)
    return [tensors, outputs, parts]


def in_place(group, rank, size):
    """Run collectives whose output and input share memory, as in sharded training."""
    whole = torch.arange(8.0 * size) * (rank + 1)
    own = whole[8 * rank : 8 * rank + 8]
    dist.reduce_scatter_tensor(own, whole.clone(), group=group)
    dist.all_gather_into_tensor(whole, own, group=group)
    return whole


def objects(group, rank, size):
    everyone = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (100 * rank)}, group=group)
    shared = [f"from {rank}", rank, None]
    dist.broadcast_object_list(shared, 0, group=group)
    collected = [None] * size if rank == 0 else None
    dist.gather_object(("rank", rank), collected, 0, group=group)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, 0, group=group)
    if rank == 0:
        dist.send_object_list(["hello", 1, {2}], 1, group=group)
    messages = [None, None, None]
    if rank == 1:
        dist.recv_object_list(messages, 0, group=group)
    return [repr([everyone, shared, collected, mine, messages])]


CALLS = [
    all_reduce_spellings,
    reduce_spellings,
    broadcast_spellings,
    gather_spellings,
    gather_single_spellings,
    reduce_scatter_spellings,
    all_to_all_spellings,
    scatter_spellings,
    coalesced,
    in_place,
    objects,
]


def check_calls(rank: int, size: int) -> None:
    gloo = gloo_group()
    for call in CALLS:
        try:
            same_on_both(gloo, lambda group, call=call: call(group, rank, size))
        except Exception as error:
            error.add_note(f"in {call.__name__}")
            raise


@pytest.mark.parametrize("size", [2, 4])
def test_every_call_and_spelling_equals_gloo(ranks, size):
    ranks(size).run(check_calls)


def check_gather_single(rank: int, size: int) -> None:
    """Gloo has no such call, so compare with the expected values."""
    group, root = dist.group.WORLD, size - 1
    own = torch.arange(6.0).view(2, 3) + rank
    expected = torch.cat([torch.arange(6.0).view(2, 3) + r for r in range(size)])
    for spelling in ("gather_single", "gather_into_tensor"):
        options = dist.GatherOptions()
        options.rootRank = root
        output = torch.zeros(2 * size, 3) if rank == root else torch.empty(0)
        getattr(group, spelling)(output, own, options).wait()
        assert rank != root or torch.equal(output, expected)
        if call := getattr(dist, spelling, None):  # from torch 2.14 on
            stacked = torch.zeros(size, 2, 3) if rank == root else None
            call(own, stacked, root)
            assert rank != root or torch.equal(stacked.flatten(0, 1), expected)
    if rank == root:
        with pytest.raises(ValueError, match="got 7 for the output and .* for all inputs together"):
            group.gather_single(torch.zeros(7), own, options)


def test_gather_single(ranks):
    ranks(3).run(check_gather_single)
