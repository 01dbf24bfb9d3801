"""Random operations over all groups of a 2 x 2 x 2 mesh on 8 ranks, interleaved, against Gloo's results.

Values are small whole numbers, so sums are exact in every type and results are compared bit for bit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

AXES = ("x", "y", "z")
SIZES = [0, 1, 2, 7, 64, 500, 3_000, 20_000, 150_000]  # elements of a rank
DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8]
MOST_OPEN = 6
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Pair:
    """A group of this package, and a Gloo group with the same ranks."""

    ours: dist.ProcessGroup
    gloo: dist.ProcessGroup
    ranks: list[int]


def mesh_groups(rank: int, make: Callable[[list[int]], Pair]) -> dict[tuple[str, ...], Pair]:
    """Return the groups of this rank: for each set of axes, the ranks that differ only on these axes."""
    mine = {}
    for count in range(1, len(AXES) + 1):
        for axes in itertools.combinations(range(len(AXES)), count):
            fixed = [axis for axis in range(len(AXES)) if axis not in axes]
            for place in itertools.product((0, 1), repeat=len(fixed)):
                ranks = [
                    r
                    for r in range(8)
                    if all((r >> axis) & 1 == at for axis, at in zip(fixed, place, strict=True))
                ]
                pair = make(ranks)
                if rank in ranks:
                    mine[tuple(AXES[axis] for axis in axes)] = pair
    return mine


def with_gloo(ranks: list[int]) -> Pair:
    """Create both groups for the given ranks."""
    return Pair(dist.new_group(ranks), dist.new_group(ranks, backend="gloo"), ranks)


def values(source: random.Random, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor that differs between ranks, and is the same for a source in the same state."""
    generator = torch.Generator().manual_seed(source.randrange(1 << 30) + rank)
    return torch.randint(0, 3, (count,), generator=generator).to(dtype)


class Step:
    """An operation that starts on this package's group, and is compared with Gloo's result after the wait."""

    def __init__(self, seed: int, pair: Pair, rank: int) -> None:
        self.source = random.Random(seed)
        self.pair = pair
        self.rank = pair.ranks.index(rank)
        self.size = len(pair.ranks)
        self.count = self.source.choice(SIZES)
        self.dtype = self.source.choice(DTYPES)
        self.root = self.source.randrange(self.size)
        self.kind = self.source.choice(list(KINDS))
        self.op = self.source.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
        self.waits = self.source.random() < 0.5
        self.seed = seed

    def tensor(self, count: int, which: int = 0) -> Tensor:
        """Return this rank's values."""
        return values(random.Random(f"{self.seed} {which}"), self.rank, count, self.dtype)

    def begin(self, group: dist.ProcessGroup, *, async_op: bool) -> tuple[list[Tensor], list[dist.Work]]:
        """Return the results, and the works that write them."""
        results, works = KINDS[self.kind](self, group, async_op)
        return results, [work for work in works if work is not None]

    def check(self, results: list[Tensor]) -> None:
        """Compare the results with Gloo."""
        expected, _ = self.begin(self.pair.gloo, async_op=False)
        for found, right in zip(results, expected, strict=True):
            assert torch.equal(found, right), f"step {self.seed}: {self.kind} of {self.count} x {self.dtype}"


Begun = tuple[list[Tensor], list[dist.Work | None]]


