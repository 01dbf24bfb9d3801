"""Where swapped activations lie: a file on a disk, or pinned memory of the host."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from farandole.data.wording import size
from farandole.memory.allocator import map_blocks_from, map_large_blocks_only
from farandole.memory.errors import SwapError

THREADS = 2
"""For each direction.  One alone copies to the page cache at a fraction of what memory can do."""

_PAGE = 4096


class Copy(Protocol):
    """One piece of memory on its way to a store, in it, and on its way back."""

    def written(self) -> bool:
        """Whether the original may be let go."""

    def wait_written(self) -> None:
        """Wait for that.  Raises SwapError."""

    def fetch(self) -> None:
        """Begin to bring it back."""

    def read(self) -> Tensor:
        """What `fetch` brings, flat, as uint8.  Raises SwapError."""


class Store(Protocol):
    """Takes pieces of memory of one device."""

    device: torch.device

    def write(self, data: Tensor) -> Copy:
        """Begin to copy `data` (flat, uint8), which must not change until it is written."""

    def close(self) -> None:
        """Give everything back."""


class DiskStore:
    """An unnamed file in `folder`, written and read by threads.  The kernel keeps in memory what there is room for.

    What is swapped are blocks of at least `threshold_bytes`: those are given back to the kernel when they are freed.
    """

    device = torch.device("cpu")

    def __init__(self, folder: str, threshold_bytes: int) -> None:
        self.folder = os.path.expanduser(folder)
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise SwapError(f"cannot swap to {self.folder}: {error.strerror}") from None
        map_blocks_from(threshold_bytes)
        self._writers = ThreadPoolExecutor(THREADS, "farandole-swap-write")
        self._readers = ThreadPoolExecutor(THREADS, "farandole-swap-read")
        self._end = 0
        self._in_use = 0
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}
        self._returned: deque[tuple[int, int]] = deque()

    def write(self, data: Tensor) -> DiskCopy:
        """Begin to write; the place in the file is free again when the copy is garbage."""
        copy = DiskCopy(self, data.numel(), self._place(data.numel()))
        copy.writing = self._writers.submit(self._write, data, copy.offset)
        return copy

    def close(self) -> None:
        """End the threads; the file has no name and is gone when it is closed."""
        for pool in (self._writers, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._file.close()
        map_large_blocks_only()

    def give_back(self, offset: int, length: int) -> None:
        """What lies there is not needed any more.  Called while objects are deleted, so it takes no lock."""
        self._returned.append((offset, length))

    def begin_read(self, offset: int, length: int, written: Future[None]) -> Future[Tensor]:
        """Read once it is written."""
        return self._readers.submit(self._read, offset, length, written)

    def explain(self, error: OSError, wanted: int) -> SwapError:
        """`error` in words."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = size(shutil.disk_usage(self.folder).free)
            why = f"no space left on the disk ({size(wanted)} to be written, {free} free)"
        else:
            why = error.strerror or str(error)
        return SwapError(f"cannot swap activations to {self.folder}: {why}")

    def _place(self, length: int) -> int:
        """Where `length` bytes fit: steps are alike, so places are used again for the same length."""
        room = -(-length // _PAGE) * _PAGE
        with self._lock:
            while self._returned:
                offset, freed = self._returned.popleft()
                self._free.setdefault(-(-freed // _PAGE) * _PAGE, []).append(offset)
                self._in_use -= 1
            if self._in_use == 0:
                self._free.clear()
                self._end = 0
            self._in_use += 1
            places = self._free.get(room)
            if places:
                return places.pop()
            self._end += room
            return self._end - room

    def _write(self, data: Tensor, offset: int) -> None:
        left = data.numpy().data
        while left:
            done = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[done:], offset + done

    def _read(self, offset: int, length: int, written: Future[None]) -> Tensor:
        written.result()
        data = torch.empty(length, dtype=torch.uint8, device="cpu")
        left = data.numpy().data
        while left:
            done = os.preadv(self._file.fileno(), [left], offset)
            if done == 0:
                raise OSError(errno.EIO, "the file is shorter than what was written to it")
            left, offset = left[done:], offset + done
        return data


class DiskCopy:
    """A piece of the file."""

    writing: Future[None]

    def __init__(self, store: DiskStore, length: int, offset: int) -> None:
        self.store, self.length, self.offset = store, length, offset
        self._reading: Future[Tensor] | None = None

    def written(self) -> bool:
        """Whether the original may be let go."""
        return self.writing.done()

    def wait_written(self) -> None:
        """Wait for that.  Raises SwapError."""
        self._result(self.writing)

    def fetch(self) -> None:
        """Begin to read."""
        self._reading = self.store.begin_read(self.offset, self.length, self.writing)

    def read(self) -> Tensor:
        """What was read."""
        assert self._reading is not None  # fetch() comes first
        reading, self._reading = self._reading, None
        data: Tensor = self._result(reading)
        return data

    def _result(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except OSError as error:
            raise self.store.explain(error, self.length) from None

    def __del__(self) -> None:
        pending = [one for one in (getattr(self, "writing", None), self._reading) if one is not None]
        place = (self.offset, self.length)
        if all(one.done() or one.cancel() for one in pending):
            self.store.give_back(*place)
        else:  # it must not be used again while a thread is at it
            store, last = self.store, pending[-1]
            last.add_done_callback(lambda _: store.give_back(*place))


class HostStore:
    """Pinned memory of the host, copied to and from by a stream of its own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def write(self, data: Tensor) -> HostCopy:
        """Begin to copy when the kernels queued so far are done."""
        return HostCopy(self, data)

    def close(self) -> None:
        """Wait for copies under way."""
        self.stream.synchronize()


class HostCopy:
    """A piece of pinned memory; torch's allocator has a cache of such."""

    def __init__(self, store: HostStore, data: Tensor) -> None:
        self.store = store
        self.host = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=True, device="cpu")
        self._fetched: Tensor | None = None
        store.stream.wait_stream(torch.cuda.current_stream(store.device))
        with torch.cuda.stream(store.stream):
            self.host.copy_(data, non_blocking=True)
            self._written = store.stream.record_event()

    def written(self) -> bool:
        """Whether the original may be let go."""
        return self._written.query()

    def wait_written(self) -> None:
        """Wait for that."""
        self._written.synchronize()

    def fetch(self) -> None:
        """Begin to copy back.  The memory is the computing stream's, which may have freed it a moment ago."""
        computing = torch.cuda.current_stream(self.store.device)
        self._fetched = torch.empty(self.host.numel(), dtype=torch.uint8, device=self.store.device)
        self.store.stream.wait_stream(computing)
        with torch.cuda.stream(self.store.stream):
            self._fetched.copy_(self.host, non_blocking=True)
            self._back = self.store.stream.record_event()
        self._fetched.record_stream(self.store.stream)

    def read(self) -> Tensor:
        """The copy; the computing stream waits for it, this thread does not."""
        assert self._fetched is not None  # fetch() comes first
        torch.cuda.current_stream(self.store.device).wait_event(self._back)
        data, self._fetched = self._fetched, None
        return data
