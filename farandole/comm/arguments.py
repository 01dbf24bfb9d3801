"""What torch's callers pass, made uniform and checked before any rank waits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.dense import plain
from farandole.comm.dtypes import REDUCTION_NAMES, REDUCTIONS, reducible
from farandole.comm.work import Call


def tensor_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a call that takes one or several."""
    return [plain(tensors)] if isinstance(tensors, Tensor) else [plain(tensor) for tensor in tensors]


def tensor_lists(tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The lists of a call that takes one list or several."""
    if tensors and isinstance(tensors[0], Tensor):
        return [tensor_list(tensors)]  # type: ignore[arg-type]
    return [tensor_list(each) for each in tensors]


def options(given: Any, kind: type, **fields: Any) -> Any:
    """The options of a call: those given, or new ones for the spellings that have plain arguments instead."""
    if hasattr(given, "asyncOp"):
        return given
    made = kind()
    if isinstance(given, timedelta):
        made.timeout = given
    for name, value in fields.items():
        if value is not None and not isinstance(value, timedelta):
            setattr(made, name, value)
    return made


def reduction_number(op: dist.ReduceOp, dtype: torch.dtype) -> int:
    """The core's number of a reduction; ValueError where it does not exist for the type."""
    number = REDUCTIONS.get(hash(op))
    if number is None:
        raise ValueError(f"reduction {op} is not supported; these are: {', '.join(REDUCTION_NAMES)}")
    name = REDUCTION_NAMES[number]
    exists = name in ("sum", "avg") if dtype.is_complex else reducible(dtype, number)
    if not exists:
        raise ValueError(f"reduction {name} does not exist for {dtype}")
    return number


def same_count(call: str, what: str, found: int, which: str, expected: int) -> None:
    """ValueError unless two counts are equal."""
    if found != expected:
        raise ValueError(f"{call}: {what} has {found}, {which} {expected}")


def in_turn(calls: Sequence[Call]) -> Call:
    """Several calls as one."""
    if len(calls) == 1:
        return calls[0]

    def run(flags: int) -> None:
        for call in calls:
            call(flags)

    return run
