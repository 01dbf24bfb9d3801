"""Differentiable collectives over the ranks of an axis, for sharded layers.

    forward pass        backward pass       function
    identity            all-reduce          copy_to_all
    all-reduce          identity            sum_of_all
    all-gather          reduce-scatter      gather_and_reduce
    reduce-scatter      all-gather          reduce_and_gather
    all-gather          slice               gather_same
    slice               all-gather          slice_of_same

The first two functions are transposes of each other, and so are the next two (Shoeybi et al., 2019, "Megatron-LM";
Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models").  The last two convert
between shards and a tensor whose values and gradient are equal on all ranks.

`linear_of_copies` is a linear layer after `copy_to_all`; its weight gradient is computed during the all-reduce.

All functions shard dimension 0 as `layout.chunk` does, so the length of this dimension need not be a multiple of the
number of ranks.  If `comm` is None, there is one rank, and the functions do not communicate.

A collective in a backward pass is not differentiable: it raises an error with `create_graph=True`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farandole.layout import chunk
from farandole.models.derivatives import first_order
from farandole.parallel.axes import AxisCommunicator


def copy_to_all(x: Tensor, comm: AxisCommunicator | None) -> Tensor:
    """Return `x`, which is equal on all ranks; its gradient is the sum of all ranks' gradients."""
    if comm is None or torch.is_inference_mode_enabled():
        return x
    return _CopyToAll.apply(x, comm)


def linear_of_copies(x: Tensor, weight: Tensor, bias: Tensor | None, comm: AxisCommunicator | None) -> Tensor:
    """Apply a linear layer to `copy_to_all(x, comm)`; `weight` and `bias` are this rank's shards.

    The gradient of the weight is computed while the gradients of `x` are summed.
    """
    if comm is None or torch.is_inference_mode_enabled() or torch.is_autocast_enabled(x.device.type):
        return F.linear(copy_to_all(x, comm), weight, bias)
    return _LinearOfCopies.apply(x, weight, bias, comm)


def sum_of_all(x: Tensor, comm: AxisCommunicator | None) -> Tensor:
    """Return the sum of `x` over all ranks."""
    if comm is None:
        return x
    if torch.is_inference_mode_enabled():  # for small tensors, faster than a separate output
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total)
        return total
    return _SumOfAll.apply(x, comm)


def gather_and_reduce(shard: Tensor, rows: int, comm: AxisCommunicator | None) -> Tensor:
    """Concatenate the shards of all ranks into a tensor with `rows` rows.

    The gradient of `shard` is this rank's shard of the sum of all ranks' gradients.
    """
    return shard if comm is None else _GatherAndReduce.apply(shard, rows, comm)


def reduce_and_gather(x: Tensor, comm: AxisCommunicator | None) -> Tensor:
    """Return this rank's shard of the sum of `x` over all ranks."""
    return x if comm is None else _ReduceAndGather.apply(x, comm)


def gather_same(shard: Tensor, rows: int, comm: AxisCommunicator | None) -> Tensor:
    """Concatenate the shards of all ranks into a tensor with `rows` rows.

    The gradient of this tensor must be equal on all ranks.
    """
    return shard if comm is None else _GatherSame.apply(shard, rows, comm)


def slice_of_same(x: Tensor, comm: AxisCommunicator | None) -> Tensor:
    """Return this rank's shard of `x`, which is equal on all ranks."""
    return x if comm is None else _SliceOfSame.apply(x, comm)


def own_rows(rows: int, comm: AxisCommunicator) -> slice:
    """Return this rank's slice of `rows` rows."""
    return slice(*chunk(rows, comm.size, comm.rank))


class _CopyToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: AxisCommunicator) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad_outputs[0], ctx.comm), None


class _LinearOfCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: AxisCommunicator) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        return F.linear(x, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = grad_outputs[0].flatten(0, -2)
        for_x = for_weight = for_bias = work = None
        if ctx.needs_input_grad[0]:
            for_x = rows @ weight
            work = ctx.comm.start_all_reduce(for_x)
        if ctx.needs_input_grad[1]:
            for_weight = rows.t() @ x.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            for_bias = rows.sum(0)
        if work is not None:
            work.wait()
        return None if for_x is None else for_x.view_as(x), for_weight, for_bias, None


class _SumOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: AxisCommunicator) -> Tensor:
        return _all_reduce(x, comm)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _GatherAndReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: int, comm: AxisCommunicator) -> Tensor:
        ctx.comm = comm
        return _all_gather(shard, rows, comm)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad_outputs[0], ctx.comm), None, None


class _ReduceAndGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: AxisCommunicator) -> Tensor:
        ctx.comm, ctx.rows = comm, len(x)
        return _reduce_scatter(x, comm)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad_outputs[0], ctx.rows, ctx.comm), None


class _GatherSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: int, comm: AxisCommunicator) -> Tensor:
        ctx.comm = comm
        return _all_gather(shard, rows, comm)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = grad_outputs
        return gradient[own_rows(len(gradient), ctx.comm)], None, None


class _SliceOfSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: AxisCommunicator) -> Tensor:
        ctx.comm, ctx.rows = comm, len(x)
        return x[own_rows(len(x), comm)].clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad_outputs[0], ctx.rows, ctx.comm), None


def _all_reduce(x: Tensor, comm: AxisCommunicator) -> Tensor:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    comm.all_reduce(x.detach().contiguous(), output=total)
    return total


def _all_gather(shard: Tensor, rows: int, comm: AxisCommunicator) -> Tensor:
    every = shard.new_empty((rows, *shard.shape[1:]))
    own = shard.detach().contiguous()
    if rows % comm.size:
        comm.all_gather([every[slice(*chunk(rows, comm.size, rank))] for rank in range(comm.size)], own)
    else:
        comm.all_gather(every, own)
    return every


def _reduce_scatter(x: Tensor, comm: AxisCommunicator) -> Tensor:
    x = x.detach().contiguous()
    own = torch.empty_like(x[own_rows(len(x), comm)])
    if len(x) % comm.size:
        comm.reduce_scatter(own, [x[slice(*chunk(len(x), comm.size, rank))] for rank in range(comm.size)])
    else:
        comm.reduce_scatter(own, x)
    return own
