"""Splits large tensors into windows, so that shared memory and the inter-node link work in parallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Combine, Steps, Store
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.host_group import HostGroup
from farandole.comm.transport import Transport

WINDOW_BYTES = 2 << 20
"""The size of one window in bytes; all ranks on a host work on the same window."""
WINDOWS_AHEAD = 4
"""How many windows may wait for the link while shared memory processes the next window."""

_SUM, _AVG, _PRODUCT = (REDUCTION_NAMES.index(name) for name in ("sum", "avg", "product"))

_Piece = TypeVar("_Piece")


@dataclass(frozen=True)
class Accumulation:
    """Describes how a reduction is accumulated over ranks and hosts.

    16-bit floats are accumulated in fp32 and rounded once.  For N ranks, a sum s of values x differs from the exact sum
    by at most u |s| + (1 + u) (N - 1) 2^-24 sum(|x|), where u = 2^-8 for bf16 and 2^-11 for fp16 (N. Higham: Accuracy
    and Stability of Numerical Algorithms, 2002, section 4.2); u = 0 for fp32.
    """

    dtype: torch.dtype
    reduction: int
    store: Store | None  # converts totals to results; None if they are equal

    @classmethod
    def of(cls, dtype: torch.dtype, reduction: int, ranks: int) -> Accumulation:
        """Return the `Accumulation` for a reduction of `ranks` tensors."""
        averages, whole = reduction == _AVG, not dtype.is_floating_point
        wide = dtype
        if averages and whole:
            wide = torch.int64
        elif not whole and dtype.itemsize < 4 and reduction in (_SUM, _AVG, _PRODUCT):
            wide = torch.float32

        def store(result: Tensor, total: Tensor) -> None:
            if averages:
                total.div_(ranks, rounding_mode="trunc" if whole else None)
            if result is not total:
                result.copy_(total)

        stores = averages or wide is not dtype
        return cls(wide, _SUM if averages else reduction, store if stores else None)


@dataclass(frozen=True)
class Window:
    """A window of a tensor, split into one share per rank on this host."""

    shares: list[Tensor]  # to be reduced
    results: list[Tensor]
    lead: Callable[[Tensor, Transport], Steps]
    """A function that reduces a leader's share over the hosts and stores the result."""


def windows_of(flat: Tensor, how: Accumulation) -> Iterator[Tensor]:
    """Split a tensor into windows that occupy at most `WINDOW_BYTES` bytes in the accumulation dtype."""
    length = max(1, WINDOW_BYTES // how.dtype.itemsize)
    return iter(flat.split(length) if flat.numel() else ())


def in_windows(
    windows: Iterable[_Piece],
    begin: Callable[[int, _Piece], tuple[Any, ...]],
    complete: Callable[..., None],
) -> None:
    """Call `begin` and later `complete` for each window, in order.

    `begin` is called for up to `WINDOWS_AHEAD` further windows before the oldest window is completed.
    """
    under_way: deque[tuple[Any, ...]] = deque()
    for number, window in enumerate(windows):
        under_way.append(begin(number, window))
        if len(under_way) > WINDOWS_AHEAD:
            complete(*under_way.popleft())
    while under_way:
        complete(*under_way.popleft())


def combine_in_core(host: HostGroup, dtype: torch.dtype, reduction: int) -> Combine:
    """Return a function that reduces two tensors in the C core.

    The function uses a single thread, so that the ranks do not compete for cores.
    """
    core, kind = host.core, TYPES[dtype]

    def combine(result: Tensor, a: Tensor, b: Tensor) -> None:
        count = result.numel()
        core.frd_combine(result.data_ptr(), a.data_ptr(), b.data_ptr(), count, kind, reduction)

    return combine
