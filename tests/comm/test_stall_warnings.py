"""A person is told for whom a rank waits, long before the deadline."""

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
            time.sleep(6.5)
        dist.all_reduce(torch.ones(5))
        file.seek(0)
        tell([line for line in file if line.startswith("farandole: ")])


@pytest.mark.parametrize(("size", "hosts"), [(3, None), (2, [0, 1])])
def test_a_late_rank_is_named_after_five_seconds(size, hosts):
    with Job(size, be_late, hosts=hosts) as job:
        said = [job.hear(rank) for rank in range(size)]
        late = job.pid(size - 1)
    assert [len(lines) for lines in said] == [1] + [0] * (size - 1), said  # one rank says it, once
    (line,) = said[0]
    rank = rf"rank {size - 1} \(process {late}( on host1)?\)"
    assert re.search(
        rf"rank 0 \(process \d+.*all_reduce\(sum, 5 x float32\).*{rank} has not arrived", line
    ) or (
        re.search(
            rf"rank 0 .* has waited 5 s for {rank} in all_reduce\(sum, 5 x float32\); host1 answers", line
        )
    ), line
