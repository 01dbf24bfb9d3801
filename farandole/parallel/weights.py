"""Where the weights of a bucket live: what the model computes with, and what the optimizer updates.

The model computes with parameters that are views of one flat buffer.  The optimizer updates a *master*: the
shard of this rank in the precision of the optimizer.  Where both have the same type, the master is a part of
the buffer itself.

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
    share memory have one buffer for all; else, and elsewhere, each has its own.  With `rounded` there is no master
    but for the time of an update (`rounding`): it reads as NaN, and takes no memory.
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
        rounded: bool = False,
    ) -> None:
        first = parameters[0]
        self._comm = comm
        self._sharded = sharded
        common = comm.common(layout.length, dtype=dtype, device=first.device) if sharded else None
        self.common = common is not None
        self._buffer = (
            torch.empty(layout.length, dtype=dtype, device=first.device) if common is None else common
        )
        self.own = layout.shard(self._buffer, own)
        self.master: Tensor | None = None
        self._rounded = rounded
        with torch.no_grad():
            if trained and rounded:
                self.master = no_master(layout, first.device)
            elif trained:
                self.master = self.own if dtype == first.dtype else copy_of_own(parameters, layout, own)
            if not self.common or comm.rank == 0:
                self._buffer.zero_()
            for parameter, view in zip(parameters, layout.views(self._buffer), strict=True):
                if not self.common or comm.rank == 0:
                    view.copy_(parameter)
                parameter.data = view
        if self.common:
            comm.barrier()

    def publish(self) -> None:
        """Give the model what the optimizer has made of this rank's shard."""
        if self.master is not None and self.master is not self.own and not self._rounded:
            self.own.copy_(self.master)
        if self._sharded and not self.common and self._comm.size > 1:
            self._comm.all_gather(self._buffer, self.own)


def no_master(layout: FlatLayout, device: torch.device) -> Tensor:
    """What stands for the master of a shard while there is none: fp32, as long, without memory."""
    return torch.full((1,), torch.nan, device=device).expand(layout.shard_length)


def copy_of_own(parameters: Sequence[nn.Parameter], layout: FlatLayout, own: int) -> Tensor:
    """Shard `own` of parameters that are not in a buffer yet, in their type."""
    first = parameters[0]
    shard = torch.zeros(layout.shard_length, dtype=first.dtype, device=first.device)
    for piece in layout.pieces(own):
        source = parameters[piece.index].detach().reshape(-1)
        shard[piece.offset : piece.offset + piece.length] = source[piece.start : piece.start + piece.length]
    return shard
