"""Errors on one rank only, such as a lack of memory during a call: all ranks must detect them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from farandole.comm import CommunicationError
from farandole.comm.hierarchical import core as hierarchical
from farandole.comm.hierarchical import exchange
from tests.comm.jobs import SOON_S, Job

# ---- in the middle of an operation between hosts ----


def fail_once(rank: int, size: int, tell: Callable, operation: str) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise MemoryError("no memory for a window")

    dist.barrier()
    if rank == 1:
        hierarchical.windows_of = hierarchical.tree.reduce = refuse
        exchange.HostExchange.all_to_all = hierarchical.HierarchicalCore._broadcast = refuse
    tensor = torch.ones(8 * size)
    start = time.monotonic()
    try:
        if operation == "all_reduce":
            dist.all_reduce(tensor)
        elif operation == "broadcast":
            dist.broadcast(tensor, 0)
            dist.barrier()  # the root does not wait
        else:
            dist.all_to_all_single(torch.empty_like(tensor), tensor)
    finally:
        assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_to_all"])
@pytest.mark.parametrize("layout", [[0, 1], [0, 0, 1, 1]])
def test_a_local_error_is_reported_on_other_hosts(layout, operation):
    with Job(len(layout), fail_once, operation, hosts=layout) as job:
        for rank in range(len(layout)):
            end = job.end(rank)
            if rank == 1:
                assert (end.kind, end.text) == ("MemoryError", "no memory for a window"), end.trace
            else:
                assert end.kind == "CommunicationError", end.trace
                assert f"rank 1 (process {job.pid(1)} on host{layout[1]}) failed in {operation}()" in end.text
                assert "MemoryError: no memory for a window" in end.text


# ---- in asynchronous work ----


def refuse(flags: int) -> None:
    raise MemoryError("no memory")


def drop_work(rank: int, size: int, tell: Callable, how: str) -> None:
    group = dist.group.WORLD
    queue, tensor = group._dispatcher.queue, torch.ones(2)
    persistent = group.communicator.all_reduce_init(tensor)
    work = queue.submit(refuse, [])
    deadline = time.monotonic() + 5
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    if how == "waited for":
        with pytest.raises(MemoryError):
            work.wait()
    elif how == "asked":
        assert isinstance(work.exception(), MemoryError)
    elif how == "kept":
        kept = [work]  # it may still be waited for
    del work
    gc.disable()
    message = r"an asynchronous call failed, and no `wait\(\)` reported the error: MemoryError: no memory"
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "asynchronous": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "list": lambda: dist.all_gather([torch.empty(2) for _ in range(size)], tensor),
        "persistent": persistent,
    }
    if how in calls:
        with pytest.raises(CommunicationError, match=message):
            calls[how]()
    for call in calls.values():  # the error is raised once, and the group stays usable
        call()
    assert tensor.tolist() == [8.0, 8.0]
    if how == "kept":
        with pytest.raises(MemoryError):
            kept[0].wait()


@pytest.mark.parametrize(
    "how", ["all_reduce", "asynchronous", "list", "persistent", "waited for", "asked", "kept"]
)
def test_an_unreported_error_is_raised_at_the_next_call(how):
    with Job(2, drop_work, how) as job:
        for rank in (0, 1):
            end = job.end(rank)
            assert end.kind == "returned", end.trace
