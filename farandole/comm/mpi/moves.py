"""Collectives that only move data, and the barrier."""

from __future__ import annotations

from typing import Any

from farandole.comm.mpi.calls import Calls
from farandole.native import Operation


class Moves(Calls):
    """Barrier, broadcast, all-gather, gather, scatter and all-to-all."""

    def frd_barrier(self, handle: Any, flags: int) -> int:
        """Wait until every rank is here."""
        self.begin(flags, Operation.BARRIER)
        self.collective(flags, "Barrier", 0)
        return 0

    def frd_broadcast(self, handle: Any, address: int, count: int, kind: int, root: int, flags: int) -> int:
        """Copy the elements of rank `root` to all ranks."""
        self.begin(flags, Operation.BROADCAST, kind, 0, count, root)
        for at, length in self.pieces(address, count, kind):
            self.collective(flags, "Bcast", length * (kind >> 8), self.buffer(at, length, kind), root)
        return 0

    def frd_all_gather_even(
        self, handle: Any, source: int, target: int, count: int, kind: int, flags: int
    ) -> int:
        """Concatenate every rank's `count` elements; the source may be its own place in the target."""
        self.begin(flags, Operation.ALL_GATHER, kind, 0, count)
        self._all_gather(flags, source, target, [count] * self.size, kind)
        return 0

    def frd_all_gather(
        self, handle: Any, source: int, targets: Any, counts: Any, kind: int, flags: int
    ) -> int:
        """Collect every rank's elements, `counts[r]` of rank r, each at its own address."""
        self.begin(flags, Operation.ALL_GATHER, kind, 0, sum(counts))
        with self.one_after_another(targets, counts, kind, written=True) as target:
            self._all_gather(flags, source, target, list(counts), kind)
        return 0

    def _all_gather(self, flags: int, source: int, target: int, counts: list[int], kind: int) -> None:
        widths = [count * (kind >> 8) for count in counts]
        own, transfer = widths[self.rank], sum(widths)
        in_place = source == target + sum(widths[: self.rank])
        copy = None if in_place else self.apart(source, own, target, transfer)
        source = source if copy is None else copy.data_ptr()
        if self.uncountable(counts):
            others = [rank for rank in range(self.size) if rank != self.rank or not in_place]
            spans = self.spans(target, counts, kind)
            self.exchange(flags, [(peer, source, own) for peer in others], [spans[peer] for peer in others])
            return
        sends = self.mpi.IN_PLACE if in_place else self.buffer(source, counts[self.rank], kind)
        if len(set(counts)) == 1:
            receives = self.blocks(target, counts[0], kind)
            self.collective(flags, "Allgather", transfer, sends, receives)
        else:
            self.collective(flags, "Allgatherv", transfer, sends, self.parts(target, counts, kind))

    def frd_gather(
        self, handle: Any, source: int, targets: Any, count: int, kind: int, root: int, flags: int
    ) -> int:
        """Collect every rank's `count` elements at the addresses that rank `root` gives."""
        self.begin(flags, Operation.GATHER, kind, 0, count, root)
        counts, width = [count] * len(targets), count * (kind >> 8)
        with self.one_after_another(targets, counts, kind, written=True) as target:
            copy = self.apart(source, width, target, width * len(targets))
            source = source if copy is None else copy.data_ptr()
            if count * self.size > self.engine.largest_count:
                receives = self.spans(target, counts, kind) if self.rank == root else []
                self.exchange(flags, [(root, source, width)], receives)
                return 0
            into = self.blocks(target, count, kind) if self.rank == root else None
            self.collective(flags, "Gather", width, self.buffer(source, count, kind), into, root)
        return 0

    def frd_scatter(
        self, handle: Any, sources: Any, target: int, count: int, kind: int, root: int, flags: int
    ) -> int:
        """Give rank i the `count` elements at the i-th address of rank `root`."""
        self.begin(flags, Operation.SCATTER, kind, 0, count, root)
        counts, width = [count] * len(sources), count * (kind >> 8)
        with self.one_after_another(sources, counts, kind, written=False) as source:
            copy = self.apart(source, width * len(sources), target, width)
            source = source if copy is None else copy.data_ptr()
            if count * self.size > self.engine.largest_count:
                sends = self.spans(source, counts, kind) if self.rank == root else []
                self.exchange(flags, sends, [(root, target, width)])
                return 0
            out = self.blocks(source, count, kind) if self.rank == root else None
            self.collective(flags, "Scatter", width, out, self.buffer(target, count, kind), root)
        return 0

    def frd_all_to_all(
        self,
        handle: Any,
        sources: Any,
        source_counts: Any,
        targets: Any,
        target_counts: Any,
        kind: int,
        flags: int,
    ) -> int:
        """Send the elements at the i-th address to rank i, and receive rank i's at the i-th other address."""
        sent, received, itemsize = list(source_counts), list(target_counts), kind >> 8
        self.begin(flags, Operation.ALL_TO_ALL, kind)
        with (
            self.one_after_another(targets, received, kind, written=True) as target,
            self.one_after_another(sources, sent, kind, written=False) as source,
        ):
            copy = self.apart(source, sum(sent) * itemsize, target, sum(received) * itemsize)
            source = source if copy is None else copy.data_ptr()
            # each rank knows its own counts only, so nobody may choose by them: 0 bytes, as far as all know
            self.collective(
                flags, "Alltoallv", 0, self.parts(source, sent, kind), self.parts(target, received, kind)
            )
        return 0
