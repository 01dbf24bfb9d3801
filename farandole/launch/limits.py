"""How many ranks a host can have: what memory, processes and open files allow, and what is wise."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from farandole.launch.cgroup import memory_room, process_room
from farandole.launch.placement import LaunchError

RANK_BYTES = 140 << 20
"""What a rank takes by itself before it computes anything: Python and torch 2.13, measured on Linux."""
RANK_TASKS = 2
"""The processes and threads of a rank that does nothing yet."""
FILES = 64
"""Files that a launcher has open beside one connection to each rank."""
START_S = 2.0
"""Seconds of a core that a rank needs to load torch."""

CROWDED = 4
"""More ranks than this on each core deserve a warning."""


def check_ranks(ranks: int) -> None:
    """Raise `LaunchError` where this host cannot even start so many ranks."""
    for most, why in _bounds(ranks):
        if ranks > most:
            raise LaunchError(
                f"--ranks {ranks}: {why}; --ranks {most} is the most that fits now"
                if most > 0
                else f"--ranks {ranks}: {why}; not even one fits now"
            )


def advice(ranks: int, cores: int) -> str | None:
    """A warning where there are many more ranks than cores, or None."""
    if ranks <= CROWDED * cores:
        return None
    starting = ranks * START_S / cores
    return (
        f"warning: {ranks} ranks on {cores} cores take about {_duration(starting)} to start and "
        f"{_gib(ranks * RANK_BYTES)} of memory before they compute anything, and in every collective each waits "
        f"for all others to have had their turn; --ranks {cores} uses every core"
    )


def _bounds(ranks: int) -> list[tuple[int, str]]:
    """The most ranks by each limit of this host, and what to say to whoever wants more."""
    bounds = []
    if (free := _free_memory()) is not None:
        need = (
            f"{_gib(ranks * RANK_BYTES)} of memory for Python and torch alone ({RANK_BYTES >> 20} MiB each)"
        )
        bounds.append((free // RANK_BYTES, f"they need {need}, and {_gib(free)} are free"))
    if (room := _free_tasks()) is not None:
        bounds.append((room // RANK_TASKS, f"this user may start {room} more processes and threads"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY:
        why = f"the launcher has a connection to each, and may open {files} files (ulimit -n)"
        bounds.append((files - FILES, why))
    return bounds


def _free_memory() -> int | None:
    """Bytes of memory that new processes can have, or None where that is not known."""
    rooms = [memory_room(), _available()]
    return min((room for room in rooms if room is not None), default=None)


def _available() -> int | None:
    """MemAvailable of proc(5): what can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _free_tasks() -> int | None:
    rooms = [process_room()]
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and os.getuid() != 0 and sys.platform == "linux":  # root has no limit
        rooms.append(limit - _tasks_of_user())
    return min((room for room in rooms if room is not None), default=None)


def _tasks_of_user() -> int:
    """The processes and threads of this user, which RLIMIT_NPROC counts."""
    count = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and process.stat().st_uid == os.getuid():
                count += sum(1 for _ in (process / "task").iterdir())
        except OSError:  # it has just ended
            continue
    return count


def _gib(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
