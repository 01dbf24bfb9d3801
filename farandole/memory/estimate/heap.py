"""How much more than its tensors a process has, because of where the C library puts them.

glibc takes blocks of up to 32 MiB from one heap.  A block is put into the smallest gap that it fits into, else at the
heap's end, and the heap does not shrink in the midst.  So what a training takes and gives back in each step leaves gaps, more
so once the optimizer has put its states, which stay, among them.  Torch's blocks are aligned to 64 bytes, for which
glibc looks for a gap larger than the block: one of the same size that was freed alone does not do (`malloc.c`,
`_int_memalign`).  The slivers beside an aligned block are kept for small objects (`tcache`, 7 of each size) and hold
gaps apart.  This is a model of that, best fit with neighbouring gaps merged.  What it leaves out is measured: `KERNELS`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import cache

MAPPED_FROM = 32 << 20
"""Bytes from which a block is mapped by itself and given back when it is freed (`mallopt(3)`, `M_MMAP_THRESHOLD`)."""

KERNELS = 32 << 20
"""Bytes beyond the model, at most: what kernels take while they run, and small objects between blocks.  Of 17 trainings
of 3 to 27 M parameters on 2 ranks (torch 2.13, glibc 2.36) the model left out 9 to 63 MB, in the mean this."""

_PASSES = 8
"""After so many forward and backward passes a heap hardly grows any more."""

_SETTLING = 3
"""In so many of them small objects that stay are made, and take slivers for good."""

_AT_MOST = 1.5
"""Gaps beside what comes and goes: more was not seen, and blocks all alike would have the model tell of more."""

_SMALL, _KEPT = 1040, 7
_HEADER, _ALIGNMENT, _LEAST = 16, 64, 32
_PAGE = 4096


class Heap:
    """A heap that blocks are taken from; `end` is how far it reaches, `peak` the most bytes of it and of mapped blocks."""

    def __init__(self) -> None:
        self.end = self.peak = self._mapped = 0
        self._gaps: list[tuple[int, int]] = []  # (size, start), smallest first
        self._small: dict[int, int] = {}  # slivers that are kept for small objects, by size
        self._starting: dict[int, int] = {}  # sizes of gaps by where they start, and by where they end
        self._ending: dict[int, int] = {}

    def take(self, nbytes: int) -> tuple[int, int]:
        """A block for `nbytes` bytes, to be given back as it is."""
        if nbytes >= MAPPED_FROM:
            block = (-1, -(-nbytes // _PAGE) * _PAGE)
            self._mapped += block[1]
        else:
            block = self._from_heap(-(-(nbytes + _HEADER) // _HEADER) * _HEADER)
        self.peak = max(self.peak, self.end + self._mapped)
        return block

    def give_back(self, block: tuple[int, int]) -> None:
        """The block is free."""
        start, size = block
        if start < 0:
            self._mapped -= size
            return
        before = self._ending.get(start)
        if before is not None:
            self._drop(start - before, before)
            start, size = start - before, size + before
        after = self._starting.get(start + size)
        if after is not None:
            self._drop(start + size, after)
            size += after
        self._keep(start, size)

    def _from_heap(self, size: int) -> tuple[int, int]:
        wanted = size + _ALIGNMENT + _LEAST
        found = bisect_left(self._gaps, (wanted, 0))
        if found < len(self._gaps):
            room, start = self._gaps[found]
            self._drop(start, room)
        else:  # the end of the heap, with the gap before it
            room = self._ending.get(self.end, 0)
            start = self.end - room
            if room:
                self._drop(start, room)
            self.end = start + max(room, wanted)
            room = self.end - start
        aligned = -(-(start + _HEADER) // _ALIGNMENT) * _ALIGNMENT - _HEADER
        if aligned > start:
            self._keep(start, aligned - start)
        if start + room > aligned + size:
            self._keep(aligned + size, start + room - aligned - size)
        return aligned, size

    def use_small(self) -> None:
        """Small objects have taken what was kept for them."""
        self._small.clear()

    def _keep(self, start: int, size: int) -> None:
        if size <= _SMALL and self._small.get(size, 0) < _KEPT:
            self._small[size] = self._small.get(size, 0) + 1
            return
        insort(self._gaps, (size, start))
        self._starting[start] = self._ending[start + size] = size

    def _drop(self, start: int, size: int) -> None:
        del self._gaps[bisect_left(self._gaps, (size, start))]
        del self._starting[start], self._ending[start + size]


Events = tuple[tuple[int, int], ...]
"""What is taken and given back, in order: (number, bytes), and (number, 0) when that number is given back."""


def replay(heap: Heap, events: Events) -> None:
    """Do what was done; what is not given back stays."""
    blocks: dict[int, tuple[int, int]] = {}
    for number, nbytes in events:
        if nbytes:
            blocks[number] = heap.take(nbytes)
        else:
            heap.give_back(blocks.pop(number))


@cache
def excess(
    before: tuple[int, ...], events: Events, states: tuple[int, ...], kept: tuple[int, ...], passes: int
) -> int:
    """How many bytes more than its tensors a training has from the C library at its peak.

    before: sizes of the parameters that are made, and given back when the model has been divided; kept: what stays.
    events: those of a forward and backward pass, of which a step has `passes`.  states: what the optimizer makes in its
    first step, to stay.
    """
    heap = Heap()
    first = [heap.take(nbytes) for nbytes in before]
    for nbytes in kept:
        heap.take(nbytes)
    for block in first:
        heap.give_back(block)
    heap.peak = 0  # what comes is more, or else the start counts
    for number in range(_PASSES):
        replay(heap, events)
        if number < _SETTLING:
            heap.use_small()
        if number == min(passes, _PASSES - 1) - 1:
            for nbytes in states:
                heap.take(nbytes)
    most = _most(events)
    gaps = heap.peak - sum(kept) - sum(states) - most
    return min(gaps, int(_AT_MOST * most)) + min(KERNELS, most // 4)


def _most(events: Events) -> int:
    """The most bytes alive at once."""
    alive: dict[int, int] = {}
    now = most = 0
    for number, nbytes in events:
        now += nbytes if nbytes else -alive.pop(number)
        if nbytes:
            alive[number] = nbytes
        most = max(most, now)
    return most
