"""The backend of CPU tensors that torch asks a process group for."""

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
    """The answer of `_get_backend` for CPU tensors: stands for torch's Gloo, made when torch uses one.

    Making Gloo is a collective call, and torch mostly asks the backend for its abilities, sometimes on one rank only;
    those are answered here.  The class claims to be Gloo's: by that torch decides where a new timeout goes.
    """

    def __init__(self, group: FarandoleProcessGroup) -> None:
        self._of = group
        self._set_default_timeout = group.set_timeout

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return dist.ProcessGroupGloo

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: buffers come from `Communicator.empty`."""
        return False

    def name(self) -> str:
        """Return the name of the backend."""
        return "farandole"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of._inner()._get_backend(torch.device("cpu")), name)
