"""Provide routers and experts for mixtures of experts (Shazeer et al., 2017, "Outrageously Large Neural Networks").

A router selects a few experts per token.  No token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from farandole.models.layers import gated


class TopKRouter(nn.Module):
    """Selects the `top` experts with the highest probabilities, and normalizes their weights to sum to 1 (Mixtral).

    Args:
        jitter: the noise during training.  The input is multiplied by random numbers in [1 - jitter, 1 + jitter].
    """

    def __init__(self, width: int, experts: int, top: int, jitter: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.top, self.jitter = top, jitter
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (tokens, width) to the indices of the selected experts and their weights, both (tokens, top)."""
        if self.jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        probabilities = F.linear(x, self.weight.to(x.dtype)).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top, -1)
        return experts, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


class GroupedRouter(nn.Module):
    """Selects experts from the best groups, and balances their load with a bias instead of an auxiliary loss.

    An expert's score is a sigmoid.  A bias, which `balance` adapts, affects the selection of experts but not their
    weights (DeepSeek-V3, 2024, section 2.1.2).

    Args:
        groups: the number of expert groups.
        top_groups: the number of groups to select experts from.  A group's score is the sum of its two highest expert
            scores.
        normalized: whether the weights of the selected experts are divided by their sum.
        scale: the factor applied to the weights.
    """

    bias: Tensor
    load: Tensor

    def __init__(
        self,
        width: int,
        experts: int,
        top: int,
        groups: int = 1,
        top_groups: int = 1,
        normalized: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if experts % groups or top_groups > groups or top > experts // groups * top_groups:
            raise ValueError(
                f"expected groups of equal size with at least {top} experts in {top_groups} of them, got "
                f"experts={experts}, groups={groups}"
            )
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.top, self.groups, self.top_groups = top, groups, top_groups
        self.normalized, self.scale = normalized, scale
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (tokens, width) to the indices of the selected experts and their weights, both (tokens, top)."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        with torch.no_grad():
            biased = scores + self.bias
            if self.groups > 1:
                grouped = biased.unflatten(-1, (self.groups, -1))
                best = (
                    grouped.topk(min(2, grouped.shape[-1]), -1)
                    .values.sum(-1)
                    .topk(self.top_groups, -1)
                    .indices
                )
                chosen = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
                biased = grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(-2)
            experts = biased.topk(self.top, -1).indices
            if self.training:
                self.load += load_of(experts, len(self.load))
        weights = scores.gather(-1, experts)
        if self.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, (weights * self.scale).to(x.dtype)

    @torch.no_grad()
    def balance(self, speed: float = 1e-3) -> None:
        """Adapt the biases to the load since the last call.

        The method adds `speed` for experts with a load below the mean, and subtracts `speed` for the others.  With
        several ranks, sum `load` over the ranks first.
        """
        self.bias += speed * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


def load_of(experts: Tensor, count: int) -> Tensor:
    """Return the number of times that each of `count` experts occurs, as int64 of shape (count)."""
    if isinstance(experts, FakeTensor):
        return experts.new_empty(count)
    return torch.bincount(experts.flatten(), minlength=count)


def as_sizes(counts: Tensor, total: int) -> list[int]:
    """Return `counts` as integers; in a dry run, in which tensors have no values, divide `total` equally."""
    if isinstance(counts, FakeTensor):
        least, more = divmod(total, len(counts))
        return [least + (number < more) for number in range(len(counts))]
    sizes: list[int] = counts.tolist()
    return sizes


Products = Callable[[Tensor, Tensor], Tensor]
"""A function of rows (rows, width), sorted by expert, and the number of rows per expert that returns the experts' outputs."""

Exchange = Callable[[Tensor, Tensor, Products], Tensor]
"""A function with the arguments and the result of `Products` for all experts, given the products of this process's experts."""


class Experts(nn.Module):
    """Gated feed-forward networks with stacked weights.

    `gate_up` is (experts, 2 inner, width) and `down` is (experts, width, inner).
    """

    exchange: Exchange | None = None
    """Sends rows to the processes that have their experts, if processes share the experts."""

    def __init__(self, experts: int, width: int, inner: int, activation: str = "silu") -> None:
        super().__init__()
        self.count = experts
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))
        self.activation = activation
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs.

        Args:
            x: (tokens, width).
            experts, weights: the indices of the selected experts and their weights, both (tokens, top).

        Returns:
            (tokens, width).
        """
        top = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        tokens = order // top
        counts = load_of(experts, self.count)
        inputs = x.index_select(0, tokens)
        products = self._products
        outputs = (
            products(inputs, counts) if self.exchange is None else self.exchange(inputs, counts, products)
        )
        outputs = outputs * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, tokens, outputs)

    def _products(self, inputs: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert i to the next counts[i] rows."""
        if inputs.device.type != "cpu" and inputs.dtype == torch.bfloat16:
            ends = counts.cumsum(0).int()
            inner = F.grouped_mm(inputs, self.gate_up.transpose(1, 2), offs=ends)
            return F.grouped_mm(gated(inner, self.activation), self.down.transpose(1, 2), offs=ends)
        parts = inputs.split(as_sizes(counts, len(inputs)))
        outputs = [
            F.linear(gated(F.linear(part, up), self.activation), down)
            for part, up, down in zip(parts, self.gate_up, self.down, strict=True)
        ]
        return torch.cat(outputs)


class MixtureOfExperts(nn.Module):
    """A router, its experts, and a shared expert that processes every token.

    Args:
        shared: the shared expert, or None.
    """

    def __init__(self, router: nn.Module, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        flat = x.flatten(0, -2)
        result: Any = self.experts(flat, *self.router(flat))
        if self.shared is not None:
            result = result + self.shared(flat)
        mixed: Tensor = result.view_as(x)
        return mixed
