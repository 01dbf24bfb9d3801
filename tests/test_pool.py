"""Test the pool of processes: results by rank, failures and timeouts."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankFailed


def total(rank, size, value):
    tensor = torch.full((2,), float(rank + value))
    dist.all_reduce(tensor)
    return tensor


def backend_and_pid(rank, size):
    return dist.get_backend(), os.getpid()


def fail_on(rank, size, bad):
    if rank == bad:
        raise ZeroDivisionError(f"rank {rank} divides by zero")
    dist.barrier()


def sleep(rank, size, seconds):
    time.sleep(seconds if rank == 1 else 0)


def leave(rank, size):
    if rank == 1:
        os._exit(5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_are_ordered_by_rank(ranks, size):
    expected = float(sum(range(size)) + 3 * size)
    for result in ranks(size).run(total, 3):
        torch.testing.assert_close(result, torch.full((2,), expected))


def test_processes_are_reused_between_worlds(ranks):
    ours = ranks(2).run(backend_and_pid)
    gloo = ranks(2, "gloo").run(backend_and_pid)
    assert [pid for _, pid in ours] == [pid for _, pid in gloo]
    assert {name for name, _ in gloo} == {"gloo"}


def test_the_failing_rank_is_named_and_the_pool_recovers(ranks):
    with pytest.raises(
        RankFailed, match=r"(?s)rank 1:.*fail_on.*ZeroDivisionError: rank 1 divides"
    ) as caught:
        ranks(2, "gloo").run(fail_on, 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(ranks(2, "gloo").run(total, 0)) == 2


def test_a_hanging_rank_times_out_with_its_stack(ranks):
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)no result within 1 s.*rank 1 did not answer.*in sleep"):
        ranks(2, "gloo").run(sleep, 60, timeout_s=1)
    assert time.monotonic() - start < 30


def test_a_rank_that_exits_is_named(ranks):
    with pytest.raises(RankFailed, match=r"rank 1:\nthe process ended with exit code 5"):
        ranks(2, "gloo").run(leave)
