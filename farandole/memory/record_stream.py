"""Records that pass through a few buffers: the next is read and the last one written while one is worked on."""

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
"""What is done with a record: its number, and its bytes (1-D, uint8)."""

_CPU = torch.device("cpu")


def host_records(record_bytes: Sequence[int], pinned: bool = False) -> RecordStream:
    """Return records in host memory, which are used where they are."""
    return RecordStream(HostStore("optimizer state", pinned), record_bytes)


def disk_records(
    folder: str | os.PathLike[str],
    record_bytes: Sequence[int],
    name: str = "optimizer state",
    buffers: int = 3,
) -> RecordStream:
    """Return records in a scratch file in `folder`.  Raise `OffloadError` if there is no space for them."""
    store = DiskStore(folder, name)
    try:
        return RecordStream(store, record_bytes, buffers)
    except BaseException:
        store.close()
        raise


@dataclass
class _Slot:
    """A buffer, and the record in it or on its way there."""

    buffer: Tensor
    record: int | None = None
    held: bool = False  # by the caller, until `write` or `release`
    blank: bool = False  # given to the caller without having been read
    prefetched: bool = False  # and not yet asked for
    used: int = 0  # when, on the stream's own clock
    # the last one: it began after those before it had ended
    moving: Transfer = field(default_factory=Transfer)


class RecordStream:
    """Records of `record_bytes` in `store`, through `buffers` buffers (at least 2; with 3, all of them move at any time).

    Records of a store in memory need no buffers: they are used where they are.

    `update` and `visit` go over many records.  For one at a time: `read` (or `blank`) gives the bytes of a record,
    until `write` or `release` takes them back; `prefetch` starts to read one that will be wanted.  Reading a record
    that is still being written waits for that; one that is still in a buffer is not read again.

    One thread at a time may use a stream.  A failure is raised as `OffloadError` by the call that waits for the
    record, and a failure to write also by every later call: the store no longer has the whole state.

    `waited_s` counts the seconds in which the caller waited for the disk.  The stream closes its store.
    """

    def __init__(self, store: OffloadStore, record_bytes: Sequence[int], buffers: int = 3) -> None:
        if buffers < 2:
            raise ValueError(
                f"buffers={buffers}: a stream needs 2 at least, to read one while another is used"
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
        """Where the records are and how they are accessed, for people."""
        return self.store.access

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buffers, or of the records if they are in memory."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    def prefetch(self, record: int) -> bool:
        """Start to read `record`; return False if all buffers are in use or prefetched already."""
        self._check(record)
        slot = self._holder(record) or self._free_slot(evict=False)
        if slot is None:
            return False
        if not slot.held:
            self._fetch(slot, record)
        return True

    def read(self, record: int) -> Tensor:
        """Return the bytes of `record`, for the caller alone until `write` or `release`."""
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
        """Return a buffer of undefined content, to make `record` again in."""
        self._check(record)
        slot = self._holder(record) or self._free_slot(evict=True)
        self._hand_out(slot, blank=True)
        slot.record = None  # until nothing moves the buffer
        try:
            self._settle_one(slot.moving)
        except BaseException:
            slot.held = False
            raise
        slot.record = record
        return slot.buffer[: self.record_bytes[record]]

    def write(self, record: int) -> None:
        """Take back the bytes of `record`, which the caller must not touch any more, and start to write them."""
        slot = self._held(record)
        slot.moving = self.store.write(self.records[record], slot.buffer, after=self._unwritten(record))
        self._writing[record] = slot.moving
        slot.held = False

    def release(self, record: int) -> None:
        """Take back the bytes of `record`, which the caller has not changed, or does not want to keep if blank."""
        slot = self._held(record)
        slot.held = False
        if slot.blank:
            slot.record = None

    def update(self, order: Iterable[int], work: Work) -> None:
        """Call `work(record, bytes)`, which may change the bytes, for each record in `order`, and write the bytes.

        If `work` raises, so does this, after all transfers have ended and all buffers are taken back.  On a disk the
        current record is as it was before, the ones before it as `work` left them.  The same holds for Ctrl-C.
        """
        self._pass(list(order), work, self.read)

    def fill(self, order: Iterable[int], work: Work) -> None:
        """The same with bytes of undefined content, to make the records in `order` again."""
        self._pass(list(order), work, self.blank)

    def visit(self, order: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield each record in `order` and its bytes, valid until the next one and not to be changed."""
        ahead = list(order)
        for position, record in enumerate(ahead):
            content = self.read(record)
            self._prefetch(ahead, position + 1)
            try:
                yield record, content
            finally:
                self.release(record)

    def flush(self) -> None:
        """Block until everything is written; raise what went wrong."""
        for transfer in self._writing.values():
            self._settle_one(transfer)
        self._raise_failed()

    def close(self) -> None:
        """Wait until nothing moves, and free buffers and store; may be called again."""
        self._settle()
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
            self._settle()
            raise

    def _prefetch(self, order: list[int], position: int) -> None:
        for record in order[position : position + len(self._slots) - 1]:
            if not self.prefetch(record):
                return

    def _check(self, record: int) -> None:
        if self._closed:
            raise OffloadError(f"record {record} of {self.store.name}: the stream has been closed")
        if not 0 <= record < len(self.record_bytes):
            raise IndexError(
                f"record {record} of {self.store.name}: there are {counted(len(self.record_bytes), 'record')}, "
                f"counted from 0"
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
        """The least recently used slot; a prefetched one only with `evict`."""
        free = [slot for slot in self._slots if not slot.held]
        idle = [slot for slot in free if not slot.prefetched]
        if evict and not free:
            raise OffloadError(
                f"all {len(self._slots)} buffers of {self.store.name} are in use (records "
                f"{sorted(slot.record for slot in self._slots if slot.record is not None)}): write or release "
                f"one, or make the stream with more"
            )
        return min(idle or (free if evict else []), key=lambda slot: slot.used, default=None)

    def _fetch(self, slot: _Slot, record: int) -> None:
        """Have `record` in `slot`, if it is not there."""
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
            raise OffloadError(
                f"record {record} of {self.store.name} has not been read: nothing to take back"
            )
        return slot

    def _unwritten(self, record: int) -> list[Transfer]:
        """What must end before `record` can be read or written again."""
        return [self._writing[record]] if record in self._writing else []

    def _wait(self, slot: _Slot) -> None:
        """Block until nothing moves in `slot`; raise what went wrong with it, or with anything written before."""
        self._settle_one(slot.moving)
        self._raise_failed()
        slot.moving.synchronize()

    def _settle_one(self, transfer: Transfer) -> None:
        if not transfer.done:
            started = time.perf_counter()
            transfer.settle()
            self.waited_s += time.perf_counter() - started

    def _raise_failed(self) -> None:
        self._writing = {r: t for r, t in self._writing.items() if not t.done or t.error is not None}
        for transfer in self._writing.values():
            if transfer.error is not None:
                raise transfer.error

    def _settle(self) -> None:
        """Take all buffers back, and return when nothing moves."""
        try:
            self.store.settle()
        finally:  # a second Ctrl-C ends the waiting; the next use of a slot waits for its last transfer
            for slot in self._slots:
                slot.record, slot.held, slot.prefetched = None, False, False
