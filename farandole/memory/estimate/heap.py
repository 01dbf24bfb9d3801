"""How much more than its tensors a process has, because of where the C library puts them.

glibc takes blocks of up to 32 MiB from one heap.  A block is put into the smallest gap that it fits into, else at the
heap's end, and the heap does not shrink in the midst.  So what a training takes and gives back in each step leaves gaps, more
so once the optimizer has put its states, which stay, among them.  Torch's blocks are aligned to 64 bytes, for which
glibc looks for a gap larger than the block: one of the same size that was freed alone does not do (`malloc.c`,
`_int_memalign`).  This is a model of that: best fit, neighbouring gaps merged; threads, and bins of small blocks, are left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MAPPED_FROM = 32 << 20
"""Bytes from which a block is mapped by itself and given back when it is freed (`mallopt(3)`, `M_MMAP_THRESHOLD`)."""

_HEADER, _ALIGNMENT, _LEAST = 16, 64, 32
_PAGE = 4096


class Heap:
    """A heap that blocks are taken from; `end` is how far it reaches, `peak` the most bytes of it and of mapped blocks."""

    def __init__(self) -> None:
        self.end = self.peak = self._mapped = 0
        self._gaps: list[tuple[int, int]] = []  # (size, start), smallest first
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

    def _keep(self, start: int, size: int) -> None:
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
