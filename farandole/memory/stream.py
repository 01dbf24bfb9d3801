"""Records that pass through a few buffers: the next is read and the last one written while one is worked on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, overload

from torch import Tensor

from farandole.data.wording import counted
from farandole.memory.disk_file import RecordFile
from farandole.memory.errors import OffloadError
from farandole.memory.transfer import Transfer

Work = Callable[[int, Tensor], None]
"""What is done with a record: its number, and its bytes (1-D, uint8)."""


@dataclass
class _Slot:
    """A buffer, and the record in it or on its way there."""

    buffer: Tensor
    record: int | None = None
    held: bool = False  # by the caller, until `write` or `release`
    blank: bool = False  # given out without having been read
    awaited: bool = False  # read ahead, for someone who has not come yet
    used: int = 0  # when, on the stream's own clock
    moving: Transfer | None = None  # the last one: it began after those before it had ended


class Stream:
    """The records of `file` through `buffers` buffers (at least 2; with 3, all of them move at any time).

    `update` and `visit` go over many records.  For one at a time: `read` (or `blank`) gives the bytes of a record,
    until `write` or `release` takes them back; `prefetch` starts to read one that will be wanted.  Reading a record
    that is still being written waits for that; one that is still in a buffer is not read again.

    One thread at a time may use a stream.  A failure is raised as `OffloadError` by the call that waits for the
    record, and a failure to write also by every later call: what is on the disk is no longer the whole state.

    `waited_s` counts the seconds in which the caller waited for the disk.
    """

    def __init__(self, file: RecordFile, buffers: int = 3) -> None:
        if buffers < 2:
            raise ValueError(
                f"buffers={buffers}: a stream needs 2 at least, to read one while another is used"
            )
        self.file = file
        self.record_bytes = file.record_bytes
        self.waited_s = 0.0
        useful = min(buffers, max(2, len(file.record_bytes)))
        self._slots = [_Slot(file.buffer()) for _ in range(useful)]
        self._writing: dict[int, Transfer] = {}
        self._clock = 0
        self._closed = False

    @property
    def memory_bytes(self) -> int:
        """What the buffers take."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    def prefetch(self, record: int) -> bool:
        """Start to read `record`; false if all buffers are in use or read ahead already."""
        self._check(record)
        slot = self._holder(record) or self._free_slot(evict=False)
        if slot is None:
            return False
        if not slot.held:
            self._fetch(slot, record)
        return True

    def read(self, record: int) -> Tensor:
        """The bytes of `record`, for the caller alone until `write` or `release`."""
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
        """A buffer to make `record` anew in; what it holds is not defined."""
        self._check(record)
        slot = self._holder(record) or self._free_slot(evict=True)
        self._hand_out(slot, blank=True)
        slot.record = None  # until the buffer is at rest
        try:
            if slot.moving is not None:
                self._settle_one(slot.moving)
        except BaseException:
            slot.held = False
            raise
        slot.record = record
        return slot.buffer[: self.record_bytes[record]]

    def write(self, record: int) -> None:
        """Take back the bytes of `record`, which the caller must not touch any more, and start to write them."""
        slot = self._given(record)
        slot.moving = self.file.write(record, slot.buffer, after=self._unwritten(record))
        self._writing[record] = slot.moving
        slot.held = False

    def release(self, record: int) -> None:
        """Take back the bytes of `record`, which the caller has not changed, or does not want to keep if blank."""
        slot = self._given(record)
        slot.held = False
        if slot.blank:
            slot.record = None

    def update(self, order: Iterable[int], work: Work) -> None:
        """Call `work(record, bytes)` for each record in `order`, and write what it makes of the bytes.

        If it raises, so does this, after everything has come to rest and all buffers are taken back: the record in
        hand is on the disk as it was before, the ones before it as `work` left them.  The same holds for Ctrl-C.
        """
        self._pass(list(order), work, self.write, self.read)

    def fill(self, order: Iterable[int], work: Work) -> None:
        """The same with buffers of undefined content, to make the records in `order` anew."""
        self._pass(list(order), work, self.write, self.blank)

    def visit(self, order: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Each record in `order` and its bytes, which are valid until the next and must not be changed."""
        ahead = list(order)
        for position, record in enumerate(ahead):
            content = self.read(record)
            self._prefetch(ahead, position + 1)
            try:
                yield record, content
            finally:
                self.release(record)

    def flush(self) -> None:
        """Return when everything that was written is with the disk."""
        started = time.perf_counter()
        Transfer.settle(self._writing.values())
        self.waited_s += time.perf_counter() - started
        self._raise_failed()

    def close(self) -> None:
        """Wait until nothing moves, and let go of the buffers; may be called again.  The file stays open."""
        self._settle()
        self._closed = True
        self._slots = []

    def _pass(
        self, order: list[int], work: Work, put: Callable[[int], None], get: Callable[[int], Tensor]
    ) -> None:
        for record in order:
            self._check(record)
        try:
            for position, record in enumerate(order):
                content = get(record)
                if get == self.read:
                    self._prefetch(order, position + 1)
                work(record, content)
                put(record)
        except BaseException:
            self._settle()
            raise

    def _prefetch(self, order: list[int], position: int) -> None:
        for record in order[position : position + len(self._slots) - 1]:
            if not self.prefetch(record):
                return

    def _check(self, record: int) -> None:
        if self._closed:
            raise OffloadError(f"record {record} of {self.file.name}: the stream has been closed")
        if not 0 <= record < len(self.record_bytes):
            raise IndexError(
                f"record {record} of {self.file.name}: there are {counted(len(self.record_bytes), 'record')}, "
                f"counted from 0"
            )

    def _holder(self, record: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.record == record), None)

    @overload
    def _free_slot(self, evict: Literal[True]) -> _Slot: ...

    @overload
    def _free_slot(self, evict: Literal[False]) -> _Slot | None: ...

    def _free_slot(self, evict: bool) -> _Slot | None:
        """The slot not used for the longest time; one that was read ahead only with `evict`."""
        free = [slot for slot in self._slots if not slot.held]
        idle = [slot for slot in free if not slot.awaited]
        if evict and not free:
            raise OffloadError(
                f"all {len(self._slots)} buffers of {self.file.name} are in use (records "
                f"{sorted(slot.record for slot in self._slots if slot.record is not None)}): write or release "
                f"one, or make the stream with more"
            )
        return min(idle or (free if evict else []), key=lambda slot: slot.used, default=None)

    def _fetch(self, slot: _Slot, record: int) -> None:
        """Have `record` in `slot`, if it is not there."""
        if slot.held:
            raise OffloadError(f"record {record} of {self.file.name} is in use: write or release it first")
        if slot.record != record:
            before = [*([] if slot.moving is None else [slot.moving]), *self._unwritten(record)]
            slot.record = None
            slot.moving = self.file.read(record, slot.buffer, after=before)
            slot.record = record
        slot.awaited = True
        self._clock += 1
        slot.used = self._clock

    def _hand_out(self, slot: _Slot, blank: bool) -> None:
        if slot.held:
            raise OffloadError(
                f"record {slot.record} of {self.file.name} is in use: write or release it first"
            )
        slot.held, slot.awaited, slot.blank = True, False, blank
        self._clock += 1
        slot.used = self._clock

    def _given(self, record: int) -> _Slot:
        slot = self._holder(record)
        if slot is None or not slot.held:
            raise OffloadError(f"record {record} of {self.file.name} has not been read: nothing to take back")
        return slot

    def _unwritten(self, record: int) -> list[Transfer]:
        """What must end before `record` can be read or written anew."""
        return [self._writing[record]] if record in self._writing else []

    def _wait(self, slot: _Slot) -> None:
        """Return when `slot` is at rest; raise what went wrong with it, or with anything written before."""
        assert slot.moving is not None  # it was read or written
        self._settle_one(slot.moving)
        self._raise_failed()
        slot.moving.wait()

    def _settle_one(self, transfer: Transfer) -> None:
        if not transfer.done:
            started = time.perf_counter()
            Transfer.settle([transfer])
            self.waited_s += time.perf_counter() - started

    def _raise_failed(self) -> None:
        self._writing = {r: t for r, t in self._writing.items() if not t.done or t.error is not None}
        for transfer in self._writing.values():
            if transfer.error is not None:
                raise transfer.error

    def _settle(self) -> None:
        """Take all buffers back, and return when nothing moves."""
        try:
            self.file.settle()
        finally:  # a second Ctrl-C ends the waiting; what still moves is waited for by what uses its slot next
            for slot in self._slots:
                slot.record, slot.held, slot.awaited = None, False, False
