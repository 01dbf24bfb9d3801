"""Records in an MPI group's store which ranks are waiting, because MPI does not expose the calls of other ranks."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from farandole.native import Call

SLOW_S = 1.0
"""Seconds for which a rank waits in a collective or for a message before it records that it is waiting."""


class Waiting:
    """Records the calls in which ranks of one group have been waiting for at least `SLOW_S`.

    Records are unavailable if the rank that hosts the store has ended.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self.recorded = 0  # the number of the last collective recorded by this rank

    def record(self, index: int) -> None:
        """Record that this rank is waiting in collective number `index`."""
        self.recorded = index
        with contextlib.suppress(RuntimeError):  # torch's DistError
            self._store.set(f"in call/{self._rank}", str(index))

    def missing(self, index: int) -> list[int]:
        """Return the other ranks that have recorded neither collective number `index` nor a later collective."""
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
        """Record the message that this rank is waiting for; None clears the record."""
        fields = (call.operation, call.type, call.count, call.root, call.layout) if call else ()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"in message/{self._rank}", " ".join(map(str, fields)))

    def message(self, rank: int) -> Call | None:
        """Return the message that `rank` is waiting for, or None if `rank` has not recorded a message."""
        key, fields = f"in message/{rank}", []
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                fields = [int(field) for field in self._store.get(key).split()]
        names = ("operation", "type", "count", "root", "layout")
        return Call(**dict(zip(names, fields, strict=True))) if fields else None
