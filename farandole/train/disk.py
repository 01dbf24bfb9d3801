"""What goes wrong with disks, said in one line."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from farandole.data.wording import size


class DiskError(RuntimeError):
    """A file that a run cannot do without cannot be written; the message says which and why."""


def reason(error: OSError | str, folder: Path, needed: int = 0) -> str:
    """Why writing to `folder` failed, in words; where space may be the cause, with what is left of it.

    `needed` is the bytes that were to be written.  Libraries hide the cause of a full disk in many ways:
    fewer free bytes than `needed` are taken as the cause whatever they say.
    """
    free = shutil.disk_usage(folder).free
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or free < needed:
        wanted = f"about {size(needed)} needed, " if needed else ""
        return f"no space left on the disk ({wanted}{size(free)} free)"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)
