"""The operations that return new tensors, with gradients through them.

The gradients are Horovod's: a result that every rank has is taken to enter each rank's loss, and what counts
is the *average* of the losses.  So the backward pass of an all-gather or a broadcast averages the ranks'
gradients, and that of an all-reduce is the same all-reduce.
"""

# mypy: disable-error-code="no-untyped-call,override"
# torch.autograd.Function: `apply` is untyped, and `forward` has arguments of its own

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.horovod.basics import rank
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch import operations as ops
from farandole.horovod.torch.compression import Compression, Compressor
from farandole.horovod.torch.operations import Average, Max, Min, Product, Sum, synchronize


def _backward_name(name: str | None) -> str | None:
    """Return the name of an operation's backward pass; ranks may run backward passes in different orders."""
    return None if name is None else f"{name}.gradient"


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, pre: float, post: float, where: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = name, op, pre, post, where
        return tuple(synchronize(ops.grouped_allreduce_async(tensors, None, name, op, pre, post, where)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, op, pre, post, where = ctx.arguments
        if op in (Min, Max, Product):
            raise NotImplementedError(
                "no gradient through an allreduce with op=Min, Max or Product: use op=Sum or op=Average"
            )
        handle = ops.grouped_allreduce_async(gradients, None, _backward_name(name), op, pre, post, where)
        return None, None, None, None, None, *synchronize(handle)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce `tensor` over the ranks, by default to the average; return a new tensor.

    prescale_factor, postscale_factor: multiply before and after the reduction.
    """
    return grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors over the ranks, none before all of them are ready on all ranks."""
    group = ops.as_group(tensors, "allreduce")
    resolved = ops.reduction(op, average, process_set, group)
    narrow = [compression.compress(tensor) for tensor in group]
    sent = [tensor for tensor, _ in narrow]
    reduced = _Allreduce.apply(name, resolved, prescale_factor, postscale_factor, process_set, *sent)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, narrow, strict=True)]


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, where: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = name, where
        handle = ops.grouped_allgather_async(tensors, name, where)
        ctx.rows = [len(tensor) for tensor in tensors]
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, where = ctx.arguments
        back = _backward_name(name)
        counts = torch.tensor([ctx.rows])
        all_counts = ops.allgather_async(counts, None if back is None else f"{back}.rows", where)
        reduced = synchronize(ops.grouped_allreduce_async(gradients, None, back, Average, process_set=where))
        starts = synchronize(all_counts)[: where.rank()].sum(0).tolist()
        own = zip(reduced, starts, ctx.rows, strict=True)
        return None, None, *[gradient[start : start + rows] for gradient, start, rows in own]


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenate all ranks' tensors along dimension 0; only this dimension may differ."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Concatenate each of several tensors over the ranks."""
    return list(_Allgather.apply(name, process_set, *ops.as_group(tensors, "allgather")))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, root: int, where: ProcessSet, tensor: Tensor) -> Any:
        ctx.arguments = name, root, where
        return synchronize(ops.broadcast_async(tensor, root, name, where))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        name, root, where = ctx.arguments
        handle = ops.allreduce_async(gradient, None, _backward_name(name), Average, process_set=where)
        reduced = synchronize(handle)
        return None, None, None, reduced if rank() == root else torch.zeros_like(reduced)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of rank `root_rank` (a rank in the world) on all ranks."""
    received: Tensor = _Broadcast.apply(name, root_rank, process_set, tensor)
    return received


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, splits: Any, where: ProcessSet, tensor: Tensor) -> Any:
        output, received = synchronize(ops.alltoall_async(tensor, splits, name, where))
        ctx.arguments = name, where
        ctx.received, ctx.unsent = (
            received,
            len(tensor) - sum(ops.split_rows(tensor, splits, where.size())),
        )
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: Any) -> Any:
        name, where = ctx.arguments
        handle = ops.alltoall_async(gradient, ctx.received, _backward_name(name), where)
        returned, _ = synchronize(handle)
        if ctx.unsent:  # rows beyond the splits went nowhere
            returned = torch.cat([returned, returned.new_zeros((ctx.unsent, *returned.shape[1:]))])
        return None, None, None, returned


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows of `tensor` to each rank and receive rows from each, concatenated in rank order.

    splits: how many rows each rank gets; equally many if None.  With splits, returns also how many rows
    came from each rank.
    """
    output, received = _Alltoall.apply(name, splits, process_set, tensor)
    return output if splits is None else (output, received)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, pre: float, post: float, where: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = name, op, pre * post, where
        return tuple(synchronize(ops.grouped_reducescatter_async(tensors, name, op, where, pre, post)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, op, factor, where = ctx.arguments
        if op not in (Sum, Average):
            raise NotImplementedError("gradients flow through a reducescatter with op=Sum or Average only")
        factor *= where.size() if op == Sum else 1
        scaled = [gradient * factor for gradient in gradients]
        gathered = synchronize(ops.grouped_allgather_async(scaled, _backward_name(name), where))
        return None, None, None, None, None, *gathered


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce `tensor` over the ranks and keep this rank's rows; the first ranks get one more row if necessary."""
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce several tensors over the ranks and keep this rank's rows of each."""
    narrow = [compression.compress(tensor) for tensor in ops.as_group(tensors, "reducescatter")]
    sent = [tensor for tensor, _ in narrow]
    kept = _Reducescatter.apply(name, op, prescale_factor, postscale_factor, process_set, *sent)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(kept, narrow, strict=True)]
