"""What all ranks have alike: parameters and buffers at the start, and buffers that a step changes on each rank in its own way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.layout import Layout
from farandole.mesh import Groups, Mesh
from farandole.parallel.sharding import ranks_of


def broadcast_parameters(model: nn.Module, mesh: Mesh, layouts: Mapping[str, Layout], groups: Groups) -> None:
    """Copy parameters and buffers from the first rank that stores them to the others; a collective call."""
    everywhere = frozenset(range(mesh.stages))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            layout = layouts.get(name) or Layout(name, tuple(tensor.shape), everywhere)
            comm = groups.of_ranks(ranks_of(mesh, layout, groups.comm.rank, 0).copies)
            if comm is not None and comm.size > 1:
                for part in _stored(tensor.detach()):
                    comm.broadcast(part, root=0)


def _stored(tensor: Tensor) -> list[Tensor]:
    """The tensors in which the values lie: `tensor` itself, or those of which a quantized one consists."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _stored(getattr(tensor, name))]


class BufferAverage:
    """Averages the floating-point buffers of `model` over the ranks of `comm`, if they have changed."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._model, self._comm = model, comm
        self._known = self._versions()

    @property
    def changed(self) -> bool:
        """Whether this rank has changed a buffer since all ranks had the same ones."""
        return self._versions() != self._known

    def average(self) -> None:
        """Give all ranks the mean of the buffers of modules in which any rank has changed one; a collective call.

        Others keep their bits, which a mean of equal values may not.
        """
        modules = [
            module for module in self._model.modules() if any(True for _ in module.buffers(recurse=False))
        ]
        known = dict(self._known)
        flags = torch.tensor(
            [any(known.get(id(b)) != b._version for b in m.buffers(recurse=False)) for m in modules],
            dtype=torch.uint8,
        )
        if self._comm.size > 1:
            self._comm.all_reduce(flags, "max")
        chosen = {
            id(b): b
            for m, flag in zip(modules, flags.tolist(), strict=True)
            if flag
            for b in m.buffers(recurse=False)
        }
        buffers = [buffer for buffer in chosen.values() if buffer.is_floating_point()]
        for kind in dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers):
            members = [buffer for buffer in buffers if (buffer.dtype, buffer.device) == kind]
            with torch.no_grad():
                flat = torch.cat([buffer.detach().reshape(-1) for buffer in members])
                self._comm.all_reduce(flat, "avg")
                for buffer, mean in zip(members, flat.split([b.numel() for b in members]), strict=True):
                    buffer.copy_(mean.view(buffer.shape))
        self._known = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        # of all buffers: BatchNorm's kernel does not count changes of its statistics, but those of the number of batches
        return [(id(buffer), buffer._version) for buffer in self._model.buffers()]
