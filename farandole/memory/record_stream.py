"""Stream records through a few buffers: one record is processed while the next is read and the previous is written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

import torch
from torch import Tensor

from farandole.data.wording import counted
from farandole.memory.disk import OffloadError
from farandole.memory.offload_store import DiskStore, HostStore, OffloadStore, Transfer

Work = Callable[[int, Tensor], None]
"""A function that processes a record, given its index and its bytes (1-D, uint8)."""

_CPU = torch.device("cpu")


def host_records(record_bytes: Sequence[int], pinned: bool = False) -> RecordStream:
    """Return a stream of records in host memory; records are processed without copies."""
    return RecordStream(HostStore("optimizer state", pinned), record_bytes)


def disk_records(
    folder: str | os.PathLike[str],
    record_bytes: Sequence[int],
    name: str = "optimizer state",
    buffers: int = 3,
) -> RecordStream:
    """Return a stream of records in a scratch file in `folder`.  Raise `OffloadError` if there is not enough space."""
    store = DiskStore(folder, name)
    try:
        return RecordStream(store, record_bytes, buffers)
    except BaseException:
        store.close()
        raise


@dataclass
class _Slot:
    """A buffer and the record that it contains or receives."""

    buffer: Tensor
    record: int | None = None
    held: bool = False  # the caller uses the buffer until `write` or `release`
    blank: bool = False  # returned to the caller without a read
    prefetched: bool = False  # read ahead and not yet requested
    used: int = 0  # the stream's use counter at the last use
    # the last transfer; earlier transfers have ended
    moving: Transfer = field(default_factory=Transfer)


class RecordStream:
    """Reads and writes the records of `store` through a pool of buffers.

    `update`, `fill` and `visit` process many records.  For a single record, `read` or `blank` returns a buffer,
    which the caller owns until it calls `write` or `release`.  A read waits for a write of the same record.  A
    record that is still in a buffer is not read again.

    Only one thread at a time may use a stream.  A failed read raises `OffloadError` in the call that waits for the
    record.  A failed write raises `OffloadError` in every later `read` and `flush`, because the store is
    incomplete.

    `waited_s` is the total time in seconds that the caller has waited for the disk.  `close` also closes the store.

    Args:
        record_bytes: the size of each record in bytes.
        buffers: the number of buffers.  With 3, one record can be read and another written while a third is processed.
            An in-memory store needs no buffers.

    Raises:
        ValueError: if `buffers` is less than 2.
    """

    def __init__(self, store: OffloadStore, record_bytes: Sequence[int], buffers: int = 3) -> None:
        if buffers < 2:
            raise ValueError(
                f"buffers={buffers}: expected at least 2, so that one record can be read while another is in use"
            )
        self.store = store
        self.record_bytes = tuple(record_bytes)
        self.waited_s = 0.0
        self.records = store.allocate(self.record_bytes)
        if store.in_memory:
            self._slots = [_Slot(one.memory, one.index) for one in self.records if one.memory is not None]
        else:
            largest = max(self.record_bytes, default=0)
            useful = min(buffers, max(2, len(self.records)))
            self._slots = [_Slot(store.empty(largest, _CPU)) for _ in range(useful)]
        self._writing: dict[int, Transfer] = {}
        self._clock = 0
        self._closed = False

    @property
    def access(self) -> str:
        """The store and its access mode, as text."""
        return self.store.access

    @property
    def memory_bytes(self) -> int:
        """The size of the buffers in bytes, or the size of the records if the store is in memory."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    def prefetch(self, record: int) -> bool:
        """Start reading `record`.  Return False if all buffers are in use or contain other prefetched records."""
        self._check(record)
        slot = self._holder(record) or self._free_slot(evict=False)
        if slot is None:
            return False
        if not slot.held:
            self._fetch(slot, record)
        return True

    def read(self, record: int) -> Tensor:
        """Return the bytes of `record`, which the caller owns until it calls `write` or `release`."""
        self._check(record)
        slot = self._holder(record) or self._free_slot(evict=True)
        self._fetch(slot, record)
        self._hand_out(slot, blank=False)
        try:
            self._wait(slot)
        except BaseException:
            slot.held, slot.record = False, None
            raise
        return slot.buffer[: self.record_bytes[record]]

    def blank(self, record: int) -> Tensor:
        """Return an uninitialized buffer for `record`.

        The caller fills the buffer and then calls `write(record)`.
        """
        self._check(record)
        slot = self._holder(record) or self._free_slot(evict=True)
        self._hand_out(slot, blank=True)
        slot.record = None  # until the buffer's transfers have ended
        try:
            self._wait_for(slot.moving)
        except BaseException:
            slot.held = False
            raise
        slot.record = record
        return slot.buffer[: self.record_bytes[record]]

    def write(self, record: int) -> None:
        """Start writing `record`; the caller must not use its bytes afterwards."""
        slot = self._held(record)
        slot.moving = self.store.write(self.records[record], slot.buffer, after=self._unwritten(record))
        self._writing[record] = slot.moving
        slot.held = False

    def release(self, record: int) -> None:
        """Release the buffer of `record` without writing it.

        The caller must not have changed bytes returned by `read`.
        """
        slot = self._held(record)
        slot.held = False
        if slot.blank:
            slot.record = None

    def update(self, order: Iterable[int], work: Work) -> None:
        """Read each record in `order`, call `work(record, bytes)`, and write the record.

        `work` may change the bytes.  If an exception is raised (including by Ctrl-C), all transfers end and all
        buffers are released before the exception propagates.  If the store is on a disk, the current record is
        then unchanged and the earlier records are updated.
        """
        self._pass(list(order), work, self.read)

    def fill(self, order: Iterable[int], work: Work) -> None:
        """For each record in `order`, call `work(record, bytes)` to fill an uninitialized buffer, and write the record."""
        self._pass(list(order), work, self.blank)

    def visit(self, order: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the bytes of each record in `order`.

        The bytes are read-only and valid until the next iteration.
        """
        ahead = list(order)
        for position, record in enumerate(ahead):
            content = self.read(record)
            self._prefetch(ahead, position + 1)
            try:
                yield record, content
            finally:
                self.release(record)

    def flush(self) -> None:
        """Wait until all records are written; raise the error of a failed write."""
        for transfer in self._writing.values():
            self._wait_for(transfer)
        self._raise_failed()

    def close(self) -> None:
        """Wait for all transfers, and free the buffers and the store.  Further calls have no effect."""
        self._wait_for_all()
        self._closed = True
        self._slots, self.records = [], []
        self.store.close()

    def _pass(self, order: list[int], work: Work, get: Callable[[int], Tensor]) -> None:
        for record in order:
            self._check(record)
        try:
            for position, record in enumerate(order):
                content = get(record)
                if get == self.read:
                    self._prefetch(order, position + 1)
                work(record, content)
                self.write(record)
        except BaseException:
            self._wait_for_all()
            raise

    def _prefetch(self, order: list[int], position: int) -> None:
        for record in order[position : position + len(self._slots) - 1]:
            if not self.prefetch(record):
                return

    def _check(self, record: int) -> None:
        if self._closed:
            raise OffloadError(
                f"cannot use record {record} of {self.store.name}: the stream is closed; create a new stream"
            )
        if not 0 <= record < len(self.record_bytes):
            raise IndexError(
                f"record {record} of {self.store.name} does not exist: there are "
                f"{counted(len(self.record_bytes), 'record')}, numbered from 0"
            )

    def _holder(self, record: int) -> _Slot | None:
        if self.store.in_memory:
            return self._slots[record]
        return next((slot for slot in self._slots if slot.record == record), None)

    @overload
    def _free_slot(self, evict: Literal[True]) -> _Slot: ...

    @overload
    def _free_slot(self, evict: Literal[False]) -> _Slot | None: ...

    def _free_slot(self, evict: bool) -> _Slot | None:
        """Return the least recently used free slot; with `evict`, discard a prefetched record if necessary."""
        free = [slot for slot in self._slots if not slot.held]
        idle = [slot for slot in free if not slot.prefetched]
        if evict and not free:
            raise OffloadError(
                f"all {len(self._slots)} buffers of {self.store.name} are in use (records "
                f"{sorted(slot.record for slot in self._slots if slot.record is not None)}): write or release "
                f"a record, or create the stream with more buffers"
            )
        return min(idle or (free if evict else []), key=lambda slot: slot.used, default=None)

    def _fetch(self, slot: _Slot, record: int) -> None:
        """Start reading `record` into `slot` unless the slot already contains it."""
        self._refuse_held(slot, record)
        if slot.record != record:
            before = [slot.moving, *self._unwritten(record)]
            slot.record = None
            slot.moving = self.store.read(self.records[record], slot.buffer, after=before)
            slot.record = record
        slot.prefetched = True
        self._touch(slot)

    def _hand_out(self, slot: _Slot, blank: bool) -> None:
        self._refuse_held(slot, slot.record)
        slot.held, slot.prefetched, slot.blank = True, False, blank
        self._touch(slot)

    def _refuse_held(self, slot: _Slot, record: int | None) -> None:
        if slot.held:
            raise OffloadError(f"record {record} of {self.store.name} is in use: write or release it first")

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.used = self._clock

    def _held(self, record: int) -> _Slot:
        slot = self._holder(record)
        if slot is None or not slot.held:
            raise OffloadError(f"record {record} of {self.store.name} is not in use: call read first")
        return slot

    def _unwritten(self, record: int) -> list[Transfer]:
        """Return the transfers that must end before `record` is read or written again."""
        return [self._writing[record]] if record in self._writing else []

    def _wait(self, slot: _Slot) -> None:
        """Wait for the transfer of `slot`; raise its error or the error of an earlier write."""
        self._wait_for(slot.moving)
        self._raise_failed()
        slot.moving.synchronize()

    def _wait_for(self, transfer: Transfer) -> None:
        if not transfer.done:
            started = time.perf_counter()
            transfer.wait_until_done()
            self.waited_s += time.perf_counter() - started

    def _raise_failed(self) -> None:
        self._writing = {r: t for r, t in self._writing.items() if not t.done or t.error is not None}
        for transfer in self._writing.values():
            if transfer.error is not None:
                raise transfer.error

    def _wait_for_all(self) -> None:
        """Release all buffers, and wait for all transfers."""
        try:
            self.store.wait_until_done()
        finally:  # after a second Ctrl-C, the next use of a slot waits for its last transfer
            for slot in self._slots:
                slot.record, slot.held, slot.prefetched = None, False, False
