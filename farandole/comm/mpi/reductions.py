"""Reductions.  Those that MPI has are MPI's; the others are computed here.

MPI has none for 16-bit floats (the type for bf16 is null in MPICH's wheel, and using it ends the job) and no average;
its minimum may drop a NaN on one rank and not on another; and sums of whole numbers of 8 and 16 bits wrap around in
torch and stop at the largest in Open MPI.  For those each rank gets a part of the elements of all ranks, reduces it
from rank 0's value to rank n-1's, 16-bit floats in fp32 and rounded once, and gives it to the others.  So results
are the same bits on all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.mpi import cuda
from farandole.comm.mpi.calls import Calls
from farandole.native import Operation

if TYPE_CHECKING:
    from farandole.comm.mpi.group import MpiGroup

_DTYPES = {number: dtype for dtype, number in TYPES.items()}
_PLAIN = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.bool: "UINT8_T",
}
_OPS = {
    "sum": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "and": "BAND",
    "or": "BOR",
    "xor": "BXOR",
}
_BOOL_OPS = {**_OPS, "sum": "BOR", "product": "BAND", "min": "BAND", "max": "BOR"}


def _differs(dtype: torch.dtype, reduction: str) -> bool:
    """Whether MPI's reduction is not, or not everywhere, torch's."""
    if dtype.is_floating_point:
        return reduction in ("min", "max")
    return dtype is not torch.bool and dtype.itemsize < 4 and reduction in ("sum", "product")


class Reductions(Calls):
    """all-reduce, reduce and reduce-scatter."""

    def __init__(self, group: MpiGroup) -> None:
        super().__init__(group)
        # for each type and reduction that are MPI's own: its type, its operation
        self._plans: dict[tuple[int, int], tuple[Any, Any]] = {}
        for dtype, name in _PLAIN.items():
            ops = _BOOL_OPS if dtype is torch.bool else _OPS
            for number, reduction in enumerate(REDUCTION_NAMES):
                if reduction in ops and not _differs(dtype, reduction):
                    plan = getattr(self.mpi, name), getattr(self.mpi, ops[reduction])
                    self._plans[TYPES[dtype], number] = plan

    def frd_all_reduce(self, handle: Any, address: int, count: int, kind: int, op: int, flags: int) -> int:
        """Reduce `count` elements over all ranks, in place."""
        self.begin(flags, Operation.ALL_REDUCE, kind, op, count)
        plan = self._plans.get((kind, op))
        if plan is None:
            self._all_reduce_here(flags, address, count, kind, op, None)
            return 0
        for at, length in self.pieces(address, count, kind):
            buffer = self.buffer(at, length, kind, plan[0])
            self.collective(flags, "Allreduce", length * (kind >> 8), self.mpi.IN_PLACE, buffer, plan[1])
        return 0

    def frd_reduce(
        self, handle: Any, address: int, count: int, kind: int, op: int, root: int, flags: int
    ) -> int:
        """Reduce into the elements of rank `root`."""
        self.begin(flags, Operation.REDUCE, kind, op, count, root)
        plan = self._plans.get((kind, op))
        if plan is None:
            self._all_reduce_here(flags, address, count, kind, op, root)
            return 0
        for at, length in self.pieces(address, count, kind):
            buffer = self.buffer(at, length, kind, plan[0])
            ends = (self.mpi.IN_PLACE, buffer) if self.rank == root else (buffer, None)
            self.collective(flags, "Reduce", length * (kind >> 8), *ends, plan[1], root)
        return 0

    def frd_reduce_scatter_even(
        self, handle: Any, source: int, target: int, count: int, kind: int, op: int, flags: int
    ) -> int:
        """Reduce `size` parts of `count` elements; keep this rank's.  The target may lie in the source."""
        self.begin(flags, Operation.REDUCE_SCATTER, kind, op, count * self.size)
        self._reduce_scatter(flags, source, target, [count] * self.size, kind, op)
        return 0

    def frd_reduce_scatter(
        self, handle: Any, sources: Any, counts: Any, target: int, kind: int, op: int, flags: int
    ) -> int:
        """The same with parts of any length, each at its own address."""
        self.begin(flags, Operation.REDUCE_SCATTER, kind, op, sum(counts))
        with self.one_after_another(sources, counts, kind, written=False) as source:
            self._reduce_scatter(flags, source, target or 0, list(counts), kind, op)
        return 0

    def _reduce_scatter(
        self, flags: int, source: int, target: int, counts: list[int], kind: int, op: int
    ) -> None:
        own, transfer = counts[self.rank], sum(counts) * (kind >> 8)
        plan = self._plans.get((kind, op))
        if plan is None or self.uncountable(counts):
            part = self._reduce_part(flags, source, counts, kind, op)
            cuda.tensor_at(target, own, _DTYPES[kind]).copy_(part)
            return
        copy = self.apart(source, transfer, target, own * (kind >> 8))
        source = source if copy is None else copy.data_ptr()
        receives = self.buffer(target, own, kind, plan[0])
        if len(set(counts)) == 1:
            sends = self.blocks(source, own, kind, plan[0])
            self.collective(flags, "Reduce_scatter_block", transfer, sends, receives, plan[1])
        else:
            sends = self.buffer(source, sum(counts), kind, plan[0])
            self.collective(flags, "Reduce_scatter", transfer, sends, receives, counts, plan[1])

    # ---- computed here ----

    def _all_reduce_here(
        self, flags: int, address: int, count: int, kind: int, op: int, root: int | None
    ) -> None:
        """Every rank reduces its part, and gives it to all others, or to the root."""
        shares = [count // self.size + (rank < count % self.size) for rank in range(self.size)]
        part = self._reduce_part(flags, address, shares, kind, op)
        if self.uncountable(shares):
            receivers = range(self.size) if root is None else [root]
            sends = [(peer, part.data_ptr(), part.numel() * (kind >> 8)) for peer in receivers]
            self.exchange(flags, sends, self.spans(address, shares, kind) if self.rank in receivers else [])
            return
        transfer, own = count * (kind >> 8), self.buffer(part.data_ptr(), part.numel(), kind)
        receives = self.parts(address, shares, kind)
        if root is None:
            self.collective(flags, "Allgatherv", transfer, own, receives)
        else:
            self.collective(flags, "Gatherv", transfer, own, receives if self.rank == root else None, root)

    def _reduce_part(self, flags: int, source: int, counts: Sequence[int], kind: int, op: int) -> Tensor:
        """This rank's part of a reduction: its elements of all ranks, and then one after the other."""
        own = [counts[self.rank]] * self.size
        rows = torch.empty(self.size, own[0], dtype=_DTYPES[kind])
        if self.uncountable(counts, own):
            self.exchange(flags, self.spans(source, counts, kind), self.spans(rows.data_ptr(), own, kind))
        else:
            sends, receives = self.parts(source, counts, kind), self.parts(rows.data_ptr(), own, kind)
            self.collective(flags, "Alltoallv", sum(counts) * (kind >> 8), sends, receives)
        return reduce_rows(rows, REDUCTION_NAMES[op])


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "and": operator.iand,
    "or": operator.ior,
    "xor": operator.ixor,
}


def reduce_rows(rows: Tensor, reduction: str) -> Tensor:
    """Reduce over the first dimension, in order; 16-bit floats in fp32, averages of whole numbers in 64 bits.

    Whole numbers are divided towards zero, as in the C core.
    """
    dtype = rows.dtype
    if dtype is torch.bool:
        reduction = {"sum": "or", "product": "and", "min": "and", "max": "or"}.get(reduction, reduction)
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    if reduction == "avg" and not dtype.is_floating_point:
        wide = torch.int64
    total = rows[0].to(wide, copy=True)
    combine = _BINARY["sum" if reduction == "avg" else reduction]
    for row in rows[1:]:
        total = combine(total, row.to(wide))
    if reduction == "avg":
        total.div_(len(rows), rounding_mode=None if dtype.is_floating_point else "trunc")
    return total.to(dtype)
