"""Provide differentiable collective operations, which return new tensors.

The gradients follow Horovod's convention: the loss is the *average* of the ranks' losses, and a result that is equal on
all ranks contributes to every rank's loss.  The backward pass of an all-gather or a broadcast therefore averages the
ranks' gradients, and the backward pass of an all-reduce is the same all-reduce.
"""

# mypy: disable-error-code="no-untyped-call,override"
# torch.autograd.Function: `apply` is untyped, and the arguments of `forward` differ from the base class

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.horovod.basics import rank
from farandole.horovod.compression import Compression, Compressor
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch import operations as ops
from farandole.horovod.torch.operations import Average, Max, Min, Product, Sum, synchronize


def _backward_name(name: str | None) -> str | None:
    # with names, ranks may run backward operations in different orders
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
                "allreduce is not differentiable with op=Min, Max or Product; use op=Sum or op=Average"
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
    """Reduce a tensor across ranks.

    Args:
        tensor: A tensor with the same shape and dtype on all ranks.
        average: Horovod's older equivalent of `op`: True for Average, False for Sum.
        name: The name of the operation.
        compression: The compressor for the communicated tensor.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: A factor that multiplies the tensor before the reduction.
        postscale_factor: A factor that multiplies the result.
        process_set: The participating ranks.

    Returns:
        A new tensor with the same shape as `tensor`.
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
    """Reduce several tensors across ranks in one operation; see `allreduce`.

    The reduction starts when all tensors are ready on all ranks.
    """
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
    """Concatenate the tensors from all ranks along dimension 0.

    Args:
        tensor: A tensor whose shape may differ between ranks in dimension 0 only.
        name: The name of the operation.
        process_set: The participating ranks.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """All-gather several tensors in one operation; see `allgather`."""
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
    """Return rank `root_rank`'s tensor on all ranks.

    Args:
        tensor: A tensor with the same shape and dtype on all ranks.
        root_rank: The rank to copy from.  This is a rank number in Horovod's world, not in the process set.
        name: The name of the operation.
        process_set: The participating ranks.
    """
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
        if ctx.unsent:  # rows beyond the sum of the splits were not sent
            returned = torch.cat([returned, returned.new_zeros((ctx.unsent, *returned.shape[1:]))])
        return None, None, None, returned


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send some rows of a tensor to each rank, and receive rows from each rank.

    Args:
        tensor: The rows to send, ordered by destination rank.
        splits: The number of rows to send to each rank, or None to split the rows equally.
        name: The name of the operation.
        process_set: The participating ranks.

    Returns:
        The received rows, ordered by source rank.  With `splits`, a pair: the received rows, and the number of
        rows received from each rank.
    """
    output, received = _Alltoall.apply(name, splits, process_set, tensor)
    return output if splits is None else (output, received)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, pre: float, post: float, where: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        handle = ops.grouped_reducescatter_async(tensors, name, op, where, pre, post)  # checks the arguments
        ctx.arguments = name, op, pre * post, where
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, op, factor, where = ctx.arguments
        if op not in (Sum, Average):
            raise NotImplementedError(
                "reducescatter is differentiable with op=Sum or op=Average only; use one of these reductions"
            )
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
    """Reduce a tensor across ranks and scatter the rows of the result.

    Args:
        tensor: A tensor with the same shape and dtype on all ranks.
        name: The name of the operation.
        compression: The compressor for the communicated tensor.
        op: Average, Sum, Min, Max or Product.
        process_set: The participating ranks.
        prescale_factor: A factor that multiplies the tensor before the reduction.
        postscale_factor: A factor that multiplies the result.

    Returns:
        This rank's rows of the result.  If the rows cannot be divided equally, the lowest ranks each get one extra
        row.
    """
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
    """Reduce several tensors across ranks and scatter the rows of each result; see `reducescatter`."""
    narrow = [compression.compress(tensor) for tensor in ops.as_group(tensors, "reducescatter")]
    sent = [tensor for tensor, _ in narrow]
    kept = _Reducescatter.apply(name, op, prescale_factor, postscale_factor, process_set, *sent)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(kept, narrow, strict=True)]
