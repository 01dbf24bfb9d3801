"""A rank that is killed, and a link that is cut, at a random moment of random operations on a 2 x 2 x 2 mesh."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from benchmarks.namespaces import two_hosts, why_not
from farandole.native import SILENCE_S
from tests.comm.jobs import SOON_S, Job, left_behind
from tests.comm.test_mesh_operations import Pair, Step, mesh_groups

RANKS = 8


def without_gloo(ranks: list[int]) -> Pair:
    group = dist.new_group(ranks)
    return Pair(group, group, ranks)


def run_operations(rank: int, size: int, tell: Callable, seed: int) -> None:
    """Run random operations on the groups of a mesh, and sometimes on all ranks, until a rank fails."""
    groups = mesh_groups(rank, without_gloo)
    order = random.Random(seed)
    dist.barrier()
    tell("begun")
    for number in range(1_000_000):
        pair = groups[order.choice(sorted(groups))]
        step = Step(number, pair, rank)
        _, works = step.begin(pair.ours, async_op=not step.waits)
        for work in works:
            work.wait()


def kill_a_rank(seed: int) -> None:
    chooses, before = random.Random(seed), left_behind()
    victim, pause = chooses.randrange(RANKS), chooses.uniform(0, 1.5)
    with Job(RANKS, run_operations, seed) as job:
        for rank in range(RANKS):
            job.hear(rank, timeout_s=60)
        time.sleep(pause)
        since = job.kill(victim)
        for rank in set(range(RANKS)) - {victim}:
            end = job.end(rank)
            assert f"rank {victim} (process {job.pid(victim)})" in end.text, f"rank {rank}: {end}"
            assert end.at - since < SOON_S, f"rank {rank} was told after {end.at - since:.2f} s: {end.text}"
    assert left_behind() <= before


def test_a_killed_rank_is_named_by_every_rank_of_the_mesh():
    for seed in range(2):
        kill_a_rank(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_fifty_killed_ranks(first):
    for seed in range(first, first + 10):
        kill_a_rank(100 + seed)


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("seed", range(10))
def test_a_cut_link_is_named(seed):
    pause = random.Random(seed).uniform(0, 1.5)
    with (
        two_hosts() as hosts,
        Job(4, run_on_hosts, seed, hosts=[0, 0, 1, 1], namespaces=hosts, timeout_s=120) as job,
    ):
        for rank in range(4):
            job.hear(rank, timeout_s=60)
        time.sleep(pause)
        hosts[1].link("down")
        since = time.monotonic()
        for rank in range(4):
            end = job.end(rank, timeout_s=SILENCE_S + 20)
            other = hosts[rank < 2].name
            assert re.search(rf"rank \d \(process \d+ on {other}\) cannot be reached", end.text), end.trace
            assert f"{other} has not responded for 15 s" in end.text
            assert end.at - since < SILENCE_S + 5, f"rank {rank} was told after {end.at - since:.1f} s"


def run_on_hosts(rank: int, size: int, tell: Callable, seed: int) -> None:
    pair, order = Pair(dist.group.WORLD, dist.group.WORLD, list(range(size))), random.Random(seed)
    dist.barrier()
    tell("begun")
    for number in range(1_000_000):
        step = Step(order.randrange(1 << 30), pair, rank)
        _, works = step.begin(pair.ours, async_op=number % 2 == 0)
        for work in works:
            work.wait()
