"""Roots and peers that the group does not have are refused before anything is sent, and the group stays usable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import Communicator
from farandole.comm.dtypes import TYPES
from farandole.native import Status

Call = Callable[[Tensor, int], object]
WITH_ROOT: dict[str, Call] = {
    "broadcast": lambda t, root: dist.group.WORLD.broadcast([t], root),
    "reduce": lambda t, root: dist.group.WORLD.reduce([t], root),
    "gather": lambda t, root: dist.group.WORLD.gather([[t.clone()] * 2], [t], root),
    "scatter": lambda t, root: dist.group.WORLD.scatter([t], [[t.clone()] * 2], root),
}
BY_FUNCTION: dict[str, Call] = {
    "broadcast": lambda t, root: dist.broadcast(t, root),
    "reduce": lambda t, root: dist.reduce(t, root),
    "send": lambda t, peer: dist.send(t, peer),
    "recv": lambda t, peer: dist.recv(t, peer),
}
BY_COMMUNICATOR: dict[str, Call] = {
    "broadcast": lambda t, root: Communicator(dist.group.WORLD).broadcast(t, root),
    "reduce": lambda t, root: Communicator(dist.group.WORLD).reduce(t, root),
    "gather": lambda t, root: Communicator(dist.group.WORLD).gather(t, None, root),
    "scatter": lambda t, root: Communicator(dist.group.WORLD).scatter(t, None, root),
    "send": lambda t, peer: Communicator(dist.group.WORLD).send(t, peer),
    "recv": lambda t, peer: Communicator(dist.group.WORLD).recv(t, peer),
}


def refuse(rank: int, size: int) -> None:
    for count in (3, 100_000):
        for calls in (WITH_ROOT, BY_FUNCTION, BY_COMMUNICATOR):
            for name, call in calls.items():
                for bad in (size, 7, -3, 10**6):
                    tensor = torch.ones(count)
                    # torch itself refuses some of them, with other messages
                    with pytest.raises(
                        (ValueError, RuntimeError), match=rf"(?i){name}.*between 0 and 1|rank"
                    ):
                        call(tensor, bad)
                    assert (tensor == 1).all()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == size).all()


def refuse_in_core(rank: int, size: int) -> None:
    """The C core refuses the same calls."""
    host = dist.group.WORLD._host
    core, handle = host.core, host.handle
    tensor = torch.ones(4)
    address, kind = tensor.data_ptr(), TYPES[tensor.dtype]
    for bad in (size, -1, -3, 10**6):
        assert core.frd_broadcast(handle, address, 4, kind, bad, 0) == Status.INVALID
        assert core.frd_reduce(handle, address, 4, kind, 0, bad, 0) == Status.INVALID
        assert core.frd_gather(handle, address, None, 4, kind, bad, 0) == Status.INVALID
        assert core.frd_scatter(handle, None, address, 4, kind, bad, 0) == Status.INVALID
        assert core.frd_post_send(handle, address, 16, kind, bad, 0) == Status.INVALID
        if bad >= 0:
            assert core.frd_post_recv(handle, address, 16, kind, bad, 0) == Status.INVALID
    dist.barrier()


@pytest.mark.parametrize("check", [refuse, refuse_in_core])
def test_invalid_ranks_are_refused(ranks, check):
    ranks(2).run(check)
