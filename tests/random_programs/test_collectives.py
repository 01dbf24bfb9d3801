"""Random calls with unusual tensors give the results of the same calls over Gloo."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from tests.comm.next_to_gloo import flat, gloo_group
from tests.random_programs.seeds import seeds

CALLS = 40

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
MOVED = [torch.bool, torch.int16, torch.float8_e4m3fn]
COMPLEX = [torch.complex64, torch.complex128]
"""Dtypes that are not reduced here."""

REDUCTIONS = {dtype: ["SUM", "AVG", "PRODUCT", "MIN", "MAX"] for dtype in FLOATS} | {
    dtype: ["SUM", "PRODUCT", "MIN", "MAX"] for dtype in INTEGERS
}
NOT_IN_GLOO = {torch.bool: torch.uint8, torch.int16: torch.int64, torch.float8_e4m3fn: torch.float32}
"""For each dtype that Gloo lacks, a dtype that represents the same values."""

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Call:
    """A random call; equal on all ranks.

    Attributes:
        ranks: the ranks that call the operation, in the order of the group; None stands for all.
        shape: the shape of one rank's part.
        layouts: how inputs and outputs lie in memory.
        rows: the number of rows that each rank sends to each other rank, for all-to-all.
    """

    operation: str
    ranks: tuple[int, ...] | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    layouts: tuple[str, str]
    reduction: str
    root: int
    is_async: bool
    rows: tuple[tuple[int, ...], ...]
    seed: int


class Caller:
    """Creates the tensors of a call, and runs the call on a group."""

    def __init__(self, call: Call, group: Group, over_gloo: bool) -> None:
        self.call, self.group, self.over_gloo = call, group, over_gloo
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.root = self.ranks[call.root % self.size]
        self.options = {"group": group, "async_op": call.is_async}
        averages = over_gloo and call.reduction == "AVG"
        self.operation = getattr(dist.ReduceOp, "SUM" if averages else call.reduction)
        self.divisor = self.size if averages else 1

    def input(self, number: int = 0, *, in_place: bool = False, rows: int | None = None) -> Tensor:
        """Return random values; `rows` adds a first dimension with this length."""
        layout = "contiguous" if in_place and self.call.layouts[0] == "expanded" else self.call.layouts[0]
        return self._tensor(layout, self.call.seed + 1000 * number + self.rank, rows)

    def output(self, rows: int | None = None) -> Tensor:
        return self._tensor(self.call.layouts[1], 1, rows)

    def _tensor(self, layout: str, seed: int, rows: int | None) -> Tensor:
        shape = self.call.shape if rows is None else (rows, *self.call.shape)
        tensor = random_tensor(shape, self.call.dtype, layout, seed)
        if self.over_gloo:
            dtype = NOT_IN_GLOO.get(self.call.dtype, self.call.dtype)
            tensor = tensor.detach().contiguous().to(dtype, copy=True)
        return tensor

    def run(self) -> list[Any]:
        """Run the call, and return its results and its inputs, which most calls must not change."""
        work, results, reduced = OPERATIONS[self.call.operation](self)
        if self.call.is_async and work is not None:
            work.wait()
        if self.divisor > 1:
            for tensor in reduced:
                tensor.div_(self.divisor)
        return flat([*results, *reduced])


def random_tensor(shape: Sequence[int], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """Return small integers with any dtype, in an unusual layout if the shape and the dtype permit it."""
    stored = list(shape)
    if layout == "strided" and stored:
        stored[-1] *= 2
    elif layout == "transposed":
        stored.reverse()
    elif layout == "expanded" and stored:
        stored[0] = 1
    generator = torch.Generator().manual_seed(seed)
    lowest = -3 if dtype.is_signed and dtype is not torch.bool else 0
    values = torch.randint(lowest, 4, stored, generator=generator)
    tensor = values.to(torch.complex64).mul(1 - 2j).to(dtype) if dtype.is_complex else values.to(dtype)
    if layout == "strided" and stored:
        tensor = tensor[..., ::2]
    elif layout == "transposed":
        tensor = tensor.permute(list(reversed(range(len(stored)))))
    elif layout == "expanded" and stored:
        tensor = tensor.expand(shape)
    elif layout == "offset":
        tensor = torch.zeros(tensor.numel() + 1, dtype=dtype)[1:].view(stored).copy_(tensor)
    elif layout == "requires_grad" and dtype in FLOATS:
        tensor.requires_grad_()
    elif layout == "channels_last" and len(stored) == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor


Result = tuple["dist.Work | None", list[Any], list[Tensor]]
"""A work object, the results and inputs, and the reduced tensors."""


def _all_reduce(caller: Caller) -> Result:
    tensor = caller.input(in_place=True)
    return dist.all_reduce(tensor, caller.operation, **caller.options), [], [tensor]


def _reduce(caller: Caller) -> Result:
    tensor = caller.input(in_place=True)
    work = dist.reduce(tensor, caller.root, caller.operation, **caller.options)
    return work, [], [tensor] if dist.get_rank() == caller.root else []


def _broadcast(caller: Caller) -> Result:
    tensor = caller.input(in_place=True)
    return dist.broadcast(tensor, caller.root, **caller.options), [tensor], []


def _all_gather(caller: Caller) -> Result:
    tensor, outputs = caller.input(), [caller.output() for _ in range(caller.size)]
    return dist.all_gather(outputs, tensor, **caller.options), [tensor, outputs], []


def _all_gather_into_tensor(caller: Caller) -> Result:
    tensor, output = caller.input(rows=2), caller.output(rows=2 * caller.size)
    return dist.all_gather_into_tensor(output, tensor, **caller.options), [tensor, output], []


def _reduce_scatter(caller: Caller) -> Result:
    tensors, output = [caller.input(number) for number in range(caller.size)], caller.output()
    work = dist.reduce_scatter(output, tensors, caller.operation, **caller.options)
    return work, tensors, [output]


def _reduce_scatter_tensor(caller: Caller) -> Result:
    tensor, output = caller.input(rows=2 * caller.size), caller.output(rows=2)
    work = dist.reduce_scatter_tensor(output, tensor, caller.operation, **caller.options)
    return work, [tensor], [output]


def _gather(caller: Caller) -> Result:
    tensor = caller.input()
    outputs = [caller.output() for _ in range(caller.size)] if dist.get_rank() == caller.root else None
    return dist.gather(tensor, outputs, dst=caller.root, **caller.options), [tensor, outputs or []], []


def _scatter(caller: Caller) -> Result:
    output, is_root = caller.output(), dist.get_rank() == caller.root
    tensors = [caller.input(number) for number in range(caller.size)] if is_root else None
    return dist.scatter(output, tensors, src=caller.root, **caller.options), [output, tensors or []], []


def _all_to_all(caller: Caller) -> Result:
    sent, received = _rows(caller)
    tensors = [caller.input(number, rows=rows) for number, rows in enumerate(sent)]
    outputs = [caller.output(rows=rows) for rows in received]
    if not caller.over_gloo:
        return dist.all_to_all(outputs, tensors, **caller.options), [tensors, outputs], []
    output = torch.cat(outputs)  # Gloo's all_to_all needs tensors of one shape
    dist.all_to_all_single(output, torch.cat(tensors), received, sent, group=caller.group)
    return None, [tensors, list(output.split(received))], []


def _all_to_all_single(caller: Caller) -> Result:
    sent, received = _rows(caller)
    tensor, output = caller.input(rows=sum(sent)), caller.output(rows=sum(received))
    work = dist.all_to_all_single(output, tensor, received, sent, **caller.options)
    return work, [tensor, output], []


def _rows(caller: Caller) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that this rank sends to each rank, and receives from each rank."""
    rows = caller.call.rows
    others = range(caller.size)
    return [rows[caller.rank][other] for other in others], [rows[other][caller.rank] for other in others]


