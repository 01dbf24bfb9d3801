"""A compressed all-reduce as the user calls it: what can be compressed, and what is said of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.compression.base import Compression, Compressor

if TYPE_CHECKING:
    from farandole.comm.process_group import FarandoleProcessGroup

SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)


def check(group: dist.ProcessGroup, tensor: Tensor) -> None:
    """TypeError or ValueError unless tensors like this one can be compressed in this group."""
    if tensor.dtype not in SUPPORTED:
        names = ", ".join(str(kind) for kind in SUPPORTED)
        raise TypeError(f"{tensor.dtype} is not compressed; what is: {names}")
    check_group = getattr(group, "check_compressible", None)
    if check_group is None:
        raise ValueError(f"compression needs a group of the backend 'farandole'; this one is {group.name()}")
    check_group(tensor)


def compressed_all_reduce(
    group: dist.ProcessGroup, tensor: Tensor, op: str, compression: Compressor | Compression, async_op: bool
) -> dist.Work | None:
    """See `Communicator.all_reduce`.  Raises ValueError or TypeError for what cannot be compressed."""
    if op not in ("sum", "avg"):
        raise ValueError(f"{op!r} is not compressed; what is: 'sum' and 'avg'")
    check(group, tensor)
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
    issue = cast("FarandoleProcessGroup", group).allreduce_compressed
    work = issue(tensor, op, compression, async_op)
    return work if async_op else None
