"""Gather an adapter on rank 0 from ranks with different pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.parallel.lora.description import Adapter


def gather_adapter(
    adapter: Adapter, own: Mapping[str, Tensor], comm: Communicator, device: torch.device
) -> dict[str, Tensor]:
    """Return the values of `adapter.tensors` on rank 0, and an empty dictionary on other ranks.

    This is a collective call.

    Args:
        own: the unsharded values of the tensors that this rank has.
        device: the device of these tensors.
    """
    found: dict[str, Tensor] = {}
    kinds = comm.all_gather_object({name: (value.shape, value.dtype) for name, value in own.items()})
    for name in adapter.tensors:
        source = next(rank for rank, of_rank in enumerate(kinds) if name in of_rank)
        if comm.rank == 0:
            shape, dtype = kinds[source][name]
            found[name] = own[name] if source == 0 else torch.empty(shape, dtype=dtype, device=device)
            if source:
                comm.recv(found[name], source)
        elif comm.rank == source:
            comm.send(own[name].contiguous(), 0)
    return found
