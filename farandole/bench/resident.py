"""Read the memory of a process from Linux: see proc_pid_status(5), proc_pid_smaps_rollup(5) and proc_pid_clear_refs(5).

Ranks of a host share memory, and the kernel counts shared pages in every process that maps them.  The *proportional*
size (PSS) divides every page among the processes that map it.  The kernel records the peak of private pages.  Shared
pages stay constant during training, so their current proportional size is added to that peak.
"""

from __future__ import annotations

from pathlib import Path

_SELF = Path("/proc/self")


def start_peak() -> None:
    """Reset the peak that `peak_bytes` returns."""
    (_SELF / "clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return this process's peak memory since `start_peak` in bytes, without file pages."""
    status = fields(_SELF / "status")
    own = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
    return own + fields(_SELF / "smaps_rollup")["Pss_Shmem"]


def data_bytes(process: Path = _SELF) -> int:
    """Return the memory of a process in bytes, without file pages; `process` is the process's folder in /proc."""
    rollup = fields(process / "smaps_rollup")
    return rollup["Pss_Anon"] + rollup["Pss_Shmem"]


def library_bytes() -> int:
    """Return the size in bytes of this process's file pages, which other processes may also map."""
    return fields(_SELF / "status")["RssFile"]


def fields(path: Path) -> dict[str, int]:
    """Return the values of lines such as `Name:  123 kB` in a /proc file, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}
