"""Where the weights of a bucket live: what the model computes with, and what the optimizer updates.

The model computes with parameters that are views of one flat buffer.  The optimizer updates a *master*: the
shard of this rank in the precision of the optimizer.  Where both have the same type, the master is a part of
the buffer itself.  A master that is kept elsewhere (`offloading`) is None here.

Ranks that share memory need one buffer in all, as they only read it: each of them updates its shard in place, and
there is nothing to gather.  Two barriers keep readers and writers apart (`DataParallel`): nobody updates before
all have ended their backward passes, and nobody reads before all have updated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.parallel.flat import FlatLayout


class Weights:
    """The weights of some parameters of one type, in a flat buffer of type `dtype`.

    The buffer is cut into `layout`'s shards; this rank owns shard `own` of them.  With `sharded`, ranks that
    share memory have one buffer for all; else, and elsewhere, each has its own.  Masters are `masters_on` a device,
    by default that of the model.
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
        masters_on: torch.device | None = None,
    ) -> None:
        first = parameters[0]
        self.parameters = list(parameters)
        self.masters_apart = trained and (dtype != first.dtype or masters_on not in (None, first.device))
        self._layout = layout
        self._comm = comm
        self._sharded = sharded
        common = comm.common(layout.length, dtype=dtype, device=first.device) if sharded else None
        self.common = common is not None
        self._buffer = (
            torch.empty(layout.length, dtype=dtype, device=first.device) if common is None else common
        )
        self._shard = own
        self._own = layout.shard(self._buffer, own)
        self.master: Tensor | None = None
        with torch.no_grad():
            if trained:
                self.master = (
                    copy_of_own(parameters, layout, own, masters_on) if self.masters_apart else self._own
                )
            if not self.common or comm.rank == 0:
                self._buffer.zero_()
            for parameter, view in zip(parameters, layout.views(self._buffer), strict=True):
                if not self.common or comm.rank == 0:
                    view.copy_(parameter)
                parameter.data = view
        if self.common:
            comm.barrier()

    def fill(self, index: int, values: Tensor) -> None:
        """Begin with other `values` of parameter `index`, shaped as it is; all ranks call it, with the same ones."""
        if not self.common or self._comm.rank == 0:
            self._layout.views(self._buffer)[index].copy_(values)
        if self.masters_apart and self.master is not None:
            fill_own(self.master, self._layout, self._shard, index, values)

    def take(self, offset: int, values: Tensor) -> None:
        """Have the model compute with new `values` of this rank's shard, from its element `offset` on."""
        self._own[offset : offset + values.numel()].copy_(values)

    def publish(self) -> None:
        """Give the model what the optimizer has made of this rank's shard."""
        if self.master is not None and self.masters_apart:
            self._own.copy_(self.master)
        if self._sharded and not self.common and self._comm.size > 1:
            self._comm.all_gather(self._buffer, self._own)


def copy_of_own(
    parameters: Sequence[nn.Parameter], layout: FlatLayout, own: int, device: torch.device | None = None
) -> Tensor:
    """Shard `own` of parameters that are not in a buffer yet, in their type, on a `device` or theirs."""
    first = parameters[0]
    shard = torch.zeros(layout.shard_length, dtype=first.dtype, device=device or first.device)
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
