"""Collectives through `torch.distributed` on the backend, on tensors of every kind, against Gloo's result.

test_collectives.py tests reductions of every type and size; this file tests the tensors that callers of torch pass.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from tests.comm.hosts import hierarchical_group
from tests.comm.next_to_gloo import gloo_group, same_on_both

COUNT = 24


def transposed(rank: int) -> Tensor:
    return torch.arange(COUNT, dtype=torch.float32).view(4, 6).add(rank).t()


def strided(rank: int) -> Tensor:
    return torch.arange(4 * COUNT, dtype=torch.float32).add(rank).view(COUNT, 4)[::2, 1:3]


def channels_last(rank: int) -> Tensor:
    return torch.randn(2, 3, 4, 5).add(rank).to(memory_format=torch.channels_last)


def nothing(rank: int) -> Tensor:
    return torch.empty(0, 3)


def scalar(rank: int) -> Tensor:
    return torch.tensor(1.5 + rank)


def leaf(rank: int) -> Tensor:
    return torch.full((COUNT,), 2.0 + rank, requires_grad=True)


def complex_numbers(rank: int) -> Tensor:
    return torch.complex(torch.arange(8.0) + rank, torch.arange(8.0) - rank)


def conjugated(rank: int) -> Tensor:
    return complex_numbers(rank).conj()


def negated(rank: int) -> Tensor:
    return complex_numbers(rank).conj().imag


def parameter(rank: int) -> Tensor:
    return torch.nn.Parameter(torch.arange(12.0).view(3, 4) * (rank + 1))


KINDS = [
    transposed, strided, channels_last, nothing, scalar, leaf, complex_numbers, conjugated, negated, parameter
]  # fmt: skip


def fresh(make, rank: int) -> Tensor:
    torch.manual_seed(7)
    return make(rank)


def like(make, rank: int, value: float = -1) -> Tensor:
    with torch.no_grad():
        return fresh(make, rank).detach().fill_(value)


def check_kinds(rank: int, size: int) -> None:
    group = dist.group.WORLD  # use its methods, because torch's functions refuse lazy conjugates
    for make in KINDS:
        own = fresh(make, rank).detach()
        everyone = [fresh(make, r).detach() for r in range(size)]
        total = torch.stack([t.resolve_conj().resolve_neg().contiguous() for t in everyone]).sum(0)

        tensor = fresh(make, rank)
        group.allreduce([tensor]).wait()
        equal(tensor, total)

        for root in range(size):
            tensor = fresh(make, rank)
            group.broadcast(tensor, root).wait()
            equal(tensor, everyone[root])

            tensor = fresh(make, rank)
            group.reduce(tensor, root).wait()
            equal(tensor, total if rank == root else own)

            parts = [like(make, rank) for _ in range(size)] if rank == root else []
            group.gather(parts, own, root).wait()
            for part, expected in zip(parts, everyone, strict=False):
                equal(part, expected)

            output = like(make, rank)
            group.scatter(output, everyone if rank == root else [], root).wait()
            equal(output, own)

        parts = [like(make, rank) for _ in range(size)]
        group.allgather(parts, own).wait()
        for part, expected in zip(parts, everyone, strict=True):
            equal(part, expected)

        output = like(make, rank)
        group.reduce_scatter(output, [own for _ in range(size)]).wait()
        equal(output, total)

        outputs = [like(make, rank) for _ in range(size)]
        group.alltoall(outputs, [own for _ in range(size)]).wait()
        for part, expected in zip(outputs, everyone, strict=True):
            equal(part, expected)

        peer = (rank + 1) % size
        if size > 1:
            output = like(make, rank)
            sent, received = group.send([own], peer, 3), group.recv([output], (rank - 1) % size, 3)
            sent.wait()
            received.wait()
            equal(output, everyone[(rank - 1) % size])


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found.detach().resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg()
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensors_of_every_kind(ranks, size):
    ranks(size).run(check_kinds)


def check_shapes_beyond_gloo(rank: int, size: int) -> None:
    one = torch.tensor([rank + 1.0]).expand(6)  # all elements at one address
    parts = [torch.zeros(6) for _ in range(size)]
    dist.all_gather(parts, one)
    assert [part.tolist() for part in parts] == [[r + 1.0] * 6 for r in range(size)]
    output = torch.zeros(6 // size)
    dist.reduce_scatter_tensor(output, one[: 6 // size * size])
    assert (output == sum(range(1, size + 1))).all()
    stacked = torch.zeros(size, 2, 3)  # Gloo refuses this form, which torch documents
    dist.all_gather_into_tensor(stacked, torch.full((2, 3), float(rank)))
    assert all((stacked[r] == r).all() for r in range(size))
    tensor = one if rank == 0 else torch.zeros(6)
    dist.broadcast(tensor, 0)  # only the values on the root are read
    assert (tensor == 1).all()


@pytest.mark.parametrize("size", [2])
def test_expanded_inputs_and_stacked_outputs(ranks, size):
    ranks(size).run(check_shapes_beyond_gloo)


def check_reduce_in_place(rank: int, size: int) -> None:
    """Write the output of a reduce-scatter into its own input, for small and large tensors."""
    for count in (8, 100_000):
        whole = torch.arange(float(size * count)).view(size, count) * (rank + 1)
        expected = torch.arange(float(size * count)).view(size, count)[rank] * sum(range(1, size + 1))
        dist.reduce_scatter_tensor(whole[rank], whole)
        torch.testing.assert_close(whole[rank], expected)


@pytest.mark.parametrize("size", [2, 4])
def test_reduce_scatter_into_its_own_input(ranks, size):
    ranks(size).run(check_reduce_in_place)


def check_async_collective_tensor(rank: int, size: int) -> None:
    pending = functional.all_reduce(torch.ones(4) * (rank + 1), "sum", dist.group.WORLD)
    assert isinstance(pending, functional.AsyncCollectiveTensor)
    total = float(sum(range(1, size + 1)))
    for async_op in (False, True):
        pending = functional.all_reduce(torch.ones(4) * (rank + 1), "sum", dist.group.WORLD)
        work = dist.all_reduce(pending, async_op=async_op)
        if work is not None:
            work.wait()
        assert (pending == total * size).all()
    output = torch.zeros(4 * size)
    dist.all_gather_into_tensor(output, functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD))
    assert (output == size).all()


def test_results_of_functional_collectives_are_accepted(ranks):
    ranks(2).run(check_async_collective_tensor)


def check_inference_mode(rank: int, size: int) -> None:
    """The thread of a group, which is not in inference mode, writes tensors that were created in inference mode."""
    for group in (dist.group.WORLD, hierarchical_group(range(size), rank)):
        with torch.inference_mode():
            transposed = torch.full((2, 3), float(rank)).t()
            gathered, means = torch.zeros(3, size).t(), torch.full((4,), float(rank))
            calls = [
                dist.all_reduce(transposed, async_op=True, group=group),
                dist.all_reduce(means, dist.ReduceOp.AVG, async_op=True, group=group),
                dist.all_gather_into_tensor(
                    gathered, torch.full((1, 3), rank + 1.0), async_op=True, group=group
                ),
            ]
        while not all(call.is_completed() for call in calls):
            time.sleep(0.001)
        for call in calls:
            call.wait()
        assert (transposed == sum(range(size))).all() and (means == sum(range(size)) / size).all()
        assert gathered[:, 0].tolist() == [r + 1.0 for r in range(size)]
        after = torch.ones(2, 3).t()
        pending = dist.all_reduce(after, async_op=True, group=group)
        with torch.inference_mode():  # a waiting thread may run the call
            pending.wait()
        after += 1
        assert (after == size + 1).all()


def test_inference_mode(ranks):
    ranks(2).run(check_inference_mode)


def check_refusals(rank: int, size: int) -> None:
    """Every rank detects these mistakes by itself, and all ranks make the same mistake, so that no rank waits."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    with pytest.raises(ValueError, match="got 7 for the input and 6 for all outputs together"):
        dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(7))
    with pytest.raises(ValueError, match="expected a multiple of 2 rows in the input, got 7"):
        dist.all_to_all_single(torch.zeros(8), torch.zeros(7))
    with pytest.raises(
        ValueError, match=r"expected 2 .* splits that add up to the 8 rows of the input, got \[1, 9\]"
    ):
        dist.all_to_all_single(torch.zeros(8), torch.zeros(8), [4, 4], [1, 9])
    with pytest.raises(ValueError, match="got RedOpType.PREMUL_SUM$"):
        dist.all_reduce(torch.zeros(8), dist._make_nccl_premul_sum(2.0))
    with pytest.raises(ValueError, match="expected a peer other than this rank"):
        dist.group.WORLD.send([torch.zeros(2)], rank, 0)
    mesh = init_device_mesh("cpu", (size,))
    with pytest.raises(TypeError, match="expected a tensor that owns its memory, got DTensor.*to_local"):
        dist.group.WORLD.allreduce([distribute_tensor(torch.ones(4), mesh)])
    dist.barrier()


