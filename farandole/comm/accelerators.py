"""Support for ranks that share a CUDA device: NCCL refuses such ranks, so their tensors are copied to the host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import dense


def visible_devices() -> list[str]:
    """Return a name for each CUDA device that this process sees, without initializing CUDA.

    A device has the same name in all processes of a host if CUDA_VISIBLE_DEVICES uses the same notation in all of them.
    """
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if count else []
    return [name.strip() for name in names[:count]] if names != [""] else [str(n) for n in range(count)]


def must_share(hosts: Iterable[Sequence[Sequence[str]]]) -> bool:
    """Return whether a host has fewer devices than ranks; `hosts` lists the devices of each rank of each host."""
    for ranks in hosts:
        visible = {name for names in ranks for name in names}
        if visible and len(visible) < len(ranks):
            return True
    return False


def lacks_nccl() -> bool:
    """Return whether this host has CUDA devices but torch has no NCCL."""
    return torch.cuda.device_count() > 0 and not dist.is_nccl_available()


def wait_for_kernels(tensors: Iterable[Tensor]) -> None:
    """Wait until the kernels that write CUDA tensors have run, on the current streams of their devices."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def staged(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors can be communicated through copies on the host; wait until kernels have written them.

    The thread that runs the call makes the copies, and this thread does not know the caller's stream.
    """
    if "cuda" in dense.reachable:  # a CUDA-aware MPI is in use; the C core does not accept device addresses
        return False
    if any(t.layout is not torch.strided or not (t.is_cpu or t.is_cuda) for t in tensors):
        return False
    wait_for_kernels(tensors)
    return True
