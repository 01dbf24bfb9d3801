"""A scratch file: space reserved, no name that could be left behind, read and written past the page cache.

What is kept here is read once and written once per step, so the page cache of the kernel has nothing to offer: it
would cost a copy, and the memory that is to be saved.  The file is opened with O_DIRECT, which asks for
addresses, offsets and lengths that are multiples of a block.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile

import torch
from torch import Tensor

from farandole.data.wording import size
from farandole.memory.errors import NoSpace, OffloadError
from farandole.memory.file_system import file_system, free_bytes, require_folder, require_space

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Bytes.  Offsets, lengths and buffers are multiples of it; no disk in use has larger blocks."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR)
"""EISDIR is what a kernel says that takes O_TMPFILE for an attempt to open the folder itself."""


def padded(count: int) -> int:
    """`count` bytes rounded up to whole blocks."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def aligned_buffer(count: int) -> Tensor:
    """Zeroed memory for `count` bytes: 1-D, uint8, page aligned, a whole number of blocks long."""
    if count == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, padded(count))
    if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages for the kernel to pin in each request
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel built without them
                raise
    return torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the memory for as long as it lives


class ScratchFile:
    """`nbytes` on the disk of `folder`, for as long as this object is used.

    `name` says in errors what is kept.  The file has no name, so that however the process ends nothing remains.
    `direct` tells whether it is read and written past the page cache.

    Raises `NoSpace` where the space cannot be reserved, `OffloadError` for anything else.
    """

    def __init__(self, folder: str | os.PathLike[str], nbytes: int, name: str) -> None:
        self.nbytes = nbytes
        self.name = name
        self.folder = require_folder(folder)
        self.file_system = file_system(self.folder)
        self._descriptor = -1
        require_space(self.folder, nbytes)
        self._descriptor = self._open()
        self._reserve()
        self.direct = self._make_direct()

    def read(self, part: memoryview, offset: int) -> None:
        """Fill `part` from the bytes at `offset`.  OSError where that fails or the file ends before."""
        done = 0
        while done < len(part):
            count = os.preadv(self._descriptor, [part[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"the file ends {len(part) - done:,} bytes too early")
            done += count
        self._forget(offset, len(part))

    def write(self, part: memoryview, offset: int) -> None:
        """Write `part` at `offset`; it is on its way to the disk, and no later error of it goes unseen."""
        done = 0
        while done < len(part):
            done += os.pwritev(self._descriptor, [part[done:]], offset + done)
        if not self.direct:
            os.fdatasync(self._descriptor)
            self._forget(offset, len(part))

    def why(self, error: OSError) -> str:
        """What failed, and where, for people."""
        return f"{error.strerror or error} in {self.folder} ({self.file_system})"

    def close(self) -> None:
        """Give the space back; may be called again.  Nothing may be in motion any more."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()

    def _open(self) -> int:
        try:
            if hasattr(os, "O_TMPFILE"):
                try:
                    return os.open(self.folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR, 0o600)
                except OSError as error:
                    if error.errno not in _UNSUPPORTED:
                        raise
            descriptor, path = tempfile.mkstemp(prefix="farandole-", dir=self.folder)
            os.unlink(path)
        except OSError as error:
            raise OffloadError(
                f"cannot make a file for {self.name}: {self.why(error)}; "
                f"name a folder in which user {os.geteuid()} can write"
            ) from error
        return descriptor

    def _reserve(self) -> None:
        if self.nbytes == 0:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, self.nbytes)
            else:  # macOS
                for at in range(0, self.nbytes, 1 << 20):
                    os.pwrite(self._descriptor, bytes(min(1 << 20, self.nbytes - at)), at)
        except OSError as error:
            needed = f"cannot reserve {size(self.nbytes)} for {self.name}: {self.why(error)}"
            if error.errno not in _FULL:
                raise OffloadError(needed) from error
            os.ftruncate(self._descriptor, 0)
            free = free_bytes(self.folder)
            more = (
                f"free {size(self.nbytes - free)} more" if free < self.nbytes else "a quota or limit is lower"
            )
            raise NoSpace(f"{needed}, {size(free)} free: {more}") from error

    def _make_direct(self) -> bool:
        """Ask for direct access, and try it: some file systems accept what they then refuse to do."""
        if not hasattr(os, "O_DIRECT") or self.nbytes == 0:
            return False
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._descriptor, [aligned_buffer(ALIGNMENT).numpy().data], 0)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise OffloadError(f"cannot read {self.name} back: {self.why(error)}") from error
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            return False
        return True

    def _forget(self, offset: int, length: int) -> None:
        """Have the page cache let go of what was moved through it."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)
