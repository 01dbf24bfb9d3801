"""Stores for offloaded state: host memory, or a file on a disk.

    store = DiskStore("/scratch", "activations")     # or HostStore(pinned=True) for a CUDA device
    record, = store.allocate([data.nbytes])
    store.write(record, data).synchronize()          # data may be freed afterwards
    again = store.empty(record.nbytes, data.device)
    store.read(record, again).wait()

Reads and writes run while the caller computes: on I/O threads (disk), or on a CUDA stream (host).  A record's space is
reused after the record has been garbage-collected.

A record on a disk is transferred in parts, several at a time, because modern disks need several queued requests to reach
full bandwidth.  ZeRO-Infinity's offload engine does the same (Rajbhandari et al., 2021, "ZeRO-Infinity: Breaking the GPU
Memory Wall for Extreme Scale Deep Learning", section 6.3).
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farandole.data.wording import size
from farandole.memory.disk import Bandwidth, NoSpace, OffloadError, free_bytes, require_folder
from farandole.memory.disk_file import ALIGNMENT, DiskFile, aligned_buffer, padded

PART_BYTES = 4 << 20
"""The maximum size, in bytes, of one read or write request to the operating system."""

DEPTH = 4
"""The number of requests in flight: the smallest number that reached full bandwidth on the tested disks."""

_PROBE_BYTES = 256 << 20
_PROBE_S = 1.0


class Transfer:
    """A read or write of a record; the base class represents a finished transfer.

    Until a transfer is `done`, the caller must keep a reference to it, and must not use the transferred memory.
    """

    error: OffloadError | None = None
    """The error of a failed transfer, set before `done` is true."""

    @property
    def done(self) -> bool:
        """Whether the transfer has finished or failed."""
        return True

    def wait_until_done(self) -> None:
        """Wait until the transfer has finished or failed."""

    def synchronize(self) -> None:
        """Wait until the transfer is done.  If the transfer failed, raise `OffloadError`, which names the record."""
        self.wait_until_done()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Make later computation on this thread, or on the current CUDA stream, wait for the transfer."""
        self.synchronize()


class Record:
    """Space for `nbytes` bytes in a store.  `memory` contains the data if the store is in memory."""

    def __init__(self, index: int, nbytes: int, memory: Tensor | None = None) -> None:
        self.index, self.nbytes, self.memory = index, nbytes, memory


