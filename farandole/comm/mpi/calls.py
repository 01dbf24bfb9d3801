"""How one call goes to MPI: its buffers, begun, and waited for.

MPI before version 4 counts in 32 bits.  What does not fit goes in pieces, or in messages between each two ranks,
whose type is as large as the message.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.comm.mpi import cuda
from farandole.native import BACKGROUND

if TYPE_CHECKING:
    from farandole.comm.mpi.group import MpiGroup

BLOCKING_FROM_BYTES = 32 << 10
"""Where Open MPI's blocking collectives are so much faster that agreeing on one pays."""
PIECE_BYTES = 1 << 30

Span = tuple[int, int, int]
"""A rank, and the address and bytes of what it is sent or sends."""


class Calls:
    """What the calls of a group have in common."""

    def __init__(self, group: MpiGroup) -> None:
        self.group = group
        self.size, self.rank = group.size, group.rank
        self.comm = group.comm
        self.engine = group.engine
        self.mpi = group.engine.mpi
        self._memory = self.mpi.memory.fromaddress
        self._begins: dict[str, Callable[..., Any]] = {}
        # data that only move are whole numbers of the right width
        names = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
        self._units = {width: getattr(self.mpi, name) for width, name in names.items()}

    # ---- buffers, as mpi4py wants them ----

    def buffer(self, address: int, count: int, kind: int, type_: Any = None) -> Any:
        """`count` elements at an address."""
        return [self._memory(address, count * (kind >> 8)), count, type_ or self._units[kind >> 8]]

    def blocks(self, address: int, count: int, kind: int, type_: Any = None) -> Any:
        """`count` elements for each rank; mpi4py multiplies."""
        memory = self._memory(address, count * self.size * (kind >> 8))
        return [memory, count, type_ or self._units[kind >> 8]]

    def parts(self, address: int, counts: Sequence[int], kind: int) -> Any:
        """Elements at an address, as parts that follow each other."""
        starts = [sum(counts[:i]) for i in range(len(counts))]
        memory = self._memory(address, sum(counts) * (kind >> 8))
        return [memory, (list(counts), starts), self._units[kind >> 8]]

    def bytes_at(self, address: int, nbytes: int) -> Any:
        """Any number of bytes: one element of a type as large as that, where MPI cannot count them."""
        memory = self._memory(address, nbytes)
        if nbytes <= self.engine.largest_count:
            return [memory, nbytes, self.mpi.BYTE]
        pieces, rest = divmod(nbytes, PIECE_BYTES)
        piece = self.mpi.BYTE.Create_contiguous(PIECE_BYTES)
        whole = self.mpi.Datatype.Create_struct([pieces, rest], [0, nbytes - rest], [piece, self.mpi.BYTE])
        return [memory, 1, whole.Commit()]

    def pieces(self, address: int, count: int, kind: int) -> Iterator[tuple[int, int]]:
        """Addresses and counts that MPI can count; one, even of nothing, where all fit."""
        if count <= self.engine.largest_count:
            yield address, count
            return
        step = PIECE_BYTES // (kind >> 8)
        for start in range(0, count, step):
            yield address + start * (kind >> 8), min(step, count - start)

    @contextmanager
    def one_after_another(
        self, addresses: Sequence[int | None], counts: Sequence[int], kind: int, *, written: bool
    ) -> Iterator[int]:
        """The address of parts that follow each other: where they are, or of a copy (that is copied back)."""
        widths = [count * (kind >> 8) for count in counts]
        used = [(address or 0, width) for address, width in zip(addresses, widths, strict=True) if width]
        ends = [address + width for address, width in used]
        if all(end == address for end, (address, _) in zip(ends, used[1:], strict=False)):
            yield used[0][0] if used else 0
            return
        copy = torch.empty(sum(widths), dtype=torch.uint8)
        places = list(zip(copy.split([width for _, width in used]), used, strict=True))
        if not written:
            for place, (address, width) in places:
                place.copy_(cuda.tensor_at(address, width, torch.uint8))
        yield copy.data_ptr()
        if written:
            for place, (address, width) in places:
                cuda.tensor_at(address, width, torch.uint8).copy_(place)

    def apart(self, source: int, nbytes: int, target: int, target_bytes: int) -> Tensor | None:
        """A copy of the source if it overlaps the target, which MPI does not allow."""
        if source < target + target_bytes and target < source + nbytes:
            return cuda.tensor_at(source, nbytes, torch.uint8).cpu().clone()
        return None

    # ---- calls ----

    def begin(
        self, flags: int, operation: int, kind: int = 0, op: int = 0, count: int = 0, root: int = 0
    ) -> None:
        """A collective begins: it is noted, for errors, and compared among the ranks if that was asked for."""
        self.group.begin(operation, kind, op, count, root)
        if self.group.compares:
            self.group.compare(bool(flags & BACKGROUND))

    def collective(self, flags: int, name: str, transfer: int, *arguments: Any) -> None:
        """One collective of MPI, by the name of its blocking form.  All ranks give the same `transfer` in bytes."""
        background = bool(flags & BACKGROUND)
        if (
            transfer >= BLOCKING_FROM_BYTES
            and self.engine.prefers_blocking
            and self._block(background, getattr(self.comm, name), arguments)
        ):
            return
        begin = self._begins.get(name)
        if begin is None:
            begin = self._begins[name] = getattr(self.comm, f"I{name[0].lower()}{name[1:]}")
        self.finish(self.group.start(begin, *arguments), transfer, background)

    def finish(self, request: Any, transfer: int, background: bool) -> None:
        """Wait for what was begun."""
        self.group.finish(request, transfer, background=background)

    def _block(self, background: bool, call: Callable[..., Any], arguments: Sequence[Any]) -> bool:
        """Make a call that blocks inside MPI if all ranks are here and can afford that; see `engine.py`."""
        alone = not background and self.engine.try_alone()
        try:
            agreed = (ctypes.c_byte * 1)(alone)
            buffer = [agreed, 1, self.mpi.INT8_T]
            self.finish(
                self.group.start(self.comm.Iallreduce, self.mpi.IN_PLACE, buffer, self.mpi.MIN), 0, background
            )
            if agreed[0]:
                self.group.start(call, *arguments)
            return bool(agreed[0])
        finally:
            if alone:
                self.engine.leave_alone()

    def exchange(self, flags: int, sends: Sequence[Span], receives: Sequence[Span]) -> None:
        """Messages between each two ranks: for what the collectives cannot count."""
        tag = self.comm.Get_attr(self.mpi.TAG_UB)  # above those of `send` and `recv`
        requests = [
            (self.group.start(begin, self.bytes_at(address, nbytes), peer, tag), nbytes)
            for begin, spans in ((self.comm.Irecv, receives), (self.comm.Isend, sends))
            for peer, address, nbytes in spans
        ]
        for request, nbytes in requests:
            self.finish(request, nbytes, bool(flags & BACKGROUND))

    def spans(self, address: int, counts: Sequence[int], kind: int) -> list[Span]:
        """For `exchange`: parts that follow each other, one for each rank."""
        widths = [count * (kind >> 8) for count in counts]
        return [(rank, address + sum(widths[:rank]), width) for rank, width in enumerate(widths)]

    def uncountable(self, *counts: Sequence[int]) -> bool:
        """Whether the elements of a call are more than MPI can count; the same on all ranks only where all know them."""
        return any(sum(each) > self.engine.largest_count for each in counts)
