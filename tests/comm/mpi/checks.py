"""Checks of the MPI backend, in addition to the checks of the shared-memory backend."""

from __future__ import annotations

import itertools
import random
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import Communicator, RankLate
from farandole.comm.compression import Cast
from farandole.comm.mpi import MpiTransport
from tests.comm import test_collectives as contract
from tests.comm.test_backend_collectives import check_large


def random_collectives(rank: int, size: int, seed: int, turns: int) -> None:
    """Check the properties of test_collectives.py with random types, reductions, counts and roots."""
    draw = random.Random(seed)
    counts = [0, 1, 2, 3, 7, 100, 4095, 5000, 70_001]
    for turn in range(turns):
        count, root = draw.choice(counts), draw.randrange(size)
        each = [draw.choice(counts) for _ in range(size)]
        table = [[draw.choice(counts) for _ in range(size)] for _ in range(size)]
        dtype = draw.choice(contract.REDUCIBLE)
        moved = draw.choice(contract.REDUCIBLE + contract.OTHERS)
        number = draw.choice(contract.FLOATS + contract.INTEGERS)
        ops = contract.ON_FLOATS if dtype in contract.FLOATS else contract.ON_INTEGERS
        op = draw.choice(contract.ON_BOOLS if dtype is torch.bool else ops)
        contract.check_all_reduce(rank, size, turn, count, dtype, op, False)
        contract.check_rooted_reduce(rank, size, turn, count, dtype, root)
        contract.check_reduce_scatter(rank, size, turn, each, number, draw.choice(["sum", "avg", "min"]))
        contract.check_gathers(rank, size, turn, each, moved, root)
        contract.check_broadcast_and_scatter(rank, size, turn, count, moved, root)
        contract.check_all_to_all(rank, size, turn, table, moved)


def every_reduction(rank: int, size: int) -> None:
    """Check that all types and reductions give the same bits on all ranks, and match one process."""
    for dtype, count in itertools.product(contract.REDUCIBLE, (5, 30_001)):
        ops = contract.ON_FLOATS if dtype in contract.FLOATS else contract.ON_INTEGERS
        for op in contract.ON_BOOLS if dtype is torch.bool else ops:
            parts = [contract.values(count, r, count, dtype) for r in range(size)]
            tensor = parts[rank].clone()
            contract.Communicator(dist.group.WORLD).all_reduce(tensor, op)
            expected = contract.reduced(parts, op)
            torch.testing.assert_close(tensor, expected, equal_nan=True, msg=f"{dtype} {op}")
            if dtype not in (torch.float32, torch.float64):
                contract.same_bits(tensor, expected)  # computed in the order of ranks
            assert same_on_all(tensor.view(torch.uint8), size), (dtype, op)


def same_on_all(tensor: Tensor, size: int) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(other, tensor) for other in everyone)


def special_floats(rank: int, size: int) -> None:
    for dtype, op in itertools.product(contract.FLOATS, contract.ON_FLOATS):
        contract.check_special_floats(rank, size, dtype, op)


def complex_sums(rank: int, size: int) -> None:
    for dtype, op in itertools.product((torch.complex64, torch.complex128), ("sum", "avg")):
        tensor = torch.full((7,), complex(rank + 1, -rank), dtype=dtype)
        contract.Communicator(dist.group.WORLD).all_reduce(tensor, op)
        total = complex(sum(range(1, size + 1)), -sum(range(size)))
        torch.testing.assert_close(
            tensor, torch.full((7,), total / (size if op == "avg" else 1), dtype=dtype)
        )


def tags_without_order(rank: int, size: int) -> None:
    """Receive small messages, which MPI buffers, in a different order than they were sent."""
    if rank == 0:
        for tag in (5, 3, 5, 4):
            dist.send(torch.full((3,), float(tag)), 1, tag=tag)
    if rank == 1:
        for tag in (3, 4, 5, 5):
            buffer = torch.zeros(3)
            dist.recv(buffer, 0, tag=tag)
            assert (buffer == tag).all()
    if rank == 0:
        for tag in (-1, 2**31 - 1, 2**32 + 7):
            with pytest.raises(ValueError, match=rf"^send: expected a tag between 0 and \d+, got {tag}$"):
                dist.send(torch.ones(1), 1, tag=tag)


