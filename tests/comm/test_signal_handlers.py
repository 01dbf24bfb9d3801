"""Signal handlers that communicate while they interrupt a call."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from farandole.comm import CommunicationError, Communicator


def waits(shape: str) -> Callable[[], object]:
    """Return a call on the default group that takes one of the paths that hold the group's queue."""
    comm, t = Communicator(dist.group.WORLD), torch.ones(3)
    prepared = comm.all_reduce_init(torch.ones(3))
    return {
        "direct": lambda: dist.barrier(),
        "general": lambda: dist.all_reduce(torch.ones(4)[::2]),
        "persistent": prepared,
        "work": lambda: dist.all_reduce(t, async_op=True).wait(),
    }[shape]


def check_handler(rank: int, size: int, shape: str) -> None:
    heard: list[object] = []
    other = dist.new_group([0])

    def handler(*_: object) -> None:
        total = torch.ones(1)
        try:
            dist.all_reduce(total)
            heard.append(total.item())
        except CommunicationError as error:
            heard.append(str(error))
        alone = torch.ones(1)
        dist.all_reduce(alone, group=other)  # another group may be used
        heard.append(alone.item())

    call = waits(shape)
    dist.barrier()
    if rank == 0:
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        call()
        signal.signal(signal.SIGALRM, before)
        assert heard[1] == 1
    else:
        time.sleep(0.8)
        call()
    # The thread of the queue may have started the work before the main thread waits for it.  The handler's call then
    # waits for that thread, and runs after the work.
    followed = shape == "work" and heard[:1] == [size]
    if not followed:
        assert rank != 0 or "a signal handler used a group during a call on this group" in str(heard[0])
        dist.all_reduce(torch.ones(1))
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [size, size]


@pytest.mark.parametrize("shape", ["direct", "general", "persistent", "work"])
def test_a_call_in_a_signal_handler_of_a_busy_group_fails(ranks, shape):
    ranks(2).run(check_handler, shape)
