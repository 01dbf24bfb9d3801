"""The process group of the backend `farandole-mpi`: that of `farandole`, over MPI instead of shared memory."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.collectives import HostCollectives
from farandole.comm.mpi import cuda
from farandole.comm.mpi.group import MpiGroup
from farandole.comm.process_group import FarandoleProcessGroup


class MpiProcessGroup(FarandoleProcessGroup):
    """Made by `torch.distributed`, not by hand.  Sparse tensors go to Gloo, all others to MPI."""

    def __init__(self, store: dist.Store, timeout: timedelta, name: str, mpi: MpiGroup, backend: str) -> None:
        self._backend = backend
        carrier = HostCollectives(mpi)  # type: ignore[arg-type]  # it has the face of a HostGroup
        super().__init__(store, mpi.rank, mpi.size, timeout, name, carrier.host, carrier, None)

    def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
        """The name of the backend."""
        return self._backend

    def name(self) -> str:
        """The name of the backend."""
        return self._backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    @property
    def shares_memory(self) -> bool:
        """Never: what MPI allocates, other ranks reach through its calls only."""
        return False

    def _carrier_of(self, *tensors: Tensor) -> Any:
        if not all(tensor.layout is torch.strided for tensor in tensors):
            return None
        if any(tensor.is_cuda for tensor in tensors):
            cuda.ready(*tensors)
        elif not all(tensor.is_cpu for tensor in tensors):
            return None
        return super()._carrier_of()

    def abandon(self, note: str, patience_s: float) -> None:
        """The program ends: what it has begun may still complete, as MPI's own end waits for all ranks anyway."""
        if not self._rest(patience_s / 2):
            super().abandon(note, patience_s / 2)
