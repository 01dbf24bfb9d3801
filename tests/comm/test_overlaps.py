"""Collectives whose input and output overlap in memory: the result is the same as with separate tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import Communicator
from tests.comm.hosts import hierarchical_group
from tests.pool import Ranks

RanksOf = Callable[[int], Ranks]

Spans = tuple[list[slice], list[slice]]
"""The parts of one tensor that a collective reads, and those that it writes."""


def parts(count: int, number: int, start: int = 0) -> list[slice]:
    return [slice(start + r * count, start + (r + 1) * count) for r in range(number)]


def overlaps(count: int, rank: int, size: int) -> Iterator[tuple[str, Spans]]:
    """Yield the operation and the spans of its input and its output, for every way in which they can overlap."""
    starts = [*(part * count for part in range(size)), rank * count + count // 2, count // 3]
    for start in starts:
        one = parts(count, 1, start)
        yield "all_gather", (one, parts(count, size))
        yield "gather", (one, parts(count, size))
        yield "reduce_scatter", (parts(count, size), one)
        yield "scatter", (parts(count, size), one)
    for start in (0, 1, count // 2, count):
        first, second = parts(count, 1), parts(count, 1, start)
        for name in ("all_reduce", "scan"):
            yield name, (first, second)
            yield name, (second, first)
    for start in (0, 1, count, size * count):
        yield "all_to_all", (parts(count, size), parts(count, size, start))
        yield "all_to_all", (parts(count, size, start), parts(count, size))


WAYS = ("list", "blocking", "asynchronous", "persistent")
"""How an operation runs; except for the first, adjacent parts are passed as one tensor."""


def call(
    comm: Communicator, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], way: str
) -> None:
    """Run an operation."""

    def joined(tensors: Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
        if way == "list":
            return tensors
        return torch.as_strided(tensors[0], (sum(map(len, tensors)),), (1,))

    last = comm.size - 1
    named: dict[str, Any] = {}
    arguments: tuple[Any, ...]
    match name:
        case "all_gather":
            arguments = joined(outputs), inputs[0]
        case "gather":
            arguments = inputs[0], outputs if comm.rank == last else None, last
        case "reduce_scatter":
            arguments = outputs[0], joined(inputs), "sum"
        case "scatter":
            arguments = outputs[0], inputs if comm.rank == 0 else None, 0
        case "all_to_all":
            arguments = joined(outputs), joined(inputs)
        case _:
            arguments, named = (inputs[0], "sum"), {"output": outputs[0]}
    if way == "persistent":
        getattr(comm, f"{name}_init")(*arguments, **named)()
    elif way == "asynchronous":
        getattr(comm, name)(*arguments, **named, async_op=True).wait()
    else:
        getattr(comm, name)(*arguments, **named)


def check_overlaps(comm: Communicator, counts: Sequence[int], allocates: bool = False) -> None:
    """Compare every overlapping call with the same call on separate tensors."""
    for count in counts:
        length = 2 * comm.size * count
        values = (torch.arange(length) % 1000 + 1000.0 * comm.rank).float()
        for name, (reads, writes) in overlaps(count, comm.rank, comm.size):
            expected, source = values.clone(), values.clone()
            call(
                comm, name, [source[span] for span in reads], [expected[span] for span in writes], "blocking"
            )
            for way in WAYS:
                tensor = comm.empty(length) if allocates else torch.empty(length)
                tensor.copy_(values)
                call(comm, name, [tensor[span] for span in reads], [tensor[span] for span in writes], way)
                for span in writes:
                    assert torch.equal(tensor[span], expected[span]), (name, count, way, reads, writes)


def check_on_this_host(rank: int, size: int, allocates: bool) -> None:
    check_overlaps(Communicator(dist.group.WORLD), [3, 3000, 90_000], allocates)


@pytest.mark.parametrize("allocates", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_on_one_host(ranks: RanksOf, size: int, allocates: bool) -> None:
    ranks(size).run(check_on_this_host, allocates)


def check_on_hosts(rank: int, size: int) -> None:
    check_overlaps(Communicator(hierarchical_group([0, 0, 1], rank)), [3, 3000, 90_000])


def test_on_two_hosts(ranks: RanksOf) -> None:
    ranks(3).run(check_on_hosts)


def check_over_gloo(rank: int, size: int) -> None:
    check_overlaps(Communicator(dist.new_group(backend="gloo")), [3, 3000])


def test_over_gloo(ranks: RanksOf) -> None:
    ranks(3).run(check_over_gloo)


def check_uneven_exchange_in_place(rank: int, size: int, allocates: bool) -> None:
    comm = Communicator(dist.group.WORLD)
    for rows in (4, 1000, 90_000):
        table = [[rows * (1 + (s + d) % 2) for d in range(size)] for s in range(size)]
        sent, received = table[rank], [row[rank] for row in table]
        whole = [torch.arange(float(sum(table[s]))) + 1e6 * s for s in range(size)]
        expected = torch.cat([whole[s].split(table[s])[rank] for s in range(size)])
        count = max(sum(sent), sum(received))
        for _ in range(5):
            tensor = comm.empty(count) if allocates else torch.empty(count)
            tensor[: sum(sent)] = whole[rank]
            comm.all_to_all(tensor[: sum(received)], tensor[: sum(sent)], received, sent)
            assert torch.equal(tensor[: sum(received)], expected), rows


@pytest.mark.parametrize("allocates", [False, True])
def test_uneven_all_to_all_in_place(ranks: RanksOf, allocates: bool) -> None:
    for size in (2, 3, 4):
        ranks(size).run(check_uneven_exchange_in_place, allocates)
