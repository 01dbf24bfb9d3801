"""Tensors that are stored in an `OffloadStore`, and loaded into memory only while they are in use.

    tensors = OffloadedTensors(DiskStore("/scratch", "gradients"))
    tensor = tensors.make(numel, torch.float32, device)
    tensor.write(values)          # starts to write; the caller must not use `values` afterwards
    tensor.prefetch()             # starts to read
    values = tensor.read()        # on `device`; valid until the tensor is written or freed

Gradients and weights use these tensors.  Optimizer states use `record_stream`.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from farandole.memory.offload_store import OffloadStore, Transfer

WRITES = 2
"""The maximum number of concurrent writes; each occupies memory until it has finished."""

_HOST = torch.device("cpu")


class OffloadedTensors:
    """Creates tensors in `store`.  `close` also closes the store.

    Only one thread at a time may use the tensors.  A failed transfer raises `OffloadError` in a later write, or in the
    tensor's next `read`.
    """

    def __init__(self, store: OffloadStore) -> None:
        self.store = store
        self._writing: deque[Transfer] = deque()

    def make(self, numel: int, dtype: torch.dtype, device: torch.device) -> OffloadedTensor:
        """Return an uninitialized tensor for use on `device`."""
        return OffloadedTensor(self, numel, dtype, device)

    def wait_for_old(self, newest: Transfer) -> None:
        """Register the write `newest`, and wait until at most `WRITES` writes are in progress."""
        self._writing.append(newest)
        while len(self._writing) > WRITES:
            self._writing.popleft().synchronize()

    def close(self) -> None:
        """Finish transfers and free the space.  Further calls have no effect."""
        self._writing.clear()
        self.store.close()


class OffloadedTensor:
    """A flat tensor, created by `OffloadedTensors`."""

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
        """Start reading the tensor, unless a read is in progress or no copy is needed."""
        if self._ahead is None and self._in_place(self._device) is None:
            self._ahead = self._store.empty(self._nbytes, self._device)
            self._reading = self._store.read(self._record, self._ahead, after=[self._writing])

    def read(self, device: torch.device | None = None) -> Tensor:
        """Return the values on `device`, by default the tensor's device.

        `device` must be the tensor's device or the CPU.  If no copy is needed, the result is the stored tensor
        itself, so in-place changes modify the stored values.
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
        """Return an uninitialized tensor on `device`, to be filled and passed to `write`."""
        if (memory := self._in_place(device or self._device)) is not None:
            self._wait_for_host()
            return memory
        return self._values(self._store.empty(self._nbytes, self._device))

    def write(self, values: Tensor) -> None:
        """Start writing `values`, and discard prefetched values.

        The caller must not use `values` afterwards.
        """
        self.drop()
        self._writing = self._store.write(self._record, values.view(torch.uint8), after=[self._writing])
        self._tensors.wait_for_old(self._writing)

    def drop(self) -> None:
        """Discard prefetched values."""
        if self._ahead is not None:
            self._reading.wait_until_done()
            self._ahead = None

    def shares_memory(self, device: torch.device) -> bool:
        """Return whether `read(device)` returns the stored tensor without a copy."""
        return self._in_place(device) is not None

    def _in_place(self, device: torch.device) -> Tensor | None:
        """Return the record's memory if `device` can use it without a copy, and None otherwise."""
        memory = self._record.memory
        return None if memory is None or device.type != "cpu" else memory.view(self._dtype)

    def _wait_for_host(self) -> None:
        """Wait for copies between the record's memory and a device."""
        self.drop()
        self._reading.synchronize()
        self._writing.synchronize()

    def _values(self, memory: Tensor) -> Tensor:
        return memory[: self._nbytes].view(self._dtype)
