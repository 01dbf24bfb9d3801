"""The bytes of the tensors that are alive while something runs, and its work."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farandole.memory.flops import operations


class Alive(TorchDispatchMode):
    """Counts what operations inside of it make, real tensors or fake ones, and what they do.

    Memory of the tensors in `outside` is not counted.  `now` and `peak` are bytes; `flops`, `moved` and `events` as
    in `Trace`.
    """

    def __init__(self, outside: Iterable[Any]) -> None:
        super().__init__()
        self.now = self.peak = self.flops = self.moved = 0
        self.events: list[tuple[int, int]] = []
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._outside = {tensor.untyped_storage()._cdata for tensor in outside if isinstance(tensor, Tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at what it returns."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        written = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        fresh = False
        for tensor in written:
            fresh |= self._add(tensor)
        self.peak = max(self.peak, self.now)
        flops = operations(func.overloadpacket, args, kwargs, output)
        self.flops += flops
        if not flops and (fresh or func._schema.is_mutable):  # else it is a view
            read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            self.moved += sum(one.numel() * one.element_size() for one in (*read, *written))
        return output

    def _add(self, tensor: Tensor) -> bool:
        """Count the storage of `tensor` from now on; whether it is a new one."""
        if tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._outside:
            return False
        known = self._seen.get(key)
        if known is not None and known() is not None:
            return False
        nbytes = storage.nbytes()
        if nbytes == 0:
            return True
        number = len(self.events)
        self.now += nbytes
        self.events.append((number, nbytes))
        self._seen[key] = weakref.ref(storage, lambda _: self._free(number, nbytes))
        return True

    def _free(self, number: int, nbytes: int) -> None:
        self.now -= nbytes
        self.events.append((number, 0))
