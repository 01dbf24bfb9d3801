"""Disk properties: file system, free space, bandwidth, and the I/O time per training step."""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from farandole._troubleshooting import Documented
from farandole.data.wording import counted, size

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


class OffloadError(Documented, RuntimeError):
    """Raised if offloaded state cannot be stored, read or written; the message names the state, location and reason."""

    _section = "offloaderror"


class NoSpace(OffloadError):
    """Raised if a file system has too little free space for the state."""

    _section = "no-space-left-on-the-disk"


@dataclass(frozen=True)
class FileSystem:
    """The file system of a folder: its type (such as `ext4`), device and mount point."""

    kind: str
    device: str
    mounted: str

    @property
    def in_memory(self) -> bool:
        """Whether the file system is in memory, in which case offloading to it saves no memory."""
        return self.kind in _IN_MEMORY

    def __str__(self) -> str:
        return f"{self.kind} of {self.device} at {self.mounted}"


def file_system(folder: str | os.PathLike[str]) -> FileSystem:
    """Return the file system of `folder`.  On systems without /proc, the type is unknown."""
    real = Path(folder).resolve()
    found = FileSystem("file system", "an unknown device", str(real))
    longest = -1
    for mount in _mounts():  # the last mount at a path hides the earlier ones
        if real.is_relative_to(mount.mounted) and len(Path(mount.mounted).parts) >= longest:
            found, longest = mount, len(Path(mount.mounted).parts)
    return found


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return how many bytes an unprivileged user can still write to `folder`; `sys.maxsize` if there is no limit."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def require_folder(folder: str | os.PathLike[str]) -> Path:
    """Return `folder` as a path with `~` expanded.  Raise `OffloadError` if the folder does not exist."""
    path = Path(folder).expanduser()
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return path
    except FileNotFoundError:
        nearest = next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
        raise OffloadError(
            f"cannot offload to {path}: the folder does not exist; create it or use the nearest existing folder, "
            f"{nearest}"
        ) from None
    except OSError as error:
        raise OffloadError(f"cannot offload to {path}: {error.strerror}; choose another folder") from error
    raise OffloadError(f"cannot offload to {path}: this path is not a folder; use {path.absolute().parent}")


def require_space(folder: str | os.PathLike[str], needed: int, ranks: int = 1) -> None:
    """Raise `NoSpace` unless `folder` has `needed` free bytes for each of `ranks` ranks on this host.

    All ranks must call this function before any rank creates its file, because each file reserves space.
    """
    path = require_folder(folder)
    total, free = needed * ranks, free_bytes(path)
    if total <= free:
        return
    where = file_system(path)
    each = f" ({size(needed)} for each of {counted(ranks, 'rank')})" if ranks > 1 else ""
    raise NoSpace(
        f"not enough disk space: {size(total)} needed in {path}{each}, {size(free)} free ({where}); "
        f"{_advice(total, free, where)}"
    )


def _advice(needed: int, free: int, where: FileSystem) -> str:
    """Return advice for the user: how much space to free, and a disk with enough space if there is one."""
    best, most = "", needed - 1
    for mount in _mounts():
        if mount.in_memory or mount.device == where.device or not mount.device.startswith("/"):
            continue
        if os.path.isdir(mount.mounted) and os.access(mount.mounted, os.W_OK):
            there = free_bytes(mount.mounted)
            if there > most:
                best, most = f", or use {mount.mounted}, which has {size(there)} free", there
    return f"free {size(needed - free)} more in this file system{best}"


def _mounts() -> list[FileSystem]:
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    mounts = []
    for line in lines:  # 36 35 98:0 /root /mounted rw,noatime master:1 - ext4 /dev/sda rw
        before, _, after = line.partition(" - ")
        kind, device = after.split(" ")[:2]
        mounts.append(FileSystem(kind, _unescape(device), _unescape(before.split(" ")[4])))
    return mounts


def _unescape(text: str) -> str:
    """Decode the octal escapes that the kernel writes for spaces."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


@dataclass(frozen=True)
class Bandwidth:
    """The read and write bandwidths of a disk, in bytes per second, and the access mode used to measure them.

    Reads and writes were measured separately.
    """

    read: float
    write: float
    access: str

    def __str__(self) -> str:
        return f"{size(self.read)}/s read, {size(self.write)}/s write ({self.access})"


@dataclass(frozen=True)
class Budget:
    """The number of bytes that a training step reads and writes, and the disk's bandwidth if known."""

    read_bytes: int
    written_bytes: int
    bandwidth: Bandwidth | None = None

    @property
    def seconds(self) -> float | None:
        """The I/O time of a step in seconds, or None if the bandwidth is unknown.

        The estimate assumes that no other process uses the disk.
        """
        if self.bandwidth is None:
            return None
        return self.read_bytes / self.bandwidth.read + self.written_bytes / self.bandwidth.write

    def __str__(self) -> str:
        text = f"each step reads {size(self.read_bytes)} and writes {size(self.written_bytes)}"
        return text if self.seconds is None else f"{text}: about {self.seconds:.2g} s at {self.bandwidth}"
