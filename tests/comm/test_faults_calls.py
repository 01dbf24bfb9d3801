"""Ranks that make a different call, or a late call: every rank names that rank and both calls."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from farandole.comm import CallMismatch, CommunicationError
from tests.comm.jobs import SOON_S, Job

LARGE = 4_000_000


def all_but(rank: int, usual: Callable[[], object], other: Callable[[], object], odd: int) -> None:
    (other if rank == odd else usual)()


def check_disagreements(rank: int, size: int) -> None:
    before, odd = segments(), size - 1
    other_root = (odd + 1) % size
    group: dist.ProcessGroup

    def reduce(
        count: int = 4, dtype: torch.dtype = torch.float32, op: object = dist.ReduceOp.SUM
    ) -> Callable:
        return lambda: dist.all_reduce(torch.ones(count, dtype=dtype), op, group=group)

    def broadcast(root: int) -> Callable:
        return lambda: dist.broadcast(torch.ones(4), root, group=group)

    def exchange(extra: int) -> Callable:
        counts = [1] * size
        sent = [1 + extra * (peer == 0) for peer in range(size)]
        return lambda: dist.all_to_all_single(
            torch.ones(size), torch.ones(sum(sent)), counts, sent, group=group
        )

    cases = [
        (reduce(), lambda: dist.barrier(group=group), r"barrier\(\), but .* all_reduce\(sum, 4 x float32\)", "operations"),
        (reduce(), reduce(count=5), r"all_reduce\(sum, 5 x float32\), but .* all_reduce\(sum, 4 x", "number of elements"),
        (reduce(LARGE), reduce(LARGE + 1), r"4000001 x float32\), but .* 4000000 x", "number of elements"),
        (reduce(), reduce(LARGE), r"4000000 x float32\), but .*, 4 x", "number of elements"),
        (reduce(), reduce(dtype=torch.int64), r"4 x int64\), but .* 4 x float32", "dtype"),
        (reduce(), reduce(op=dist.ReduceOp.MAX), r"all_reduce\(max, .*, but .* all_reduce\(sum", "reduction"),
        (broadcast(0), broadcast(other_root + 1), r"from rank 1\), but .* from rank 0", "root"),
        (exchange(0), exchange(1), r"sent 2 elements to rank 0 \(process \d+\), which expected 1, in all_to_all", ""),
    ]  # fmt: skip
    for usual, other, saying, difference in cases:
        group = dist.new_group()
        pids = group._host.membership.pids
        start = time.monotonic()
        with pytest.raises(CallMismatch) as caught:
            all_but(rank, usual, other, odd)
        message = str(caught.value)
        assert time.monotonic() - start < SOON_S
        assert message.startswith(f"rank {odd} (process {pids[odd]}) "), message
        assert re.search(saying, message) and difference in message, message
        with pytest.raises(CallMismatch):  # the group stays broken, and raises at once
            dist.barrier(group=group)
        dist.barrier()
        dist.destroy_process_group(group)
    assert segments() <= before  # buffers of earlier tests may still exist


def segments() -> set[tuple[str, str]]:
    """Return the shared memory that this process has open."""
    return {(fd, link(fd)) for fd in os.listdir("/proc/self/fd") if "memfd" in link(fd)}


def link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_a_different_call_are_named(ranks, size):
    ranks(size).run(check_disagreements)


def check_messages_disagree(rank: int, size: int) -> None:
    for receive_first in (True, False):
        group = dist.new_group()
        if rank == 0:
            dist.send(torch.ones(4), 1, group)
            time.sleep(0.1)
        else:
            time.sleep(0 if receive_first else 0.1)
            with pytest.raises(
                CallMismatch,
                match=r"^rank 0 \(process \d+\) called send\(4 x float32, to rank 1\), but rank 1 \(process \d+\) called "
                r"recv\(3 x float32, from rank 0\) of group .*: they differ in number of elements",
            ):
                dist.recv(torch.ones(3), 0, group)
        dist.barrier()
        dist.destroy_process_group(group)


def test_messages_of_a_wrong_size_are_refused(ranks):
    ranks(2).run(check_messages_disagree)


# ---- a rank is late ----


def check_late(rank: int, size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    pids = group._host.membership.pids
    if rank:
        start = time.monotonic()
        work = None if rank == 1 else dist.all_reduce(torch.ones(LARGE), group=group, async_op=True)
        with pytest.raises(CommunicationError) as caught:
            work.wait() if work else dist.all_reduce(torch.ones(LARGE), group=group)
        assert 0.3 < time.monotonic() - start < 0.5 + SOON_S
        text = rf"^rank 0 \(process {pids[0]}\) did not arrive within the timeout of 0.5 s \(it has made no call\); rank \d .* was waiting in "
        assert re.search(
            text + r"all_reduce\(sum, 4000000 x float32\), call number 1 of group", str(caught.value)
        )
    dist.barrier()
    dist.destroy_process_group(group)

    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 1:
        with pytest.raises(
            CommunicationError,
            match=rf"^rank 0 \(process {pids[0]}\) did not send the message that rank 1 .* expected .* within the timeout of 0.5 s",
        ):
            dist.recv(torch.ones(2), 0, group)
    dist.barrier()
    dist.destroy_process_group(group)

    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 1:
        with pytest.raises(
            CommunicationError,
            match=r"^no rank sent a message within the timeout of 0.5 s to rank 1 .* recv\(2 x float32, from any",
        ):
            dist.recv(torch.ones(2), group=group)
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [2, 4])
def test_a_late_rank_is_named_at_the_deadline(ranks, size):
    ranks(size).run(check_late)


def meet_alone(rank: int, size: int, tell: Callable) -> None:
    if rank == 0:
        dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=1))
        dist.new_group(timeout=timedelta(seconds=1))
    else:
        time.sleep(2.5)


def test_a_rank_missing_at_group_creation_is_named():
    with Job(2, meet_alone) as job:
        end = job.end(0)
        assert (
            end.kind == "RankLate" and "rank 1 of 2 did not arrive within the timeout of 1 s" in end.text
        ), end
