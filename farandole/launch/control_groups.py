"""Read the limits that control groups set for a container, a Kubernetes pod or a Slurm job.

Both versions of control groups are supported, and the limits of all enclosing groups apply.  See cgroups(7) and
https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""Version 1 of control groups reports a limit of at least this number of bytes if memory is unlimited."""


def available_memory() -> int:
    """Return how many bytes of memory the host and the control groups still allow this process to allocate."""
    kib = read_field(Path("/proc/meminfo"), "MemAvailable:")
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if kib is None else kib << 10
    granted = free_memory()
    return host if granted is None else max(0, min(host, granted))


def free_memory() -> int | None:
    """Return how many bytes of memory the control groups still allow; None if memory is unlimited.

    Cached files count as free, because the kernel drops them when memory is needed.
    """
    found = []
    for folder in _folders("memory"):
        for limit_name, current_name, prefix in (  # version 2, version 1
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, current = _read_number(folder / limit_name), _read_number(folder / current_name)
            if limit is not None and current is not None and limit < UNLIMITED:
                cached = (f"{prefix}inactive_file", f"{prefix}active_file")
                cached_bytes = sum(read_field(folder / "memory.stat", name) or 0 for name in cached)
                found.append(limit - current + cached_bytes)
                break
    return min(found, default=None)


def free_tasks() -> int | None:
    """Return the number of additional processes and threads that the control groups allow; None if unlimited."""
    found = []
    for folder in _folders("pids"):
        limit, current = _read_number(folder / "pids.max"), _read_number(folder / "pids.current")
        if limit is not None and current is not None:
            found.append(limit - current)
    return min(found, default=None)


def processor_quota() -> float | None:
    """Return the CPU quota of the control groups, as a number of processors; None if there is no quota.

    `docker run --cpus` and Kubernetes limits set this quota.
    """
    found = []
    for folder in _folders("cpu"):
        words = _read_words(folder / "cpu.max") or [  # version 2, version 1
            *_read_words(folder / "cpu.cfs_quota_us"),
            *_read_words(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and all(word.isdecimal() for word in words):  # neither "max" nor -1
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def oom_kills() -> int | None:
    """Return how many processes of this control group the kernel has killed for lack of memory; None if unknown."""
    for folder in _folders("memory"):
        for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
            kills = read_field(folder / name, "oom_kill")
            if kills is not None:
                return kills
    return None


def read_field(path: Path, name: str) -> int | None:
    """Return the number on the line `<name> <number>` of a file, or None if there is no such line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and its enclosing groups, innermost first."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(",") and controllers:
            continue
        mount = MOUNT / controller if controllers else MOUNT
        inner = Path(path.lstrip("/"))
        yield from (mount / folder for folder in (inner, *inner.parents) if (mount / folder).is_dir())


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _read_number(path: Path) -> int | None:
    """Return the number in a file, or None if the content is not a number (for example, "max")."""
    words = _read_words(path)
    return int(words[0]) if words and words[0].isdecimal() else None
