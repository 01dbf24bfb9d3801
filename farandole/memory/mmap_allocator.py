"""Tensors in memory-mapped scratch files: the kernel keeps in memory what fits.

For gradients and parameters, which are used all through a step; master weights and optimizer states, whose next use is
known, go through `record_stream`.  A page whose memory is needed is written to the file if it has changed, and read
again when it is used.  The files have no names, so that nothing remains of them however a process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.data.wording import size
from farandole.memory.disk import NoSpace, OffloadError, require_folder, require_space


class MmapAllocator:
    """Makes tensors in files in `folder`, for one rank or for all ranks of `comm`, which share memory.

    Every method is called by all ranks of `comm`.  Raises `OffloadError` on all of them if one can have no file.
    """

    def __init__(self, folder: str, comm: Communicator) -> None:
        self._folder, self._comm = folder, comm

    def own(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat tensor of this rank."""

        def make() -> tuple[Tensor, str]:
            tensor, path = _new_file(self._folder, numel, dtype)
            os.unlink(path)
            return tensor, path

        return self._together(make)[0]

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat tensor in memory that all ranks of `comm` share."""
        tensor, path = self._together(
            lambda: _new_file(self._folder, numel, dtype) if self._comm.rank == 0 else (torch.empty(0), "")
        )
        try:
            whole = self._comm.broadcast_object(path)
            if self._comm.rank != 0:
                tensor = self._together(lambda: (_map(whole, numel, dtype), ""))[0]
            else:
                self._together(lambda: (tensor, ""))
        finally:
            if path:
                os.unlink(path)
        return tensor

    def _together(self, make: Callable[[], tuple[Tensor, str]]) -> tuple[Tensor, str]:
        """Return the result of `make`; raise on all ranks if it fails on one."""
        made, refusal = (torch.empty(0), ""), None
        try:
            made = make()
        except OffloadError as error:
            refusal = error
        refusals = self._comm.all_gather_object(None if refusal is None else str(refusal))
        found = next(((rank, text) for rank, text in enumerate(refusals) if text is not None), None)
        if found is not None:
            if made[1]:
                with suppress(FileNotFoundError):
                    os.unlink(made[1])
            raise refusal or OffloadError(f"rank {found[0]}: {found[1]}")
        return made


def _new_file(folder: str, numel: int, dtype: torch.dtype) -> tuple[Tensor, str]:
    """Return a tensor in a new file that still has a name, and the name."""
    nbytes = max(1, numel * dtype.itemsize)
    where = require_folder(folder)
    require_space(where, nbytes)
    try:
        descriptor, path = tempfile.mkstemp(prefix="farandole-", dir=where)
    except OSError as error:
        raise OffloadError(f"cannot make a file in {where}: {error.strerror}") from error
    try:
        os.posix_fallocate(
            descriptor, 0, nbytes
        )  # else a full disk would kill the process at a write to memory
    except OSError as error:
        os.unlink(path)
        raise NoSpace(f"no room for {size(nbytes)} in {where}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return _map(path, numel, dtype), path


def _map(path: str, numel: int, dtype: torch.dtype) -> Tensor:
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), max(1, numel * dtype.itemsize))
    except OSError as error:
        raise OffloadError(f"cannot map {path}: {error.strerror}") from error
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel)  # the tensor keeps the mapping alive
