"""Records of waiting ranks in the store of an MPI group, because MPI does not expose the calls of other ranks."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from farandole.native import Call

SLOW_S = 1.0
"""Seconds in a call or a message after which a rank records that it is waiting."""


class Waiting:
    """The calls in which ranks of one group have waited for at least `SLOW_S`.

    If the store has ended with the rank that hosts it, no records are available.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self.recorded = 0  # the number of the last collective that this rank has recorded

    def record(self, index: int) -> None:
        """Record that this rank is in collective number `index`."""
        self.recorded = index
        with contextlib.suppress(RuntimeError):  # torch's DistError
            self._store.set(f"in call/{self._rank}", str(index))

    def missing(self, index: int) -> list[int]:
        """Return the ranks that have not recorded collective number `index` or a later one."""
        missing = []
        for rank in range(self._size):
            key = f"in call/{rank}"
            with contextlib.suppress(RuntimeError):
                if rank != self._rank and not (
                    self._store.check([key]) and int(self._store.get(key)) >= index
                ):
                    missing.append(rank)
        return missing

    def record_message(self, call: Call | None) -> None:
        """Record the message for which this rank waits; None ends the wait."""
        fields = (call.operation, call.type, call.count, call.root, call.layout) if call else ()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"in message/{self._rank}", " ".join(map(str, fields)))

    def message(self, rank: int) -> Call | None:
        """Return the message for which a rank has recorded that it waits, or None."""
        key, fields = f"in message/{rank}", []
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                fields = [int(field) for field in self._store.get(key).split()]
        names = ("operation", "type", "count", "root", "layout")
        return Call(**dict(zip(names, fields, strict=True))) if fields else None
