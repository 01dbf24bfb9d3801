"""Building blocks for all algorithms: steps, tensor parts and element-wise reductions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from farandole.comm.transport import Pending, Transport

Steps = Iterator[Pending]
"""A running algorithm; yields each message that it waits for."""

Combine = Callable[[Tensor, Tensor, Tensor], object]
"""`combine(result, a, b)`: result = a op b, element by element; result may be a or b."""

Store = Callable[[Tensor, Tensor], object]
"""`store(result, total)`: convert a total to the type of `result`; may overwrite the total."""

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
"""An algorithm that sums a one-dimensional tensor over all ranks of a transport in place."""


class Running:
    """An algorithm that has been started and has posted its first messages."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._next = next(steps, None)

    @property
    def done(self) -> bool:
        """Whether the algorithm has finished."""
        return self._next is None

    def advance(self, deadline: float) -> None:
        """Wait for the current message, and run until the algorithm must wait again.

        `deadline` is a `time.monotonic` time.
        """
        if self._next is not None:
            self._next.wait(max(0.0, deadline - time.monotonic()))
            self._next = next(self._steps, None)

    def finish(self, deadline: float) -> None:
        """Run all remaining steps."""
        while not self.done:
            self.advance(deadline)


def finish(steps: Steps, timeout_s: float) -> None:
    """Run all steps of an algorithm."""
    Running(steps).finish(time.monotonic() + timeout_s)


def split(tensor: Tensor, parts: int) -> list[Tensor]:
    """Split a one-dimensional tensor into parts whose lengths differ by at most one."""
    bounds = [tensor.numel() * part // parts for part in range(parts + 1)]
    return [tensor[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return one view over adjacent parts of a tensor."""
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
    """A transport among the first 2^k ranks of another transport, for the largest possible k.

    Each remaining rank sends its values to a partner among the first 2^k ranks and receives the results from it.
    """

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.size = 1 << (transport.size.bit_length() - 1)
        self.outside = self.rank >= self.size
        self.send, self.recv = transport.send, transport.recv
        self._partner = self.rank - self.size if self.outside else self.rank + self.size
        self._has_partner = self._partner < transport.size

    def delegate(self, tensor: Tensor, result: Tensor) -> Steps:
        """Send the values to the partner and receive the result; called by the remaining ranks."""
        yield self.send(tensor, self._partner)
        yield self.recv(result, self._partner)

    def combine_outside(self, tensor: Tensor, combine: Combine) -> Steps:
        """Receive the partner's values and combine them with `tensor`; called before the exchange."""
        if self._has_partner:
            spare = torch.empty_like(tensor)
            yield self.recv(spare, self._partner)
            combine(tensor, tensor, spare)

    def send_outside(self, result: Tensor) -> Steps:
        """Send the result to the partner; called after the exchange."""
        if self._has_partner:
            yield self.send(result, self._partner)


def in_order(combine: Combine, own: Tensor, other: Tensor, own_first: bool) -> None:
    """Combine `other` into `own`, with the same operand order on both ranks, so that results are bitwise equal."""
    if own_first:
        combine(own, own, other)
    else:
        combine(own, other, own)
