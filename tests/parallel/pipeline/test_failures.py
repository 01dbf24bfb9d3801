"""A stage that dies or is stuck is named by the other ranks."""

from __future__ import annotations

import itertools
import logging
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farandole
from farandole.comm import RankLate
from farandole.parallel.pipeline.stage import Absent
from farandole.plan import Plan
from tests.comm.jobs import Job, survivors_of
from tests.parallel.pipeline.models import batches, build, loss

STUCK_S = 5.5


def _train(
    rank: int, size: int, tell: Callable[[Any], None], schedule: str, broken: int, sleep_s: float
) -> None:
    """Run a step; a block of rank `broken` sleeps in its second call.

    Tells the warnings of this rank, and for each warning how long after the start of the rank's longest wait it was logged.
    """
    engine = farandole.parallelize(build("gpt"), Plan(pipeline=size, schedule=schedule))
    calls = itertools.count(1)

    def sleep(*_: Any) -> None:
        if next(calls) == 2:
            tell("sleeps")
            time.sleep(sleep_s)

    if rank == broken:
        block = next(block for block in engine.model if not isinstance(block, Absent))
        block.register_forward_hook(sleep)
    warnings: list[tuple[str, float]] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append((record.getMessage(), time.perf_counter()))  # type: ignore[method-assign]
    logging.getLogger("farandole").addHandler(handler)
    engine.forward_backward(batches("gpt", 0, 0, 4), loss)
    assert engine.pipeline is not None
    waits = itertools.pairwise(engine.pipeline.spans)
    longest = max(waits, key=lambda spans: spans[1].start - spans[0].end)
    tell([(text, at - longest[0].end) for text, at in warnings])
    engine.close()


@pytest.mark.parametrize(
    ("schedule", "broken", "stages"),
    [("1f1b", 1, "stage 1"), ("zb-v", 3, "stages 3 and 4"), ("gems", 0, "stages 0 and 3")],
)
def test_a_killed_stage_is_named_by_all_ranks(schedule: str, broken: int, stages: str) -> None:
    with Job(4, _train, schedule, broken, 60) as job:
        assert job.hear(broken) == "sleeps"
        killed = job.kill(broken, signal.SIGKILL)
        survivors_of(job, broken, killed, "RankDied", rf"^rank {broken} \(process \d+, {stages}\) died")


def test_a_stuck_stage_is_named_within_five_seconds() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2."""
    with Job(3, _train, "1f1b", 2, STUCK_S) as job:
        assert job.hear(2) == "sleeps"
        warnings = [job.hear(rank) for rank in range(3)]
        stuck = rf"the message from rank 2 \(process {job.pid(2)}, stage 2\) has not arrived"
    assert warnings[2] == []
    for rank in range(2):
        ((text, waited_s),) = warnings[rank]
        assert re.search(rf"rank {rank} \(process \d+, stage {rank}\) is waiting in recv\(.*; {stuck}", text)
        assert waited_s < 5


def _late(rank: int, size: int) -> None:
    """Rank 0 sends nothing to rank 1, before and after the engine is closed."""

    def receive() -> str:
        group = dist.new_group(timeout=timedelta(seconds=0.3))
        text = ""
        if rank == 1:
            with pytest.raises(RankLate) as caught:
                dist.recv(torch.ones(2), 0, group)
            text = str(caught.value)
        dist.barrier()
        dist.destroy_process_group(group)
        return re.sub(r"process \d+", "process", text)

    engine = farandole.parallelize(build("gpt"), Plan(pipeline=size, schedule="1f1b"))
    with_stages = receive()
    engine.close()
    without = receive()
    if rank == 1:
        for text, first, second in ((with_stages, ", stage 0", ", stage 1"), (without, "", "")):
            assert text.startswith(
                f"rank 0 (process{first}) did not send the message that rank 1 (process{second}) expected"
            )


def test_a_late_stage_is_named_until_the_engine_is_closed(ranks: Any) -> None:
    ranks(2).run(_late)
