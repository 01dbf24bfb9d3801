"""Tensor fusion: many all-reduces of one kind become one, over a buffer in shared memory.

What is fused with what depends on the agreed list alone, so that it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farandole.comm import Communicator
from farandole.horovod.engine.negotiation import Ready

_SMALLEST_BUFFER = 1 << 20


@dataclass
class Pack:
    """Tensors that one all-reduce carries: of which ready name, and the how-manieth of its group."""

    dtype: torch.dtype
    members: list[tuple[Ready, int]] = field(default_factory=list)
    size: int = 0  # bytes

    @property
    def names(self) -> list[str]:
        """The names that take part, each once."""
        return list(dict.fromkeys(ready.name for ready, _ in self.members))


def pack(ready: Iterable[Ready], threshold: int) -> list[Pack]:
    """Pack all-reduces of equal type, operation, factors and device, up to `threshold` bytes each.

    A tensor that is larger has a pack of its own.  Packs are in the order of their first members.
    """
    packs: list[Pack] = []
    open_packs: dict[tuple[object, ...], Pack] = {}
    for one in ready:
        agreed = one.signature
        for index, (dtype, shape) in enumerate(zip(agreed.dtypes, agreed.shapes, strict=True)):
            size = dtype.itemsize
            for length in shape:
                size *= length
            kind = (dtype, agreed.op, agreed.prescale, agreed.postscale, agreed.device)
            current = open_packs.get(kind)
            if current is None or current.size + size > threshold:
                current = open_packs[kind] = Pack(dtype)
                packs.append(current)
            current.members.append((one, index))
            current.size += size
    return packs


class FusionBuffer:
    """Memory for one pack at a time, which all ranks of the group share where they can.

    It grows with the largest pack so far; as packs are the same on all ranks, they grow it together.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._memory: dict[torch.device, Tensor] = {}

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of `size` bytes; it holds what the last one left there."""
        memory = self._memory.get(device)
        if memory is None or memory.numel() < size:
            room = _SMALLEST_BUFFER
            while room < size:
                room *= 2
            self._memory.pop(device, None)
            with torch.inference_mode(False):  # later packs are written in any mode
                memory = self._memory[device] = self._comm.empty(room, dtype=torch.uint8, device=device)
        return memory[:size].view(dtype)


def views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Consecutive parts of a flat tensor, in the shapes of others."""
    parts: list[Tensor] = torch._C._nn.unflatten_dense_tensors(flat, like)
    return parts
