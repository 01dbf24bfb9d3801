"""Records of fixed sizes in a scratch file, several requests at a time.

A large record is moved in parts, a few at a time (the queue of a modern disk wants more than one request), by
threads that are in the kernel all the while.  The design is that of ZeRO-Infinity's offload engine (Rajbhandari
et al., 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", section 6.3).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
from torch import Tensor

from farandole.data.wording import counted
from farandole.memory.errors import OffloadError
from farandole.memory.scratch import ALIGNMENT, ScratchFile, aligned_buffer, padded
from farandole.memory.transfer import Transfer, after_all

PART_BYTES = 4 << 20
"""Bytes of one request to the kernel."""

DEPTH = 4
"""Requests in flight: with 4 MiB each, the smallest number that gave all that the disks tried can do."""

Move = Callable[[memoryview, int], None]


class RecordFile:
    """Records of `record_bytes` (one size each) in a scratch file of this process in `folder`.

    `name` says in errors what is kept.  The space is reserved at once, and given back however the process ends.
    `read` and `write` return at once, and may be called from any thread; the caller orders those that touch the
    same record or buffer, for example with `after`.

    Raises `NoSpace` or `OffloadError`.  Where several ranks share the disk, all of them call
    `require_space` with their number first.
    """

    def __init__(
        self, folder: str | os.PathLike[str], record_bytes: Sequence[int], name: str = "records"
    ) -> None:
        self.record_bytes = tuple(record_bytes)
        if any(count < 0 for count in self.record_bytes):
            raise ValueError(f"record_bytes={list(record_bytes)}: a record has 0 bytes or more")
        *self._starts, self.nbytes = accumulate(map(padded, self.record_bytes), initial=0)
        self._file = ScratchFile(folder, self.nbytes, name)
        self._threads = ThreadPoolExecutor(DEPTH, thread_name_prefix="farandole-disk")
        self._moving: set[Transfer] = set()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False

    @property
    def name(self) -> str:
        """What is kept here."""
        return self._file.name

    @property
    def direct(self) -> bool:
        """Whether the disk is read and written past the page cache."""
        return self._file.direct

    @property
    def access(self) -> str:
        """Which disk, and how it is reached, for people."""
        where = self._file.file_system
        if where.in_memory:
            how = "which lies in memory, so that nothing is gained by keeping state there"
        elif self.direct:
            how = "direct"
        else:
            how = "without O_DIRECT: through the page cache, flushed at once"
        return f"{where}, {how}"

    def buffer(self) -> Tensor:
        """A buffer for any record of this file."""
        return aligned_buffer(max(self.record_bytes, default=0))

    def read(self, record: int, buffer: Tensor, after: Iterable[Transfer] = ()) -> Transfer:
        """Start to fill the first bytes of `buffer` with `record`, once all of `after` are done."""
        return self._start("reading", self._file.read, record, buffer, after)

    def write(self, record: int, buffer: Tensor, after: Iterable[Transfer] = ()) -> Transfer:
        """Start to write the first bytes of `buffer` as `record`, once all of `after` are done."""
        return self._start("writing", self._file.write, record, buffer, after)

    def settle(self) -> None:
        """Return when nothing is read or written any more, for good or bad."""
        with self._lock:
            moving = list(self._moving)
        Transfer.settle(moving)

    def close(self) -> None:
        """Wait for what is in motion, and give the space back; may be called again."""
        self._closed = True
        if self._process == os.getpid():  # a forked process has none of the threads
            self.settle()
            self._threads.shutdown()
        self._file.close()

    def _start(
        self, doing: str, move: Move, record: int, buffer: Tensor, after: Iterable[Transfer]
    ) -> Transfer:
        what = f"{doing} record {record} of {self.name}"
        self._check(what, record, buffer)
        start, count = self._starts[record], padded(self.record_bytes[record])
        parts = deque(range(0, count, PART_BYTES))
        content = buffer.numpy().data[:count]  # keeps the memory alive while threads move it
        transfer = Transfer(len(parts))
        if not parts:
            return transfer
        moving, lock, threads, why = self._moving, self._lock, self._threads, self._file.why

        def move_part() -> None:
            try:
                at = parts.popleft()
            except IndexError:  # submitted twice: see below
                return
            try:
                move(content[at : at + PART_BYTES], start + at)
            except Exception as error:
                transfer.end_part(
                    OffloadError(f"{what}: {why(error) if isinstance(error, OSError) else error}")
                )
            else:
                transfer.end_part()

        def submit() -> None:
            try:
                for _ in range(len(parts)):
                    threads.submit(move_part)
            except RuntimeError as error:  # closed, the program ends, or there can be no more threads
                while parts:
                    parts.pop()
                    transfer.end_part(OffloadError(f"{what}: {error}"))

        def forget() -> None:
            with lock:
                moving.discard(transfer)

        def begin() -> None:
            with lock:
                moving.add(transfer)
            transfer.then(forget)
            after_all(after, submit)

        after = tuple(after)
        try:
            begin()
        except BaseException:  # Ctrl-C: a record is not left half-written, and nobody waits for ever
            begin()
            raise
        return transfer

    def _check(self, what: str, record: int, buffer: Tensor) -> None:
        if not 0 <= record < len(self.record_bytes):
            raise IndexError(f"{what}: there are {counted(len(self.record_bytes), 'record')}, counted from 0")
        if self._closed:
            raise OffloadError(f"{what}: the file has been closed")
        if self._process != os.getpid():
            raise OffloadError(
                f"{what}: the file belongs to process {self._process}, from which this one forked"
            )
        needed = padded(self.record_bytes[record])
        memory = buffer.dtype == torch.uint8 and buffer.device.type == "cpu" and buffer.is_contiguous()
        if not memory or buffer.numel() < needed or (needed and buffer.data_ptr() % ALIGNMENT):
            raise ValueError(
                f"{what} takes uint8 memory of at least {needed:,} bytes at a multiple of {ALIGNMENT}, such as "
                f"buffer() makes; this is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}"
            )
