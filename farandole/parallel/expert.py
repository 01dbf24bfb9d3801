"""Expert parallelism: each rank of an axis has some of the experts of each mixture of experts, and its own samples.

A row is a token's hidden state for one of the token's experts.  A rank sends each row to the rank that has the expert,
and receives the expert's output (Lepikhin et al., 2021, "GShard").  The number of rows varies between ranks and
experts, and no row is dropped:

    1. all-gather      the number of rows for each expert, from each rank
    2. all-to-all      the rows, which are sorted by expert
    3. compute         the outputs of this rank's experts
    4. all-to-all      the outputs

A shared expert is computed during the first all-to-all.

All other parameters are replicated on the axis, and their gradients are summed as on the data axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from farandole.layout import Shard, chunk
from farandole.models.derivatives import first_order
from farandole.models.moe import Experts, Meanwhile, Products, as_sizes
from farandole.parallel.axes import AxisCommunicator, Layouts, Position
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
                f"expert={ranks}: {path} has only {experts.count} experts; nearest plan: expert={experts.count}"
            )
        for parameter in experts.parameters():
            layouts.shard(parameter, AXIS, Shard(0), position)
        comm = position.comm(AXIS)
        if comm is not None:
            experts.exchange = ExpertExchange(experts.count, comm)


class ExpertExchange:
    """Computes a mixture of `experts` experts, which are distributed over the ranks of `comm`."""

    def __init__(self, experts: int, comm: AxisCommunicator) -> None:
        self._experts, self._comm = experts, comm
        self._ranges = [chunk(experts, comm.size, rank) for rank in range(comm.size)]

    def __call__(
        self, rows: Tensor, counts: Tensor, products: Products, meanwhile: Meanwhile | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs (rows, width) for rows that are sorted by expert, and the result of `meanwhile`.

        Args:
            counts: the number of rows for each expert.
            products: a function that computes the outputs of this rank's experts.
            meanwhile: a function that runs while rows are sent.  Its backward pass runs while gradients are sent.
        """
        comm, (first, end) = self._comm, self._ranges[self._comm.rank]
        if isinstance(rows, FakeTensor):  # a dry run, in which all experts have the same load
            sizes = as_sizes(rows.new_empty(comm.size), len(rows))
            arrived, other = exchange_rows(rows, sizes, sizes, comm, meanwhile)
            return exchange_rows(products(arrived, counts[first:end]), sizes, sizes, comm)[0], other
        every = counts.new_empty((comm.size, self._experts))
        comm.all_gather(every, counts.contiguous())
        every = every.cpu()
        sent = [int(every[comm.rank, start:stop].sum()) for start, stop in self._ranges]
        own = every[:, first:end]  # (ranks, experts of this rank)
        received = own.sum(1).tolist()
        arrived, other = exchange_rows(rows, sent, received, comm, meanwhile)
        blocks = own.tolist()
        outputs = products(transpose_blocks(arrived, blocks), own.sum(0).to(rows.device))
        outputs = transpose_blocks(outputs, own.T.tolist())
        return exchange_rows(outputs, received, sent, comm)[0], other


def transpose_blocks(rows: Tensor, counts: list[list[int]]) -> Tensor:
    """Transpose the order of the blocks of `rows` (rows, width); block (i, j) has counts[i][j] rows.

    The blocks are sorted by i in the input, and by j in the result.
    """
    if len(counts) == 1 or len(counts[0]) == 1:
        return rows
    transposed: Tensor = _TransposeBlocks.apply(rows, counts)
    return transposed


class _TransposeBlocks(torch.autograd.Function):
    """Reorders blocks of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[list[int]]) -> Tensor:
        blocks = rows.split([count for row in counts for count in row])
        columns = len(counts[0])
        ctx.counts = [list(column) for column in zip(*counts, strict=True)]
        return torch.cat([block for j in range(columns) for block in blocks[j::columns]])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        # faster than the backward pass of `index_select`, which zeroes its result and then accumulates into it
        return transpose_blocks(grad_outputs[0], ctx.counts), None


class _Transfer:
    """An all-to-all that sends `sent[i]` rows to rank i, and receives `received[i]` rows from rank i."""

    def __init__(self, sent: list[int], received: list[int], comm: AxisCommunicator, overlaps: bool) -> None:
        self.sent, self.received, self.comm, self.overlaps = sent, received, comm, overlaps
        self._work: dist.Work | None = None
        self._rows: tuple[Tensor, Tensor] | None = None

    def start(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Start the exchange.  The returned tensor must not be read before `wait`."""
        leaving = rows.detach().contiguous()
        arriving = self.comm.receive_buffer((sum(received), *rows.shape[1:]), rows)
        self._work = self.comm.all_to_all(
            list(arriving.split(received)), list(leaving.split(sent)), async_op=self.overlaps
        )
        self._rows = leaving, arriving  # the memory must not be freed before `wait`
        return arriving

    def wait(self) -> Tensor:
        assert self._rows is not None
        if self._work is not None:
            self._work.wait()
        arrived = self._rows[1]
        self._work = self._rows = None
        return arrived


def exchange_rows(
    rows: Tensor,
    sent: list[int],
    received: list[int],
    comm: AxisCommunicator,
    meanwhile: Meanwhile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the rows that this rank receives, and the result of `meanwhile`, which runs during the transfer.

    The backward pass of `meanwhile` runs during the transfer of the gradients.
    """
    transfer = _Transfer(sent, received, comm, overlaps=meanwhile is not None)
    # autograd runs the backward passes of later calls first: `_Wait`, then `meanwhile`, then `_Start`
    arriving = _Start.apply(rows, transfer)
    other = None if meanwhile is None else meanwhile()
    return _Wait.apply(arriving, transfer), other


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.start(rows, transfer.sent, transfer.received)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return (
            ctx.transfer.wait(),
            None,
        )  # not `grad_outputs`, which has the shape of the rows that were received


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.wait().view_as(arriving)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        transfer: _Transfer = ctx.transfer
        transfer.start(grad_outputs[0], transfer.received, transfer.sent)
        return grad_outputs[0], None