def _ring(caller: Caller) -> Result:
    """Send to the next rank and receive from the previous one, several messages at a time in one batch."""
    following, previous = (caller.ranks[(caller.rank + step) % caller.size] for step in (1, -1))
    tensors = [caller.input(number) for number in range(3)]
    outputs = [caller.output() for _ in tensors]
    transfers = [
        *(dist.P2POp(dist.isend, tensor, following, caller.group, tag) for tag, tensor in enumerate(tensors)),
        *(dist.P2POp(dist.irecv, output, previous, caller.group, tag) for tag, output in enumerate(outputs)),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    return None, [tensors, outputs], []


def _objects(caller: Caller) -> Result:
    gathered: list[Any] = [None] * caller.size
    dist.all_gather_object(gathered, (caller.rank, "text" * caller.rank, None), group=caller.group)
    broadcast = [caller.rank, {"rank": caller.rank}]
    dist.broadcast_object_list(broadcast, caller.root, group=caller.group)
    return None, [*gathered, *broadcast], []


def _functional(caller: Caller) -> Result:
    tensor = caller.input(rows=2)
    gathered = functional.all_gather_tensor(tensor.detach(), 0, caller.group)
    exchanged = functional.all_to_all_single(gathered, None, None, caller.group)
    return None, [tensor, gathered.clone(), exchanged.clone()], []


REDUCING: dict[str, Callable[[Caller], Result]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
}
OPERATIONS = REDUCING | {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "ring": _ring,
    "objects": _objects,
    "functional": _functional,
}


WITHOUT_COMPLEX = {"gather", "functional"}
"""The operations for which Gloo refuses complex tensors."""


def random_call(choose: random.Random, size: int) -> Call:
    operation = choose.choice(list(OPERATIONS))
    dtypes = [*FLOATS, *INTEGERS]
    if operation not in REDUCING:
        dtypes += MOVED + (COMPLEX if operation not in WITHOUT_COMPLEX else [])
    shape = tuple(choose.choice([0, 1, 2, 3, 5, 8, 64]) for _ in range(choose.choice([0, 1, 1, 2, 3, 4])))
    everywhere = ["contiguous", "contiguous", "strided", "transposed", "offset"]
    inputs = [*everywhere, "expanded", "requires_grad", "channels_last"]
    return Call(
        operation,
        ranks=choose.choice([None, None, tuple(reversed(range(size - 1)))]),
        dtype=(dtype := choose.choice(dtypes)),
        shape=choose.choice([shape, shape, shape, shape, (100_003,)]),
        layouts=(choose.choice(inputs), choose.choice(everywhere)),
        reduction=choose.choice(REDUCTIONS.get(dtype, ["SUM"])),
        root=choose.randrange(size),
        is_async=choose.random() < 0.4,
        rows=tuple(tuple(choose.randrange(4) for _ in range(size)) for _ in range(size)),
        seed=choose.randrange(1 << 30),
    )


def _compare(rank: int, size: int, seed: int) -> None:
    choose = random.Random(seed)
    members = list(reversed(range(size - 1)))
    groups = {None: (dist.group.WORLD, gloo_group()), tuple(members): (dist.new_group(members), None)}
    groups[tuple(members)] = groups[tuple(members)][0], dist.new_group(members, backend="gloo")
    for _ in range(CALLS):
        call = random_call(choose, size)
        if call.ranks is not None and rank not in call.ranks:
            continue
        own, gloo = groups[call.ranks]
        expected = Caller(call, gloo, over_gloo=True).run()
        found = Caller(call, own, over_gloo=False).run()
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, Tensor):
                torch.testing.assert_close(
                    one.to(other.dtype),
                    other,
                    rtol=1e-2,
                    atol=1e-2,
                    msg=lambda why, call=call: f"{call}: {why}",
                )
            else:
                assert one == other, str(call)
    for group in groups[tuple(members)]:
        if rank in members:
            dist.destroy_process_group(group)


@pytest.mark.parametrize("seed", seeds(4))
def test_gloo(ranks: Callable[..., Any], seed: int) -> None:
    ranks(3).run(_compare, seed)
