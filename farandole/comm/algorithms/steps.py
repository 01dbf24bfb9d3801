"""What all algorithms are made of: steps, parts of a tensor, and the sum of two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from farandole.comm.transport import Pending

Steps = Iterator[Pending]
"""An algorithm under way: it yields the messages that it waits for."""

Combine = Callable[[Tensor, Tensor, Tensor], object]
"""`combine(result, a, b)`: result = a op b, element by element; result may be a or b."""

COMBINE: dict[str, Combine] = {
    "sum": lambda result, a, b: torch.add(a, b, out=result),
    "product": lambda result, a, b: torch.mul(a, b, out=result),
    "min": lambda result, a, b: torch.minimum(a, b, out=result),
    "max": lambda result, a, b: torch.maximum(a, b, out=result),
    "and": lambda result, a, b: torch.bitwise_and(a, b, out=result),
    "or": lambda result, a, b: torch.bitwise_or(a, b, out=result),
    "xor": lambda result, a, b: torch.bitwise_xor(a, b, out=result),
}


class Running:
    """Steps that have been begun: their first messages are on their way."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._next = next(steps, None)

    def finish(self, deadline: float) -> None:
        """Go through all that is left; `deadline` is on the clock of `time.monotonic`."""
        while self._next is not None:
            self._next.wait(max(0.0, deadline - time.monotonic()))
            self._next = next(self._steps, None)


def finish(steps: Steps, timeout_s: float) -> None:
    """Go through all steps."""
    Running(steps).finish(time.monotonic() + timeout_s)


def split(tensor: Tensor, parts: int) -> list[Tensor]:
    """A one-dimensional tensor in parts that differ in length by one at most."""
    bounds = [tensor.numel() * part // parts for part in range(parts + 1)]
    return [tensor[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def in_order(combine: Combine, own: Tensor, other: Tensor, own_first: bool) -> None:
    """own = own op other, with the operands in the same order on both ranks, so that both get the same bits."""
    if own_first:
        combine(own, own, other)
    else:
        combine(own, other, own)
