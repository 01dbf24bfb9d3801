"""Bytes of the tensors that are alive while a step runs, and the most of them at any one time.

What the operating system says of a process holds its libraries, the allocator's leftovers and pages that were
never touched; this is what the program itself asked to keep.  Two tensors on one storage count once.
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
    """The memory of a tensor, of a DTensor what this rank has of it; None where it has none."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.device.type == "meta" or local.layout != torch.strided:
        return None
    storage = local.untyped_storage()
    try:
        storage.data_ptr()
    except RuntimeError:  # a subclass of Tensor whose values are elsewhere, as those of a sharded gradient
        return None
    return storage


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of all storages alive after each operator that runs inside of it.

        with TensorBytes(model.parameters()) as tracked:
            step()
        print(tracked.before, tracked.peak)

    `kept` are tensors to look at besides those that Python's collector knows, with their gradients.  The storages are
    summed anew after each operator, because one may change its size in place, as FSDP2 frees its
    parameters; that takes milliseconds, so a step inside of it is not to be timed.  What an operator takes and
    gives back before it returns is not seen.
    """

    def __init__(self, kept: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._alive: dict[int, Reference] = {}
        # not `[*gc.get_objects()]`: that list would be in itself, and keep all that is in it until the next collection
        for tensor in chain(gc.get_objects(), kept):
            if issubclass(type(tensor), Tensor):  # `isinstance` would ask a proxy for its class
                self._add(tensor)
                if tensor.is_leaf and tensor.grad is not None:
                    self._add(tensor.grad)
        self.before = self.now()
        """Bytes alive when this was made."""
        self.peak = self.before
        """The most bytes alive at once, so far."""

    def now(self) -> int:
        """Bytes alive at this moment."""
        storages = [reference() for reference in self._alive.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def _add(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None:
            return
        # The C++ storage tells two Python objects of one storage apart from two storages.
        key = storage._cdata
        known = self._alive.get(key)
        if known is None or known() is None:
            self._alive[key] = weakref.ref(storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and look."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak = max(self.peak, self.now())
        return result
