"""Memory for whole gradients, of which only a few exist at a time.

Buckets of several parameters, which are filled little by little, take turns in two slots.  A bucket of a single parameter
*stands alone*: it is full as soon as there is anything in it, and has no slot, but the gradient that autograd has made, or a
buffer for as long as it needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.memory.purpose import taking

DEPTH = 2
"""One bucket is filled while the one before it is reduced; and so many that stand alone have memory at a time."""


def slot_lengths(lengths: Sequence[int]) -> list[int]:
    """How long the slots are in which buckets of these `lengths` take turns: each as its longest bucket."""
    return [max(lengths[turn::DEPTH]) for turn in range(min(DEPTH, len(lengths)))]


@dataclass(frozen=True)
class Loan:
    """What bucket `number` may borrow."""

    lender: Lender
    number: int

    def bring(self) -> None:
        """A bucket that stands alone brings memory of its own, until `give_back`."""
        self.lender.bring(self.number)

    def take(self) -> Tensor:
        """The buffer."""
        return self.lender.borrow(self.number)

    def give_back(self) -> None:
        """It is needed no more."""
        self.lender.give_back(self.number)


class Lender:
    """Lends buffers to buckets that are filled in order, those that stand `alone` and others.

    The others take turns in slots, the same on every rank: as slots are in memory that ranks share, nothing is copied for
    their reduction.  One that comes too early, while an unfinished one has its slot, gets ordinary memory.

    `settle(n)` is called when bucket n has a slot that another one wants, or is one too many of those that stand alone: it
    completes n's reduction if that was launched, and says whether it was.
    """

    def __init__(
        self,
        comm: Communicator,
        lengths: Sequence[int],
        alone: Sequence[bool],
        dtype: torch.dtype,
        device: torch.device,
        settle: Callable[[int], bool],
    ) -> None:
        self._lengths, self._dtype, self._device = list(lengths), dtype, device
        self._settle = settle
        others = [number for number, apart in enumerate(alone) if not apart]
        self._slot_of = {number: turn % DEPTH for turn, number in enumerate(others)}
        with taking("gradients"):
            self._slots = [
                comm.empty(length, dtype=dtype, device=device)
                for length in slot_lengths([lengths[number] for number in others])
            ]
        self._holders: list[int | None] = [None] * len(self._slots)
        self._alone: list[int] = []  # that have memory

    def loans(self) -> list[Loan]:
        """One for each bucket."""
        return [Loan(self, number) for number in range(len(self._lengths))]

    @property
    def nbytes(self) -> int:
        """What all slots take on this rank."""
        return sum(slot.nbytes for slot in self._slots)

    def bring(self, number: int) -> None:
        """Bucket `number` has memory of its own: no more than `DEPTH` have, where reductions can be completed."""
        for earlier in self._alone[: len(self._alone) + 1 - DEPTH]:
            self._settle(earlier)
        self._alone.append(number)

    def borrow(self, number: int) -> Tensor:
        """A buffer for bucket `number`, as long as that is."""
        slot = self._slot_of.get(number)
        if slot is None:
            self.bring(number)
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
            self._alone.remove(number)
        elif self._holders[slot] == number:
            self._holders[slot] = None

    def _ordinary(self, number: int) -> Tensor:
        with taking("gradients"):
            return torch.empty(self._lengths[number], dtype=self._dtype, device=self._device)
