"""The numbers that identify dtypes and reductions in the C core."""

from __future__ import annotations

import torch
import torch.distributed as dist

_REDUCIBLE = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]
_ALL = _REDUCIBLE + [
    kind
    for kind in dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype))
    if kind not in _REDUCIBLE and not str(kind).startswith(("torch.q", "torch.bits"))
]


class _Types(dict[torch.dtype, int]):
    def __missing__(self, dtype: torch.dtype) -> int:
        raise ValueError(
            f"expected a dtype that can be communicated, got {dtype}; convert the tensor (for a quantized dtype, use "
            "int_repr(); for a bits dtype, use view(torch.uint8))"
        )


TYPES = _Types({kind: kind.itemsize << 8 | number for number, kind in enumerate(_ALL) if kind.itemsize})
"""The C core's number for each dtype: (bytes per element << 8) | code.

The lookup of another dtype, such as `torch.qint8`, raises ValueError.
"""

TYPE_NAMES = {number: str(kind).removeprefix("torch.") for kind, number in TYPES.items()}

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}
"""The names of torch's reductions; the index of a name is the reduction's number in the C core."""

REDUCTION_NAMES = tuple(REDUCE_OPS)

REDUCTIONS: dict[int, int] = {hash(op): number for number, op in enumerate(REDUCE_OPS.values())}
"""The C core's number for each torch `ReduceOp`, keyed by hash because comparing two `ReduceOp`s is slow."""


def reducible(dtype: torch.dtype, reduction: int) -> bool:
    """Return whether the C core supports a reduction for a dtype.

    Floating-point dtypes do not support bitwise reductions, and bool does not support averages.
    """
    if dtype not in _REDUCIBLE:
        return False
    name = REDUCTION_NAMES[reduction]
    if dtype.is_floating_point:
        return name not in ("and", "or", "xor")
    return not (dtype is torch.bool and name == "avg")
