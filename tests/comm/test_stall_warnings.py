"""A waiting rank names the rank for which it waits, long before the timeout."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.comm.jobs import Job


def be_late(rank: int, size: int, tell: Callable) -> None:
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
        dist.barrier()
        if rank == size - 1:
            time.sleep(5.5)
        dist.all_reduce(torch.ones(5))
        file.seek(0)
        tell([line for line in file if line.startswith("farandole: ")])


@pytest.mark.parametrize(("size", "hosts"), [(3, None), (2, [0, 1])])
def test_a_late_rank_is_named_within_five_seconds(size, hosts):
    with Job(size, be_late, hosts=hosts) as job:
        said = [job.hear(rank) for rank in range(size)]
        late = job.pid(size - 1)
    assert [len(lines) for lines in said] == [1] + [0] * (size - 1), said  # one rank logs one line
    (line,) = said[0]
    rank = rf"rank {size - 1} \(process {late}( on host1)?\)"
    assert re.search(
        rf"rank 0 \(process \d+\) has waited \d s in all_reduce\(sum, 5 x float32\).*{rank} has not arrived",
        line,
    ) or (
        re.search(
            rf"rank 0 .* has waited \d s for {rank} in all_reduce\(sum, 5 x float32\); host1 responds", line
        )
    ), line
    assert re.search(r"; the wait fails after \d+ s; see 'farandole explain has-waited'$", line), line


def send_in_a_cycle(rank: int, size: int, tell: Callable) -> None:
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
        try:
            dist.send(torch.ones(100_000), (rank + 1) % size)
        finally:
            file.seek(0)
            tell([line for line in file if line.startswith("farandole: ")])


def test_a_cycle_of_sends_is_named():
    with Job(3, send_in_a_cycle, timeout_s=9) as job:
        said = [job.hear(rank) for rank in range(3)]
        assert {job.end(rank).kind for rank in range(3)} == {"RankLate"}
        pids = [job.pid(rank) for rank in range(3)]
    assert said[1:] == [[], []] and len(said[0]) == 2, said
    waits = []
    for line in said[0]:
        found = re.fullmatch(
            rf"farandole: rank 0 \(process {pids[0]}\) has waited (\d) s in send\(100000 x float32, to rank 1\); "
            rf"rank 1 \(process {pids[1]}\) is waiting in send\(100000 x float32, to rank 2\); "
            rf"rank 2 \(process {pids[2]}\) is waiting in send\(100000 x float32, to rank 0\): these ranks are waiting "
            "for each other; post one of the receives first, .*; the wait fails after 9 s; see .*\n",
            line,
        )
        assert found, line
        waits.append(int(found[1]))
    assert 4 <= waits[0] < waits[1] < 9, waits


def receive_late(rank: int, size: int, tell: Callable) -> None:
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
        if rank == 0:
            time.sleep(4.7)
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(3), 0)
        file.seek(0)
        tell([line for line in file if line.startswith("farandole: ")])


def test_a_late_message_is_named_within_five_seconds():
    with Job(2, receive_late) as job:
        assert job.hear(0) == []
        (line,) = job.hear(1)
        assert re.fullmatch(
            rf"farandole: rank 1 \(process {job.pid(1)}\) has waited \d s in recv\(3 x float32, from rank 0\); "
            rf"the message from rank 0 \(process {job.pid(0)}\) has not arrived; the wait fails after \d+ s; "
            r"see 'farandole explain has-waited'\n",
            line,
        ), line
