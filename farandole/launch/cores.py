"""Divide a host's cores among the ranks of a job, excluding cores reserved by other jobs.

Every rank of a data-parallel job waits for the slowest rank, so all ranks get the same number of threads, on cores that
no other rank uses.  The launcher divides the processors in its own affinity mask, within the CPU quota of its
container.  The hardware threads of a physical core stay together, unless there are fewer cores than ranks.

A job reserves a processor by binding a name in Linux's *abstract* socket namespace.  Only one process on the host can
bind a name at a time, and the name creates no file.  When the launcher ends, for any reason, the kernel releases the
name.  The ranks end when the launcher ends.  Reservations are advisory: any process can still use the processor.
Containers with separate network namespaces do not see each other's reservations.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from farandole._troubleshooting import see
from farandole.launch.control_groups import processor_quota
from farandole.launch.reports import count

Core = tuple[int, ...]
"""The logical processors (hardware threads) of one physical core."""

LOCK_S = 2.0
"""How long to wait, in seconds, while another launcher reserves its processors."""


@dataclass(frozen=True)
class Share:
    """The number of threads of one rank, and the processors to which the rank is pinned.

    If `processors` is empty, the rank is not pinned.
    """

    threads: int
    processors: Sequence[int] = ()


@dataclass(frozen=True)
class Division:
    """Each rank's share of a host's cores, and a one-line description for the user."""

    shares: tuple[Share, ...]
    summary: str

    @property
    def processors(self) -> frozenset[int]:
        """The logical processors to which ranks are pinned."""
        return frozenset(p for share in self.shares for p in share.processors)


# ---- the cores of this host ----


def processor_name() -> str:
    """Return the name of this host's processor, or "unknown"."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor()) or "unknown"


def affinity(pid: int = 0) -> frozenset[int]:
    """Return the logical processors that a process may use; `pid` 0 is this process."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(pid))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return the number of physical cores that this process may use, within the quota of its container."""
    cores = len(physical_cores(affinity()))
    quota = processor_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def physical_cores(
    processors: frozenset[int], siblings: Callable[[int], frozenset[int]] | None = None
) -> list[Core]:
    """Group logical processors by physical core, in ascending order.

    Args:
        processors: The logical processors to group.
        siblings: A function that returns all logical processors on the same physical core as its argument; by
            default, the topology is read from sysfs.
    """
    find = siblings or _siblings
    return sorted({tuple(sorted((find(p) | {p}) & processors)) for p in processors})


