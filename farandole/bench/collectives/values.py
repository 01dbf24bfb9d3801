"""Input values and expected results, used to check every element.

Values repeat with a prime period, so that a misplaced block of elements is detected.  They are small integers that
every dtype represents exactly, and differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from farandole.bench.collectives.operations import ROOT, Operation

PERIOD = 127
_SLICE = 1 << 20  # elements compared at a time, so that a check allocates little memory

_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.sum(0),  # divided in `_reduced`
    "product": lambda stack: stack.prod(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "and": lambda stack: _fold(stack, torch.bitwise_and),
    "or": lambda stack: _fold(stack, torch.bitwise_or),
    "xor": lambda stack: _fold(stack, torch.bitwise_xor),
}


def values(rank: int, count: int, dtype: torch.dtype, reduction: str | None) -> Tensor:
    """Return the input of `rank` as a tensor with `count` elements.

    `reduction` is the name of the reduction, or None if the operation applies no reduction.
    """
    return _repeated(_period(rank, reduction), count, dtype)


def expected(
    operation: Operation, reduction: str, rank: int, ranks: int, count: int, dtype: torch.dtype
) -> Tensor | None:
    """Return the expected result on `rank`, or None if `operation` does not define a result on this rank.

    `count` is the number of elements in the larger of the input and the output.
    """
    part = count // ranks
    if operation.reduces:
        if operation.name == "reduce" and rank != ROOT:
            return None
        whole = _repeated(_reduced(reduction, ranks, dtype), count, dtype)
        return whole[rank * part : (rank + 1) * part] if operation.output == "part" else whole
    if operation.name == "broadcast":
        return values(ROOT, count, dtype, None)
    if operation.name == "scatter":
        return values(ROOT, count, dtype, None)[rank * part : (rank + 1) * part]
    if operation.name == "all_to_all":
        inputs = (values(sender, count, dtype, None) for sender in range(ranks))
        return torch.cat([each[rank * part : (rank + 1) * part] for each in inputs])
    if operation.name == "all_gather" or (operation.name == "gather" and rank == ROOT):
        return torch.cat([values(sender, part, dtype, None) for sender in range(ranks)])
    return None


def count_errors(found: Tensor, wanted: Tensor, ranks: int) -> int:
    """Return the number of elements of `found` that differ from `wanted`.

    Floating-point elements may have a relative error of up to `ranks` times the machine epsilon.
    """
    errors = 0
    for part, right in zip(found.view(-1).split(_SLICE), wanted.view(-1).split(_SLICE), strict=True):
        if part.dtype.is_floating_point:
            allowed = ranks * torch.finfo(part.dtype).eps * right.abs().double()
            errors += int((~((part.double() - right.double()).abs() <= allowed)).sum())
        else:
            errors += int((part != right).sum())
    return errors


def _period(rank: int, reduction: str | None) -> Tensor:
    index = torch.arange(PERIOD)
    if reduction == "product":  # 1 or 2, whose products over a few ranks are exact
        return 1 + (index * 7 + rank * 13).remainder(PERIOD).remainder(4).eq(0).long()
    place = (index * 7 + rank * 13).remainder(PERIOD)
    return place.remainder(4) if reduction in ("sum", "avg") else place


def _reduced(reduction: str, ranks: int, dtype: torch.dtype) -> Tensor:
    whole = _REDUCE[reduction](torch.stack([_period(rank, reduction) for rank in range(ranks)]))
    if reduction != "avg":
        return whole
    return whole.double() / ranks if dtype.is_floating_point else whole.div(ranks, rounding_mode="trunc")


def _repeated(period: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return period.to(dtype).repeat(-(-count // PERIOD))[:count]


def _fold(stack: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    result = stack[0]
    for each in stack[1:]:
        result = combine(result, each)
    return result
