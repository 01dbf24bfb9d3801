"""Forked processes: a child cannot use its parent's groups, may create its own, and hides no failed rank."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from farandole.comm import Communicator
from tests.comm.jobs import SOON_S, Job


def in_child(function: Callable[[], object], timeout_s: float = 20.0) -> str:
    """Call a function in a forked child, and return its result or traceback as text."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(function())
        except BaseException:
            text = traceback.format_exc()
        os.write(writable, text.encode()[-4000:])
        os._exit(0)
    os.close(writable)
    deadline = time.monotonic() + timeout_s
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "the child did not end"
        time.sleep(0.01)
    with os.fdopen(readable) as pipe:
        return pipe.read()


def calls_of_child() -> Iterator[tuple[str, Callable[[], object]]]:
    comm, t = Communicator(dist.group.WORLD), torch.ones(3)
    prepared = comm.all_reduce_init(torch.ones(3))
    pending = dist.irecv(torch.zeros(3), 1 - dist.get_rank(), tag=9)
    queued = dist.all_reduce(torch.ones(3), async_op=True)
    peer = 1 - dist.get_rank()
    yield "all_reduce", lambda: dist.all_reduce(t)
    yield "large", lambda: dist.all_reduce(torch.ones(1 << 20))
    yield "asynchronous", lambda: dist.all_reduce(t, async_op=True).wait()
    yield "barrier", lambda: dist.barrier()
    yield "persistent", lambda: prepared()
    yield "communicator", lambda: comm.all_gather(torch.ones(6), t)
    yield "send", lambda: comm.send(t, peer)
    yield "isend", lambda: dist.isend(t, peer).wait()
    yield "message under way", lambda: pending.wait()
    yield "empty", lambda: comm.empty(4)
    queued.wait()
    dist.send(torch.ones(3), peer, tag=9)
    pending.wait()


def check_child_calls(rank: int, size: int) -> None:
    shared = Communicator(dist.group.WORLD).empty(1000).fill_(rank + 1)
    for name, call in calls_of_child():
        said = in_child(call)
        assert "CommunicationError" in said and "was forked from process" in said, f"{name}: {said}"
        dist.barrier()
    assert in_child(lambda: shared.sum().item()) == repr(1000.0 * (rank + 1))  # readable
    total = torch.ones(5)
    dist.all_reduce(total)  # the parent's phases are unchanged
    dist.all_reduce(shared)
    assert total.tolist() == [size] * 5
    assert shared.eq(size * (size + 1) / 2).all()
    if rank == 0:
        assert in_child(lambda: dist.destroy_process_group()) == "None"
    dist.barrier()


def test_a_forked_child_cannot_use_groups(ranks):
    ranks(2).run(check_child_calls, timeout_s=120)


def new_world(port: int, rank: int, size: int) -> list[float]:
    """Create another world in a child, with the children of all ranks."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "farandole", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20)
    )
    shared = Communicator(dist.group.WORLD).empty(70_000).fill_(rank + 1)
    dist.all_reduce(shared)
    small = torch.full((2,), float(rank))
    dist.broadcast(small, size - 1)
    for _ in range(3):
        dist.destroy_process_group(dist.new_group())
    dist.destroy_process_group()
    return [shared.unique().item(), *small.tolist()]


def check_new_worlds(rank: int, size: int) -> None:
    for _ in range(2):
        for _ in range(3):  # groups whose memory waits for the other rank
            dist.destroy_process_group(dist.new_group())
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        port = torch.tensor([store.port if store else 0])
        dist.broadcast(port, 0)
        said = in_child(lambda port=int(port): new_world(port, rank, size), 40)
        assert said == repr([size * (size + 1) / 2, size - 1.0, size - 1.0]), said
        dist.barrier()


def test_forked_children_can_create_their_own_world(ranks):
    ranks(2).run(check_new_worlds, timeout_s=120)


def keep_a_child(rank: int, size: int, tell: Callable[[object], None]) -> None:
    dist.all_reduce(torch.ones(3))
    dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
    dist.recv(torch.ones(1), 1) if rank == 0 else dist.send(torch.ones(1), 0)
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)  # like a DataLoader's worker
            os._exit(0)
        tell(child)
    else:
        tell("ready")
    dist.recv(torch.ones(1), 1 - rank)


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_a_child_does_not_hide_the_death_of_its_parent(hosts):
    with Job(2, keep_a_child, hosts=hosts) as job:
        child = job.hear(1)
        try:
            job.hear(0)
            time.sleep(0.3)
            killed = job.kill(1)
            end = job.end(0)
            assert end.kind == "RankDied", end.trace
            assert end.at - killed < SOON_S
        finally:
            os.kill(child, 9)
