"""Dividing the cores of a host among its ranks.

Every rank of a data-parallel job waits for the slowest, so that each gets the same number of threads, on
cores that no other rank uses.  What is divided is what the launcher itself may use: its affinity mask,
and the processor time that a container grants.  The threads of one physical core stay together.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

Core = tuple[int, ...]
"""The logical processors (hardware threads) of one physical core."""


@dataclass(frozen=True)
class Share:
    """What one rank computes with: `threads`, on `processors`, or on any where that is empty."""

    threads: int
    processors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Division:
    """How the cores of a host are divided among its ranks, and the line that says so."""

    shares: tuple[Share, ...]
    line: str

    @property
    def processors(self) -> frozenset[int]:
        """The logical processors to which the ranks keep; none where they are not pinned."""
        return frozenset(p for share in self.shares for p in share.processors)


def affinity(pid: int = 0) -> frozenset[int]:
    """The logical processors that a process may use (this one: 0)."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(pid))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many physical cores this process may use, a container's quota included."""
    cores = len(physical_cores(affinity()))
    quota = processor_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def physical_cores(
    processors: frozenset[int], siblings: Callable[[int], frozenset[int]] | None = None
) -> list[Core]:
    """Group logical processors by the physical core that runs them, in the order of their numbers."""
    find = siblings or _siblings
    return sorted({tuple(sorted((find(p) | {p}) & processors)) for p in processors})


def processor_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """How many processors' time the control group grants (docker run --cpus, Kubernetes limits), or None."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def divide_cores(
    ranks: int,
    cores: Sequence[Core],
    *,
    quota: float | None = None,
    pin: bool = True,
    threads: int | None = None,
    taken: Collection[int] = (),
) -> Division:
    """Divide `cores` among the `ranks` of this host.

    With `pin`, each rank keeps to its own cores, none of them `taken` by another job; not so where there are
    more ranks than such cores, or less time than cores (`quota`, in processors).  `threads` overrides the
    number of threads of each rank.
    """
    free = [core for core in cores if not set(core).intersection(taken)]
    others = len(cores) - len(free) if pin else 0
    crowded_out = others > 0 and len(_units(free, ranks)) < ranks
    if others and not crowded_out:
        cores = free
    units = _units(cores, ranks)
    number = len(units) if quota is None else min(len(units), max(1, math.floor(quota)))
    each = threads or max(1, number // ranks)
    what = (
        f"{count(ranks, 'rank')} on {count(number, 'free core' if cores is free else 'core')}: "
        f"{count(each, 'thread')}{' each' if ranks > 1 else ''}"
    )
    if ranks == 1 and not others:
        why_not = ""
    elif number < ranks:
        why_not = ", more ranks than cores: they take turns"
    elif crowded_out:
        why_not = f", not pinned: other jobs keep {others} of them for their ranks"
    elif number < len(units):
        why_not = ", not pinned: a quota limits the time, not the cores"
    elif not pin:
        why_not = ", not pinned"
    elif sys.platform != "linux":
        why_not = ", not pinned: this system cannot"
    else:
        blocks = [units[rank * number // ranks : (rank + 1) * number // ranks] for rank in range(ranks)]
        shares = tuple(Share(each, tuple(p for core in block for p in core)) for block in blocks)
        return Division(shares, f"{what}, pinned ({_describe(shares)}); --no-pin turns it off")
    return Division(tuple(Share(each) for _ in range(ranks)), what + why_not)


def _units(cores: Sequence[Core], ranks: int) -> list[Core]:
    """What is dealt out: physical cores; hardware threads where there are fewer cores than ranks."""
    if len(cores) >= ranks:
        return list(cores)
    return [(processor,) for core in cores for processor in core]


def _describe(shares: Sequence[Share]) -> str:
    words = [f"rank {rank}: {_processors(share.processors)}" for rank, share in enumerate(shares)]
    if len(words) > 4:
        words = [*words[:2], "...", words[-1]]
    return ", ".join(words)


def _processors(processors: Sequence[int]) -> str:
    """`core 3`, `cores 0-3`, `cores 0-3,8-11`."""
    runs: list[list[int]] = []
    for processor in sorted(processors):
        if runs and processor == runs[-1][-1] + 1:
            runs[-1].append(processor)
        else:
            runs.append([processor])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"core {text}" if len(processors) == 1 else f"cores {text}"


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _siblings(processor: int) -> frozenset[int]:
    """The logical processors that share a physical core with this one, as Linux lists them."""
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
