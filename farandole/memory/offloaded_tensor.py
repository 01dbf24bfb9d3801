"""Tensors in records of an `OffloadStore`, which are in memory only while they are used.

    tensors = OffloadedTensors(DiskStore("/scratch", "gradients"))
    tensor = tensors.make(numel, torch.float32, device)
    tensor.write(values)          # starts; the caller no longer uses `values`
    tensor.prefetch()             # starts to read
    values = tensor.read()        # on `device`; the caller's until it is written or freed

For gradients and weights, each of which has a size of its own; the states of an optimizer, which pass through a few buffers
one after another, use `record_stream`.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from farandole.memory.offload_store import OffloadStore, Transfer

WRITES = 2
"""Tensors that are being written at a time, and occupy memory meanwhile."""

_HOST = torch.device("cpu")


class OffloadedTensors:
    """Makes tensors in `store`, which it closes.

    One thread at a time uses them.  A failure is raised as `OffloadError`: by the next writes, or by `read` of the tensor.
    """

    def __init__(self, store: OffloadStore) -> None:
        self.store = store
        self._writing: deque[Transfer] = deque()

    def make(self, numel: int, dtype: torch.dtype, device: torch.device) -> OffloadedTensor:
        """Return a tensor of undefined content that is used on `device`."""
        return OffloadedTensor(self, numel, dtype, device)

    def wait_for_old(self, newest: Transfer) -> None:
        """Count a write that has started, and wait until few are under way."""
        self._writing.append(newest)
        while len(self._writing) > WRITES:
            self._writing.popleft().synchronize()

    def close(self) -> None:
        """Finish transfers and free the space; may be called again."""
        self._writing.clear()
        self.store.close()


class OffloadedTensor:
    """A flat tensor, made by `OffloadedTensors`."""

    def __init__(
        self, tensors: OffloadedTensors, numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tensors, self._store = tensors, tensors.store
        self._dtype, self._device = dtype, device
        self._nbytes = numel * dtype.itemsize
        (self._record,) = self._store.allocate([self._nbytes])
        self._ahead: Tensor | None = None  # memory into which the record is being read
        self._reading = self._writing = Transfer()

    def prefetch(self) -> None:
        """Start to read, if that has not begun."""
        if self._ahead is None and self._in_place(self._device) is None:
            self._ahead = self._store.empty(self._nbytes, self._device)
            self._reading = self._store.read(self._record, self._ahead, after=[self._writing])

    def read(self, device: torch.device | None = None) -> Tensor:
        """Return the values on `device`, which is the tensor's own or the host.

        Where they need not be copied it is the memory of the record: what the caller changes is then changed in the record.
        """
        if (memory := self._in_place(device or self._device)) is not None:
            self._wait_for_host()
            return memory
        self.prefetch()
        assert self._ahead is not None
        memory, self._ahead = self._ahead, None
        self._reading.wait()
        if self._writing.error is not None:
            raise self._writing.error
        return self._values(memory)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Return memory of undefined content on `device`, to be filled and written."""
        if (memory := self._in_place(device or self._device)) is not None:
            self._wait_for_host()
            return memory
        return self._values(self._store.empty(self._nbytes, self._device))

    def write(self, values: Tensor) -> None:
        """Start to write `values`, which the caller must not touch any more; what was prefetched is forgotten."""
        self.drop()
        self._writing = self._store.write(self._record, values.view(torch.uint8), after=[self._writing])
        self._tensors.wait_for_old(self._writing)

    def drop(self) -> None:
        """Forget what was prefetched."""
        if self._ahead is not None:
            self._reading.settle()
            self._ahead = None

    def shares_memory(self, device: torch.device) -> bool:
        """Whether `read(device)` returns the memory of the record."""
        return self._in_place(device) is not None

    def _in_place(self, device: torch.device) -> Tensor | None:
        """The memory of the record, if the store has memory and `device` can use it."""
        memory = self._record.memory
        return None if memory is None or device.type != "cpu" else memory.view(self._dtype)

    def _wait_for_host(self) -> None:
        """Wait for copies between the memory of the record and a device."""
        self.drop()
        self._reading.synchronize()
        self._writing.synchronize()

    def _values(self, memory: Tensor) -> Tensor:
        return memory[: self._nbytes].view(self._dtype)
