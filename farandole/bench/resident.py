"""Read the memory usage of a process from /proc.

The files are described in proc_pid_status(5), proc_pid_smaps_rollup(5) and proc_pid_clear_refs(5).

Ranks on a host share memory, and the kernel counts shared pages in every process that maps them.  The *proportional*
size (PSS) divides every page among the processes that map it.  The kernel does not record the peak of this size.
Shared pages stay constant during training, so their current proportional size is added to the peak of private pages.
"""

from __future__ import annotations

from pathlib import Path

_SELF = Path("/proc/self")


def start_peak() -> None:
    """Reset the peak that `peak_bytes` returns."""
    (_SELF / "clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return this process's peak memory in bytes since the call to `start_peak`, without pages of mapped files."""
    status = fields(_SELF / "status")
    own = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
    return own + fields(_SELF / "smaps_rollup")["Pss_Shmem"]


def data_bytes(process: Path = _SELF) -> int:
    """Return the current memory usage of a process in bytes, without pages of mapped files such as libraries.

    Args:
        process: the folder of the process in /proc.
    """
    rollup = fields(process / "smaps_rollup")
    return rollup["Pss_Anon"] + rollup["Pss_Shmem"]


def library_bytes() -> int:
    """Return the resident size of the files that this process maps, mostly libraries, in bytes.

    Other processes may share these pages.
    """
    return fields(_SELF / "status")["RssFile"]


def fields(path: Path) -> dict[str, int]:
    """Return a dict that maps names to bytes, from lines such as `Name:  123 kB` of a file in /proc."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}
