"""Track the memory of live tensors during a step, and its peak.

The memory that the operating system reports includes libraries and freed memory that the allocator keeps, and excludes
untouched pages.  This module counts only the memory of live tensors.  Two tensors that share a storage count once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Reference = weakref.ref[torch.UntypedStorage]


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor or of a DTensor's local part; None for a tensor without memory."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.device.type == "meta" or local.layout != torch.strided:
        return None
    storage = local.untyped_storage()
    try:
        storage.data_ptr()
    except RuntimeError:  # a subclass of Tensor without memory, such as a sharded gradient
        return None
    return storage


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of all live storages after each operator in its context.

        with TensorBytes(model.parameters()) as tracked:
            step()
        print(tracked.before, tracked.peak)

    `kept` contains tensors that Python's garbage collector may not track; their gradients count too.  All storages are
    summed after each operator, because an operator may resize a storage in place; FSDP2 frees parameters in this way.
    The sum takes milliseconds, so do not time a step in this context.  Memory that an operator allocates and frees
    internally is not tracked.
    """

    def __init__(self, kept: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._alive: dict[int, Reference] = {}
        # not `[*gc.get_objects()]`: this list would contain itself, and keep its elements until the next collection
        for tensor in chain(gc.get_objects(), kept):
            if issubclass(type(tensor), Tensor):  # `isinstance` would read `__class__` of a proxy
                self._add(tensor)
                if tensor.is_leaf and tensor.grad is not None:
                    self._add(tensor.grad)
        self.before = self.now()
        """The number of bytes of live tensors when the context was created."""
        self.peak = self.before
        """The largest number of live bytes so far."""

    def now(self) -> int:
        """Return the current number of live bytes."""
        storages = [reference() for reference in self._alive.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def _add(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None:
            return
        # Several Python objects may represent the same C++ storage.
        key = storage._cdata
        known = self._alive.get(key)
        if known is None or known() is None:
            self._alive[key] = weakref.ref(storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and update the peak."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak = max(self.peak, self.now())
        return result
