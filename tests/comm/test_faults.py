"""Failures of ranks: every waiting rank soon reports which rank failed, where and why."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.comm.jobs import SOON_S, Job, left_behind, survivors_of
from tests.comm.programs import run_program

LARGE = 4_000_000

# ---- a rank is killed ----


def wait_for_the_dead(rank: int, size: int, tell: Callable, asynchronous: bool) -> None:
    dist.barrier()
    if rank == size - 1:
        tell("here")
        time.sleep(60)
    if asynchronous:
        works = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(3)]
        future = works[1].get_future()
        chained = works[2].get_future().then(lambda future: future.value())
        with pytest.raises(RuntimeError, match="died"):
            future.wait()
        with pytest.raises(RuntimeError, match="died"):
            chained.wait()
        assert works[1].exception() is not None and not works[1].is_success()
        works[0].wait()
    else:
        dist.all_reduce(torch.ones(5))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_killed_before_it_arrives(size, asynchronous):
    with Job(size, wait_for_the_dead, asynchronous) as job:
        job.hear(size - 1)
        time.sleep(0.2)
        since = job.kill(size - 1)
        survivors_of(
            job,
            size - 1,
            since,
            "RankDied",
            r"died \(killed or crashed\) after barrier\(\), its call number 1",
            r"rank \d \(process \d+\) was waiting for it in all_reduce\(sum, 5 x float32\), call number 2 of",
            "of the default group",
        )


def run_all_reduce(turn: int, rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(LARGE))


def run_async(turn: int, rank: int, size: int) -> None:
    for work in [dist.all_reduce(torch.ones(LARGE), async_op=True) for _ in range(2)]:
        work.wait()


def run_mixture(turn: int, rank: int, size: int) -> None:
    whole = torch.ones(LARGE // size * size)
    dist.all_gather_into_tensor(whole, whole[: LARGE // size].clone())
    dist.reduce_scatter_tensor(whole[: LARGE // size].clone(), whole)
    dist.broadcast(whole, 0)
    dist.all_to_all_single(torch.empty_like(whole), whole)


def run_messages(turn: int, rank: int, size: int) -> None:
    """Send messages around a ring, so that each rank communicates only with its neighbors."""
    works = [
        dist.isend(torch.ones(LARGE), (rank + 1) % size),
        dist.irecv(torch.ones(LARGE), (rank - 1) % size),
    ]
    for work in works:
        work.wait()


def loop(rank: int, size: int, tell: Callable, body: Callable) -> None:
    for turn in range(10_000):
        body(turn, rank, size)
        if turn == 1:
            tell("going")


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        (run_all_reduce, r"all_reduce\(sum, 4000000 x float32\)"),
        (run_async, r"all_reduce\(sum, 4000000 x float32\)"),
        (run_mixture, r"(all_gather|reduce_scatter|broadcast|all_to_all)\("),
        (run_messages, r"(send|recv)\(4000000 x float32, (to|from) rank"),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_killed_during_a_call(size, body, calls):
    victim = size // 2
    with Job(size, loop, body) as job:
        job.hear(victim)
        time.sleep(0.113)
        since = job.kill(victim)
        survivors_of(
            job, victim, since, "RankDied", rf"was waiting for it in {calls}", rf"(in|after|called) {calls}"
        )


def send_on(turn: int, rank: int, size: int) -> None:
    """Send a message that takes about 20 ms, so that a signal arrives during a transfer."""
    tensor = torch.ones(10 * LARGE)
    if rank:
        dist.recv(tensor, 0)
    else:
        dist.send(tensor, 1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_stopped_while_it_copies_a_message(victim):
    with Job(2, loop, send_on, timeout_s=1) as job:
        job.hear(victim)
        time.sleep(0.113)
        since = job.kill(victim, signal.SIGSTOP)
        end = job.end(1 - victim)
        assert end.kind == "RankLate" and 0.5 < end.at - since < 8, end
        job.kill(victim, signal.SIGCONT)
        assert job.end(victim).kind == "RankLate"


def train_with_ddp(rank: int, size: int, tell: Callable) -> None:
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(6)))
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.5)
    for step in range(10_000):
        if step == 3 and rank == 1:
            tell("dying")
            time.sleep(60)
        parallel(torch.ones(4, 300)).sum().backward()


def test_a_rank_killed_during_the_backward_pass_of_ddp():
    with Job(3, train_with_ddp) as job:
        job.hear(1)
        time.sleep(0.3)
        since = job.kill(1)
        for rank in (0, 2):
            end = job.end(rank)
            assert end.at - since < SOON_S
            assert f"rank 1 (process {job.pid(1)}) died" in end.text and "all_reduce(" in end.text, end


# ---- a rank ends in another way ----


def end_early(rank: int, size: int, tell: Callable, how: str) -> str | None:
    dist.barrier()
    if rank == 0:
        tell(time.monotonic())
        if how == "destroy":
            dist.destroy_process_group()
            time.sleep(3)
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(0)
        return None
    if rank == 1:
        dist.recv(torch.ones(3), 0)
    else:
        dist.all_gather([torch.ones(2)] * size, torch.ones(2))
    return "nobody told me"


@pytest.mark.parametrize(
    ("how", "kind", "saying"),
    [
        ("destroy", "RankLeft", r"left the group \(it destroyed the group\) after barrier\(\)"),
        ("return", "RankLeft", r"left the group \(its program ended\) after barrier\(\)"),
        ("exit", "RankLeft", r"left the group \(its program ended\) after barrier\(\)"),
        ("_exit", "RankDied", r"died \(killed or crashed\) after barrier\(\)"),
    ],
)
def test_a_rank_that_ends_while_others_wait(how, kind, saying):
    with Job(3, end_early, how) as job:
        since = job.hear(0)
        survivors_of(job, 0, since, kind, saying, r"was waiting for it in (recv\(3|all_gather\(6) x float32")
        if how == "exit":
            assert job.exit_code(0) == 3


def test_an_uncaught_exception_is_reported_and_leaves_no_resources(tmp_path):
    before = left_behind()
    # threads are in works, messages and callbacks of all kinds when the interpreter shuts down
    body = """
