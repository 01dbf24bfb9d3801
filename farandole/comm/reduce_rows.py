"""Reduce the rows of a matrix in a fixed order, for collectives that gather values and reduce locally.

16-bit floats are accumulated in fp32 and rounded once, as in the C core.  The C core's kernels are used if available.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from farandole import native
from farandole.comm.algorithms.steps import COMBINE
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES, reducible

_FOR_BOOL = {"sum": "or", "product": "and", "min": "and", "max": "or"}
_BLOCK = 4096  # the 16-bit codecs accept any block length that the C core supports


def reduce_rows(rows: Tensor, reduction: int) -> Tensor:
    """Reduce `rows` over dimension 0, in row order.

    Args:
        rows: A contiguous tensor with at least one row.  Its values may be overwritten.
        reduction: The index of the reduction in `REDUCTION_NAMES`.  Integer averages are truncated toward zero.

    Returns:
        The reduced row.
    """
    dtype, name = rows.dtype, REDUCTION_NAMES[reduction]
    if len(rows) == 1 and not (dtype is torch.bool or name == "avg"):
        return rows[0]
    rounds = dtype.is_floating_point and dtype.itemsize < 4 and name in ("sum", "avg", "product")
    if rounds and (len(rows) > 2 or name == "avg"):
        return _in_fp32(rows, name)
    if name == "avg":
        return _average(rows)
    combine = _combine(dtype, reduction, name)
    total, *others = rows.unbind()
    for row in others:
        combine(total, total, row)
    return total


def _in_fp32(rows: Tensor, name: str) -> Tensor:
    total = torch.empty(rows.shape[1], dtype=torch.float32, device="cpu")
    if native.available() and name != "product":
        core, kind, count = native.library(), TYPES[rows.dtype], total.numel()
        for number, row in enumerate(rows):
            core.frd_decode(kind, row.data_ptr(), total.data_ptr(), 1.0 if number else 0.0, count, _BLOCK)
        if name == "avg":
            total.div_(len(rows))
        core.frd_encode(kind, total.data_ptr(), 1.0, None, rows.data_ptr(), None, count, _BLOCK)
        return rows[0]
    total.copy_(rows[0])
    for row in rows[1:]:
        total = total.mul_(row) if name == "product" else total.add_(row)
    if name == "avg":
        total.div_(len(rows))
    return total.to(rows.dtype)


def _average(rows: Tensor) -> Tensor:
    if rows.dtype.is_floating_point:
        return reduce_rows(rows, REDUCTION_NAMES.index("sum")).div_(len(rows))
    total = rows[0].to(torch.int64, copy=True)
    for row in rows[1:]:
        total += row
    return total.div_(len(rows), rounding_mode="trunc").to(rows.dtype)


def _combine(dtype: torch.dtype, reduction: int, name: str) -> Callable[[Tensor, Tensor, Tensor], object]:
    if not (native.available() and reducible(dtype, reduction)):
        return COMBINE[_FOR_BOOL.get(name, name) if dtype is torch.bool else name]
    core, kind = native.library(), TYPES[dtype]

    def combine(result: Tensor, a: Tensor, b: Tensor) -> None:
        core.frd_combine(result.data_ptr(), a.data_ptr(), b.data_ptr(), result.numel(), kind, reduction)

    return combine
