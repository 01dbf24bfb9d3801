"""The memory that this process's control group grants, and how often the kernel killed a process for it.

A container, a Kubernetes pod and a job of Slurm are such groups.  Both versions are read: cgroup(7),
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

NO_LIMIT = 1 << 60
"""What version 1 shows for no limit is a number beyond this, in bytes."""


def memory_room() -> int | None:
    """Bytes that the group, and those around it, still grant; None without a limit.

    What the kernel has cached of files counts as free: it gives that back.
    """
    rooms = [room for folder in _groups() if (room := _room(folder)) is not None]
    return min(rooms, default=None)


def process_room() -> int | None:
    """How many more processes and threads the group, and those around it, allow; None without a limit."""
    rooms = []
    for folder in _groups(controller="pids"):
        limit, current = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and current is not None:
            rooms.append(limit - current)
    return min(rooms, default=None)


def oom_kills() -> int | None:
    """How many processes of the group the kernel has killed for lack of memory; None where it does not say."""
    for folder in _groups():
        for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
            count = _field(folder / name, "oom_kill")
            if count is not None:
                return count
    return None


def _groups(controller: str = "memory") -> Iterator[Path]:
    """The folder of this process's group and of those around it, the innermost first."""
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


def _room(folder: Path) -> int | None:
    for limit_name, current_name, cached in (
        ("memory.max", "memory.current", ("inactive_file", "active_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        limit, current = _number(folder / limit_name), _number(folder / current_name)
        if limit is not None and current is not None and limit < NO_LIMIT:
            return limit - current + sum(_field(folder / "memory.stat", name) or 0 for name in cached)
    return None


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as for "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str) -> int | None:
    """The number after `name` in a file of names and numbers."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)
