"""The backend object that a process group returns to torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from farandole.comm.backend.default_backend import NoCapabilities
from farandole.comm.dynamo import exclude_from_dynamo

if TYPE_CHECKING:
    from farandole.comm.backend.process_group import FarandoleProcessGroup


@exclude_from_dynamo
class LazyBackend(NoCapabilities):
    """The backend that `_get_backend` returns for a device that needs no Gloo or NCCL group.

    torch usually only queries the capabilities of the backend, sometimes on only one rank.  This class answers these
    queries itself.  Access to any other attribute creates a Gloo backend, which is a collective call.
    `__class__` returns Gloo's class, because torch checks the class before it sets a timeout.
    """

    def __init__(self, group: FarandoleProcessGroup) -> None:
        self._of = group
        self._set_default_timeout = group.set_timeout

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return dist.ProcessGroupGloo

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False, because this backend does not allocate tensors."""
        return False

    def name(self) -> str:
        """Return the name of the backend."""
        return "farandole"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of._inner()._get_backend(torch.device("cpu")), name)
