"""Format numbers, sizes and disk errors for messages."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from farandole._troubleshooting import see


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: `1 token`, `2 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def short(number: float) -> str:
    """Format a count compactly: `850`, `42 k`, `2.6 M`, `1.3 G`."""
    if number < 1000:
        return f"{number:g}"
    if number < 10**6:
        return f"{number / 1e3:.0f} k"
    value, unit = _scaled(number / 1e6, 1000, ("M", "G", "T", "P", "E"))
    return f"{value:,.1f} {unit}"


def size(count: float) -> str:
    """Format a number of bytes: `512 bytes`, `1.5 KiB`, `20.0 GiB`."""
    if count < 1024:
        return counted(int(count), "byte")
    value, unit = _scaled(count / 1024, 1024, ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
    return f"{value:,.1f} {unit}"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    """Convert `value` to the largest unit in which it is at least 1; units differ by the factor `base`."""
    for unit in units[:-1]:
        if value < base:
            return value, unit
        value /= base
    return value, units[-1]


def disk_failure(error: OSError | str, folder: Path, needed: int = 0) -> str:
    """Return the reason for a failed write to `folder`, with the free space if the disk is full.

    If fewer than `needed` bytes are free, any `error` is reported as a full disk, because libraries report a full
    disk in different ways.  If `folder` does not exist, its nearest existing parent folder is measured.
    """
    free = _free_bytes(folder)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or (free is not None and free < needed):
        sizes = [f"about {size(needed)} needed"] if needed else []
        sizes += [f"{size(free)} free"] if free is not None else []
        numbers = f" ({', '.join(sizes)})" if sizes else ""
        return f"no space left on the disk{numbers}{see('no-space-left-on-the-disk')}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


def _free_bytes(folder: Path) -> int | None:
    """Return the free space on the disk of `folder` or of its nearest existing parent folder, or None if unknown."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
        return shutil.disk_usage(existing).free
    except OSError:
        return None
