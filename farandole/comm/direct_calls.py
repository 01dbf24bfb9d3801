"""Blocking operations on small tensors with as little Python as possible.

The operations of `core.py` validate, arrange and dispatch every case.  For a small tensor that costs more than the C
core itself, so the common case calls the same C functions directly.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_size_t, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from farandole.comm.core import GroupCore
from farandole.comm.dtypes import REDUCTION_NAMES, REDUCTIONS, TYPES, reducible
from farandole.comm.native_core import NativeCore
from farandole.comm.work import WorkQueue, flags_here

_REDUCING: dict[tuple[torch.dtype | None, object], tuple[int, int]] = {
    (dtype, key): (TYPES[dtype], number)
    for dtype in TYPES
    for number, (code, name) in enumerate(zip(REDUCTIONS, REDUCTION_NAMES, strict=True))
    if reducible(dtype, number)
    for key in (code, name)
}
_MOVING: dict[torch.dtype | None, tuple[int]] = {
    dtype: (kind,) for dtype, kind in TYPES.items() if not dtype.is_complex
}


_STRIDED = torch.strided


class DirectCalls:
    """Blocking operations on dense tensors with as little Python as possible.

    Every method returns False, without effect, where this path does not apply: calls are under way, or a tensor is
    not an ordinary dense CPU tensor of the right size.  `operation.call` then serves the call or explains its mistake.
    A reduction is a name or the hash of a torch `ReduceOp` (comparing `ReduceOp`s takes a microsecond).
    """

    _group: Any = None
    _all_reduce: Any
    _reduce: Any
    _broadcast: Any
    _barrier: Any
    _reduce_scatter: Any
    _all_gather: Any
    _all_to_all: Any

    def __init__(self, core: NativeCore, queue: WorkQueue) -> None:
        library = core.host.core  # by index: functions without argument types, which convert nothing
        self._group = c_void_p(core.host.handle)  # freed only after the queue has been closed
        self._size, self._check = core.size, core.check
        self._enter, self._leave = queue.enter, queue.leave
        self._ranks, self._rank, self._messages = range(core.size), core.rank, core.messages
        self._all_reduce, self._reduce = library["frd_all_reduce"], library["frd_reduce"]
        self._broadcast, self._barrier = library["frd_broadcast"], library["frd_barrier"]
        self._reduce_scatter = library["frd_reduce_scatter_even"]
        self._all_gather = library["frd_all_gather_even"]
        self._all_to_all = library["frd_all_to_all_even"]

    def all_reduce(self, tensor: Tensor, reduction: object) -> bool:
        """All-reduce `tensor` in place."""
        plan = _REDUCING.get((getattr(tensor, "dtype", None), reduction))
        return plan is not None and self._in_place(self._all_reduce, tensor, plan)

    def reduce(self, tensor: Tensor, reduction: object, root: int) -> bool:
        """Reduce `tensor` into the one of rank `root`."""
        plan = _REDUCING.get((getattr(tensor, "dtype", None), reduction))
        return (
            plan is not None and root in self._ranks and self._in_place(self._reduce, tensor, (*plan, root))
        )

    def broadcast(self, tensor: Tensor, root: int) -> bool:
        """Copy the `tensor` of rank `root` to all ranks."""
        plan = _MOVING.get(getattr(tensor, "dtype", None))
        return (
            plan is not None
            and root in self._ranks
            and self._in_place(self._broadcast, tensor, (*plan, root))
        )

    def reduce_scatter(self, output: Tensor, input: Tensor, reduction: object) -> bool:
        """Reduce `input` and keep this rank's equal part."""
        plan = _REDUCING.get((getattr(input, "dtype", None), reduction))
        if plan is None or not isinstance(output, Tensor):
            return False
        count = output.numel()
        return input.numel() == count * self._size and self._between(
            self._reduce_scatter, input, output, count, plan
        )

    def all_gather(self, output: Tensor, input: Tensor) -> bool:
        """Concatenate every rank's `input` in `output`."""
        plan = _MOVING.get(getattr(input, "dtype", None))
        if plan is None or not isinstance(output, Tensor):
            return False
        count = input.numel()
        return output.numel() == count * self._size and self._between(
            self._all_gather, input, output, count, plan
        )

    def all_to_all(self, output: Tensor, input: Tensor) -> bool:
        """Exchange equal parts along dimension 0."""
        plan = _MOVING.get(getattr(input, "dtype", None))
        if plan is None or not isinstance(output, Tensor):
            return False
        shape = input.shape
        return (
            len(shape) > 0
            and shape == output.shape
            and not shape[0] % self._size
            and self._between(self._all_to_all, input, output, input.numel() // self._size, plan)
        )

    def barrier(self) -> bool:
        """Wait until every rank has called it."""
        if not self._enter():
            return False
        try:
            if status := self._barrier(self._group, flags_here()):
                self._check(status)
        finally:
            self._leave()
        return True

    # ---- point-to-point ----

    def send(self, tensor: Tensor, peer: int, tag: int) -> bool:
        """Send `tensor`, and block until it may be changed."""
        return self._is_message(tensor, peer) and self._messages.send(
            tensor.data_ptr(), tensor.nbytes, TYPES[tensor.dtype], peer, tag
        )

    def recv(self, tensor: Tensor, peer: int, tag: int) -> bool:
        """Receive into `tensor`, and block until it has arrived."""
        return self._is_message(tensor, peer) and self._messages.recv(
            tensor.data_ptr(), tensor.nbytes, TYPES[tensor.dtype], peer, tag
        )

    def post(self, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> Work | None:
        """Begin a message; None where this path does not apply."""
        if not self._is_message(tensor, peer):
            return None
        return self._messages.begin(
            tensor, tensor, tensor.data_ptr(), tensor.nbytes, TYPES[tensor.dtype], peer, tag, sends
        )

    def _is_message(self, tensor: Tensor, peer: int) -> bool:
        return (
            peer in self._ranks
            and peer != self._rank
            and tensor.is_cpu
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
            and tensor.data_ptr() != 0
        )

    def _in_place(self, function: Any, tensor: Tensor, plan: tuple[int, ...]) -> bool:
        address = tensor.data_ptr() if tensor.is_cpu and tensor.layout is _STRIDED else 0
        if not address or not tensor.is_contiguous() or tensor.is_neg() or not self._enter():
            return False  # an address of 0: no elements, or a wrapper of another tensor
        try:
            count = c_size_t(tensor.numel())
            status = function(self._group, c_void_p(address), count, *plan, flags_here())
            if status:  # while the queue is held: afterwards another thread may destroy the group
                self._check(status)
        finally:
            self._leave()
        return True

    def _between(
        self, function: Any, source: Tensor, target: Tensor, count: int, plan: tuple[int, ...]
    ) -> bool:
        if (
            source.dtype is not target.dtype
            or not (source.is_cpu and target.is_cpu)
            or not (source.layout is _STRIDED is target.layout)
        ):
            return False
        start, end = source.data_ptr(), target.data_ptr()
        if (
            not (start and end)
            or not (source.is_contiguous() and target.is_contiguous())
            or source.is_neg()
            or target.is_neg()
            or not self._enter()
        ):
            return False
        try:
            status = function(
                self._group, c_void_p(start), c_void_p(end), c_size_t(count), *plan, flags_here()
            )
            if status:
                self._check(status)
        finally:
            self._leave()
        return True


class DirectMethods(DirectCalls):
    """The same over the methods of an implementation that does not take addresses."""

    def __init__(self, core: GroupCore, queue: WorkQueue) -> None:
        own: Any = core  # with the operations of `Core`
        self._size, self._check = core.size, core.check
        self._enter, self._leave = queue.enter, queue.leave
        self._ranks, self._rank, self._messages = range(core.size), core.rank, core.messages
        rank = core.rank
        self._all_reduce = lambda t, _, op, flags: own.all_reduce(t, t, op, flags)
        self._reduce = lambda t, _, op, root, flags: own.reduce(
            t if rank == root else None, t, op, root, flags
        )
        self._broadcast = lambda t, _, root, flags: own.broadcast(
            *((None, t) if rank == root else (t, None)), root, flags
        )
        self._reduce_scatter = lambda source, target, _, op, flags: own.reduce_scatter(
            target, [source], op, flags
        )
        self._all_gather = lambda source, target, _, flags: own.all_gather([target], source, flags)
        self._all_to_all = lambda source, target, _, flags: own.all_to_all([target], [source], flags)
        self._barrier = lambda _, flags: own.barrier(flags)

    def _in_place(self, function: Any, tensor: Tensor, plan: tuple[int, ...]) -> bool:
        return self._run(function, [tensor], plan)

    def _between(
        self, function: Any, source: Tensor, target: Tensor, count: int, plan: tuple[int, ...]
    ) -> bool:
        return source.dtype is target.dtype and self._run(function, [source, target], plan)

    def _run(self, function: Any, tensors: list[Tensor], plan: tuple[int, ...]) -> bool:
        for tensor in tensors:
            address = tensor.data_ptr() if tensor.is_cpu and tensor.layout is _STRIDED else 0
            if not address or not tensor.is_contiguous() or tensor.is_neg():
                return False
        if not self._enter():
            return False
        try:
            with torch.no_grad():
                function(*tensors, *plan, flags_here())
        finally:
            self._leave()
        return True


class NoDirectCalls:
    """The direct path of implementations that have none."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None