def test_invalid_calls_fail_before_any_rank_waits(ranks):
    ranks(2).run(check_refusals)


def check_sparse(rank: int, size: int) -> None:
    gloo = gloo_group()

    def total(group):
        tensor = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0 + rank], (5,))
        dist.all_reduce(tensor, group=group)
        return tensor.coalesce().to_dense()

    same_on_both(gloo, total)


def test_sparse_tensors_go_through_gloo(ranks):
    ranks(2).run(check_sparse)


def check_large(rank: int, size: int, count: int) -> None:
    """Run all_reduce and broadcast in place with counts and offsets that do not fit in 32 bits."""
    tensor = torch.full((count,), rank + 1, dtype=torch.uint8)
    tensor[-3:] = 10 * (rank + 1)
    dist.all_reduce(tensor)
    probe = torch.cat([tensor[:2], tensor[2**31 - 1 : 2**31 + 1], tensor[-3:]])
    assert probe.tolist() == [3, 3, 3, 3, 30, 30, 30]
    if rank == 0:
        tensor[-3:] = 77
    dist.broadcast(tensor, 0)
    assert tensor[-4:].tolist() == [3, 77, 77, 77]


def test_tensors_larger_than_two_gibibytes(ranks):
    if free_bytes() < 7 * 2**30:
        pytest.skip("less than 7 GiB of memory are free")
    ranks(2).run(check_large, 2**31 + 7, timeout_s=120)


def free_bytes() -> int:
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
