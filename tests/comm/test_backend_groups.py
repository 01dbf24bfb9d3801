"""Groups of the backend: subgroups, several groups at once, and asynchronous work on them."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from farandole.comm import RankLate
from farandole.comm.backend.process_group import FarandoleProcessGroup


def check_sub_groups(rank: int, size: int) -> None:
    """Run a collective on each of several overlapping groups, in the order of the groups."""
    members = [[0, 1], list(range(1, size)), list(range(size))[::-1], [size - 1]]
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group in zip(members, groups, strict=True):
        if rank not in ranks:
            continue
        assert isinstance(group, FarandoleProcessGroup)
        assert group.size() == len(ranks) and dist.get_process_group_ranks(group) == sorted(ranks)
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor == sum(ranks)
        dist.broadcast(tensor, max(ranks), group=group)
    dist.barrier()
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)


def check_interleaved(rank: int, size: int) -> None:
    """Start asynchronous work on several groups, and wait for it, in a different order on every rank."""
    groups = [dist.new_group() for _ in range(4)]
    generator = random.Random(rank)
    for turn in range(20):
        tensors = {g: [torch.full((n,), float(rank + g)) for n in (3, 40_000, 5)] for g in range(4)}
        order = [g for g in range(4) for _ in range(3)]
        generator.shuffle(order)
        works = []
        position = [0] * 4
        for g in order:  # within a group, all ranks keep the same order
            works.append(dist.all_reduce(tensors[g][position[g]], group=groups[g], async_op=True))
            position[g] += 1
        generator.shuffle(works)
        for work in works:
            if turn % 2:
                work.wait()
            else:
                work.get_future().wait()
        for g, parts in tensors.items():
            for part in parts:
                assert (part == sum(r + g for r in range(size))).all()
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


def check_threads(rank: int, size: int) -> None:
    """Several threads, each with its own group, communicate at the same time."""
    groups = [dist.new_group() for _ in range(3)]
    errors = []

    def work(g: int) -> None:
        try:
            for turn in range(100):
                tensor = torch.full((1 + 5000 * g,), float(rank + turn))
                dist.all_reduce(tensor, group=groups[g])
                assert (tensor == sum(r + turn for r in range(size))).all()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(g,)) for g in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


def check_callbacks_that_communicate(rank: int, size: int) -> None:
    """Callbacks issue collectives and wait for them, while later works of the same group are queued."""
    ranks_sum = float(sum(range(1, size + 1)))
    results = []
    for step in range(10):
        if (step + rank) % 3 == 0:
            time.sleep(0.002)  # each rank completes different works before it adds their callbacks
        tensor = torch.full((2000,), float(rank + 1))
        future = dist.all_reduce(tensor, async_op=True).get_future()

        def again(future: torch.futures.Future, step: int = step) -> torch.Tensor:
            (value,) = future.value()
            dist.all_reduce(value)  # synchronously
            dist.all_reduce(value, async_op=True).get_future().wait()
            work = dist.all_reduce(value, async_op=True)
            work.wait()
            return value

        def once_more(future: torch.futures.Future) -> float:
            total = future.value().clone()
            dist.broadcast(total, size - 1)
            return total[0].item()

        results.append(future.then(again).then(once_more))
    collected = torch.futures.collect_all(results).wait()
    expected = ranks_sum * size**3
    assert [each.value() for each in collected] == [expected] * 10
    both = torch.futures.collect_all(
        [dist.all_reduce(torch.ones(5), async_op=True).get_future() for _ in range(2)]
    ).then(lambda _: dist.all_reduce(torch.ones(1), async_op=True).wait())
    assert both.wait() is True


def check_work_api(rank: int, size: int) -> None:
    if rank == 0:
        time.sleep(0.3)
    tensor = torch.ones(3)
    start = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    assert time.monotonic() - start < 0.25
    if rank == 1:
        assert not work.is_completed()
        with pytest.raises(
            RankLate,
            match=r"not complete within the timeout of 0.05 s: all_reduce\(sum, 3 x float32\).*rank 0 .*has not",
        ):
            work.wait(timedelta(seconds=0.05))
    assert work.wait() is True
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is tensor
    work.synchronize()
    assert work.wait(timedelta(seconds=5)) is True
    assert work.get_future().done() and work.get_future().value()[0] is tensor
    works = [dist.barrier(async_op=True) for _ in range(3)]
    deadline = time.monotonic() + 10
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(0.001)  # they complete although no rank waits
    assert all(work.is_completed() for work in works)


def check_many_async(rank: int, size: int) -> None:
    tensors = [torch.full((1 + 37 * i,), float(rank)) for i in range(300)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.all_reduce(torch.ones(1))  # a synchronous collective after them
    assert all(work.is_completed() for work in works)
    for tensor in tensors:
        assert (tensor == sum(range(size))).all()


def check_timeouts(rank: int, size: int) -> None:
    """Timeouts of a group and of a call, and a changed timeout: the late rank is named, and the group is broken."""
    for how in ("group", "call", "set", "torch"):
        group = dist.new_group(timeout=timedelta(seconds=0.3 if how == "group" else 50))
        if how == "set":
            group.set_timeout(timedelta(seconds=0.3))
        if how == "torch":
            distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), group)
        if rank == 0:
            start = time.monotonic()
            timeout = timedelta(seconds=0.3) if how == "call" else None
            with pytest.raises(
                RankLate, match=r"rank 1 \(process \d+\).* did not arrive within the timeout of 0.3 s"
            ):
                group.barrier(timeout=timeout).wait()
            assert time.monotonic() - start < 2
        dist.barrier()
        if rank == 1:
            with pytest.raises(RankLate, match="within the timeout of 0.3 s"):  # rank 1 arrives too late
                dist.barrier(group=group)
        dist.destroy_process_group(group)


def check_identity(rank: int, size: int) -> None:
    group = dist.group.WORLD
    assert dist.get_backend() == "farandole" and group.name() == "farandole"
    assert group.group_name and group.group_desc == "default_pg"
    assert repr(group._device_types[0]) == "device(type='cpu')"
    backend = group._get_backend(torch.device("cpu"))
    assert not backend.supports_splitting and backend.name() == "farandole"


@pytest.mark.parametrize(
    "check",
    [
        check_sub_groups,
        check_interleaved,
        check_threads,
        check_callbacks_that_communicate,
        check_many_async,
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_on_all_ranks(ranks, size, check):
    ranks(size).run(check)


@pytest.mark.parametrize("check", [check_work_api, check_timeouts, check_identity])
def test_on_two_ranks(ranks, check):
    ranks(2).run(check)
