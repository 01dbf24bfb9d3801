"""Operations on tensors among the ranks of an MPI communicator.

MPI runs the reductions whose results match torch's, and `_reduce_here` computes the others.  MPI has no average and no
16-bit floats (the bf16 datatype is null in the MPICH wheel, and using it ends the job).  MPI's minimum may drop a NaN
on one rank and keep it on another.  Sums of 8-bit and 16-bit integers wrap around in torch but saturate in Open MPI.

MPI versions before 4 have 32-bit counts.  Operations on longer tensors are split, or use messages between each pair of
ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from farandole.comm.accelerators import wait_for_kernels
from farandole.comm.core import GroupCore, Parts
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.mpi.group import MpiGroup
from farandole.comm.reduce_rows import reduce_rows
from farandole.native import BACKGROUND, Operation

BLOCKING_FROM_BYTES = 32 << 10
"""The size in bytes from which Open MPI's blocking collectives are faster than its non-blocking collectives.

The time of a blocking collective includes the preceding agreement (`_block`).
"""
PIECE_BYTES = 1 << 30
WINDOW_BYTES = 2 << 20
"""The window size in bytes for `_reduce_here`, small enough for the cache."""

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.bool: "UINT8_T",
}
_OPS = {
    "sum": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "and": "BAND",
    "or": "BOR",
    "xor": "BXOR",
}
_BOOL_OPS = {**_OPS, "sum": "BOR", "product": "BAND", "min": "BAND", "max": "BOR"}
_UNITS = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
"""The MPI datatype for each element size in bytes, for data movement without reduction."""


class MpiCore(GroupCore):
    """Runs the operations of a group over MPI."""

    completes_at_exit = True
    takes_devices = True

    def __init__(self, group: MpiGroup, name: str = "farandole-mpi") -> None:
        super().__init__(group)  # type: ignore[arg-type]  # has the methods of a HostGroup that are used here
        self.name = name
        self.group, self.comm, self.engine = group, group.comm, group.engine
        self.mpi = group.engine.mpi
        self._memory = self.mpi.memory.fromaddress
        self._begins: dict[str, Callable[..., Any]] = {}
        self._units = {width: getattr(self.mpi, unit) for width, unit in _UNITS.items()}
        # MPI datatypes and reduction operations
        self._reductions: dict[tuple[torch.dtype, int], tuple[Any, Any]] = {}
        for dtype, kind in _TYPES.items():
            ops = _BOOL_OPS if dtype is torch.bool else _OPS
            for number, reduction in enumerate(REDUCTION_NAMES):
                if reduction in ops and not _differs(dtype, reduction):
                    plan = getattr(self.mpi, kind), getattr(self.mpi, ops[reduction])
                    self._reductions[dtype, number] = plan

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return the name of the backend; MPI selects the algorithm."""
        return self.name

    def supports(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all tensors are strided CPU or CUDA tensors; wait for the kernels that write these tensors."""
        for tensor in tensors:
            if tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
                return False
        wait_for_kernels(tensors)  # MPI does not support CUDA streams
        return True

    def subgroup(self, members: Sequence[int]) -> MpiCore:
        """Return an `MpiCore` for the group of `members`; only these ranks call this method."""
        return MpiCore(self.group.subgroup(members), self.name)

    # ---- reductions ----

    def all_reduce(self, output: Tensor, input: Tensor, reduction: int, flags: int) -> None:
        """Reduce `input` over all ranks into `output`."""
        self._begin(flags, Operation.ALL_REDUCE, input, reduction, input.numel())
        plan = self._reductions.get((input.dtype, reduction))
        if plan is None:
            self._reduce_here(output, input, reduction, None, flags)
            return
        kind, op = plan
        for source, target in zip(self._pieces(input), self._pieces(output), strict=True):
            in_place = source.data_ptr() == target.data_ptr()
            sends = self.mpi.IN_PLACE if in_place else self._buffer(source, kind)
            self._collective(flags, "Allreduce", target.nbytes, sends, self._buffer(target, kind), op)

    def reduce(self, output: Tensor | None, input: Tensor, reduction: int, root: int, flags: int) -> None:
        """Reduce `input` over all ranks into `output` on rank `root`."""
        self._begin(flags, Operation.REDUCE, input, reduction, input.numel(), root)
        plan = self._reductions.get((input.dtype, reduction))
        if plan is None:
            self._reduce_here(output, input, reduction, root, flags)
            return
        kind, op = plan
        for source, target in zip(
            self._pieces(input), self._pieces(input if output is None else output), strict=True
        ):
            sends = self.mpi.IN_PLACE if output is input else self._buffer(source, kind)
            receives = None if output is None else self._buffer(target, kind)
            self._collective(flags, "Reduce", source.nbytes, sends, receives, op, root)

    def reduce_scatter(self, output: Tensor, inputs: Parts, reduction: int, flags: int) -> None:
        """Reduce `inputs` over all ranks and store this rank's part in `output`."""
        source, counts = self._whole(inputs), self._counts(inputs)
        self._begin(flags, Operation.REDUCE_SCATTER, output, reduction, source.numel())
        plan = self._reductions.get((output.dtype, reduction))
        if plan is None or self._uncountable(counts):
            output.view(-1).copy_(self._reduce_part(source, counts, reduction, flags))
            return
        kind, op = plan
        source, receives = _apart(source, output), self._buffer(output, kind)
        if len(set(counts)) == 1:
            sends = self._blocks(source, kind)
            self._collective(flags, "Reduce_scatter_block", source.nbytes, sends, receives, op)
        else:
            sends = self._buffer(source, kind)
            self._collective(flags, "Reduce_scatter", source.nbytes, sends, receives, counts, op)

    def _reduce_here(
        self, output: Tensor | None, input: Tensor, reduction: int, root: int | None, flags: int
    ) -> None:
        """Reduce in windows: every rank reduces one part of each window, and the reduced parts are gathered."""
        source = input.view(-1)
        target = source if output is None else output.view(-1)
        length = max(1, WINDOW_BYTES // source.element_size() // self.size) * self.size
        even = source.numel() // self.size * self.size
        windows = (
            [*zip(source[:even].split(length), target[:even].split(length), strict=True)] if even else []
        )
        if even < source.numel():
            windows.append((source[even:], target[even:]))
        exchanged = self._exchange_rows(windows[0][0], flags) if windows else (None, source)
        gathering: tuple[Any, Tensor] = None, source  # the pending request and the memory that MPI reads
        # three windows overlap: n is exchanged while n - 1 is reduced and n - 2 is gathered
        for number, (window, result) in enumerate(windows):
            request, rows = exchanged
            if number + 1 < len(windows):
                exchanged = self._exchange_rows(windows[number + 1][0], flags)
            self._finish(request, window.nbytes, flags)
            before, part = gathering, reduce_rows(rows, reduction)
            gathering = self._gather_parts(result, part, root, flags), part
            self._finish(before[0], window.nbytes, flags)
        self._finish(gathering[0], gathering[1].nbytes, flags)

    def _exchange_rows(self, window: Tensor, flags: int) -> tuple[Any, Tensor]:
        """Start receiving the values that this rank reduces; return the request and a matrix with one row per rank."""
        size, count = self.size, window.numel()
        if not count % size:
            rows = torch.empty(size, count // size, dtype=window.dtype, device="cpu")
            return self._start(
                flags, "Alltoall", window.nbytes, self._blocks(window), self._blocks(rows)
            ), rows
        shares = _shares(count, size)
        rows = torch.empty(size, shares[self.rank], dtype=window.dtype, device="cpu")
        sends, receives = self._parts(window, shares), self._parts(rows, [shares[self.rank]] * size)
        return self._start(flags, "Alltoallv", window.nbytes, sends, receives), rows

    def _gather_parts(self, window: Tensor, part: Tensor, root: int | None, flags: int) -> Any:
        """Start gathering the reduced parts into `window` on `root` (None: on all ranks); return the request."""
        even, takes = not window.numel() % self.size, root in (None, self.rank)
        receives = None
        if takes:
            receives = (
                self._blocks(window) if even else self._parts(window, _shares(window.numel(), self.size))
            )
        name = ("Allgather" if root is None else "Gather") + ("" if even else "v")
        arguments = [self._buffer(part), receives, *([] if root is None else [root])]
        return self._start(flags, name, window.nbytes, *arguments)

    def _reduce_part(self, source: Tensor, counts: Sequence[int], reduction: int, flags: int) -> Tensor:
        """Reduce `source` over all ranks in rank order, and return this rank's part of the result."""
        own = [counts[self.rank]] * self.size
        rows = torch.empty(self.size, own[0], dtype=source.dtype, device="cpu")
        if self._uncountable(counts, own):
            self._exchange(flags, source.split(list(counts)), rows.unbind())
        else:
            sends, receives = self._parts(source, counts), self._parts(rows, own)
            self._collective(flags, "Alltoallv", source.nbytes, sends, receives)
        return reduce_rows(rows, reduction)

    # ---- data movement ----

    def barrier(self, flags: int) -> None:
        """Block until every rank has called this method."""
        self._begin(flags, Operation.BARRIER)
        self._collective(flags, "Barrier", 0)

    def broadcast(self, output: Tensor | None, input: Tensor | None, root: int, flags: int) -> None:
        """Copy `input` from rank `root` to `output` on the other ranks."""
        tensor = output if input is None else input
        assert tensor is not None
        self._begin(flags, Operation.BROADCAST, tensor, 0, tensor.numel(), root)
        for piece in self._pieces(tensor):
            self._collective(flags, "Bcast", piece.nbytes, self._buffer(piece), root)

    def all_gather(self, outputs: Parts, input: Tensor, flags: int) -> None:
        """Gather every rank's `input` into `outputs`."""
        counts = self._counts(outputs)
        self._begin(
            flags, Operation.ALL_GATHER, input, 0, input.numel() if len(outputs) == 1 else sum(counts)
        )
        with self._collected(outputs) as whole:
            self._all_gather(whole, input, counts, flags)

    def _all_gather(self, whole: Tensor, input: Tensor, counts: list[int], flags: int) -> None:
        parts = whole.split(counts)
        in_place = input.data_ptr() == parts[self.rank].data_ptr()
        source = input if in_place else _apart(input, whole)
        if self._uncountable(counts):
            self._exchange(flags, [source] * self.size, parts)
            return
        sends = self.mpi.IN_PLACE if in_place else self._buffer(source)
        if len(set(counts)) == 1:
            self._collective(flags, "Allgather", whole.nbytes, sends, self._blocks(whole))
        else:
            self._collective(flags, "Allgatherv", whole.nbytes, sends, self._parts(whole, counts))

    def gather(
        self, outputs: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int] | None, flags: int
    ) -> None:
        """Gather every rank's `input` into `outputs` on rank `root`."""
        sizes = list(counts or [input.numel()] * self.size)
        self._begin(flags, Operation.GATHER, input, 0, sum(sizes) if counts else input.numel(), root)
        with self._collected(outputs) as whole:
            source, is_root = _apart(input, whole), self.rank == root
            if self._uncountable(sizes):
                nothing = [input.new_empty(0)] * self.size
                sends = [source if rank == root else nothing[0] for rank in range(self.size)]
                self._exchange(flags, sends, whole.split(sizes) if is_root else nothing)
                return
            receives = (self._parts(whole, sizes) if counts else self._blocks(whole)) if is_root else None
            name, transfer = "Gatherv" if counts else "Gather", max(sizes) * input.element_size()
            self._collective(flags, name, transfer, self._buffer(source), receives, root)

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor], root: int, counts: Sequence[int] | None, flags: int
    ) -> None:
        """Send `inputs[r]` from rank `root` to `output` on rank r."""
        sizes = list(counts or [output.numel()] * self.size)
        self._begin(flags, Operation.SCATTER, output, 0, sum(sizes) if counts else output.numel(), root)
        is_root = self.rank == root
        source = _apart(self._whole(inputs), output) if is_root else output
        if self._uncountable(sizes):
            nothing = [output.new_empty(0)] * self.size
            receives = [output if rank == root else nothing[0] for rank in range(self.size)]
            self._exchange(flags, source.split(sizes) if is_root else nothing, receives)
            return
        sends = (self._parts(source, sizes) if counts else self._blocks(source)) if is_root else None
        name, transfer = "Scatterv" if counts else "Scatter", max(sizes) * output.element_size()
        self._collective(flags, name, transfer, sends, self._buffer(output), root)

    def all_to_all(self, outputs: Parts, inputs: Parts, flags: int) -> None:
        """Send part j of `inputs` to rank j, and receive part i of `outputs` from rank i."""
        self._begin(flags, Operation.ALL_TO_ALL, inputs[0])
        sent, received = self._counts(inputs), self._counts(outputs)
        if self.group.compares:
            self.group.compare_counts(sent, received, bool(flags & BACKGROUND))
        with self._collected(outputs) as whole:
            source = _apart(self._whole(inputs), whole)
            sends, receives = self._parts(source, sent), self._parts(whole, received)
            # counts differ between ranks, so all ranks pass 0 bytes to make the same choice
            self._collective(flags, "Alltoallv", 0, sends, receives)

    # ---- mpi4py buffers ----

    def _buffer(self, tensor: Tensor, kind: Any = None) -> Any:
        kind = kind or self._units[tensor.element_size()]
        return [self._memory(tensor.data_ptr(), tensor.nbytes), tensor.numel(), kind]

    def _blocks(self, tensor: Tensor, kind: Any = None) -> Any:
        """Return an mpi4py buffer with one equal part per rank; its count is the length of one part."""
        kind = kind or self._units[tensor.element_size()]
        return [self._memory(tensor.data_ptr(), tensor.nbytes), tensor.numel() // self.size, kind]

    def _parts(self, tensor: Tensor, counts: Sequence[int]) -> Any:
        """Return an mpi4py buffer for a tensor with consecutive parts of the given lengths."""
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        memory = self._memory(tensor.data_ptr(), tensor.nbytes)
        return [memory, (list(counts), starts), self._units[tensor.element_size()]]

    def _counts(self, parts: Parts) -> list[int]:
        if len(parts) == 1:
            return [parts[0].numel() // self.size] * self.size
        return [part.numel() for part in parts]

    def _pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        """Split a tensor into parts whose sizes fit MPI's count type."""
        if tensor.numel() <= self.engine.largest_count:
            return [tensor]
        return tensor.view(-1).split(PIECE_BYTES // tensor.element_size())

    def _whole(self, parts: Parts) -> Tensor:
        """Return the parts as one tensor: a view if the parts are adjacent in memory, else a copy."""
        return _joined(parts) if _adjacent(parts) else torch.cat([part.reshape(-1) for part in parts])

    @contextmanager
    def _collected(self, parts: Parts) -> Iterator[Tensor]:
        """Yield a view of the parts if they are adjacent, else a buffer that is copied to the parts on exit."""
        if _adjacent(parts):
            yield _joined(parts)
            return
        whole = parts[0].new_empty(sum(part.numel() for part in parts))
        yield whole
        for part, values in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view(part.shape))

    def _uncountable(self, *counts: Sequence[int]) -> bool:
        """Return whether the sum of any list in `counts` exceeds MPI's limit."""
        # all ranks must pass the same counts, so that they make the same choice
        return any(sum(each) > self.engine.largest_count for each in counts)

    # ---- calls ----

    def _begin(
        self,
        flags: int,
        operation: int,
        tensor: Tensor | None = None,
        op: int = 0,
        count: int = 0,
        root: int = 0,
    ) -> None:
        """Record the call for error messages; compare the ranks' calls if the debug level requires it."""
        kind = 0 if tensor is None else TYPES[tensor.dtype]
        self.group.begin(operation, kind, op, 0 if operation == Operation.ALL_TO_ALL else count, root)
        if self.group.compares:
            self.group.compare(bool(flags & BACKGROUND))

    def _collective(self, flags: int, name: str, transfer: int, *arguments: Any) -> None:
        """Run the MPI collective `name`; `transfer`, the message size in bytes, must be equal on all ranks."""
        self._finish(self._start(flags, name, transfer, *arguments), transfer, flags)

    def _start(self, flags: int, name: str, transfer: int, *arguments: Any) -> Any:
        """Start the MPI collective `name`; return the request, or None if a faster blocking call ran instead."""
        if (
            transfer >= BLOCKING_FROM_BYTES
            and self.engine.prefers_blocking
            and self._block(bool(flags & BACKGROUND), getattr(self.comm, name), arguments)
        ):
            return None
        begin = self._begins.get(name)
        if begin is None:
            begin = self._begins[name] = getattr(self.comm, f"I{name[0].lower()}{name[1:]}")
        return self.group.start(begin, *arguments)

    def _finish(self, request: Any, transfer: int, flags: int) -> None:
        if request is not None:
            self.group.finish(request, transfer, background=bool(flags & BACKGROUND))

    def _block(self, background: bool, call: Callable[..., Any], arguments: Sequence[Any]) -> bool:
        """Run the blocking method `call` if all ranks may block (see `engine.py`); return whether it ran."""
        alone = not background and self.engine.try_alone()
        try:
            agreed = (ctypes.c_byte * 1)(alone)
            buffer = [agreed, 1, self.mpi.INT8_T]
            request = self.group.start(self.comm.Iallreduce, self.mpi.IN_PLACE, buffer, self.mpi.MIN)
            self.group.finish(request, 0, background=background)
            if agreed[0]:
                self.group.block(call, *arguments)
            return bool(agreed[0])
        finally:
            if alone:
                self.engine.leave_alone()

    def _exchange(self, flags: int, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Exchange messages between each pair of ranks, for counts that exceed the limit for collectives."""
        tag = self.group.largest_tag + 1  # not used by `send` and `recv`
        requests = [
            (
                self.group.start(
                    begin, self.group.message_buffer(tensor.data_ptr(), tensor.nbytes), peer, tag
                ),
                tensor,
            )
            for begin, tensors in ((self.comm.Irecv, receives), (self.comm.Isend, sends))
            for peer, tensor in enumerate(tensors)
        ]
        for request, tensor in requests:
            self.group.finish(request, tensor.nbytes, background=bool(flags & BACKGROUND))


def _shares(count: int, ranks: int) -> list[int]:
    """Return the number of elements that each rank reduces; the numbers add up to `count`."""
    return [count * (rank + 1) // ranks - count * rank // ranks for rank in range(ranks)]


def _differs(dtype: torch.dtype, reduction: str) -> bool:
    """Return whether MPI's result for a reduction may differ from torch's result."""
    if dtype.is_floating_point:
        return reduction in ("min", "max")
    return dtype is not torch.bool and dtype.itemsize < 4 and reduction in ("sum", "product")


def _adjacent(parts: Parts) -> bool:
    used = [part for part in parts if part.numel()]
    return all(
        a.data_ptr() + a.nbytes == b.data_ptr()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        for a, b in pairwise(used)
    )


def _joined(parts: Parts) -> Tensor:
    """Return a view of all tensors, which must be adjacent in memory."""
    first = next((part for part in parts if part.numel()), None)
    if first is None:
        return parts[0].view(-1) if parts else torch.empty(0, device="cpu")
    return first.as_strided((sum(part.numel() for part in parts),), (1,))


def _apart(source: Tensor, target: Tensor) -> Tensor:
    """Return `source`, or a copy if `source` overlaps `target`, because MPI forbids overlap."""
    start, end = source.data_ptr(), target.data_ptr()
    overlaps = start < end + target.nbytes and end < start + source.nbytes
    return source.clone() if overlaps else source