for _ in range(20):
    work = dist.all_reduce(torch.ones(20_000), async_op=True)
    work.get_future().then(lambda f: f.value()[0].sum()).then(lambda f: 1)
other = 1 - dist.get_rank()
dist.irecv(torch.ones(2), other).get_future().then(lambda f: 1)
dist.isend(torch.ones(500_000), other, tag=5).get_future().then(lambda f: 1)
if dist.get_rank() == 1:
    dist.all_reduce(torch.ones(9), async_op=True)
    raise ValueError("the data are bad")
work = dist.all_reduce(torch.ones(2_000_000), async_op=True)
work.get_future().then(lambda f: 2)
dist.broadcast(torch.ones(2), 1)
"""
    (code_0, errors_0), (code_1, errors_1) = run_program(tmp_path, 2, body, ("-X", "dev"))
    assert code_0 == code_1 == 1
    assert "ValueError: the data are bad" in errors_1
    assert "Traceback" in errors_0 and "farandole.comm.errors." in errors_0
    for words in ("Segmentation", "Fatal", "terminate called", "Aborted"):
        assert words not in errors_0 + errors_1
    assert left_behind() == before
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("ValueError('the data are bad')", "ValueError: the data are bad"),
        (
            "type('E', (Exception,), {'__str__': lambda error: 1 / 0})()",
            r"E: <exception str\(\) failed>",
        ),
    ],
)
def test_the_error_names_the_exception_of_the_ended_rank(tmp_path, error, text):
    body = f"""
if dist.get_rank() == 1:
    raise {error}
dist.broadcast(torch.ones(2), 1)
"""
    (code_0, errors_0), _ = run_program(tmp_path, 2, body)
    assert code_0 == 1
    assert re.search(
        r"RankLeft: rank 1 \(process \d+\) left the group \(its program ended with " + text + r"\) "
        r"after all_reduce\(sum, 3 x float32\), its call number 1; rank 0 \(process \d+\) was waiting for it in "
        r"broadcast\(2 x float32, from rank 1\), call number 2 of the default group",
        errors_0,
    ), errors_0
