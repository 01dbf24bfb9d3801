"""Memory of processes as Linux counts it.

Ranks of one host may share memory, and count it each in full in their resident size.  *Proportional* size (PSS)
divides every page among those that map it, so the sum over ranks is what the machine gives.  Pages of
files (libraries) are left out of the sum here: they are shared with whatever else runs at the time.
See proc_pid_smaps_rollup(5) and proc_pid_status(5).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType


def data_bytes(pid: int) -> int:
    """The proportional size of a process without files: its own memory, and its part of what is shared."""
    return _sum(Path(f"/proc/{pid}/smaps_rollup"), ("Pss_Anon:", "Pss_Shmem:"))


def peak_resident_bytes(pid: int) -> int:
    """The most that has been resident since the process began (VmHWM), libraries and shared memory in full."""
    return _sum(Path(f"/proc/{pid}/status"), ("VmHWM:",))


def available_bytes() -> int:
    """What the machine can give to new processes."""
    return _sum(Path("/proc/meminfo"), ("MemAvailable:",))


def _sum(path: Path, names: tuple[str, ...]) -> int:
    lines = (line.split() for line in path.read_text().splitlines())
    return sum(int(words[1]) << 10 for words in lines if words[0] in names)


class PeakOf:
    """The most data bytes of some processes together while a `with` block runs, sampled by a thread.

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
