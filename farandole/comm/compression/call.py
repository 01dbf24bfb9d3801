"""A compressed all-reduce: which tensors can be compressed, and on which groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.compression.base import Compression, Compressor
from farandole.comm.dense import copy_back, readable
from farandole.comm.fallback import TorchCore
from farandole.comm.hierarchical.core import HierarchicalCore
from farandole.comm.notices import print_once
from farandole.comm.operations import ALL_REDUCE, reduction_number

if TYPE_CHECKING:
    from farandole.comm.communicator import Communicator

SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)


def check(comm: Communicator, tensor: Tensor) -> None:
    """Raise TypeError or ValueError unless tensors like this one can be compressed on this communicator."""
    if tensor.dtype not in SUPPORTED:
        names = ", ".join(str(kind) for kind in SUPPORTED)
        raise TypeError(f"{tensor.dtype} is not compressed; what is: {names}")
    dispatcher = comm.dispatcher
    if isinstance(dispatcher.core, TorchCore):
        if dispatcher.fallback is not None:
            raise ValueError("there is no compression without the C core; reduce without it")
        raise ValueError(
            f"compression needs a group of the backend 'farandole'; this one is {dispatcher.core.name}"
        )
    if not dispatcher.serves([tensor]):
        raise ValueError(
            f"there is no compression of {tensor.layout} tensors on {tensor.device}, only of dense ones on "
            f"the CPU; reduce without it"
        )


def compressed_all_reduce(
    comm: Communicator, tensor: Tensor, op: str, compression: Compressor | Compression, async_op: bool
) -> dist.Work | None:
    """See `Communicator.all_reduce`.  Raises ValueError or TypeError for what cannot be compressed."""
    if op not in ("sum", "avg"):
        raise ValueError(f"{op!r} is not compressed; what is: 'sum' and 'avg'")
    check(comm, tensor)
    if isinstance(compression, Compression):
        if compression.error_feedback:
            raise ValueError(
                f"{compression} remembers what each message has missed: make its memory once, with "
                f"for_tensor({tensor.numel()}), and pass that, or set error_feedback=False"
            )
        compression = compression.for_tensor(tensor.numel())
    if not isinstance(compression, Compressor):
        raise TypeError(
            f"compression={compression!r}: a Compression (Cast, Int8, TopK, PowerSGD) or its for_tensor(n)"
        )
    if tensor.numel() != compression.count:
        raise ValueError(
            f"the tensor has {tensor.numel()} elements, and the compressor was made for {compression.count}"
        )
    core, compressor = comm.dispatcher.core, compression
    if not isinstance(core, HierarchicalCore):
        if comm.rank == 0:
            print_once("nothing is compressed: all ranks are on this host, and share its memory")
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
