"""Check how many ranks a host can start, given its limits on memory, processes and open files."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from farandole.launch import control_groups
from farandole.launch.cores import usable_cores
from farandole.launch.placement import LaunchError

RANK_BYTES = 140 << 20
"""The memory in bytes that a rank uses before any computation, for Python and torch 2.13, as measured on Linux."""
RANK_TASKS = 2
"""The number of processes and threads of an idle rank."""
LAUNCHER_FILES = 64
"""The number of files that a launcher opens, not counting one connection per rank."""
START_S = 2.0
"""The processor time in seconds that a rank needs to load torch."""
MAX_RANKS_PER_CORE = 4
"""A higher number of ranks per core causes a warning."""


ACCELERATOR_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
"""The device files of the NVIDIA and AMD drivers."""


def offered_accelerators() -> int:
    """Return the number of accelerators visible to torch; torch is loaded only if a driver is installed."""
    if not any(os.path.exists(path) for path in ACCELERATOR_DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def offered_ranks(accelerators: int | None = None) -> int:
    """Return the default number of ranks on this host: one per accelerator, else one per physical core."""
    found = offered_accelerators() if accelerators is None else accelerators
    return found or usable_cores()


def check_rank_limits(ranks: int) -> None:
    """Raise `LaunchError` if this host cannot start this many ranks."""
    for most, why in _limits(ranks):
        if ranks > most:
            advice = f"use at most --ranks {most}" if most > 0 else "this host cannot start even one rank"
            raise LaunchError(f"--ranks {ranks}: {why}; {advice}")


def oversubscription_warning(ranks: int, cores: int) -> str | None:
    """Return a warning if there are more than `MAX_RANKS_PER_CORE` ranks per core, else None."""
    if ranks <= MAX_RANKS_PER_CORE * cores:
        return None
    seconds = ranks * START_S / cores
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    return (
        f"warning: {ranks} ranks on {cores} cores take about {duration} and {_gib(ranks * RANK_BYTES)} of memory to "
        f"start, and every collective waits until each rank has run on a core; use --ranks {cores} for one rank "
        "per core"
    )


def _limits(ranks: int) -> list[tuple[int, str]]:
    """Return upper limits on the number of ranks on this host, each with an explanation for an error message."""
    free = control_groups.available_memory()
    need = f"{_gib(ranks * RANK_BYTES)} of memory for Python and torch alone ({RANK_BYTES >> 20} MiB each)"
    limits = [(free // RANK_BYTES, f"the ranks need {need}, but only {_gib(free)} is free")]
    for tasks in (control_groups.free_tasks(), _free_user_tasks()):
        if tasks is not None:
            limits.append((tasks // RANK_TASKS, f"only {tasks} more processes and threads may be started"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY:
        why = f"the launcher needs a connection to each rank, but may open only {files} files (ulimit -n)"
        limits.append((files - LAUNCHER_FILES, why))
    return limits


def _free_user_tasks() -> int | None:
    """Return how many more processes and threads RLIMIT_NPROC allows this user; None if unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or os.getuid() == 0 or sys.platform != "linux":  # root has no limit
        return None
    tasks = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and process.stat().st_uid == os.getuid():
                tasks += sum(1 for _ in (process / "task").iterdir())
        except OSError:  # the process has just ended
            continue
    return limit - tasks


def _gib(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"
