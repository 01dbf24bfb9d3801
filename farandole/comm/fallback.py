"""torch's own process groups, for what shared memory does not carry."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def has_nccl() -> bool:
    """Whether CUDA tensors can be communicated here."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, address: str | None
) -> dist.ProcessGroupGloo:
    """Gloo at this address of the host; without one it takes what the host's name stands for, if that is known."""
    if address is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def torch_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, address: str | None
) -> dist.ProcessGroup:
    """A group over the same ranks: Gloo for CPU tensors and, where there is one, NCCL for CUDA tensors."""
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(dist.PrefixStore("torch/", store), rank, size)
    gloo = gloo_group(dist.PrefixStore("gloo/", store), rank, size, timeout, address)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    group._set_default_backend(kinds.GLOO)
    if has_nccl():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    group._set_group_name(f"{name}/torch")  # type: ignore[arg-type]  # a NewType of str
    return group


class LazyBackend:
    """What `_get_backend` answers for CPU tensors: a stand-in for torch's Gloo, made when something of it is used.

    Making Gloo is a collective call, and torch asks for the backend mostly to look at its abilities, on one
    rank at times; those are answered here.  It says that its class is Gloo's, as it stands for one: by that
    torch decides where a new timeout goes.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self, make: Callable[[], dist.ProcessGroup], set_timeout: Callable[[timedelta], None]
    ) -> None:
        self._make = make
        self._set_default_timeout = set_timeout

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return dist.ProcessGroupGloo

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Buffers come from `Communicator.empty`, not from here."""
        return False

    def name(self) -> str:
        """The name of the backend."""
        return "farandole"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make()._get_backend(torch.device("cpu")), name)
