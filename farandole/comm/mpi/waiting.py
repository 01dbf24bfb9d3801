"""What the ranks of an MPI group wait in: MPI does not say, so a rank that waits for long records it in the group's store."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from farandole.native import Call

SLOW_S = 1.0
"""Seconds in a call or a message after which a rank records that it waits."""


class Waiting:
    """The calls in which the ranks of one group have waited for long.

    A store that is gone, with the rank that kept it, knows of no rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self.recorded = 0  # the number of the last collective that the store knows of

    def record(self, index: int) -> None:
        """This rank is in collective number `index`."""
        self.recorded = index
        with contextlib.suppress(RuntimeError):  # torch's DistError
            self._store.set(f"in call/{self._rank}", str(index))

    def missing(self, index: int) -> list[int]:
        """The ranks that have not recorded that they are in collective number `index` or in a later one."""
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
        """This rank waits for a message, or (None) does not any more."""
        fields = (call.operation, call.type, call.count, call.root, call.layout) if call else ()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"in message/{self._rank}", " ".join(map(str, fields)))

    def message(self, rank: int) -> Call | None:
        """The message for which a rank has recorded that it waits."""
        key, fields = f"in message/{rank}", []
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                fields = [int(field) for field in self._store.get(key).split()]
        names = ("operation", "type", "count", "root", "layout")
        return Call(**dict(zip(names, fields, strict=True))) if fields else None
