"""A stage that dies or is stuck is named by the other ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import farandole
from farandole.parallel.pipeline.stage import Absent
from farandole.plan import Plan
from tests.comm.jobs import Job, survivors_of
from tests.parallel.pipeline.models import batches, build, loss

STUCK_S = 6.5


def _train(rank: int, size: int, tell: Callable[[Any], None], schedule: str, broken: int, how: str) -> None:
    """Train; a block of rank `broken` waits in its third call, for a time or until the rank is killed."""
    torch.set_num_threads(1)
    engine = farandole.parallelize(build("gpt"), Plan(pipeline=size, schedule=schedule))
    optimizer = engine.optimizer(torch.optim.SGD(engine.model.parameters(), 0.1))
    calls = 0

    def wait(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            tell("waits")
            time.sleep(STUCK_S if how == "stuck" else 60)

    if rank == broken:
        block = next(block for block in engine.model if not isinstance(block, Absent))
        block.register_forward_hook(wait)
    with tempfile.TemporaryFile("w+") as file:
        if how == "stuck":
            os.dup2(file.fileno(), sys.stderr.fileno())
        for step in range(2):
            engine.forward_backward(batches("gpt", step, 0, 4), loss)
            optimizer.step()
            optimizer.zero_grad()
        file.seek(0)
        tell([line for line in file if line.startswith("farandole: ")])
    engine.close()


@pytest.mark.parametrize(("schedule", "broken"), [("1f1b", 1), ("zb-v", 3), ("gems", 0)])
def test_a_killed_stage_is_named_by_all_ranks(schedule: str, broken: int) -> None:
    with Job(4, _train, schedule, broken, "killed") as job:
        assert job.hear(broken) == "waits"
        survivors_of(job, broken, job.kill(broken, signal.SIGKILL), "RankDied")


def test_a_stuck_stage_is_named_after_five_seconds() -> None:
    with Job(2, _train, "1f1b", 1, "stuck") as job:
        assert job.hear(1, 30) == "waits"
        lines = job.hear(0, 30)
    waits = r"rank 0 \(process \d+\) is waiting in recv\(.* from rank 1"
    assert any(re.search(waits, line) for line in lines), lines
