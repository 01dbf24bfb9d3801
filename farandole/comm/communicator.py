"""A group of ranks and the collectives among them.

`Communicator` is the one object that the rest of the package talks to.  It stands on any
`torch.distributed` process group; on a group of the `farandole` backend whose ranks share a host,
`empty` hands out buffers that every rank of the group can reach, and a collective on such a buffer
copies nothing.  On any other group the same calls work, with ordinary memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.compression.base import Compression, Compressor
from farandole.comm.compression.call import compressed_all_reduce

ReduceName = Literal["sum", "avg", "product", "min", "max", "and", "or", "xor"]

REDUCE_OPS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}
"""Torch's reductions, by the names that are used here."""

# from torch 2.13 on, which warns of the names before
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator:
    """The collectives among the ranks of one process group.

    Every method is called by all ranks of the group, in the same order.  With `async_op=True` a
    method returns a `torch.distributed.Work` at once; the tensors may be used after its `wait()`.

        comm = farandole.init().comm
        gradients = comm.empty(1_000_000)          # shared memory: reduced in place, no copies
        comm.all_reduce(gradients, "avg")
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def empty(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Tensor:
        """An uninitialised tensor that lives in memory shared by the ranks of this group.

        A collective call: every rank asks for the same shape and type.  Where the group cannot share
        memory (another backend, several hosts, a device other than the CPU), the tensor is an ordinary one.
        """
        allocate = getattr(self.group, "allocate_shared", None)
        if allocate is None or (device is not None and device.type != "cpu"):
            return torch.empty(*shape, dtype=dtype, device=device)
        shared: Tensor = allocate(shape, dtype)
        return shared

    def common(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Tensor | None:
        """One uninitialised tensor for all ranks: what one of them writes into it, all of them see.

        A collective call: every rank asks for the same shape and type.  Who writes where, and when, is the
        callers' business: `barrier` separates writing from reading.  None where the ranks do not share memory
        (another backend, several hosts, a device other than the CPU).
        """
        if not self.shares_memory(device):
            return None
        common: Tensor = self.group.allocate_common(shape, dtype)  # type: ignore[attr-defined]
        return common

    def shares_memory(self, device: torch.device | None = None) -> bool:
        """Whether `common` has tensors on this device."""
        here = device is None or device.type == "cpu"
        return here and getattr(self.group, "shares_memory", False)

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceName = "sum",
        *,
        compression: Compressor | Compression | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `tensor` over all ranks, in place.

        With a `compression` a sum or an average of fp32, bf16 or fp16 is compressed where it crosses hosts: a
        `Compressor` of this tensor (`Int8().for_tensor(n)`), or settings that remember nothing from call to call.
        """
        if compression is not None:
            return compressed_all_reduce(self.group, tensor, op, compression, async_op)
        return dist.all_reduce(tensor, REDUCE_OPS[op], group=self.group, async_op=async_op)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: ReduceName = "sum", *, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce `input` (`size` equal parts along dimension 0) and keep this rank's part in `output`."""
        return _reduce_scatter(output, input, REDUCE_OPS[op], group=self.group, async_op=async_op)

    def all_gather(self, output: Tensor, input: Tensor, *, async_op: bool = False) -> dist.Work | None:
        """Concatenate every rank's `input` into `output` (`size` times as large), in rank order."""
        return _all_gather(output, input, group=self.group, async_op=async_op)

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> dist.Work | None:
        """Copy the `tensor` of rank `root` of this group to all its ranks."""
        return dist.broadcast(tensor, group=self.group, group_src=root, async_op=async_op)

    def reduce(
        self, tensor: Tensor, root: int = 0, op: ReduceName = "sum", *, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce `tensor` over all ranks into the one of rank `root`; the others' keep their values."""
        return dist.reduce(tensor, group=self.group, group_dst=root, op=REDUCE_OPS[op], async_op=async_op)

    def gather(
        self, tensor: Tensor, outputs: list[Tensor] | None = None, root: int = 0, *, async_op: bool = False
    ) -> dist.Work | None:
        """Collect every rank's `tensor` in `outputs` of rank `root` (None elsewhere)."""
        return dist.gather(tensor, outputs, group=self.group, group_dst=root, async_op=async_op)

    def scatter(
        self, tensor: Tensor, inputs: list[Tensor] | None = None, root: int = 0, *, async_op: bool = False
    ) -> dist.Work | None:
        """Give rank i of the group `inputs[i]` of rank `root` (None elsewhere)."""
        return dist.scatter(tensor, inputs, group=self.group, group_src=root, async_op=async_op)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Send part j of `input` to rank j and receive part i of `output` from rank i.

        Parts are equal along dimension 0 unless their lengths are given in rows.
        """
        return dist.all_to_all_single(
            output,
            input,
            None if output_splits is None else list(output_splits),
            None if input_splits is None else list(input_splits),
            group=self.group,
            async_op=async_op,
        )

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        """Send `tensor` to rank `to` of this group; returns when it may be changed again."""
        dist.send(tensor, group=self.group, group_dst=to, tag=tag)

    def recv(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `source` of this group, or from any; returns the sender."""
        if source is None:
            sender = dist.recv(tensor, group=self.group, tag=tag)
            return dist.get_group_rank(self.group, sender)
        dist.recv(tensor, group=self.group, group_src=source, tag=tag)
        return source

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        dist.barrier(group=self.group)
