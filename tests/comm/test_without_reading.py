"""Where the system forbids reading another process's memory: the same results through shared memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from farandole import native
from farandole.comm import Communicator
from tests.comm.jobs import Job

COUNTS = [1, 5_000, 70_000, 300_001]


def forbid_reading() -> None:
    native.library().frd_forbid_reading()


def exchange(rank: int, size: int, tell: Callable) -> None:
    comm = Communicator(dist.group.WORLD)
    host = dist.group.WORLD._host
    others = [other for other in range(size) if other != rank]
    assert not any(host.core.frd_can_read(host.endpoint._handle, other) for other in others)
    for count in COUNTS:
        own = torch.arange(count * size, dtype=torch.float32).add(rank)
        gathered = torch.zeros(count * size * size)
        comm.all_gather(gathered, own)
        expected = torch.stack([torch.arange(count * size, dtype=torch.float32).add(r) for r in range(size)])
        assert torch.equal(gathered.view(size, -1), expected)
        exchanged = torch.zeros(count * size)
        comm.all_to_all(exchanged, own)
        assert torch.equal(exchanged.view(size, -1), expected[:, rank * count : (rank + 1) * count])
        tensor = own.clone()
        comm.broadcast(tensor, size - 1)
        assert torch.equal(tensor, expected[size - 1])
        part = torch.zeros(count)
        comm.scatter(part, list(expected[0].split(count)) if rank == 0 else None, 0)
        assert torch.equal(part, expected[0][rank * count : (rank + 1) * count])
        parts = [torch.zeros(count * size) for _ in range(size)] if rank == 0 else None
        comm.gather(own, parts, 0)
        assert parts is None or torch.equal(torch.stack(parts), expected)
        received = [torch.zeros(count * size) for _ in range(3)]
        works = [comm.irecv(each, (rank - 1) % size, tag) for tag, each in enumerate(received)]
        works += [comm.isend(own, (rank + 1) % size, tag) for tag in range(3)]
        for work in works:
            work.wait()
        assert all(torch.equal(each, expected[(rank - 1) % size]) for each in received)


@pytest.mark.parametrize("size", [2, 4])
def test_results_are_the_same_without_reading(size):
    with Job(size, exchange, before=forbid_reading) as job:
        for rank in range(size):
            end = job.end(rank, 60)
            assert end.kind == "returned", end.trace
