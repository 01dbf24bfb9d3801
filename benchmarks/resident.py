"""Read the memory use of running Linux processes; see `farandole.bench.resident`."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from farandole.bench import resident


def data_bytes(pid: int) -> int:
    """Return the proportional set size of a process in bytes, without file-backed pages."""
    return resident.data_bytes(Path("/proc", str(pid)))


def peak_resident_bytes(pid: int) -> int:
    """Return the peak resident set size of a process in bytes (VmHWM), including libraries and all shared memory."""
    return resident.fields(Path("/proc", str(pid), "status"))["VmHWM"]


def available_bytes() -> int:
    """Return the number of bytes available to new processes."""
    return resident.fields(Path("/proc/meminfo"))["MemAvailable"]


def in_shared_memory(address: int) -> bool:
    """Return whether the memory mapping at `address` is shared."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, access, *_ = line.split()
        low, high = (int(end, 16) for end in extent.split("-"))
        if low <= address < high:
            return access[3] == "s"
    raise ValueError(f"expected the address of mapped memory, got {address:#x}")


class PeakOf:
    """Records the peak of the total `data_bytes` of several processes, sampled by a thread during a `with` block.

    with PeakOf(pids) as memory:
        ...
    print(memory.peak, memory.samples)
    """

    def __init__(self, pids: Iterable[int], every_s: float = 0.005) -> None:
        self.peak, self.samples = 0, 0
        self._pids, self._every_s = list(pids), every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, sum(data_bytes(pid) for pid in self._pids))
            self.samples += 1
            if self._over.wait(self._every_s):
                return

    def __enter__(self) -> PeakOf:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
