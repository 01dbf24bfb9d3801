"""Memory for whole gradients, of which only a few exist at a time.

A bucket of several parameters gets a slot, which its gradients are copied into.  One of a single parameter needs none: it
*adopts* the gradient that autograd has made, which is reduced from where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.memory.purpose import taking

DEPTH = 2
"""One bucket is filled while the one before it is reduced; of those that adopt, so many have a gradient at a time."""

_WORTH_IT = 0.9
"""A bucket waits for the one before it where that leaves at most this part of the memory."""


def slots_for(lengths: Sequence[int]) -> list[int]:
    """The number of the slot that each bucket gets; a slot is as long as the longest bucket that gets it.

    Buckets take turns, so that neighbours have different slots.  Where the two longest ones, such as those of an embedding and
    of an output layer, would each make a slot long, two neighbours have the same, and the turns change after them.
    """
    plain = [number % DEPTH for number in range(len(lengths))]
    if len(lengths) < 2:
        return plain
    by_turn = [
        [length * (slot == turn) for length, slot in zip(lengths, plain, strict=True)]
        for turn in range(DEPTH)
    ]
    until = [list(accumulate(turn, max)) for turn in by_turn]
    since = [list(accumulate(reversed(turn), max))[::-1] for turn in by_turn]

    def total(last: int) -> int:
        """Of the slots, where the turns change after bucket `last`."""
        return max(until[0][last], since[1][last + 1]) + max(until[1][last], since[0][last + 1])

    change = min(range(len(lengths) - 1), key=lambda number: (total(number), lengths[number]))
    if total(change) > _WORTH_IT * sum(slot_lengths(lengths, plain)):
        return plain
    return [(number + (number > change)) % DEPTH for number in range(len(lengths))]


def slot_lengths(lengths: Sequence[int], slots: Sequence[int]) -> list[int]:
    """How long each slot has to be."""
    longest = [0] * (max(slots, default=-1) + 1)
    for length, slot in zip(lengths, slots, strict=True):
        longest[slot] = max(longest[slot], length)
    return longest


@dataclass(frozen=True)
class Loan:
    """What bucket `number` may borrow."""

    lender: Lender
    number: int

    @property
    def adopts(self) -> bool:
        """Whether there is no slot, since the bucket is the gradient of one parameter."""
        return self.lender.adopts[self.number]

    def adopt(self) -> None:
        """A gradient of autograd's is to serve instead, until it is given back."""
        self.lender.adopt(self.number)

    def take(self) -> Tensor:
        """The buffer."""
        return self.lender.borrow(self.number)

    def give_back(self) -> None:
        """It is needed no more."""
        self.lender.give_back(self.number)


class Lender:
    """Lends buffers to buckets that are filled in order, the same slot to a bucket on every rank (`slots_for`).

    As all ranks take the same slot for a bucket, and slots are in memory that ranks share, nothing is copied for
    its reduction.  A bucket that comes too early, while an unfinished one has its slot, gets ordinary memory; so does one
    that `adopts`, if it wants a buffer all the same.

    `settle(n)` is called when what bucket n has is wanted by another one, or is one too many: it completes n's reduction
    if that was launched, and says whether it was.
    """

    def __init__(
        self,
        comm: Communicator,
        lengths: Sequence[int],
        adopts: Sequence[bool],
        dtype: torch.dtype,
        device: torch.device,
        settle: Callable[[int], bool],
    ) -> None:
        self.adopts = list(adopts)
        self._lengths, self._dtype, self._device = list(lengths), dtype, device
        self._settle = settle
        lent = [number for number, adopted in enumerate(adopts) if not adopted]
        slots = slots_for([lengths[number] for number in lent])
        self._slot_of = dict(zip(lent, slots, strict=True))
        with taking("gradients"):
            self._slots = [
                comm.empty(length, dtype=dtype, device=device)
                for length in slot_lengths([lengths[number] for number in lent], slots)
            ]
        self._holders: list[int | None] = [None] * len(self._slots)
        self._adopters: list[int] = []

    def loans(self) -> list[Loan]:
        """One for each bucket."""
        return [Loan(self, number) for number in range(len(self._lengths))]

    @property
    def nbytes(self) -> int:
        """What all slots take on this rank."""
        return sum(slot.nbytes for slot in self._slots)

    def adopt(self, number: int) -> None:
        """Bucket `number` has a gradient in memory of its own; there are `DEPTH` such where reductions can be ended."""
        for holder in self._adopters[: len(self._adopters) + 1 - DEPTH]:
            self._settle(holder)
        self._adopters.append(number)

    def borrow(self, number: int) -> Tensor:
        """A buffer for bucket `number`, as long as that is."""
        slot = self._slot_of.get(number)
        if slot is None:
            self.adopt(number)
            return self._ordinary(number)
        holder = self._holders[slot]
        if holder is not None and not self._settle(holder):
            return self._ordinary(number)
        self._holders[slot] = number
        return self._slots[slot][: self._lengths[number]]

    def give_back(self, number: int) -> None:
        """Bucket `number` needs its buffer no more."""
        slot = self._slot_of.get(number)
        if slot is None:
            self._adopters.remove(number)
        elif self._holders[slot] == number:
            self._holders[slot] = None

    def _ordinary(self, number: int) -> Tensor:
        with taking("gradients"):
            return torch.empty(self._lengths[number], dtype=self._dtype, device=self._device)
