"""Which file system a folder lies on, and whether there is room."""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from farandole.data.wording import counted, size
from farandole.memory.errors import NoSpace, OffloadError

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


@dataclass(frozen=True)
class FileSystem:
    """Where a folder lies: the kind (`ext4`), the device and the folder where it is mounted."""

    kind: str
    device: str
    mounted: str

    @property
    def in_memory(self) -> bool:
        """Whether its files occupy memory, so that nothing is gained by keeping state there."""
        return self.kind in _IN_MEMORY

    def __str__(self) -> str:
        return f"{self.kind} of {self.device} at {self.mounted}"


def file_system(folder: str | os.PathLike[str]) -> FileSystem:
    """The file system of `folder`; of an unknown kind where there is no /proc to ask."""
    real = Path(folder).resolve()
    found = FileSystem("file system", "an unknown device", str(real))
    longest = -1
    for mount in _mounts():  # the last of those mounted at one place covers the others
        if real.is_relative_to(mount.mounted) and len(Path(mount.mounted).parts) >= longest:
            found, longest = mount, len(Path(mount.mounted).parts)
    return found


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """What a user without privileges can still write there; no limit where the file system names none."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else sys.maxsize


def require_folder(folder: str | os.PathLike[str]) -> Path:
    """`folder` as a path.  Raises `OffloadError`, with the nearest folder there is, if it is none."""
    path = Path(folder)
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return path
    except FileNotFoundError:
        nearest = next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
        raise OffloadError(
            f"no folder {path} to keep state in; the nearest that exists is {nearest}"
        ) from None
    except OSError as error:
        raise OffloadError(f"cannot keep state in {path}: {error.strerror}") from error
    raise OffloadError(f"{path} is not a folder to keep state in; it lies in {path.absolute().parent}")


def require_space(folder: str | os.PathLike[str], needed: int, ranks: int = 1) -> None:
    """Raise `NoSpace` unless `folder` has room for `needed` bytes of each of this host's `ranks`.

    All ranks ask before the first one makes its file: what one has reserved is no longer free for the others.
    """
    path = require_folder(folder)
    total, free = needed * ranks, free_bytes(path)
    if total <= free:
        return
    where = file_system(path)
    each = f" ({size(needed)} for each of {counted(ranks, 'rank')})" if ranks > 1 else ""
    raise NoSpace(
        f"{size(total)} needed in {path}{each}, {size(free)} free ({where}); {_advice(total, free, where)}"
    )


def _advice(needed: int, free: int, where: FileSystem) -> str:
    """The nearest thing that works: what must go, or which disk has room."""
    best, room = "", needed - 1
    for mount in _mounts():
        if mount.in_memory or mount.device == where.device or not mount.device.startswith("/"):
            continue
        if os.path.isdir(mount.mounted) and os.access(mount.mounted, os.W_OK):
            there = free_bytes(mount.mounted)
            if there > room:
                best, room = f", or use {mount.mounted}, which has {size(there)}", there
    return f"free {size(needed - free)} more there{best}"


def _mounts() -> list[FileSystem]:
    """What is mounted, in the order in which it was."""
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    mounts = []
    for line in lines:  # 36 35 98:0 /root /mounted rw,noatime master:1 - ext4 /dev/sda rw
        before, _, after = line.partition(" - ")
        kind, device = after.split(" ")[:2]
        mounts.append(FileSystem(kind, _plain(device), _plain(before.split(" ")[4])))
    return mounts


def _plain(text: str) -> str:
    """Without the escapes of spaces: the kernel writes them as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
