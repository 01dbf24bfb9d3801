"""Expert parallelism: the ranks of an axis share the experts of each mixture of experts, and have different samples.

A rank sends each row (the hidden state of a token for one of its experts) to the rank that has the expert, and gets the
expert's output back (Lepikhin et al., 2021, "GShard").  The numbers of rows differ, and no row is dropped:

    1. all-gather      the number of rows for each expert, from each rank
    2. all-to-all      the rows, which are sorted by expert
    3. the products of this rank's experts
    4. all-to-all      the outputs

All other parameters are replicated on the axis, and their gradients are summed as on the data axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from farandole.comm.communicator import Communicator
from farandole.layout import Shard, chunk
from farandole.models.moe import Experts, Products, as_sizes
from farandole.parallel.axes import Layouts, Position
from farandole.plan import Plan, PlanError

AXIS = "expert"


def apply(model: nn.Module, position: Position, plan: Plan, layouts: Layouts) -> None:
    """Distribute the experts of `model` over the ranks of the expert axis, in order and as evenly as possible.

    Raises:
        PlanError: if the model has no experts, or fewer experts than ranks.
    """
    ranks = position.size(AXIS)
    if ranks == 1:
        return
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, Experts)]
    if not found:
        raise PlanError(
            f"expert={ranks}: {type(model).__name__} has no mixture of experts; nearest plan: expert=1"
        )
    for path, experts in found:
        if experts.count < ranks:
            raise PlanError(
                f"expert={ranks}: {path} has {experts.count} experts; nearest plan: expert={experts.count}"
            )
        for parameter in experts.parameters():
            layouts.shard(parameter, AXIS, Shard(0), position)
        comm = position.comm(AXIS)
        if comm is not None:
            experts.exchange = ExpertExchange(experts.count, comm)


class ExpertExchange:
    """Computes rows of `experts` experts that the ranks of `comm` share."""

    def __init__(self, experts: int, comm: Communicator) -> None:
        self._experts, self._comm = experts, comm
        self._ranges = [chunk(experts, comm.size, rank) for rank in range(comm.size)]

    def __call__(self, rows: Tensor, counts: Tensor, products: Products) -> Tensor:
        """Return the outputs (rows, width) for rows that are sorted by expert, with `counts[e]` rows for expert e."""
        comm, (first, end) = self._comm, self._ranges[self._comm.rank]
        if isinstance(rows, FakeTensor):  # a dry run, in which all experts have the same load
            sizes = as_sizes(rows.new_empty(comm.size), len(rows))
            inputs = _Exchange.apply(rows, sizes, sizes, comm)
            found: Tensor = _Exchange.apply(products(inputs, counts[first:end]), sizes, sizes, comm)
            return found
        every = counts.new_empty((comm.size, self._experts))
        comm.all_gather(every, counts.contiguous())
        every = every.cpu()
        sent = [int(every[comm.rank, start:stop].sum()) for start, stop in self._ranges]
        own = every[:, first:end]  # (ranks, experts of this rank)
        received = own.sum(1).tolist()
        inputs = _Exchange.apply(rows, sent, received, comm)
        # from the order (rank, expert) to (expert, rank)
        numbers = torch.arange(end - first).repeat(comm.size).repeat_interleave(own.flatten())
        order = numbers.argsort(stable=True).to(rows.device)
        outputs = products(inputs.index_select(0, order), own.sum(0).to(rows.device))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        result: Tensor = _Exchange.apply(outputs.index_select(0, back), received, sent, comm)
        return result


class _Exchange(torch.autograd.Function):
    """Sends `sent[i]` rows to rank i, and receives `received[i]` rows from rank i."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], comm: Communicator) -> Tensor:
        ctx.sent, ctx.received, ctx.comm = sent, received, comm
        return _all_to_all(rows, sent, received, comm)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad_outputs[0], ctx.received, ctx.sent, ctx.comm), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], comm: Communicator) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    comm.all_to_all(list(arrived.split(received)), list(rows.detach().contiguous().split(sent)))
    return arrived
