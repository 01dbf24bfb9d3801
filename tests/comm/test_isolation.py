"""A job shares no memory with other users of the machine, and jobs do not disturb each other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from farandole.comm.host import Segment, open_segment
from tests.comm.jobs import End, Job, survivors_of

LARGE = 4_000_000


def reach(rank: int, size: int, tell: Callable) -> None:
    buffer = dist.group.WORLD.allocate_shared((1000,), torch.float32)
    dist.barrier()
    maps = Path("/proc/self/maps").read_text().splitlines()
    tell([line.split()[0] for line in maps if "memfd:farandole" in line])
    time.sleep(20)
    del buffer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can pose as another user")
def test_another_user_cannot_open_the_memory():
    with Job(2, reach) as job:
        maps = job.hear(0)
        assert len(maps) >= 2  # the group's, and the buffer
        segment = Segment(4096, "test")
        paths = [f"/proc/{os.getpid()}/fd/{segment.descriptor}", f"/proc/{job.pid(0)}/mem"]
        paths += [f"/proc/{job.pid(0)}/map_files/{line}" for line in maps]
        attempt = "\n".join(
            [
                "import os, sys",
                "os.setgroups([]); os.setgid(65534); os.setuid(65534)",
                "for path in sys.argv[1:]:",
                "    try:",
                "        os.open(path, os.O_RDWR)",
                "    except PermissionError:",
                "        print('refused')",
            ]
        )
        out = subprocess.run(
            [sys.executable, "-c", attempt, *paths], capture_output=True, text=True, check=True
        ).stdout
        segment.close()
        assert out.split() == ["refused"] * len(paths)
        for rank in (0, 1):
            job.kill(rank)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may open another user's memory")
def test_memory_of_another_user_is_refused():
    segment = Segment(4096, "test")
    os.close(open_segment(segment.name))
    os.fchown(segment.descriptor, 65534, 65534)
    with pytest.raises(
        OSError, match=r"memory of process \d+: expected the owner to be user 0, got user 65534"
    ):
        open_segment(segment.name)
    segment.close()


def count_up(rank: int, size: int, tell: Callable, turns: int) -> float:
    tensor = torch.zeros(1000)
    for _ in range(turns):
        tensor += 1
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return tensor[0].item()


def go_on(rank: int, size: int, tell: Callable) -> None:
    for turn in range(10_000):
        dist.all_reduce(torch.ones(LARGE))
        if turn == 1:
            tell("going")


def test_two_jobs_do_not_disturb_each_other():
    with Job(2, count_up, 500) as good, Job(2, go_on) as bad:
        bad.hear(0)
        since = bad.kill(1)
        survivors_of(bad, 1, since, "RankDied")
        ends: list[End] = [good.end(rank) for rank in (0, 1)]
        assert [(end.kind, end.text) for end in ends] == [("returned", "500.0")] * 2
