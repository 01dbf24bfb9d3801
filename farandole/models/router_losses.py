"""Add router losses to a model's loss, without passing them from block to block.

A router loss is attached to the output of the mixture of experts: the output does not change, but the backward pass
also propagates through the router loss.  Therefore, blocks need no additional outputs, even if they are recomputed.

Each router loss receives the same gradient as the model's summed loss.  This gradient is known when the backward pass
begins at the head.  In a pipeline, each stage passes the sum of its own and earlier router losses to the next stage
(`continue_from`, `pass_on`).  In the backward pass, a stage first receives the gradient of this sum.

For each sequence, a router's loss is averaged over the positions and weighted by the number of targets.  The sum
over all sequences therefore does not depend on the distribution of sequences over micro-batches and processes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class RouterLosses:
    """The sum of all router losses in one forward pass.

    Args:
        targets: int64 of shape (batch, positions) for complete sequences.  Negative targets are ignored.
        documents: document numbers (batch, positions), negative for padding; or None.
    """

    def __init__(self, targets: Tensor, documents: Tensor | None = None) -> None:
        self._targets, self._documents = targets, documents
        self._values: list[Tensor] = []
        self._before: Tensor | None = None
        self._gradient: Tensor | None = None
        self._complete = False

    @cached_property
    def lengths(self) -> Tensor:
        """Return the number of positions in each sequence, excluding padding."""
        documents = self._documents
        real = torch.ones_like(self._targets) if documents is None else (documents >= 0).long()
        return real.sum(1).clamp(min=1)

    @cached_property
    def weights(self) -> Tensor:
        """Return the weight of each sequence: its number of targets divided by its length."""
        return (self._targets >= 0).sum(1) / self.lengths

    def attach(self, hidden: Tensor, loss: Tensor, copies: int = 1) -> Tensor:
        """Return `hidden` with a router's `loss`, an fp32 scalar, attached for the backward pass.

        Args:
            copies: the number of processes that compute the same loss and sum its gradients.
        """
        attached: Tensor = _Attach.apply(hidden, loss, self, copies)
        return attached

    def add(self, total: Tensor) -> Tensor:
        """Return the model's summed loss plus the router losses."""
        self._complete = True
        if self._before is not None:
            total = total + self._before
        if not self._values:
            return total
        added: Tensor = _Add.apply(total, self)
        return added

    def continue_from(self, before: Tensor) -> None:
        """Start the sum at `before`, the fp32 sum of the losses of the previous stages."""
        self._before = before

    def pass_on(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return `hidden` and the fp32 sum of the losses so far.

        The next stage passes this sum to `continue_from`.
        """
        self._complete = True
        before = hidden.new_zeros((), dtype=torch.float32) if self._before is None else self._before
        passed: tuple[Tensor, Tensor] = _PassOn.apply(hidden, before, self)
        return passed


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, losses: RouterLosses, copies: int) -> Tensor:
        ctx.losses, ctx.copies = losses, copies
        if not losses._complete:  # otherwise a block is recomputed
            losses._values.append(loss.detach())
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        gradient = ctx.losses._gradient  # None if the model's loss is not part of this backward pass
        return grad_outputs[0], None if gradient is None else gradient / ctx.copies, None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, losses: RouterLosses) -> Tensor:
        ctx.losses = losses
        return total + torch.stack(losses._values).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (ctx.losses._gradient,) = grad_outputs
        return grad_outputs[0], None


class _PassOn(torch.autograd.Function):
    """Returns the hidden states and the sum of the losses; the backward pass stores the sum's gradient."""

    # The sum is an output, so that the backward pass receives its gradient before a router needs it.

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, before: Tensor, losses: RouterLosses) -> tuple[Tensor, Tensor]:
        ctx.losses = losses
        return hidden.view_as(hidden), torch.stack([before, *losses._values]).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, ctx.losses._gradient = grad_outputs
        return hidden, ctx.losses._gradient, None
