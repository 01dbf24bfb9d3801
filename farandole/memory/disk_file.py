"""An unnamed scratch file with reserved space, accessed without the page cache.

Each step reads and writes the offloaded state once, so the page cache would cost a copy and use the memory that
offloading saves.  The file is therefore opened with O_DIRECT, which requires addresses, offsets and lengths to be
multiples of the block size.
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
from farandole.memory.disk import (
    NoSpace,
    OffloadError,
    file_system,
    free_bytes,
    require_folder,
    require_space,
)

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""All offsets, lengths and buffer addresses are multiples of this number of bytes.

No current disk has larger blocks.
"""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR)
"""The error codes of kernels and file systems that do not support O_TMPFILE or O_DIRECT.

A kernel without O_TMPFILE tries to open the folder itself, which fails with EISDIR.
"""


def padded(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(nbytes: int) -> Tensor:
    """Return zeroed, page-aligned memory of `padded(nbytes)` bytes (1-D, uint8)."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, padded(nbytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):  # the kernel pins fewer pages in each request
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the kernel does not support huge pages
                raise
    return torch.frombuffer(memory, dtype=torch.uint8)  # the tensor keeps the memory alive


class DiskFile:
    """An unnamed file in `folder`, deleted by the kernel when the process ends.

    Error messages use `name` to describe the file's content.  `direct` is true if the file bypasses the page cache.

    Raises:
        OffloadError: if the file cannot be created.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str) -> None:
        self.nbytes = 0
        self.direct = False
        self.name = name
        self.folder = require_folder(folder)
        self.file_system = file_system(self.folder)
        self._descriptor = -1
        self._descriptor = self._open()

    @property
    def access(self) -> str:
        """The disk and its access mode, as text."""
        if self.file_system.in_memory:
            how = "which is in memory, so offloading to it saves no memory"
        elif self.direct:
            how = "direct"
        else:
            how = "without O_DIRECT: through the page cache, flushed after each write"
        return f"{self.file_system}, {how}"

    def extend(self, nbytes: int) -> None:
        """Reserve `nbytes` more bytes.  On failure, raise `NoSpace` or `OffloadError` and reserve nothing."""
        if nbytes:
            require_space(self.folder, nbytes)
            self._reserve(nbytes)
            if self.nbytes == 0:
                self.direct = self._make_direct()
            self.nbytes += nbytes

    def read(self, part: memoryview, offset: int) -> None:
        """Fill `part` with the bytes at `offset`.  Raise OSError if the read fails or the file is too short."""
        done = 0
        while done < len(part):
            count = os.preadv(self._descriptor, [part[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"the file is {len(part) - done:,} bytes too short")
            done += count
        self._drop_cache(offset, len(part))

    def write(self, part: memoryview, offset: int) -> None:
        """Write `part` to the disk at `offset`.  Raise OSError if the write fails."""
        done = 0
        while done < len(part):
            done += os.pwritev(self._descriptor, [part[done:]], offset + done)
        if not self.direct:
            os.fdatasync(self._descriptor)
            self._drop_cache(offset, len(part))

    def why(self, error: OSError) -> str:
        """Return the reason for `error` and the location of the file, as text."""
        return f"{error.strerror or error} in {self.folder} ({self.file_system})"

    def close(self) -> None:
        """Close the file and free its space.  Further calls have no effect."""
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
                f"cannot create a file for {self.name}: {self.why(error)}; "
                f"choose a folder in which user {os.geteuid()} can write"
            ) from error
        return descriptor

    def _reserve(self, nbytes: int) -> None:
        start, end = self.nbytes, self.nbytes + nbytes
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, start, nbytes)
            else:  # macOS
                for at in range(start, end, 1 << 20):
                    os.pwrite(self._descriptor, bytes(min(1 << 20, end - at)), at)
        except OSError as error:
            needed = f"cannot reserve {size(nbytes)} for {self.name}: {self.why(error)}"
            if error.errno not in _FULL:
                raise OffloadError(needed) from error
            os.ftruncate(self._descriptor, start)
            free = free_bytes(self.folder)
            more = f"free {size(nbytes - free)} more" if free < nbytes else "check quotas and `ulimit -f`"
            raise NoSpace(f"{needed}, {size(free)} available; {more}") from error

    def _make_direct(self) -> bool:
        """Try to enable direct access, and return whether it works."""
        if not hasattr(os, "O_DIRECT"):
            return False
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            # some file systems accept the flag but reject reads
            os.preadv(self._descriptor, [aligned_buffer(ALIGNMENT).numpy().data], 0)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise OffloadError(
                    f"cannot read {self.name} back: {self.why(error)}; choose a folder on another disk"
                ) from error
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            return False
        return True

    def _drop_cache(self, offset: int, length: int) -> None:
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)