def transport(rank: int, size: int) -> None:
    """Send empty, small and large messages in both directions at once, and one message after a timeout."""
    store = dist.PrefixStore("transport", dist.distributed_c10d._get_default_store())
    way = MpiTransport.connect(store, rank, size, dist.distributed_c10d.default_pg_timeout)
    assert (way.rank, way.size) == (rank, size)
    peer, source = (rank + 1) % size, (rank - 1) % size
    sent = [torch.randn(count) + rank for count in (0, 1, 1000, 400_000, 3)]
    received = [torch.empty(len(tensor)) for tensor in sent]
    with pytest.raises(ValueError, match=r"^recv: expected a tag between 0 and \d+, got -1$"):
        way.recv(received[0], source, -1)
    pending = [way.recv(tensor, source, 7) for tensor in received]
    pending += [way.send(tensor, peer, 7) for tensor in sent]
    for each in pending:
        each.wait(20.0)
        assert each.test()
    everyone: list = [None] * size
    dist.all_gather_object(everyone, sent)
    for tensor, expected in zip(received, everyone[source], strict=True):
        assert torch.equal(tensor, expected)
    late = way.recv(torch.empty(2), source, 8)
    assert not late.test()
    start = time.monotonic()
    with pytest.raises(
        RankLate,
        match=rf"rank {source} \(process \d+\) did not send the message that .* expected in .* within the timeout of 0.2 s",
    ):
        late.wait(0.2)
    assert 0.2 <= time.monotonic() - start < 2
    dist.barrier()
    way.send(torch.ones(2), peer, 8).wait(20.0)
    late.wait(20.0)  # the receive was still pending
    abandoned = torch.zeros(2)
    way.recv(abandoned, source, 9)
    memory = weakref.ref(abandoned)
    del abandoned
    assert memory() is not None
    dist.barrier()
    way.send(torch.ones(2), peer, 9).wait(20.0)
    deadline = time.monotonic() + 20
    while memory() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert memory() is None
    with pytest.raises(ValueError, match="expected a contiguous CPU tensor"):
        way.send(torch.ones(4, 4).t(), peer, 1)
    with pytest.raises(ValueError, match=f"expected a peer between 0 and .*, got {size}"):
        way.send(torch.ones(4), size, 1)
    dist.barrier()
    way.close()


def deadlines(rank: int, size: int) -> None:
    """Check that a timeout names the missing ranks, and breaks only its own group."""
    group = dist.new_group(timeout=timedelta(seconds=0.4))
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(
            RankLate,
            match=r"^rank 1 \(process \d+\).* did not arrive within the timeout of 0.4 s; rank 0 .*waiting in all_reduce\(sum, 3 x",
        ):
            dist.all_reduce(torch.ones(3), group=group)
        assert time.monotonic() - start < 3
        with pytest.raises(RankLate, match="did not arrive within the timeout of 0.4 s"):
            dist.barrier(group=group)
    dist.barrier()
    if rank > 0:
        dist.all_reduce(torch.ones(3), group=group)  # late, so that rank 0's pending operation completes
    dist.barrier()
    dist.destroy_process_group(group)


