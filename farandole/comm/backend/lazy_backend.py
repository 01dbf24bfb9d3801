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
    """The result of `_get_backend` for tensors that need no inner torch group.

    torch usually only queries the capabilities of the backend, sometimes on only one rank.  This class answers these
    queries itself.  For all other attributes it creates a Gloo backend; the creation is a collective call.
    `__class__` returns Gloo's class, because torch checks the class before it sets a timeout.
    """

    def __init__(self, group: FarandoleProcessGroup) -> None:
        self._of = group
        self._set_default_timeout = group.set_timeout

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return dist.ProcessGroupGloo

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: this backend does not allocate tensors; `Communicator.empty` does."""
        return False

    def name(self) -> str:
        """Return the name of the backend."""
        return "farandole"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of._inner()._get_backend(torch.device("cpu")), name)
