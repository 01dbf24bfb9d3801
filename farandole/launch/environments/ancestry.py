"""A name for the job of a launcher that gives it none: its process on this host."""

from __future__ import annotations

import os
from pathlib import Path


def job_of_ancestor(*names: str) -> str:
    """Name the nearest ancestor process called one of `names`; this process's parent where there is none.

    The start time is part of the name: process ids come back, pairs of the two do not.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            name, parent, started = _process(pid)
        except (OSError, ValueError):  # no /proc, or an ancestor outside this container
            break
        if name in names:
            return f"{name}-{pid}-{started}"
        pid = parent
    return f"parent-{os.getppid()}"


def _process(pid: int) -> tuple[str, int, int]:
    """Name, parent and start time (in clock ticks since boot) of a process; see proc(5)."""
    text = Path(f"/proc/{pid}/stat").read_text()
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, int(fields[1]), int(fields[19])