class OffloadStore(ABC):
    """Stores records of fixed sizes.  Error messages use `name` to describe the content of the records.

    The caller must order transfers that use the same record or memory, for example with `after`.
    """

    name: str
    in_memory: bool
    """Whether the records have `memory`."""

    @property
    @abstractmethod
    def access(self) -> str:
        """The store and its access mode, as text."""

    @abstractmethod
    def allocate(self, sizes: Sequence[int]) -> Sequence[Record]:
        """Reserve space for records of these sizes.  Raise `NoSpace` or `OffloadError` on failure."""

    @abstractmethod
    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return an uninitialized 1-D uint8 tensor on `device` for reading a record of `nbytes` bytes."""

    @abstractmethod
    def write(self, record: Any, data: Tensor, after: Iterable[Transfer] = ()) -> Transfer:
        """Start copying `data` (1-D, uint8) to `record`, after all transfers in `after`."""

    @abstractmethod
    def read(self, record: Any, into: Tensor, after: Iterable[Transfer] = ()) -> Transfer:
        """Start copying `record` to the start of `into` (1-D, uint8), after all transfers in `after`."""

    @abstractmethod
    def wait_until_done(self) -> None:
        """Block until all transfers have finished or failed."""

    @abstractmethod
    def close(self) -> None:
        """Finish transfers and free the space.  Further calls have no effect."""


class HostStore(OffloadStore):
    """Stores records in host memory.

    Copies to and from a device run in order on a separate stream.  With `pinned`, copies to and from a CUDA device
    overlap with kernels and run at full speed.

    Raises:
        ValueError: if `pinned` is set on a machine without a CUDA device.
    """

    in_memory = True

    def __init__(self, name: str = "records", pinned: bool = False) -> None:
        if pinned and not torch.cuda.is_available():
            raise ValueError(
                "pinned=True requires a CUDA device, and this machine has none; use pinned=False"
            )
        self.name = name
        self._pinned = pinned
        self._nbytes = self._count = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def access(self) -> str:
        """The type and size of the host memory, as text."""
        return f"{'pinned ' if self._pinned else ''}memory, {size(self._nbytes)}"

    def allocate(self, sizes: Sequence[int]) -> Sequence[Record]:
        """Allocate memory for records of these sizes."""
        start = self._count
        self._count += len(sizes)
        self._nbytes += sum(sizes)
        memory = [torch.empty(n, dtype=torch.uint8, pin_memory=self._pinned, device="cpu") for n in sizes]
        return [Record(start + at, one.nbytes, one) for at, one in enumerate(memory)]

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialized memory of `nbytes` bytes on `device`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def write(self, record: Record, data: Tensor, after: Iterable[Transfer] = ()) -> Transfer:
        """Copy `data` to `record`.  A copy from a CUDA device starts after the kernels queued on the current stream."""
        return self._copy(record.memory, data, data)

    def read(self, record: Record, into: Tensor, after: Iterable[Transfer] = ()) -> Transfer:
        """Copy `record` to `into`.  A copy to a CUDA device starts after the kernels queued on the current stream."""
        return self._copy(into, record.memory, into)

    def wait_until_done(self) -> None:
        """Wait for the copies on all streams."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Wait for all copies to finish.  The memory is freed when the records are freed."""
        self.wait_until_done()

    def _copy(self, to: Tensor | None, source: Tensor | None, outside: Tensor) -> Transfer:
        assert to is not None and source is not None  # records of this store have memory
        count = min(to.numel(), source.numel())
        if to.data_ptr() == source.data_ptr():
            return Transfer()
        if not outside.is_cuda:
            to[:count].copy_(source[:count])
            return Transfer()
        device = outside.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # queued kernels may still use the memory
        with torch.cuda.stream(stream):
            to[:count].copy_(source[:count], non_blocking=True)
            event = stream.record_event()
        outside.record_stream(stream)  # the caller may free this memory before the copy has run
        return _StreamTransfer(event, device)


