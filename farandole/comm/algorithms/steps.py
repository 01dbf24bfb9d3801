"""Building blocks for all algorithms: running an algorithm, splitting tensors, and element-wise reductions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from farandole.comm.transport import Pending, Transport

Steps = Iterator[Pending]
"""A generator that runs an algorithm; it yields each message for which the caller must wait."""

Combine = Callable[[Tensor, Tensor, Tensor], object]
"""An element-wise reduction: `combine(result, a, b)` stores `a op b` in `result`, which may be `a` or `b`."""

Store = Callable[[Tensor, Tensor], object]
"""A conversion of totals to results: `store(result, total)` writes `result`, and may overwrite `total`.

For example, it divides by the number of ranks, or converts to another dtype.
"""

COMBINE: dict[str, Combine] = {
    "sum": lambda result, a, b: torch.add(a, b, out=result),
    "product": lambda result, a, b: torch.mul(a, b, out=result),
    "min": lambda result, a, b: torch.minimum(a, b, out=result),
    "max": lambda result, a, b: torch.maximum(a, b, out=result),
    "and": lambda result, a, b: torch.bitwise_and(a, b, out=result),
    "or": lambda result, a, b: torch.bitwise_or(a, b, out=result),
    "xor": lambda result, a, b: torch.bitwise_xor(a, b, out=result),
}


Reduce = Callable[[Tensor, Transport], Steps]
"""An all-reduce: `reduce(tensor, transport)` sums a one-dimensional tensor over all ranks in place."""


class Running:
    """A running algorithm.  The constructor runs the algorithm until the first message for which it must wait."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._next = next(steps, None)

    @property
    def done(self) -> bool:
        """Return whether the algorithm has finished."""
        return self._next is None

    def advance(self, deadline: float) -> None:
        """Wait for the current message, and then run the algorithm until it must wait again or has finished.

        The message must arrive before `deadline`, as measured by `time.monotonic`.
        """
        if self._next is not None:
            self._next.wait(max(0.0, deadline - time.monotonic()))
            self._next = next(self._steps, None)

    def finish(self, deadline: float) -> None:
        """Run the algorithm to completion; all messages must arrive before `deadline` (a `time.monotonic` time)."""
        while not self.done:
            self.advance(deadline)


def finish(steps: Steps, timeout_s: float) -> None:
    """Run an algorithm to completion; all its messages must arrive within `timeout_s` seconds."""
    Running(steps).finish(time.monotonic() + timeout_s)


def split(tensor: Tensor, parts: int) -> list[Tensor]:
    """Split a one-dimensional tensor into `parts` views whose lengths differ by at most one."""
    bounds = [tensor.numel() * part // parts for part in range(parts + 1)]
    return [tensor[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return one view that covers all of `parts`, which must be adjacent parts of a tensor."""
    count = sum(part.numel() for part in parts)
    # the view cannot start at an empty part, which may have any address
    start = next((part for part in parts if part.numel()), parts[0])
    return start.as_strided((count,), (1,))


def power_of_two(ranks: int) -> int:
    """Return `ranks`; raise ValueError unless it is a power of two."""
    if ranks & (ranks - 1):
        raise ValueError(f"expected a power of 2 as the number of ranks, got {ranks}; use the ring algorithm")
    return ranks


class PowerOfTwo:
    """A transport among the first 2^k ranks of `transport`, where k is as large as possible.

    Each remaining rank sends its values to a partner among the first 2^k ranks, and receives the results from this
    partner.
    """

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.size = 1 << (transport.size.bit_length() - 1)
        self.outside = self.rank >= self.size
        self.send, self.recv = transport.send, transport.recv
        self._partner = self.rank - self.size if self.outside else self.rank + self.size
        self._has_partner = self._partner < transport.size

    def delegate(self, tensor: Tensor, result: Tensor) -> Steps:
        """Send `tensor` to the partner, and receive `result` from the partner.

        Only ranks outside the first 2^k ranks call this method.
        """
        yield self.send(tensor, self._partner)
        yield self.recv(result, self._partner)

    def combine_outside(self, tensor: Tensor, combine: Combine) -> Steps:
        """If this rank has a partner outside the first 2^k ranks, combine the partner's values into `tensor`.

        The first 2^k ranks call this method before they exchange values.
        """
        if self._has_partner:
            spare = torch.empty_like(tensor)
            yield self.recv(spare, self._partner)
            combine(tensor, tensor, spare)

    def send_outside(self, result: Tensor) -> Steps:
        """If this rank has a partner outside the first 2^k ranks, send `result` to the partner.

        The first 2^k ranks call this method after they have exchanged values.
        """
        if self._has_partner:
            yield self.send(result, self._partner)


def in_order(combine: Combine, own: Tensor, other: Tensor, own_first: bool) -> None:
    """Combine the partner's values `other` into this rank's values `own`.

    Exactly one of the two partners must pass `own_first=True`.  Both partners then use the same operand order, and
    get bitwise equal results.
    """
    if own_first:
        combine(own, own, other)
    else:
        combine(own, other, own)
