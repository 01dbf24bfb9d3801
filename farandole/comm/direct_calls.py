"""The fast path from Python calls to the C core.

`operations.py` handles every case, but for small tensors its validation and dispatch take longer than the operation
itself.  The fast path therefore calls the C functions directly in the common case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_size_t, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from farandole.comm.core import GroupCore
from farandole.comm.dense import overlaps
from farandole.comm.dtypes import REDUCTION_NAMES, REDUCTIONS, TYPES, reducible
from farandole.comm.native_core import NativeCore
from farandole.comm.work import COMPLETED, WorkQueue, flags_here

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
    """The fast path for blocking operations on dense CPU tensors.

    The fast path does not apply if other calls are pending, or if a tensor is not a dense CPU tensor of the expected
    size.  A method then does nothing and returns None (`send` and `recv` return False), and the caller must use
    `Operation.call`, which handles every case and raises an error for invalid arguments.

    Reductions are passed as names or as hashes of torch `ReduceOp`s, because comparing two `ReduceOp` objects takes a
    microsecond.
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
        # indexing returns functions without argument types, so ctypes does not convert arguments
        library = core.host.core
        self._group = c_void_p(core.host.handle)  # freed only after the queue is closed
        self._size, self._check = core.size, core.check
        self._queue, self._enter, self._leave = queue, queue.enter, queue.leave
        self._ranks, self._rank, self._messages = range(core.size), core.rank, core.messages
        self._largest_tag = core.messages.largest_tag
        self._all_reduce, self._reduce = library["frd_all_reduce"], library["frd_reduce"]
        self._broadcast, self._barrier = library["frd_broadcast"], library["frd_barrier"]
        self._reduce_scatter = library["frd_reduce_scatter_even"]
        self._all_gather = library["frd_all_gather_even"]
        self._all_gather_list = library["frd_all_gather"]
        self._all_to_all = library["frd_all_to_all_even"]
        self._addresses, self._counts = c_void_p * core.size, c_size_t * core.size

    def all_reduce(self, tensor: Tensor, reduction: object) -> Work | None:
        """All-reduce `tensor` in place."""
        plan = _REDUCING.get((getattr(tensor, "dtype", None), reduction))
        return None if plan is None else self._in_place(self._all_reduce, tensor, plan)

    def reduce(self, tensor: Tensor, reduction: object, root: int) -> Work | None:
        """Reduce `tensor` over all ranks into the tensor on rank `root`."""
        plan = _REDUCING.get((getattr(tensor, "dtype", None), reduction))
        if plan is None or root not in self._ranks:
            return None
        return self._in_place(self._reduce, tensor, (*plan, root))

    def broadcast(self, tensor: Tensor, root: int) -> Work | None:
        """Copy `tensor` from rank `root` to all other ranks."""
        plan = _MOVING.get(getattr(tensor, "dtype", None))
        if plan is None or root not in self._ranks:
            return None
        return self._in_place(self._broadcast, tensor, (*plan, root))

    def reduce_scatter(self, output: Tensor, input: Tensor, reduction: object) -> Work | None:
        """Reduce `input` over all ranks, split the result into equal parts, and store part r in `output` on rank r."""
        plan = _REDUCING.get((getattr(input, "dtype", None), reduction))
        if plan is None or not isinstance(output, Tensor) or input.numel() != output.numel() * self._size:
            return None
        return self._between(self._reduce_scatter, input, output, output.numel(), plan, -self._rank)

    def all_gather(self, output: Tensor | Sequence[Tensor], input: Tensor) -> Work | None:
        """Gather every rank's `input` into `output`, which is a tensor or a list of tensors."""
        plan = _MOVING.get(getattr(input, "dtype", None))
        if plan is None:
            return None
        if not isinstance(output, Tensor):
            return self._collect(output, input, plan)
        count = input.numel()
        if output.numel() != count * self._size:
            return None
        return self._between(self._all_gather, input, output, count, plan, self._rank)

    def all_to_all(self, output: Tensor, input: Tensor) -> Work | None:
        """Send part j of `input` to rank j, and receive part i of `output` from rank i.

        The parts have equal sizes along dimension 0.
        """
        plan = _MOVING.get(getattr(input, "dtype", None))
        if plan is None or not isinstance(output, Tensor):
            return None
        shape = input.shape
        if not shape or shape != output.shape or shape[0] % self._size:
            return None
        return self._between(self._all_to_all, input, output, input.numel() // self._size, plan)

    def barrier(self) -> Work | None:
        """Block until every rank has called this method."""
        return self._execute((), None, self._barrier)

    # ---- point-to-point ----

    def send(self, tensor: Tensor, peer: int, tag: int) -> bool:
        """Send `tensor`, or return False if the fast path does not apply.

        When this method returns True, `tensor` may be modified.
        """
        return self._is_message(tensor, peer, tag) and self._messages.send(
            tensor.data_ptr(), tensor.nbytes, TYPES[tensor.dtype], peer, tag
        )

    def recv(self, tensor: Tensor, peer: int, tag: int) -> bool:
        """Receive into `tensor`, or return False if the fast path does not apply.

        When this method returns True, the message has arrived.
        """
        return self._is_message(tensor, peer, tag) and self._messages.recv(
            tensor.data_ptr(), tensor.nbytes, TYPES[tensor.dtype], peer, tag
        )

    def post(self, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> Work | None:
        """Start sending `tensor` to rank `peer` if `sends` is True, else start receiving into `tensor` from `peer`.

        Return None if the fast path does not apply.
        """
        if not self._is_message(tensor, peer, tag):
            return None
        return self._messages.begin(
            tensor, tensor, tensor.data_ptr(), tensor.nbytes, TYPES[tensor.dtype], peer, tag, sends
        )

    def _is_message(self, tensor: Tensor, peer: int, tag: int) -> bool:
        return (
            peer in self._ranks
            and peer != self._rank
            and 0 <= tag <= self._largest_tag
            and tensor.is_cpu
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
            and tensor.data_ptr() != 0
        )

    # ---- execution ----

    def _in_place(self, function: Any, tensor: Tensor, plan: tuple[int, ...]) -> Work | None:
        address = tensor.data_ptr() if tensor.is_cpu and tensor.layout is _STRIDED else 0
        if not address or not tensor.is_contiguous() or tensor.is_neg():
            return None  # a tensor at address 0 is empty or wraps another tensor
        count = c_size_t(tensor.numel())
        return self._execute((tensor,), None, function, c_void_p(address), count, *plan)

    def _between(
        self,
        function: Any,
        source: Tensor,
        target: Tensor,
        count: int,
        plan: tuple[int, ...],
        place: int | None = None,
    ) -> Work | None:
        """Call `function` with `source` and `target`, which may overlap only if the call is in place."""
        if (
            source.dtype is not target.dtype
            or not (source.is_cpu and target.is_cpu)
            or not (source.layout is _STRIDED is target.layout)
        ):
            return None
        start, end = source.data_ptr(), target.data_ptr()
        if (
            not (start and end)
            or not (source.is_contiguous() and target.is_contiguous())
            or source.is_neg()
            or target.is_neg()
            or (-source.nbytes < start - end < target.nbytes and _disturbs(source, target, place))
        ):
            return None
        arguments = c_void_p(start), c_void_p(end), c_size_t(count)
        return self._execute((target,), source, function, *arguments, *plan)

    def _collect(self, outputs: Sequence[Tensor], input: Tensor, plan: tuple[int, ...]) -> Work | None:
        dtype, addresses, counts = input.dtype, [], []
        for tensor in (*outputs, input):
            if (
                not isinstance(tensor, Tensor)
                or tensor.dtype is not dtype
                or not tensor.is_cpu
                or tensor.layout is not _STRIDED
                or not tensor.is_contiguous()
                or tensor.is_neg()
            ):
                return None
            addresses.append(tensor.data_ptr())
            counts.append(tensor.numel())
        source, count = addresses.pop(), counts.pop()
        if len(counts) != self._size or counts[self._rank] != count or not (source and all(addresses)):
            return None
        width = input.element_size()
        for rank, address in enumerate(addresses):
            in_place = rank == self._rank and address == source
            if overlaps(source, count * width, address, counts[rank] * width) and not in_place:
                return None
        arguments = c_void_p(source), self._addresses(*addresses), self._counts(*counts)
        return self._execute(outputs, input, self._all_gather_list, *arguments, *plan)

    def _execute(
        self, outputs: Sequence[Tensor], input: Tensor | None, function: Any, *arguments: Any
    ) -> Work | None:
        """Call the C function `function`, or return None if other calls are pending."""
        if not self._enter():
            return None
        try:
            status = function(self._group, *arguments, flags_here())
            # check before releasing the queue, because another thread may then destroy the group
            if status:
                self._check(status)
        finally:
            self._leave()
        return COMPLETED


class AsyncDirectCalls(DirectCalls):
    """The fast path for asynchronous operations: collectives return pending work."""

    def _execute(
        self, outputs: Sequence[Tensor], input: Tensor | None, function: Any, *arguments: Any
    ) -> Work | None:
        if self._queue.closed:
            return None
        check, group = self._check, self._group

        def call(flags: int, _kept: Tensor | None = input) -> None:
            status = function(group, *arguments, flags)
            if status:
                check(status)

        return self._queue.submit(call, outputs)


class DirectMethods(DirectCalls):
    """The fast path for implementations that accept tensors instead of addresses."""

    def __init__(self, core: GroupCore, queue: WorkQueue) -> None:
        own: Any = core  # the methods of `Core`
        self._size, self._check = core.size, core.check
        self._queue, self._enter, self._leave = queue, queue.enter, queue.leave
        self._ranks, self._rank, self._messages = range(core.size), core.rank, core.messages
        self._largest_tag = core.messages.largest_tag
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
        self._barrier = own.barrier

    def _in_place(self, function: Any, tensor: Tensor, plan: tuple[int, ...]) -> Work | None:
        return self._run(function, [tensor], plan)

    def _between(
        self,
        function: Any,
        source: Tensor,
        target: Tensor,
        count: int,
        plan: tuple[int, ...],
        place: int | None = None,
    ) -> Work | None:
        if source.dtype is not target.dtype or _disturbs(source, target, place):
            return None
        return self._run(function, [source, target], plan)

    def _collect(self, outputs: Sequence[Tensor], input: Tensor, plan: tuple[int, ...]) -> Work | None:
        return None

    def barrier(self) -> Work | None:
        """Block until every rank has called this method."""
        return self._run(self._barrier, [], ())

    def _run(self, function: Any, tensors: list[Tensor], plan: tuple[int, ...]) -> Work | None:
        for tensor in tensors:
            address = tensor.data_ptr() if tensor.is_cpu and tensor.layout is _STRIDED else 0
            if not address or not tensor.is_contiguous() or tensor.is_neg():
                return None
        if not self._enter():
            return None
        try:
            with torch.no_grad():
                function(*tensors, *plan, flags_here())
        finally:
            self._leave()
        return COMPLETED


def _disturbs(source: Tensor, target: Tensor, place: int | None) -> bool:
    """Return whether the tensors overlap and the call is not in place."""
    start, end, length, other = source.data_ptr(), target.data_ptr(), source.nbytes, target.nbytes
    # in place: the smaller tensor is an equal part of the larger tensor, and `source` starts `place` parts after
    # `target` (before `target` if negative); `place` is None if the operation has no in-place form
    in_place = place is not None and start - end == place * min(length, other)
    return overlaps(start, length, end, other) and not in_place


class NoDirectCalls:
    """A replacement for `DirectCalls` in implementations without a fast path: every method returns None."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None
