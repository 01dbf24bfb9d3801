"""All ranks begin with the model of rank 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator


def start_equal(model: nn.Module, comm: Communicator) -> None:
    """Copy the parameters and buffers of rank 0 to all ranks."""
    if comm.size == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            for part in _stored(tensor.detach()):
                comm.broadcast(part, root=0)


def _stored(tensor: Tensor) -> list[Tensor]:
    """The tensors in which the values lie: `tensor` itself, or those that a quantized one consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _stored(getattr(tensor, name))]
