"""A folder for a launcher's temporary files, which does not stay behind whatever becomes of the launcher.

One that is killed cannot remove its folder.  Each launcher therefore holds a lock on its own, which the kernel
opens when it ends, and removes those of this user whose lock is open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[str]:
    """A folder for the time of the block, whose name begins with `prefix`; sweeps those that were left."""
    _sweep(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, _locked(Path(folder)):
        yield folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; it appears there locked, so that nobody finds it open in between."""
    with open(folder / f"{LOCK}.new", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.rename(file.name, folder / LOCK)
        yield


def _sweep(prefix: str) -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
        with contextlib.suppress(OSError), open(lock, "r+") as file:  # another user's, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_uid == os.getuid():
                shutil.rmtree(lock.parent)
