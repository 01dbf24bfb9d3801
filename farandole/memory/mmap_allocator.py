"""Tensors in memory-mapped scratch files: the kernel keeps in memory what fits.

For gradients and parameters, which are used all through a step; master weights and optimizer states, whose next use is
known, go through `record_stream`.  A page whose memory is needed is written to the file if it has changed, and read
again when it is used.  The files have no names, so that nothing remains of them however a process ends.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.memory.disk import OffloadError
from farandole.memory.disk_file import DiskFile

T = TypeVar("T")


class MmapAllocator:
    """Makes tensors in files in `folder`, for one rank or for all ranks of `comm`, which share memory.

    Every method is called by all ranks of `comm`.  Raises `OffloadError` on all of them if one can have no file.
    """

    def __init__(self, folder: str, comm: Communicator) -> None:
        self._folder, self._comm = folder, comm

    def own(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat tensor of this rank."""

        def make() -> mmap.mmap:
            file = self._file(numel * dtype.itemsize, linked=False)
            try:
                return file.map()
            finally:
                file.close()

        return _tensor(self._together(make), numel, dtype)

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat tensor in memory that all ranks of `comm` share."""
        first = self._comm.rank == 0
        file = self._together(lambda: self._file(numel * dtype.itemsize, linked=True) if first else None)
        try:
            path = self._comm.broadcast_object(file.path if file is not None else "")
            memory = self._together(lambda: _open_map(path) if file is None else file.map())
        finally:
            if file is not None:
                file.close()
        return _tensor(memory, numel, dtype)

    def _file(self, nbytes: int, linked: bool) -> DiskFile:
        file = DiskFile(self._folder, "a memory-mapped tensor", linked)
        try:
            file.extend(max(1, nbytes))  # else a full disk would kill the process at a write to memory
        except OffloadError:
            file.close()
            raise
        return file

    def _together(self, make: Callable[[], T]) -> T:
        """Return the result of `make`; raise on all ranks if it fails on one."""
        made, refusal = None, None
        try:
            made = make()
        except OffloadError as error:
            refusal = error
        refusals = self._comm.all_gather_object(None if refusal is None else str(refusal))
        found = next(((rank, text) for rank, text in enumerate(refusals) if text is not None), None)
        if found is not None:
            if isinstance(made, DiskFile):
                made.close()
            raise refusal or OffloadError(f"rank {found[0]}: {found[1]}")
        return cast(T, made)


def _open_map(path: str) -> mmap.mmap:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except OSError as error:
        raise OffloadError(f"cannot map {path}: {error.strerror}") from error


def _tensor(memory: mmap.mmap, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the tensor in `memory`, which it keeps alive."""
    return torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)
