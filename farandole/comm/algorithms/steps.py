"""What all algorithms are made of: steps, parts of a tensor, and the sum of two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from farandole.comm.transport import Pending, Transport

Steps = Iterator[Pending]
"""An algorithm under way: it yields the messages that it waits for."""

Combine = Callable[[Tensor, Tensor, Tensor], object]
"""`combine(result, a, b)`: result = a op b, element by element; result may be a or b."""

Store = Callable[[Tensor, Tensor], object]
"""`store(result, total)`: put a total, which may be changed, into the result, which may be of another type."""

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
"""Sums a one-dimensional tensor over all ranks of a transport, in place."""


class Running:
    """Steps that have been begun: their first messages are on their way."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._next = next(steps, None)

    @property
    def done(self) -> bool:
        """Whether nothing is left."""
        return self._next is None

    def advance(self, deadline: float) -> None:
        """Wait for one message and go on to the next; `deadline` is on the clock of `time.monotonic`."""
        if self._next is not None:
            self._next.wait(max(0.0, deadline - time.monotonic()))
            self._next = next(self._steps, None)

    def finish(self, deadline: float) -> None:
        """Go through all that is left."""
        while not self.done:
            self.advance(deadline)


def finish(steps: Steps, timeout_s: float) -> None:
    """Go through all steps."""
    Running(steps).finish(time.monotonic() + timeout_s)


def split(tensor: Tensor, parts: int) -> list[Tensor]:
    """A one-dimensional tensor in parts that differ in length by one at most."""
    bounds = [tensor.numel() * part // parts for part in range(parts + 1)]
    return [tensor[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts of one tensor, in a row in its memory, as one tensor there."""
    count = sum(part.numel() for part in parts)
    # an empty part is no place to begin at: its memory may be anywhere
    start = next((part for part in parts if part.numel()), parts[0])
    return start.as_strided((count,), (1,))


def power_of_two(ranks: int) -> int:
    """The number itself; ValueError if it is no power of two."""
    if ranks & (ranks - 1):
        raise ValueError(f"expected a power of 2 as the number of ranks, got {ranks}; try ring")
    return ranks


class PowerOfTwo:
    """The first 2^k ranks of a transport, for the largest k: a transport among them.

    Each other rank sends its values to a partner of these ranks and receives the results from it.
    """

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.size = 1 << (transport.size.bit_length() - 1)
        self.outside = self.rank >= self.size
        self.send, self.recv = transport.send, transport.recv
        self._partner = self.rank - self.size if self.outside else self.rank + self.size
        self._has_partner = self._partner < transport.size

    def delegate(self, tensor: Tensor, result: Tensor) -> Steps:
        """Send the values to the partner and receive the result: all that a rank outside does."""
        yield self.send(tensor, self._partner)
        yield self.recv(result, self._partner)

    def combine_outside(self, tensor: Tensor, combine: Combine) -> Steps:
        """Before the exchange: combine with the values of the partner outside."""
        if self._has_partner:
            spare = torch.empty_like(tensor)
            yield self.recv(spare, self._partner)
            combine(tensor, tensor, spare)

    def send_outside(self, result: Tensor) -> Steps:
        """After the exchange: send the result to the partner outside."""
        if self._has_partner:
            yield self.send(result, self._partner)


def in_order(combine: Combine, own: Tensor, other: Tensor, own_first: bool) -> None:
    """own = own op other, with the operands in the same order on both ranks, so that both get the same bits."""
    if own_first:
        combine(own, own, other)
    else:
        combine(own, other, own)
