"""Where the weights of a bucket live: what the model computes with, and what the optimizer updates.

The model computes with parameters that are views of one flat buffer.  The optimizer updates a *master*: the
shard of this rank in the precision of the optimizer.  Where both have the same type, the master is a part of
the buffer itself.  A master that is kept elsewhere (`offloading`) is None here.

Ranks that share memory need one buffer in all, as they only read it: each of them updates its shard in place, and
there is nothing to gather.  Two barriers keep readers and writers apart (`Engine`): nobody updates before
all have ended their backward passes, and nobody reads before all have updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.memory.mmap_allocator import MmapAllocator
from farandole.memory.tracker import memory_tag
from farandole.parallel.flat import FlatLayout

Masters = Literal["beside", "offloaded", "none"]
"""Where masters are: beside the weights that the model computes with, in the memory of the host on the way to where they
are offloaded to, or nowhere but in an update (`rounding`)."""


class Weights:
    """The weights of some parameters of one type, in a flat buffer of type `dtype`.

    The buffer is cut into `layout`'s shards; this rank owns shard `own` of them.  With `sharded`, ranks that
    share memory have one buffer for all; else, and elsewhere, each has its own.  It is made in `room`, or in memory.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        own: int,
        comm: Communicator,
        dtype: torch.dtype,
        *,
        sharded: bool,
        trained: bool,
        masters: Masters = "beside",
        room: MmapAllocator | None = None,
    ) -> None:
        first = parameters[0]
        self.parameters = list(parameters)
        self.masters_apart = trained and are_apart(masters, first, dtype)
        self._layout = layout
        self._comm = comm
        self._sharded = sharded
        self.common = sharded and comm.shares_memory(first.device)
        with memory_tag("weights", parameters, ranks=comm.size if self.common else 1):
            self._buffer = _buffer(comm, layout.length, dtype, first.device, common=self.common, room=room)
        self._shard = own
        self.own = layout.shard(self._buffer, own)
        self.master: Tensor | None = None
        with torch.no_grad():
            if trained:
                apart = self.masters_apart or masters == "none"
                with memory_tag("masters and states", parameters):
                    self.master = (
                        first_master(masters, copy_of_own(parameters, layout, own), self.own)
                        if apart
                        else self.own
                    )
            self._views = layout.views(self._buffer)
            if not self.common or comm.rank == 0:
                self._buffer.zero_()
                for parameter, view in zip(parameters, self._views, strict=True):
                    view.copy_(parameter)
            self.show_weights()
        if self.common:
            comm.barrier()

    def show_weights(self) -> None:
        """The parameters are what the model computes with."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def show_masters(self) -> None:
        """The parameters are copies of the masters, whole.  All ranks call it."""
        whole = self._buffer.clone()
        if self.masters_apart and self.master is not None:
            whole = self.master.new_empty(self._layout.length)
            gather_shards(self._comm if self._sharded else None, whole, self.master)
        for parameter, view in zip(self.parameters, self._layout.views(whole), strict=True):
            parameter.data = view

    def holds(self, index: int) -> bool:
        """Whether parameter `index` lies in the buffer."""
        return is_same_memory(self.parameters[index], self._views[index])

    def fill(self, index: int, values: Tensor) -> None:
        """Begin with other `values` of parameter `index`, shaped as it is; all ranks call it, with the same ones."""
        if not self.common or self._comm.rank == 0:
            self._views[index].copy_(values)
        if self.masters_apart and self.master is not None:
            fill_own(self.master, self._layout, self._shard, index, values)

    def shard_parts(self) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
        """(parameter, values, start): what this rank's shard has of each parameter, flat."""
        for piece in self._layout.pieces(self._shard):
            yield (
                self.parameters[piece.index],
                self.own[piece.offset : piece.offset + piece.length],
                piece.start,
            )

    def take(self, offset: int, values: Tensor) -> None:
        """Have the model compute with new `values` of this rank's shard, from its element `offset` on."""
        self.own[offset : offset + values.numel()].copy_(values)

    def publish(self) -> None:
        """Give the model what the optimizer has made of this rank's shard."""
        if self.master is not None and self.masters_apart:
            self.own.copy_(self.master)
        if self._sharded and not self.common and self._comm.size > 1:
            self._comm.all_gather(self._buffer, self.own)


def gather_shards(comm: Communicator | None, whole: Tensor, own: Tensor) -> None:
    """Fill `whole` with the shards of all ranks, or of this one only."""
    if comm is None or comm.size == 1:
        whole.copy_(own)
    else:
        comm.all_gather(whole, own)


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are views of the same memory."""
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.device == b.device


def master_type(parameter: Tensor) -> torch.dtype:
    """The type of a parameter's master: the one that the model was made in, and fp32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _buffer(
    comm: Communicator,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    common: bool,
    room: MmapAllocator | None,
) -> Tensor:
    if room is not None:
        return room.shared(length, dtype) if common else room.own(length, dtype)
    if common:
        shared = comm.common(length, dtype=dtype, device=device)
        assert shared is not None
        return shared
    return torch.empty(length, dtype=dtype, device=device)


def are_apart(masters: Masters, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Whether masters like `parameter`, computed with as `dtype`, are tensors of their own."""
    elsewhere = masters == "offloaded" and parameter.device.type != "cpu"
    return masters != "none" and (dtype != master_type(parameter) or elsewhere)


def first_master(masters: Masters, shard: Tensor, own: Tensor) -> Tensor:
    """The master of a rank's `shard`, with which the model computes as `own`."""
    if masters == "none":  # it reads as NaN, and takes no memory
        return torch.full((1,), torch.nan, device=shard.device).expand(shard.shape)
    if masters == "offloaded" and shard.device.type != "cpu":
        return shard.cpu()
    return own if own.dtype == shard.dtype else shard


def copy_of_own(parameters: Sequence[nn.Parameter], layout: FlatLayout, own: int) -> Tensor:
    """Shard `own` of parameters that are not in a buffer yet, in the type of masters."""
    first = parameters[0]
    shard = torch.zeros(layout.shard_length, dtype=master_type(first), device=first.device)
    for piece in layout.pieces(own):
        source = parameters[piece.index].detach().reshape(-1)
        shard[piece.offset : piece.offset + piece.length] = source[piece.start : piece.start + piece.length]
    return shard


def fill_own(shard: Tensor, layout: FlatLayout, own: int, index: int, values: Tensor) -> None:
    """Put into shard `own` what lies there of `values`, which are those of parameter `index`."""
    for piece in layout.pieces(own):
        if piece.index == index:
            part = values.reshape(-1)[piece.start : piece.start + piece.length]
            shard[piece.offset : piece.offset + piece.length].copy_(part)
