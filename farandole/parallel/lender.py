"""Memory for whole gradients, of which only a few exist at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.memory.purpose import taking

DEPTH = 2
"""One bucket is filled while the one before it is reduced."""


@dataclass(frozen=True)
class Loan:
    """What bucket `number` may borrow."""

    lender: Lender
    number: int

    def take(self) -> Tensor:
        """The buffer."""
        return self.lender.borrow(self.number)

    def give_back(self) -> None:
        """It is needed no more."""
        self.lender.give_back(self.number)


class Lender:
    """Lends buffers to buckets that are filled in order: bucket n gets slot n modulo `DEPTH` on every rank.

    As all ranks take the same slot for a bucket, and slots are in memory that ranks share, nothing is copied for
    its reduction.  A bucket that comes too early, while an unfinished one has its slot, gets ordinary memory.

    `settle(n)` is called when bucket n has a slot that another one wants: it completes n's reduction if that
    was launched, and says whether it was.
    """

    def __init__(
        self,
        comm: Communicator,
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        settle: Callable[[int], bool],
    ) -> None:
        self._lengths = list(lengths)
        self._settle = settle
        with taking("gradients"):
            self._slots = [
                comm.empty(max(lengths[slot::DEPTH]), dtype=dtype, device=device)
                for slot in range(min(DEPTH, len(lengths)))
            ]
        self._holders: list[int | None] = [None] * len(self._slots)

    def loans(self) -> list[Loan]:
        """One for each bucket."""
        return [Loan(self, number) for number in range(len(self._lengths))]

    @property
    def nbytes(self) -> int:
        """What all slots take on this rank."""
        return sum(slot.nbytes for slot in self._slots)

    def borrow(self, number: int) -> Tensor:
        """A buffer for bucket `number`, as long as that is."""
        slot, length = number % len(self._slots), self._lengths[number]
        holder = self._holders[slot]
        if holder is not None and not self._settle(holder):
            with taking("gradients"):
                return torch.empty(length, dtype=self._slots[slot].dtype, device=self._slots[slot].device)
        self._holders[slot] = number
        return self._slots[slot][:length]

    def give_back(self, number: int) -> None:
        """Bucket `number` needs its buffer no more."""
        slot = number % len(self._slots)
        if self._holders[slot] == number:
            self._holders[slot] = None