def all_reduce(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    tensor = step.tensor(step.count)
    return [tensor], [dist.all_reduce(tensor, step.op, group=group, async_op=async_op)]


def reduce(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    tensor = step.tensor(step.count)
    work = dist.reduce(tensor, group_dst=step.root, op=step.op, group=group, async_op=async_op)
    return [tensor] if step.rank == step.root else [], [work]  # Gloo's result is undefined on other ranks


def broadcast(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    tensor = step.tensor(step.count)
    return [tensor], [dist.broadcast(tensor, group_src=step.root, group=group, async_op=async_op)]


def all_gather(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    output = torch.zeros(step.count * step.size, dtype=step.dtype)
    return [output], [dist.all_gather_single(output, step.tensor(step.count), group=group, async_op=async_op)]


def all_gather_list(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    outputs = [torch.zeros(step.count, dtype=step.dtype) for _ in range(step.size)]
    return outputs, [dist.all_gather(outputs, step.tensor(step.count), group=group, async_op=async_op)]


def reduce_scatter(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    output = torch.zeros(step.count, dtype=step.dtype)
    whole = step.tensor(step.count * step.size)
    return [output], [dist.reduce_scatter_single(output, whole, step.op, group=group, async_op=async_op)]


def gather(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    here = step.rank == step.root
    outputs = [torch.zeros(step.count, dtype=step.dtype) for _ in range(step.size)] if here else None
    work = dist.gather(step.tensor(step.count), outputs, group_dst=step.root, group=group, async_op=async_op)
    return outputs or [], [work]


def scatter(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    output = torch.zeros(step.count, dtype=step.dtype)
    inputs = [step.tensor(step.count, part) for part in range(step.size)] if step.rank == step.root else None
    return [output], [dist.scatter(output, inputs, group_src=step.root, group=group, async_op=async_op)]


def all_to_all(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    whole = step.tensor(step.count * step.size)
    output = torch.zeros_like(whole)
    return [output], [dist.all_to_all_single(output, whole, group=group, async_op=async_op)]


def all_to_all_uneven(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    table = random.Random(step.seed)
    counts = [
        [table.choice((0, 1, step.count // 7, step.count)) for _ in range(step.size)]
        for _ in range(step.size)
    ]
    sent, received = counts[step.rank], [row[step.rank] for row in counts]
    output = torch.zeros(sum(received), dtype=step.dtype)
    work = dist.all_to_all_single(
        output, step.tensor(sum(sent)), received, sent, group=group, async_op=async_op
    )
    return [output], [work]


def messages(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    """Send several messages around a ring at once."""
    right, left = (step.rank + 1) % step.size, (step.rank - 1) % step.size
    received = [torch.zeros(step.count, dtype=step.dtype) for _ in range(3)]
    works: list[dist.Work | None] = []
    for number, tensor in enumerate(received):
        works.append(dist.irecv(tensor, group=group, group_src=left, tag=number))
    for number in range(3):
        works.append(dist.isend(step.tensor(step.count, number), group=group, group_dst=right, tag=number))
    if not async_op:
        for work in works:
            assert work is not None
            work.wait()
        works = []
    return received, works


def barrier(step: Step, group: dist.ProcessGroup, async_op: bool) -> Begun:
    return [], [dist.barrier(group=group, async_op=async_op)]


KINDS: dict[str, Callable[[Step, dist.ProcessGroup, bool], Begun]] = {
    each.__name__: each
    for each in (
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        all_gather_list,
        reduce_scatter,
        gather,
        scatter,
        all_to_all,
        all_to_all_uneven,
        messages,
        barrier,
    )
}


def run_steps(rank: int, size: int, steps: int) -> int:
    """Start operations in the same order in every group, and wait for them in a different order on every rank."""
    groups = mesh_groups(rank, with_gloo)
    classes = list(groups)
    order, own = random.Random(5), random.Random(rank)
    open_steps: list[tuple[Step, list[Tensor], list[dist.Work]]] = []
    for number in range(steps):
        pair = groups[order.choice(classes)]
        step = Step(number, pair, rank)
        results, works = step.begin(pair.ours, async_op=not step.waits)
        open_steps.append((step, results, works))
        if len(open_steps) < MOST_OPEN and number + 1 < steps:
            continue
        for _, _, begun in own.sample(open_steps, len(open_steps)):
            for work in begun:
                work.wait()
        for done, found, _ in open_steps:
            done.check(found)
        open_steps = []
    return steps


@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_operations_over_a_mesh(ranks, steps):
    assert ranks(8).run(run_steps, steps, timeout_s=TIMEOUT_S + steps / 4) == [steps] * 8