def _siblings(processor: int) -> frozenset[int]:
    """Return the logical processors on the physical core of `processor`, as listed by Linux."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    try:
        text = path.read_text()
    except OSError:
        return frozenset({processor})
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


# ---- division among ranks ----


def divide_cores(
    ranks: int,
    cores: Sequence[Core],
    *,
    quota: float | None = None,
    pin: bool = True,
    threads: int | None = None,
    reserved: Collection[int] = (),
) -> Division:
    """Divide `cores` among the `ranks` of this host.

    Args:
        quota: The CPU quota, as a number of processors; None if unlimited.
        pin: Whether to pin each rank to its own cores.  If there are fewer cores than ranks, several ranks are pinned to
            the same core.  Ranks are not pinned if some cores would have more ranks than others, if other jobs'
            reservations leave fewer cores than ranks, or if `quota` is smaller than the number of cores.  A single rank
            is pinned only if other jobs have reserved cores.
        threads: The number of threads per rank; by default, the number of cores divided by the number of ranks.
        reserved: The processors that other jobs have reserved.
    """
    free = [core for core in cores if not set(core).intersection(reserved)]
    reserved_cores = len(cores) - len(free) if pin else 0
    too_few_free = reserved_cores > 0 and len(_units(free, ranks)) < ranks
    if reserved_cores and not too_few_free:
        cores = free
    units = _units(cores, ranks)
    number = len(units) if quota is None else min(len(units), max(1, math.floor(quota)))
    each = threads or max(1, number // ranks)
    what = (
        f"{count(ranks, 'rank')} on {count(number, 'free core' if cores is free else 'core')}: "
        f"{count(each, 'thread')}{' each' if ranks > 1 else ''}"
    )
    if ranks == 1 and not reserved_cores:
        why_not = ""
    elif too_few_free:
        why_not = f", not pinned: other jobs have reserved {count(reserved_cores, 'core')}{see('not-pinned-other-jobs')}"
    elif number < ranks and ranks % number:
        why_not = f", not pinned: {ranks} ranks cannot be divided evenly among {number} cores"
    elif number < len(units):
        why_not = ", not pinned: a quota limits processor time, not the cores"
    elif not pin:
        why_not = ", not pinned"
    elif sys.platform != "linux":
        why_not = ", not pinned: pinning requires Linux"
    else:
        starts = [rank * number // ranks for rank in range(ranks + 1)]
        blocks = [units[start : max(start + 1, end)] for start, end in pairwise(starts)]
        shares = tuple(Share(each, tuple(p for core in block for p in core)) for block in blocks)
        return Division(shares, f"{what}, pinned ({_describe(shares)}); --no-pin turns pinning off")
    return Division(tuple(Share(each) for _ in range(ranks)), what + why_not)


def _units(cores: Sequence[Core], ranks: int) -> list[Core]:
    """Return the units to divide: physical cores, or hardware threads if there are fewer cores than ranks."""
    if len(cores) >= ranks:
        return list(cores)
    return [(processor,) for core in cores for processor in core]


def _describe(shares: Sequence[Share]) -> str:
    words = [f"rank {rank}: {_format_processors(share.processors)}" for rank, share in enumerate(shares)]
    if len(words) > 4:
        words = [*words[:2], "...", words[-1]]
    return ", ".join(words)


def _format_processors(processors: Sequence[int]) -> str:
    """Return text such as `core 3`, `cores 0-3` or `cores 0-3,8-11`."""
    runs: list[list[int]] = []
    for processor in sorted(processors):
        if runs and processor == runs[-1][-1] + 1:
            runs[-1].append(processor)
        else:
            runs.append([processor])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"core {text}" if len(processors) == 1 else f"cores {text}"


# ---- reservation against other jobs ----


class CoreReservation:
    """Reserves processors for this job until `release` is called or the process ends."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self.reserved_by_others: set[int] = set()
        self.error: OSError | None = None
        """The reason why reservations of other jobs are not visible, or None."""

    @property
    def held(self) -> frozenset[int]:
        """The processors that this job has reserved."""
        return frozenset(self._sockets)

    def reserve(self, processors: Collection[int]) -> None:
        """Reserve `processors`, but skip processors that another job has reserved."""
        for processor in sorted(processors):
            try:
                self._sockets[processor] = _bind(f"processor {processor}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    self.error = error
                    return
                self.reserved_by_others.add(processor)

    def keep_only(self, processors: Collection[int]) -> None:
        """Release all processors except `processors`."""
        for processor in self.held.difference(processors):
            self._sockets.pop(processor).close()

    def release(self) -> None:
        """Release all processors."""
        self.keep_only(())


@contextlib.contextmanager
def reserve_cores(ranks: int, pin: bool, threads: int | None) -> Iterator[Division]:
    """Reserve cores for this job, divide them among its ranks, and release them when the context exits.

    Cores reserved by other jobs are used only if there are too few unreserved cores.
    """
    processors = affinity()
    reservation = CoreReservation()
    try:
        with _lock():
            if pin and sys.platform == "linux":
                reservation.reserve(processors)
            division = divide_cores(
                ranks,
                physical_cores(processors),
                quota=processor_quota(),
                pin=pin,
                threads=threads,
                reserved=reservation.reserved_by_others,
            )
            reservation.keep_only(division.processors)
        if reservation.error is not None:
            unknown = f"; cores reserved by other jobs are unknown: {reservation.error}"
            division = replace(division, summary=division.summary + unknown)
        yield division
    finally:
        reservation.release()


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Hold the lock for reserving cores; if waiting takes `LOCK_S` seconds, continue without the lock."""
    # Without a lock, if two jobs start at the same time, each job could get only some of the cores that it needs.
    deadline = time.monotonic() + LOCK_S
    held = None
    while held is None and time.monotonic() < deadline:
        try:
            held = _bind("lock")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                break  # processors cannot be reserved either, for the reason in `CoreReservation.error`
            time.sleep(0.01)
    try:
        yield
    finally:
        if held is not None:
            held.close()


def _bind(name: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bound.bind(f"\0farandole-{name}")
    except OSError:
        bound.close()
        raise
    return bound
