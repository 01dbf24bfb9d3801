"""Memory for whole gradients, of which only a few exist at a time.

Buckets take turns in two slots: those of several parameters, which are filled little by little, in two of theirs, and those of
a single one, which are full as soon as there is anything in them, in two others.  A bucket that *adopts* has none: what
is reduced is the gradient that autograd has made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.memory.tracker import memory_tag

DEPTH = 2
"""One bucket is filled while the one before it is reduced; and so many that adopt have a gradient at a time."""


def slot_lengths(lengths: Sequence[int]) -> list[int]:
    """How long the slots are in which buckets of these `lengths` take turns: each as its longest bucket."""
    return [max(lengths[turn::DEPTH]) for turn in range(min(DEPTH, len(lengths)))]


@dataclass(frozen=True)
class Loan:
    """What bucket `number` may borrow."""

    lender: Lender
    number: int

    @property
    def adopts(self) -> bool:
        """Whether there is no slot, as a gradient of autograd's is to be reduced."""
        return self.lender.adopts

    def adopt(self) -> None:
        """A gradient of autograd's serves as buffer, until `give_back`."""
        self.lender.adopt(self.number)

    def take(self) -> Tensor:
        """The buffer."""
        return self.lender.borrow(self.number)

    def give_back(self) -> None:
        """It is needed no more."""
        self.lender.give_back(self.number)


class Lender:
    """Lends buffers to buckets that are filled in order, or counts what they have if they adopt.

    Slots are taken in turn, the same on every rank: as they are in memory that ranks share, nothing is copied for a
    reduction.  A bucket that comes too early, while an unfinished one has its slot, gets ordinary memory; so does one that
    adopts and finds nothing to.

    `settle(n)` is called when bucket n has a slot that another one wants, or is one too many of those that adopted: it
    completes n's reduction if that was launched, and says whether it was.
    """

    def __init__(
        self,
        comm: Communicator,
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        settle: Callable[[int], bool],
        *,
        adopts: bool = False,
    ) -> None:
        self.adopts = adopts
        self._lengths, self._dtype, self._device = list(lengths), dtype, device
        self._settle = settle
        with memory_tag("gradients"):
            self._slots = [
                comm.empty(length, dtype=dtype, device=device)
                for length in slot_lengths([] if adopts else lengths)
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
        """Bucket `number` has memory of its own: no more than `DEPTH` have, where reductions can be completed."""
        for earlier in self._adopters[: len(self._adopters) + 1 - DEPTH]:
            self._settle(earlier)
        self._adopters.append(number)

    def borrow(self, number: int) -> Tensor:
        """A buffer for bucket `number`, as long as that is."""
        if self.adopts:
            self.adopt(number)
            return self._ordinary(number)
        slot = number % DEPTH
        holder = self._holders[slot]
        if holder is not None and not self._settle(holder):
            return self._ordinary(number)
        self._holders[slot] = number
        return self._slots[slot][: self._lengths[number]]

    def give_back(self, number: int) -> None:
        """Bucket `number` needs its buffer no more."""
        if self.adopts:
            self._adopters.remove(number)
        elif self._holders[number % DEPTH] == number:
            self._holders[number % DEPTH] = None

    def _ordinary(self, number: int) -> Tensor:
        with memory_tag("gradients"):
            return torch.empty(self._lengths[number], dtype=self._dtype, device=self._device)
