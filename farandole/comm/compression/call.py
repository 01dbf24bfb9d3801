"""The implementation of `Communicator.all_reduce` with compression, including argument validation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.compression.base import Compression, Compressor
from farandole.comm.dense import copy_back, readable
from farandole.comm.fallback import TorchCore
from farandole.comm.hierarchical.core import HierarchicalCore
from farandole.comm.native_core import NativeCore
from farandole.comm.notices import warn_once
from farandole.comm.operations import ALL_REDUCE, reduction_number

if TYPE_CHECKING:
    from farandole.comm.communicator import Communicator

SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)


def check(comm: Communicator, tensor: Tensor) -> None:
    """Check that `comm` supports compression for tensors with the dtype, layout and device of `tensor`.

    Raises:
        TypeError: if the dtype cannot be compressed.
        ValueError: if the group or the tensor does not support compression.
    """
    if tensor.dtype not in SUPPORTED:
        names = ", ".join(str(kind) for kind in SUPPORTED)
        raise TypeError(
            f"compression: expected one of {names}, got {tensor.dtype}; convert the tensor or reduce without "
            "compression"
        )
    dispatcher = comm.dispatcher
    if not isinstance(dispatcher.core, NativeCore | HierarchicalCore):
        if isinstance(dispatcher.core, TorchCore) and dispatcher.fallback is not None:
            raise ValueError("compression requires the C core, which is missing; reduce without compression")
        raise ValueError(
            f"compression: expected a group with the backend 'farandole', got a group with {dispatcher.core.name}; "
            f"reduce without compression"
        )
    if not dispatcher.serves([tensor]):
        raise ValueError(
            f"compression: expected a dense tensor on the CPU, got a {tensor.layout} tensor on {tensor.device}; "
            f"reduce without compression"
        )


def compressed_all_reduce(
    comm: Communicator, tensor: Tensor, op: str, compression: Compressor | Compression, async_op: bool
) -> dist.Work | None:
    """All-reduce `tensor` in place with compression, as described in `Communicator.all_reduce`.

    If all ranks are on one host, the tensor is not compressed, and a warning is logged once.

    Raises:
        TypeError: if the dtype cannot be compressed, or `compression` has an unsupported type.
        ValueError: if the group, the tensor or `op` does not support compression, or `compression` does not fit the
            tensor.
    """
    if op not in ("sum", "avg"):
        raise ValueError(
            f"compression: expected the reduction 'sum' or 'avg', got {op!r}; reduce without compression"
        )
    check(comm, tensor)
    if isinstance(compression, Compression):
        if compression.error_feedback:
            raise ValueError(
                f"compression: {compression} uses error feedback, which requires a compressor; create one with "
                f"for_tensor({tensor.numel()}) and pass it to each call, or set error_feedback=False"
            )
        compression = compression.for_tensor(tensor.numel())
    if not isinstance(compression, Compressor):
        raise TypeError(
            f"compression: expected Cast, Int8, TopK, PowerSGD or the result of for_tensor(n), got {compression!r}"
        )
    if tensor.numel() != compression.count:
        raise ValueError(
            f"compression: expected {compression.count} elements (as passed to for_tensor), got {tensor.numel()}; "
            "create another compressor"
        )
    core, compressor = comm.dispatcher.core, compression
    if not isinstance(core, HierarchicalCore):
        if comm.rank == 0:
            warn_once("compression has no effect: all ranks are on this host and reduce in shared memory")
        reduction = reduction_number(op, tensor.dtype)
        work = comm.dispatcher.run(ALL_REDUCE, [tensor], [tensor], reduction, async_op=async_op)
        return work if async_op else None
    compressor.bind(core.hosts, op)

    def call(flags: int) -> None:
        with torch.no_grad():
            buffer = readable(tensor)
            core.all_reduce_compressed(buffer, op, compressor, flags)
            copy_back([tensor], [buffer])

    work = comm.dispatcher.issue(call, [tensor], async_op)
    return work if async_op else None