def late_messages(rank: int, size: int) -> None:
    """Check that a late message fails its group, and that MPI then neither writes nor reads freed memory."""
    receiving, sending, silent = groups = [dist.new_group() for _ in range(3)]
    received, count = torch.zeros(3), 1 << 20
    if rank == 1:
        receiving.set_timeout(timedelta(seconds=0.3))
        late = r"^rank 0 \(process \d+\) did not send the message that .* within the timeout of 0.3 s"
        with pytest.raises(RankLate, match=late):
            dist.recv(received, 0, group=receiving)
        with pytest.raises(RankLate, match=late):
            dist.irecv(torch.zeros(3), 0, group=receiving)
        with pytest.raises(RankLate, match=late):
            dist.barrier(group=receiving)
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(3), 1, group=receiving)
        sending.set_timeout(timedelta(seconds=0.3))
        late = r"^rank 1 \(process \d+\) did not receive the message that .* within the timeout of 0.3 s"
        with pytest.raises(RankLate, match=late):
            Communicator(sending).send(torch.full((count,), 7.0), 1)
        with pytest.raises(RankLate, match=late):
            dist.isend(torch.ones(3), 1, group=sending)
    reused = torch.zeros(count)  # in the memory of the late tensor, if it has been freed
    dist.barrier()
    if rank == 1:
        dist.recv(reused, 0, group=sending)
        assert (reused == 7).all()
        assert not received.any()
    silent.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(RankLate, match=r"no rank sent a message within the timeout of 0.3 s to rank \d+"):
        dist.recv(torch.ones(2), group=silent)
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


def wrong_sizes(rank: int, size: int) -> None:
    """Check that a message of an unexpected size raises an error that states the size."""
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=1)
        dist.send(torch.ones(3), 1, tag=2)
    if rank == 1:
        call = r"rank 1 \(process \d+\) called recv\({} x float32, from rank 0, tag {}\) of the default group, which receives {} bytes"
        with pytest.raises(RuntimeError, match=r"rank 0 .* sent 12 bytes, but " + call.format(5, 1, 20)):
            dist.recv(torch.ones(5), 0, tag=1)
        with pytest.raises(RuntimeError, match="a longer message arrived, but " + call.format(1, 2, 4)):
            dist.recv(torch.ones(1), 0, tag=2)
    dist.barrier()


def over_mpi4py(rank: int, size: int) -> None:
    """Check communicators over mpi4py communicators, and groups split from them."""
    from mpi4py import MPI

    comm = Communicator.from_mpi(MPI.COMM_WORLD, timeout_s=20)
    assert (comm.rank, comm.size) == (MPI.COMM_WORLD.Get_rank(), size) and not comm.shares_memory()
    array = np.full(1000, rank + 1.0)
    comm.all_reduce(array)
    assert (array == sum(range(1, size + 1))).all()
    half = torch.full((100_000,), rank + 1.0, dtype=torch.bfloat16)
    op = comm.all_reduce_init(half, "max")
    op()
    assert (half == size).all()
    with pytest.raises(ValueError, match="expected a group with the backend 'farandole'"):
        comm.all_reduce(torch.ones(4), compression=Cast())
    assert comm.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    received = np.zeros(3)
    work = comm.irecv(received, (rank - 1) % size)
    comm.send(np.full(3, float(rank)), (rank + 1) % size)
    work.wait()
    assert (received == (rank - 1) % size).all()
    reversed_ = comm.split(0, key=-rank)
    assert reversed_.rank == size - 1 - rank
    token = torch.tensor([rank])
    reversed_.broadcast(token, 0)
    assert token == size - 1
    alone = comm.split(rank)
    alone.barrier()
    assert alone.size == 1 and comm.split(None) is None
    for each in (alone, reversed_, comm):
        each.close()
    with pytest.raises(RuntimeError, match="was destroyed"):
        comm.barrier()


def large_counts(rank: int, size: int, count: int) -> None:
    """Reduce, send and gather more elements than fit in a 32-bit count."""
    check_large(rank, size, count)
    tensor = torch.full((count,), 77, dtype=torch.uint8)
    tensor[-1] = rank
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    assert tensor[-2:].tolist() == [77, 0]
    half = count // 2 + 1
    whole = torch.empty(2 * half, dtype=torch.uint8)
    dist.all_gather_into_tensor(whole, tensor[:half].fill_(rank + 3))
    assert whole[[0, half - 1, half, 2 * half - 1]].tolist() == [3, 3, 4, 4]
