"""The response cache: requests that all ranks have agreed on before, each known by a small number, its slot.

In a training loop the same names come back with the same signatures in every step.  Once agreed on, a name is a
bit: what all ranks have set, all ranks may execute.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.horovod.engine.requests import Signature


@dataclass(frozen=True)
class Entry:
    """An agreement: the name, and what each rank of the process set asks for under it."""

    slot: int
    name: str
    signatures: tuple[Signature, ...]


class ResponseCache:
    """At most `capacity` agreements.  When it is full the one that was least recently executed makes room.

    It is the same on all ranks as long as they call `add`, `use` and `remove` in the same order, because every
    decision in here depends on these calls alone.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._by_name: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self._by_slot: dict[int, Entry] = {}
        self._free = list(range(capacity))

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> Entry | None:
        """The agreement on a name."""
        return self._by_name.get(name)

    def at(self, slot: int) -> Entry:
        """The agreement in a slot."""
        return self._by_slot[slot]

    def use(self, entry: Entry) -> None:
        """Note that it is executed now."""
        self._by_name.move_to_end(entry.name)

    def add(self, name: str, signatures: Sequence[Signature]) -> int | None:
        """Remember an agreement; returns the slot of the one that had to go, if any."""
        if not self.capacity:
            return None
        gone = None
        if name in self._by_name:
            gone = self._by_name[name].slot
        elif not self._free:
            gone = next(iter(self._by_name.values())).slot
        if gone is not None:
            self.remove(gone)
        entry = Entry(heapq.heappop(self._free), name, tuple(signatures))
        self._by_name[name] = entry
        self._by_slot[entry.slot] = entry
        return gone

    def remove(self, slot: int) -> None:
        """Forget an agreement; without effect if it is gone already."""
        entry = self._by_slot.pop(slot, None)
        if entry is not None:
            del self._by_name[entry.name]
            heapq.heappush(self._free, slot)

    def all_bits(self) -> int:
        """A number in which the bits of all slots in use are set."""
        return sum(1 << slot for slot in self._by_slot)
