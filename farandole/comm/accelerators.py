"""Detect ranks that share a CUDA device, and prepare CUDA tensors for communication through the host.

NCCL does not support several ranks on one device.  Tensors of ranks that share a device are therefore copied to the
host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import dense


def visible_devices() -> list[str]:
    """Return the names of the CUDA devices that are visible to this process, without initializing CUDA.

    The names come from CUDA_VISIBLE_DEVICES.  Two processes on a host therefore get the same name for a device only if
    both use the same notation in this variable, such as indices or UUIDs.
    """
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if count else []
    return [name.strip() for name in names[:count]] if names != [""] else [str(n) for n in range(count)]


def must_share(hosts: Iterable[Sequence[Sequence[str]]]) -> bool:
    """Return whether any host with CUDA devices has more ranks than devices.

    `hosts[h][r]` lists the devices that are visible to rank r of host h.
    """
    for ranks in hosts:
        visible = {name for names in ranks for name in names}
        if visible and len(visible) < len(ranks):
            return True
    return False


def lacks_nccl() -> bool:
    """Return whether this host has CUDA devices but torch has no NCCL."""
    return torch.cuda.device_count() > 0 and not dist.is_nccl_available()


def wait_for_kernels(tensors: Iterable[Tensor]) -> None:
    """Wait for the kernels in the current stream of each CUDA device that holds one of `tensors`."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def staged(tensors: Sequence[Tensor]) -> bool:
    """Return whether `tensors` must be communicated through copies on the host.

    Before it returns True, this function waits for the kernels that compute the tensors, because the
    copies may be made by another thread.  That thread does not use the caller's stream.
    """
    if "cuda" in dense.reachable:  # set for a CUDA-aware MPI, which needs no host copies
        return False
    if any(t.layout is not torch.strided or not (t.is_cpu or t.is_cuda) for t in tensors):
        return False
    wait_for_kernels(tensors)
    return True
