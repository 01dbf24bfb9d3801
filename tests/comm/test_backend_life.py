"""Destroyed groups leave no resources behind: on one host, on several hosts, and with forked workers."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from farandole.comm import endpoint
from farandole.comm.errors import RankLeft
from tests.comm.jobs import Job


def resources() -> Counter[str]:
    """Return the numbers of descriptors by kind, of memory maps and of threads of this process."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        maps = sum("memfd:farandole" in line for line in lines)
    counts = Counter(maps=maps, threads=len(os.listdir("/proc/self/task")))
    for entry in os.listdir("/proc/self/fd"):
        try:
            counts[os.readlink(f"/proc/self/fd/{entry}").split(":")[0]] += 1
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return counts


def check_nothing_leaks(rank: int, size: int) -> None:
    def use_a_group() -> None:
        group = dist.new_group()
        shared = group.allocate_shared((1000,), torch.float32)
        shared.fill_(1)
        dist.all_reduce(shared, group=group)
        dist.all_reduce(torch.ones(9), group=group, async_op=True).get_future().then(lambda f: 1).wait()
        if rank < 2:
            dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, torch.ones(300_000), 1 - rank, group),
                    dist.P2POp(dist.irecv, torch.ones(300_000), 1 - rank, group),
                ]
            )[1].wait()
        dist.barrier(group=group)
        del shared
        dist.destroy_process_group(group)

    for _ in range(3):
        use_a_group()
    before = resources()
    for _ in range(30):
        use_a_group()
    dist.barrier()
    after = resources()
    grown = {kind: (before[kind], count) for kind, count in after.items() if count > before[kind]}
    assert not grown, f"rank {rank}: {grown}"


def check_destroyed_group(rank: int, size: int) -> None:
    group = dist.new_group()
    pending = dist.all_reduce(torch.ones(50_000), group=group, async_op=True)  # complete before the end
    message = dist.isend(torch.ones(2), 1, group) if rank == 0 else dist.irecv(torch.ones(2), 0, group)
    forgotten = dist.irecv(torch.ones(2), 1 - rank, group, tag=99)
    message.wait()
    if rank == 1:  # rank 0 leaves first
        with pytest.raises(RankLeft, match=r"left the group \(it destroyed the group"):
            forgotten.wait()
    dist.destroy_process_group(group)
    assert pending.is_completed() and pending.wait()
    assert forgotten.is_completed()
    with pytest.raises(
        RuntimeError, match="was destroyed before the message arrived" if rank == 0 else "left"
    ):
        forgotten.wait()
    with pytest.raises(RuntimeError, match="was destroyed; create a new group"):
        group.allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError, match="was destroyed; create a new group"):
        group.barrier()
    group.set_timeout(timedelta(seconds=5))  # has no effect
    group.abort()
    group.shutdown()


def check_world_of_one(rank: int, size: int) -> None:
    tensor = torch.tensor([3.0])
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
    work.wait()
    dist.broadcast(tensor, 0)
    dist.barrier()
    gathered = [torch.zeros(1)]
    dist.all_gather(gathered, tensor)
    received = torch.zeros(1)
    dist.all_to_all_single(received, tensor)
    everyone = [None]
    dist.all_gather_object(everyone, "me")
    assert tensor == 3 and gathered == [tensor] and received == 3 and everyone == ["me"]


def check_several_hosts(rank: int, size: int) -> None:
    """Ranks claim to be on two hosts: some groups span both hosts, others are on one host."""
    identity = endpoint.host_identity
    endpoint.host_identity = lambda: f"{identity()}-{rank % 2}"
    try:
        world = dist.new_group()
        mine = [dist.new_group([r for r in range(size) if r % 2 == parity]) for parity in (0, 1)][rank % 2]
    finally:
        endpoint.host_identity = identity
    assert world._host.consensus is not None and mine._host.consensus is None
    tensor = torch.full((5,), float(rank))
    dist.all_reduce(tensor, group=world)
    assert (tensor == sum(range(size))).all()
    dist.all_reduce(tensor, group=mine)
    outputs = torch.zeros(2 * size)
    dist.all_gather_into_tensor(outputs, torch.full((2,), float(rank)), group=world)
    assert outputs.tolist() == [float(r) for r in range(size) for _ in (0, 1)]
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, torch.ones(size), group=world)
    assert part == size
    works = [
        dist.isend(torch.tensor([float(rank)]), (rank + 1) % size, world),
        dist.irecv(part, (rank - 1) % size, world),
    ]
    for work in works:
        work.wait()
    assert part == (rank - 1) % size
    everyone = [None] * size
    dist.all_gather_object(everyone, rank, group=world)
    assert everyone == list(range(size))
    dist.barrier(group=world)
    from farandole.comm import Communicator

    shared = Communicator(world).empty(4)  # shared inside each host
    shared.fill_(1)
    Communicator(world).all_reduce(shared, "sum")
    assert (shared == size).all()
    dist.barrier()
    for group in (world, mine):
        dist.destroy_process_group(group)


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index**2))


def check_forked_workers(rank: int, size: int) -> None:
    """A DataLoader forks the rank while the group exists and asynchronous work is in flight."""
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    for _ in range(2):
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
        total = torch.stack([batch.sum() for batch in loader]).sum()
        dist.all_reduce(total)
        assert total == size * sum(i * i for i in range(8))
        for work in works:
            work.wait()
    dist.barrier()  # no rank treats the exit of a worker as a failure


@pytest.mark.parametrize("check", [check_nothing_leaks, check_several_hosts])
@pytest.mark.parametrize("size", [2, 4])
def test_on_all_ranks(ranks, size, check):
    ranks(size).run(check)


@pytest.mark.parametrize("check", [check_destroyed_group, check_forked_workers])
def test_on_two_ranks(ranks, check):
    ranks(2).run(check)


def test_a_world_of_one(ranks):
    ranks(1).run(check_world_of_one)


def init_again(rank: int, size: int, tell: Callable) -> None:
    store = dist.distributed_c10d._get_default_store()  # keep the job's own store
    stale = dist.group.WORLD
    sizes = []
    for turn in range(10):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        sizes.append(resources())
        dist.init_process_group(
            "farandole", store=dist.PrefixStore(f"turn {turn}", store), rank=rank, world_size=size
        )
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        model(torch.full((3, 4), float(rank))).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((2, 4), 3 * (size - 1) / 2))
        group = dist.new_group()
        total = torch.full((70_000,), float(rank + turn))
        dist.all_reduce(total, group=group)
        assert (total == sum(r + turn for r in range(size))).all()
        with pytest.raises(RuntimeError, match="was destroyed; create a new group"):
            stale.allreduce([torch.ones(1)])
        del model
    # an endpoint, with a map and a descriptor for each peer, is freed only when the next endpoint is opened, and only
    # if the peers have closed theirs by then
    grown = {
        kind: (sizes[0][kind], count)
        for kind, count in sizes[-1].items()
        if count > sizes[0][kind] + 3 * (size - 1)
    }
    assert not grown, grown
    tell("done")


@pytest.mark.parametrize(("size", "hosts"), [(2, None), (4, None), (4, [0, 0, 1, 1])])
def test_destroy_and_init_again(size, hosts):
    with Job(size, init_again, hosts=hosts) as job:
        for rank in range(size):
            assert job.hear(rank) == "done"
