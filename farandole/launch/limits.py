"""Check how many ranks a host can start: by memory, processes and open files.

The memory and the processes may be limited by a control group: a container, a Kubernetes pod or a Slurm job.  Both
versions of control groups are read: cgroups(7),
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from farandole.launch.placement import LaunchError

RANK_BYTES = 140 << 20
"""Memory of a rank before it computes anything: Python and torch 2.13, measured on Linux."""
RANK_TASKS = 2
"""The processes and threads of an idle rank."""
LAUNCHER_FILES = 64
"""Open files of a launcher, without the one connection to each rank."""
START_S = 2.0
"""Core seconds that a rank needs to load torch."""
MAX_RANKS_PER_CORE = 4
"""More ranks than this on each core cause a warning."""

CGROUP_MOUNT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_UNLIMITED = 1 << 60
"""Version 1 shows a number beyond this, in bytes, if there is no limit."""


def check_rank_limits(ranks: int) -> None:
    """Raise `LaunchError` if this host cannot start so many ranks."""
    for most, why in _limits(ranks):
        if ranks > most:
            advice = f"--ranks {most} is the most that fits now" if most > 0 else "not even one fits now"
            raise LaunchError(f"--ranks {ranks}: {why}; {advice}")


def oversubscription_warning(ranks: int, cores: int) -> str | None:
    """Return a warning if there are many more ranks than cores, or None."""
    if ranks <= MAX_RANKS_PER_CORE * cores:
        return None
    seconds = ranks * START_S / cores
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    return (
        f"warning: {ranks} ranks on {cores} cores take about {duration} to start and "
        f"{_gib(ranks * RANK_BYTES)} of memory before they compute anything, and every collective waits until "
        f"each rank has had its turn on a core; --ranks {cores} uses every core"
    )


def count_oom_kills() -> int | None:
    """Return how many processes of this control group the kernel has killed for lack of memory, if it is known."""
    for folder in _cgroups("memory"):
        for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
            kills = _read_field(folder / name, "oom_kill")
            if kills is not None:
                return kills
    return None


def _limits(ranks: int) -> list[tuple[int, str]]:
    """Return each limit of this host in ranks, with an explanation for a user who wants more."""
    limits = []
    if (free := _smallest(_free_cgroup_memory(), _available_memory())) is not None:
        need = (
            f"{_gib(ranks * RANK_BYTES)} of memory for Python and torch alone ({RANK_BYTES >> 20} MiB each)"
        )
        limits.append((free // RANK_BYTES, f"they need {need}, and {_gib(free)} are free"))
    if (tasks := _smallest(_free_cgroup_tasks(), _free_user_tasks())) is not None:
        limits.append((tasks // RANK_TASKS, f"this user may start {tasks} more processes and threads"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY:
        why = f"the launcher has a connection to each, and may open {files} files (ulimit -n)"
        limits.append((files - LAUNCHER_FILES, why))
    return limits


def _available_memory() -> int | None:
    """Return MemAvailable of proc(5), in bytes: the memory that is available without swapping."""
    kib = _read_field(Path("/proc/meminfo"), "MemAvailable:")
    return None if kib is None else kib << 10


def _free_user_tasks() -> int | None:
    """Return how many more processes and threads RLIMIT_NPROC allows this user; None if it is unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or os.getuid() == 0 or sys.platform != "linux":  # root has no limit
        return None
    tasks = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and process.stat().st_uid == os.getuid():
                tasks += sum(1 for _ in (process / "task").iterdir())
        except OSError:  # it has just ended
            continue
    return limit - tasks


# ---- control groups ----


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of the enclosing groups, the innermost first."""
    try:
        lines = CGROUP_MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(",") and controllers:
            continue
        mount = CGROUP_MOUNT / controller if controllers else CGROUP_MOUNT
        inner = Path(path.lstrip("/"))
        yield from (mount / folder for folder in (inner, *inner.parents) if (mount / folder).is_dir())


def _free_cgroup_memory() -> int | None:
    """Return the bytes that the control groups still grant; None if they are unlimited.

    Cached files count as free: the kernel drops them when memory is needed.
    """
    found = []
    for folder in _cgroups("memory"):
        for limit_name, current_name, prefix in (  # version 2, version 1
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, current = _read_number(folder / limit_name), _read_number(folder / current_name)
            if limit is not None and current is not None and limit < CGROUP_UNLIMITED:
                cached = (f"{prefix}inactive_file", f"{prefix}active_file")
                cached_bytes = sum(_read_field(folder / "memory.stat", name) or 0 for name in cached)
                found.append(limit - current + cached_bytes)
                break
    return _smallest(*found)


def _free_cgroup_tasks() -> int | None:
    """Return how many more processes and threads the control groups allow; None if they are unlimited."""
    found = []
    for folder in _cgroups("pids"):
        limit, current = _read_number(folder / "pids.max"), _read_number(folder / "pids.current")
        if limit is not None and current is not None:
            found.append(limit - current)
    return _smallest(*found)


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is none, as for "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _read_field(path: Path, name: str) -> int | None:
    """Return the number after `name` in a file of names and numbers."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)


def _smallest(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _gib(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"
