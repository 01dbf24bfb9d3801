"""Ctrl-C in a collective, and the end of a group while another thread is in one."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from farandole.comm import CommunicationError
from tests.comm.jobs import Job
from tests.comm.programs import PROGRAM, start_program

LARGE = 4_000_000


def wait_for_ever(rank: int, size: int, tell: Callable, how: str) -> None:
    if rank == 0:
        tell("waiting")
        if how == "sync":
            dist.all_reduce(torch.ones(3))
        if how == "async":
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        if how == "behind":  # main helps with the first work while it waits for the second
            works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
            time.sleep(0.05)
            works[1].wait()
        if how == "message":
            dist.recv(torch.ones(3), 1)
    else:
        time.sleep(30)


@pytest.mark.parametrize("how", ["sync", "async", "behind", "message"])
def test_ctrl_c_ends_a_wait(how):
    with Job(2, wait_for_ever, how) as job:
        job.hear(0)
        time.sleep(0.3)
        since = job.kill(0, signal.SIGINT)
        end = job.end(0)
        assert end.kind == "KeyboardInterrupt", end.trace
        assert end.at - since < 1
        assert job.exit_code(0) == 0  # its process ends although work is in flight
        job.kill(1)


def test_ctrl_c_in_a_script(tmp_path):
    """An interrupted script exits as usual in Python, and the other rank reports the failure."""
    body = """
if dist.get_rank() == 0:
    print("waiting", file=sys.stderr, flush=True)
    dist.all_reduce(torch.ones(3), async_op=True).wait()
time.sleep(1.5)
dist.barrier()
"""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(body=body))
    first, second = start_program(tmp_path, 2, [str(script)])
    assert first.stderr is not None
    while "waiting" not in first.stderr.readline():
        assert first.poll() is None
    time.sleep(0.3)
    first.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, errors = first.communicate(timeout=20)
    assert time.monotonic() - start < 5
    assert first.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors
    _, errors = second.communicate(timeout=20)
    assert second.returncode == 1
    assert re.search(
        r"rank 0 \(process \d+\) was interrupted \(Ctrl-C.*\) in all_reduce\(sum, 3 x float32\)", errors
    ), errors


def abort_from_another_thread(rank: int, size: int, tell: Callable) -> str:
    if rank:
        time.sleep(1.5)
        return "done"
    threading.Timer(0.3, dist.group.WORLD.abort).start()
    start = time.monotonic()
    with pytest.raises(
        CommunicationError, match=r"this rank, rank 0 .*left the group \(it destroyed the group\)"
    ):
        dist.all_reduce(torch.ones(LARGE))
    assert time.monotonic() - start < 1.3
    return "done"


def test_abort_ends_the_calls_of_other_threads():
    with Job(2, abort_from_another_thread) as job:
        assert [job.end(rank).text for rank in (0, 1)] == ["'done'"] * 2
