"""What Linux says of a process's memory: see proc_pid_status(5), proc_pid_smaps_rollup(5) and proc_pid_clear_refs(5).

Ranks of a host share memory, and the kernel counts it in each of them.  Its *proportional* size (PSS) divides
every page among those that map it.  What is a process's own has a peak that the kernel keeps; what is
shared does not come and go in a training, so the proportional size of now is added to it.
"""

from __future__ import annotations

from pathlib import Path

_SELF = Path("/proc/self")


def start_peak() -> None:
    """Have `peak_bytes` speak of the time from now on."""
    (_SELF / "clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most bytes of this process at any moment, but for pages of files."""
    status = fields(_SELF / "status")
    own = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
    return own + fields(_SELF / "smaps_rollup")["Pss_Shmem"]


def data_bytes(process: Path = _SELF) -> int:
    """The same, now; of another process by its folder in /proc."""
    rollup = fields(process / "smaps_rollup")
    return rollup["Pss_Anon"] + rollup["Pss_Shmem"]


def library_bytes() -> int:
    """Pages of files, which other processes may map too."""
    return fields(_SELF / "status")["RssFile"]


def fields(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file of /proc, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}
