"""The default backend that this package's process groups register with torch's C++ code.

A torch process group usually has one backend per device, which `ProcessGroup::getBackend` returns.  The process groups
of this package run their collectives in Python and use no such backend.  However, torch 2.15 attaches its flight
recorder to every new group and queries the capabilities of the group's default backend, so there must be one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


class NoCapabilities:
    """A base class for backends that support none of the optional features that torch queries."""

    supports_abort_hooks = False
    supports_coalescing = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_shrinking = False
    supports_splitting = False
    supports_time_estimate = _supports_time_estimate = False
    supports_window = False


def register_default_backend(group: dist.ProcessGroup, rank: int, size: int, name: str) -> Any:
    """Register a backend without collectives as the default backend of `group`.

    Returns:
        The backend, to which the group must keep a reference.  Before torch 2.14, the result is None, because a
        backend cannot be created in Python.
    """
    backend_class = _backend_class()
    if backend_class is None:
        return None
    backend = backend_class(rank, size, name)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), custom, backend)
    group._set_default_backend(custom)
    return backend


@functools.cache
def _backend_class() -> type | None:
    base: Any = c10d.Backend
    try:
        base(0, 1)
    except TypeError:  # No constructor defined!
        return None

    class DefaultBackend(NoCapabilities, base):
        """A backend without collectives: each collective raises torch's error for unsupported operations."""

        def __init__(self, rank: int, size: int, name: str) -> None:
            super().__init__(rank, size)
            self._name = name

        def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
            return self._name

    return DefaultBackend