class _StreamTransfer(Transfer):
    """A copy on a CUDA stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    @property
    def done(self) -> bool:
        return self._event.query()

    def wait_until_done(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Extent(Record):
    """A record in a file; its space is appended to `returned` when the record is garbage-collected."""

    def __init__(self, index: int, nbytes: int, offset: int, returned: deque[tuple[int, int]]) -> None:
        super().__init__(index, nbytes)
        self.offset, self._extent, self._returned = offset, (offset, padded(nbytes)), returned

    def __del__(self) -> None:  # runs at any time in any thread, so it must not take a lock
        self._returned.append(self._extent)


class _DiskTransfer(Transfer):
    """A transfer whose parts are divided among the threads that call `work`.

    `parts` contains the offset of each part in the record.
    """

    def __init__(
        self, what: str, parts: Iterable[int], move: Callable[[int], None], after: Iterable[Transfer]
    ) -> None:
        self._what, self._move, self._after = what, move, tuple(after)
        self._parts = deque(parts)
        self._left = len(self._parts)
        self._lock = threading.Lock()
        self._finished = threading.Event()
        if not self._left:
            self._finished.set()

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def wait_until_done(self) -> None:
        self._finished.wait()

    def work(self) -> None:
        """Wait for the transfers in `after`, then transfer parts until all parts have been started."""
        for before in self._after:
            if isinstance(before, _DiskTransfer):
                before.work()  # in case no other thread runs this transfer
            before.wait_until_done()
        move = self._move
        while True:
            try:
                at = self._parts.popleft()
            except IndexError:
                return
            try:
                move(at)
            except Exception as error:
                self._end_part(OffloadError(f"{self._what}: {error}"))
            else:
                self._end_part()

    def fail(self, error: Exception) -> None:
        """Mark all parts that have not been started as failed."""
        with suppress(IndexError):
            while True:
                self._parts.pop()
                self._end_part(OffloadError(f"{self._what}: {error}"))

    def _end_part(self, error: OffloadError | None = None) -> None:
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            if self._left:
                return
        self._after, self._move = (), _nothing  # release memory and earlier transfers
        self._finished.set()


def _nothing(at: int) -> None:
    """Transfer nothing."""


class DiskStore(OffloadStore):
    """Stores records in an unnamed scratch file in `folder`, bypassing the page cache if possible.

    `allocate` reserves the space.  `read` and `write` return immediately and may be called from any thread.  Unaligned
    memory is copied through a buffer.  If several ranks share the disk, all of them must call `require_space` with the
    number of ranks before they allocate.

    Raises:
        OffloadError: if the file cannot be created.
    """

    in_memory = False

    def __init__(self, folder: str | os.PathLike[str], name: str = "records") -> None:
        self.name = name
        self._file = DiskFile(folder, name)
        self._threads = ThreadPoolExecutor(DEPTH, thread_name_prefix="farandole-disk")
        self._buffers = threading.local()
        self._moving: list[_DiskTransfer] = []
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}
        self._returned: deque[tuple[int, int]] = deque()
        self._end = self._in_use = self._count = 0
        self._process = os.getpid()
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether the disk is accessed without the page cache."""
        return self._file.direct

    @property
    def access(self) -> str:
        """The disk and its access mode, as text."""
        return self._file.access

    @property
    def nbytes(self) -> int:
        """The length of the file in bytes."""
        return self._file.nbytes

    def allocate(self, sizes: Sequence[int]) -> Sequence[Record]:
        """Reserve space, reusing the space of freed records of the same sizes if possible."""
        if any(count < 0 for count in sizes):
            raise ValueError(f"sizes={list(sizes)}: expected at least 0 bytes per record")
        with self._lock:
            while self._returned:
                offset, length = self._returned.popleft()
                self._free.setdefault(length, []).append(offset)
                self._in_use -= 1
            if self._in_use == 0:  # later records may have other sizes
                self._free, self._end = {}, 0
            reused = [places.pop() if (places := self._free.get(padded(n))) else None for n in sizes]
            end = self._end + sum(padded(n) for n, at in zip(sizes, reused, strict=True) if at is None)
            try:
                self._file.extend(max(0, end - self._file.nbytes))
            except OffloadError:
                for nbytes, at in zip(sizes, reused, strict=True):
                    if at is not None:
                        self._free[padded(nbytes)].append(at)
                raise
            records = []
            for nbytes, at in zip(sizes, reused, strict=True):
                records.append(_Extent(self._count, nbytes, self._end if at is None else at, self._returned))
                self._count += 1
                self._end += padded(nbytes) if at is None else 0
            self._in_use += len(records)
        return records

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return page-aligned host memory.  Freeing the tensor returns the memory to the kernel."""
        if device.type != "cpu":
            raise ValueError(f"expected a CPU device, got {device}: DiskStore reads into host memory only")
        return aligned_buffer(nbytes)

    def write(self, record: Record, data: Tensor, after: Iterable[Transfer] = ()) -> Transfer:
        """Start writing `data` to `record`."""
        return self._start("write", record, data, after)

    def read(self, record: Record, into: Tensor, after: Iterable[Transfer] = ()) -> Transfer:
        """Start reading `record` into `into`."""
        return self._start("read", record, into, after)

    def wait_until_done(self) -> None:
        """Block until all transfers have finished or failed."""
        with self._lock:
            moving = list(self._moving)
        for transfer in moving:
            transfer.wait_until_done()
        with self._lock:
            self._moving = [transfer for transfer in self._moving if not transfer.done]

    def close(self) -> None:
        """Finish transfers and free the space.  Further calls have no effect."""
        self._closed = True
        if self._process == os.getpid():  # a forked process has no I/O threads
            self.wait_until_done()
            self._threads.shutdown()
        self._file.close()

    def _start(self, operation: str, record: Record, memory: Tensor, after: Iterable[Transfer]) -> Transfer:
        what = f"cannot {operation} record {record.index} of {self.name}"
        content = self._check(what, record, memory)

        def move(at: int) -> None:
            try:
                self._move_part(operation == "read", record, content, at)
            except OSError as error:
                raise RuntimeError(self._file.why(error)) from error

        transfer = _DiskTransfer(what, range(0, padded(record.nbytes), PART_BYTES), move, after)
        with self._lock:
            self._moving = [other for other in self._moving if not other.done]
            self._moving.append(transfer)
        try:
            for _ in range(min(DEPTH, -(-record.nbytes // PART_BYTES))):
                self._threads.submit(transfer.work)
        except RuntimeError as error:  # the interpreter is shutting down, or no thread can be started
            transfer.fail(error)
        except BaseException:  # after Ctrl-C, finish the record, and let waiting threads continue
            self._threads.submit(transfer.work)
            raise
        return transfer

    def _move_part(self, reading: bool, record: Record, content: np.ndarray[Any, Any], at: int) -> None:
        assert isinstance(record, _Extent)
        part = content[at : at + PART_BYTES]
        offset, length = record.offset + at, min(PART_BYTES, padded(record.nbytes) - at)
        aligned = len(part) == length and part.ctypes.data % ALIGNMENT == 0
        if aligned or not self.direct:
            (self._file.read if reading else self._file.write)(part.data, offset)
            return
        if not hasattr(self._buffers, "own"):
            self._buffers.own = aligned_buffer(PART_BYTES).numpy()
        buffer = self._buffers.own[:length]
        if reading:
            self._file.read(buffer.data, offset)
            np.copyto(part, buffer[: len(part)])
        else:
            np.copyto(buffer[: len(part)], part)
            self._file.write(buffer.data, offset)

    def _check(self, what: str, record: Record, memory: Tensor) -> np.ndarray[Any, Any]:
        """Check the arguments of a transfer; return at most the first `padded(record.nbytes)` bytes of `memory`."""
        if self._closed:
            raise OffloadError(f"{what}: the file is closed; create a new store")
        if self._process != os.getpid():
            raise OffloadError(
                f"{what}: the file belongs to process {self._process}; create another store in this forked process"
            )
        flat = memory.dim() == 1 and memory.is_contiguous()
        if (
            memory.dtype != torch.uint8
            or memory.device.type != "cpu"
            or not flat
            or memory.numel() < record.nbytes
        ):
            raise ValueError(
                f"{what}: expected contiguous 1-D uint8 memory of at least {record.nbytes:,} bytes on the CPU, got "
                f"{tuple(memory.shape)} {memory.dtype} on {memory.device}"
            )
        content: np.ndarray[Any, Any] = memory.detach().numpy()[: padded(record.nbytes)]
        return content  # keeps the memory alive during the transfer


def measure_bandwidth(folder: str | os.PathLike[str], limit_bytes: int = _PROBE_BYTES) -> Bandwidth:
    """Measure the bandwidth of the disk that contains `folder`.

    Write and read at most `limit_bytes` random bytes in a `DiskStore`, for about one second in total.

    Raises:
        OffloadError: if the folder cannot be written to, or has too little space.
    """
    allowed = min(limit_bytes, free_bytes(require_folder(folder)))
    if allowed < PART_BYTES:
        raise NoSpace(
            f"cannot measure the bandwidth of the disk that contains {folder}: {size(PART_BYTES)} required, but the free "
            f"space or limit_bytes allows only {size(allowed)}; delete files, choose another folder, or raise limit_bytes"
        )
    store = DiskStore(folder, "random bytes")
    try:
        records = store.allocate([PART_BYTES] * (allowed // PART_BYTES))
        own = torch.Generator().manual_seed(0)  # does not change the global generator
        buffers = [aligned_buffer(PART_BYTES).random_(generator=own) for _ in range(2 * DEPTH)]
        written, write = _move_for_a_while(store.write, records, buffers)
        _, read = _move_for_a_while(store.read, records[:written], buffers)
        return Bandwidth(read, write, store.access)
    finally:
        store.close()


def _move_for_a_while(
    move: Callable[[Record, Tensor], Transfer], records: Sequence[Record], buffers: list[Tensor]
) -> tuple[int, float]:
    """Transfer records for at most `_PROBE_S / 2` seconds; return the number of records and the bandwidth in bytes/s."""
    start = time.perf_counter()
    moving: list[Transfer] = []
    for at, record in enumerate(records):
        if at >= len(buffers):
            moving[at - len(buffers)].synchronize()
        if time.perf_counter() - start > _PROBE_S / 2:
            break
        moving.append(move(record, buffers[at % len(buffers)]))
    for transfer in moving:
        transfer.synchronize()
    return len(moving), len(moving) * PART_BYTES / (time.perf_counter() - start)
