"""Buffers that a step changes on each rank in its own way, such as the statistics of BatchNorm: all ranks go on with their mean."""

from __future__ import annotations

import torch
from torch import nn

from farandole.comm.communicator import Communicator


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
