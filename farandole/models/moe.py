"""Provide routers and experts for mixtures of experts (Shazeer et al., 2017, "Outrageously Large Neural Networks").

A router selects a few experts per token.  Without a capacity limit, no token is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from farandole.models.layers import gated
from farandole.models.sequence import SequenceInfo

# ---- routers ----


@dataclass(frozen=True)
class Balance:
    """Settings for balancing the load of a router's experts during training.  By default, no loss and no limit apply.

    Losses and capacities apply to each sequence separately, so they do not depend on the distribution of sequences over
    micro-batches and processes.

    Args:
        loss: the coefficient of the load-balancing loss E / (k T) sum_e n_e p_e (Fedus et al., 2022, "Switch
            Transformers", section 2.2; DeepSeek-V3, 2024, equations 17 to 20).  Each of T tokens selects k of E
            experts.  n_e tokens select expert e, and p_e is the mean score of expert e.  The loss is 1 for a uniform
            load.
        z_loss: the coefficient of the z-loss, which keeps logits small: the mean squared logarithm of the softmax
            denominator (Zoph et al., 2022, "ST-MoE", equation 5).
        capacity: the maximum number of tokens per expert in a sequence, as a multiple of the mean k T / E; None for no
            limit.  Tokens beyond the limit are dropped: the expert does not process them (Lepikhin et al., 2021,
            "GShard").  First choices have priority over second choices.  Among equal choices, earlier tokens have
            priority.

    Raises:
        ValueError: if a coefficient is negative, or the capacity is not positive.
    """

    loss: float = 0.0
    z_loss: float = 0.0
    capacity: float | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "z_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected a coefficient of at least 0")
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(
                f"capacity={self.capacity}: expected a number greater than 0, or None for no limit"
            )

    @property
    def has_losses(self) -> bool:
        """Return whether the router adds losses to the model's loss."""
        return self.loss > 0 or self.z_loss > 0


@dataclass(frozen=True)
class Routing:
    """The experts that a router selected.

    Args:
        experts, weights: the indices of the selected experts and their weights, both (tokens, top).
        scores: fp32 scores (tokens, experts), which sum to 1 for each token.
        logits: the logits (tokens, experts) from which `scores` were computed.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


class Router(nn.Module):
    """Selects `top` of `experts` experts for each token; subclasses implement `route`.

    Buffers stay in fp32 if the model is converted to another dtype, because lower precisions round small changes to
    zero.
    """

    load: Tensor
    """The number of selections of each expert, followed by the number of dropped selections; reset by `take_loads`.

    The shape is (experts + 1).
    """

    copies = 1
    """The number of processes that compute this router for the same tokens, and sum its gradients."""

    def __init__(self, width: int, experts: int, top: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.register_buffer("load", torch.zeros(experts + 1, dtype=torch.float32), persistent=False)
        self.top = top
        nn.init.normal_(self.weight, std=0.02)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Self:
        buffers = dict(self._buffers)
        super()._apply(fn, *args, **kwargs)
        for name, before in buffers.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def route(self, x: Tensor) -> Routing:
        """Select `top` experts for each row of `x` (tokens, width)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Routing:
        """Select `top` experts for each row of `x` (tokens, width), and update `load` if `counts_load` is true."""
        routing = self.route(x)
        if self.counts_load:
            with torch.no_grad():
                self.load[:-1] += load_of(routing.experts, len(self.weight))
        return routing

    @property
    def counts_load(self) -> bool:
        """Return whether a forward pass adds to `load`.

        The result is true in training mode, except while a backward pass recomputes activations.
        """
        return self.training and torch._C._current_graph_task_id() == -1


class TopKRouter(Router):
    """Selects the `top` experts with the highest probabilities, and normalizes their weights to sum to 1 (Mixtral).

    Args:
        jitter: the amplitude of the noise during training.  The input is multiplied by random numbers in
            [1 - jitter, 1 + jitter].
    """

    def __init__(self, width: int, experts: int, top: int, jitter: float = 0.0) -> None:
        super().__init__(width, experts, top)
        self.jitter = jitter

    def route(self, x: Tensor) -> Routing:
        """Select `top` experts for each row of `x` (tokens, width)."""
        if self.jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        logits = F.linear(x, self.weight.to(x.dtype))
        probabilities = logits.softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top, -1)
        return Routing(experts, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), probabilities, logits)


class GroupedRouter(Router):
    """Selects experts from the best groups, and balances their load with biases instead of an auxiliary loss.

    An expert's score is the sigmoid of its logit.  Each expert's bias, which `balance` adapts, affects the selection
    but not the weights (DeepSeek-V3, 2024, section 2.1.2).

    Args:
        groups: the number of expert groups.
        top_groups: the number of groups to select experts from.  A group's score is the sum of its two highest expert
            scores.
        normalized: whether the weights of the selected experts are divided by their sum.
        scale: the factor applied to the weights.

    Raises:
        ValueError: if groups would have different sizes, `top_groups` exceeds `groups`, or the selected groups have
            fewer than `top` experts.
    """

    bias: Tensor

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
        super().__init__(width, experts, top)
        if experts % groups or top_groups > groups or top > experts // groups * top_groups:
            raise ValueError(
                "expected experts % groups == 0, top_groups <= groups and top <= experts / groups * top_groups; "
                f"got experts={experts}, groups={groups}, top_groups={top_groups}, top={top}"
            )
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float32))
        self.groups, self.top_groups = groups, top_groups
        self.normalized, self.scale = normalized, scale

    def route(self, x: Tensor) -> Routing:
        """Select `top` experts for each row of `x` (tokens, width)."""
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid()
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
        weights = scores.gather(-1, experts)
        if self.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(
            experts, (weights * self.scale).to(x.dtype), scores / scores.sum(-1, keepdim=True), logits
        )

    @torch.no_grad()
    def balance(self, load: Tensor, speed: float = 1e-3) -> None:
        """Adapt the biases: add `speed` for experts below the mean load, and subtract `speed` for experts above it.

        Args:
            load: the number of tokens per expert on all processes since the last call.
        """
        self.bias += speed * torch.sign(load.mean() - load)


@dataclass(frozen=True)
class RouterLoad:
    """The load of a router's experts, summed over all processes.

    Args:
        tokens: the number of tokens for each expert, before tokens are dropped, fp32 of shape (experts).
        dropped: the fraction of selections (pairs of a token and an expert) that were dropped.
    """

    tokens: Tensor
    dropped: float

    @property
    def imbalance(self) -> float:
        """Return the ratio of the largest load to the mean load, which is 1 for a uniform load."""
        return float(self.tokens.max() / self.tokens.mean().clamp(min=1e-20))


def routers_of(model: nn.Module) -> dict[str, Router]:
    """Return a model's routers, keyed by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


def router_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers of a model's routers, which are stored in fp32."""
    return {
        f"{path}.{name}" if path else name
        for path, router in routers_of(model).items()
        for name, _ in router.named_buffers()
    }


@torch.no_grad()
def take_loads(
    model: nn.Module,
    all_reduce: Callable[[Tensor], object] | None = None,
    experts: Mapping[str, int] | None = None,
) -> dict[str, RouterLoad]:
    """Return each router's load since the last call, keyed by router name, and reset the loads.

    This function also balances the experts of each `GroupedRouter`.  All processes must call it once per step.

    Args:
        all_reduce: a function that sums a tensor over all processes in place.
        experts: a dict that maps each router's name to its number of experts.  The dict includes routers on other
            processes, and has the same order on all processes.  It is required if processes have different routers.
    """
    routers = routers_of(model)
    if experts is None:
        experts = {name: len(router.weight) for name, router in routers.items()}
    if not experts:
        return {}
    device = next(model.parameters()).device
    every = torch.cat(
        [
            routers[name].load / routers[name].copies
            if name in routers
            else torch.zeros(count + 1, device=device)
            for name, count in experts.items()
        ]
    )
    if all_reduce is not None:
        all_reduce(every)
    loads = {}
    for name, load in zip(experts, every.split([count + 1 for count in experts.values()]), strict=True):
        tokens = load[:-1]
        loads[name] = RouterLoad(tokens, float(load[-1] / tokens.sum().clamp(min=1)))
        router = routers.get(name)
        if isinstance(router, GroupedRouter):
            router.balance(tokens)
        if router is not None:
            router.load.zero_()
    return loads


def load_of(experts: Tensor, count: int) -> Tensor:
    """Return the number of times that each of `count` experts occurs, as int64 of shape (count)."""
    if isinstance(experts, FakeTensor):
        return experts.new_empty(count)
    return torch.bincount(experts.flatten(), minlength=count)


def as_sizes(counts: Tensor, total: int) -> list[int]:
    """Return `counts` as a list.  In a dry run, tensors have no values, so divide `total` equally."""
    if isinstance(counts, FakeTensor):
        least, more = divmod(total, len(counts))
        return [least + (number < more) for number in range(len(counts))]
    sizes: list[int] = counts.tolist()
    return sizes


def kept_within(capacity: int, experts: Tensor, sequences: int, count: int) -> Tensor:
    """Return a mask of the selections that fit in the capacity of their experts, with the shape of `experts`.

    Args:
        capacity: the maximum number of tokens that an expert processes in each sequence.
        experts: the indices of the selected experts (tokens, top).
        sequences: the number of sequences, which have equal lengths and consecutive tokens.
        count: the number of experts.
    """
    tokens, top = experts.shape
    by_choice = experts.view(sequences, -1, top).transpose(1, 2)  # first choices of all tokens come first
    groups = by_choice + count * torch.arange(sequences, device=experts.device)[:, None, None]
    flat = groups.flatten()
    order = flat.argsort(stable=True)
    sizes = torch.bincount(flat, minlength=sequences * count)
    first = sizes.cumsum(0) - sizes
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat), device=flat.device) - first[flat[order]]
    kept = (place < capacity).view(by_choice.shape).transpose(1, 2)
    return kept.reshape(tokens, top)


# ---- experts ----


Products = Callable[[Tensor, Tensor], Tensor]
"""A function that applies experts to rows, and returns the output rows.

It takes rows (rows, width) sorted by expert, and the number of rows of each expert.
"""

Meanwhile = Callable[[], Tensor]
"""A computation that can overlap with communication."""

Exchange = Callable[[Tensor, Tensor, Products, Meanwhile | None], tuple[Tensor, Tensor | None]]
"""A function that sends rows to the processes that have their experts, and receives the output rows.

It takes this process's rows sorted by expert, the number of these rows for each expert of all processes, the `Products`
that applies this process's experts, and an optional computation to overlap with communication.  It returns the output
rows and the result of the computation.
"""


Multiply = Callable[[Tensor, Tensor], Tensor]
"""A function that maps rows (rows, inputs) and a weight (outputs, inputs) to rows (rows, outputs)."""


class StackedLinear(nn.Module):
    """A linear layer for each expert, without biases.  `weight` has shape (experts, outputs, inputs)."""

    multiply: Multiply | None = None
    """Replaces `F.linear` for the rows of one expert, to multiply in a precision other than that of the weights."""

    grouped = True
    """Whether one grouped product can compute all experts."""

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.count, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """For each expert on this process, map a tensor (rows, inputs) to a tensor (rows, outputs)."""
        multiply = self.multiply or F.linear
        return [multiply(part, weight) for part, weight in zip(parts, self.weight, strict=True)]


class Experts(nn.Module):
    """Gated feed-forward networks with stacked weights."""

    exchange: Exchange | None = None
    """Sends rows to the processes that have their experts, if the experts are divided among processes."""

    def __init__(self, experts: int, width: int, inner: int, activation: str = "silu") -> None:
        super().__init__()
        self.count = experts
        self.gate_up = StackedLinear(experts, width, 2 * inner)
        self.down = StackedLinear(experts, inner, width)
        self.activation = activation

    def forward(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        kept: Tensor | None = None,
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Return the weighted sum of the experts' outputs.

        Args:
            x: (tokens, width).
            experts, weights: the indices of the selected experts and their weights, both (tokens, top).
            kept: a mask (tokens, top) of the selections that are computed; None for all.
            meanwhile: a function whose result is added to the sum.  It runs while rows are sent to other processes.

        Returns:
            (tokens, width).
        """
        top = experts.shape[1]
        flat = experts.flatten()
        counts = load_of(flat if kept is None else flat[kept.flatten()], self.count)
        if kept is not None:
            flat = flat.masked_fill(~kept.flatten(), self.count)
        order = flat.argsort(stable=True)
        if kept is not None:
            order = order[: int(counts.sum())]
        tokens = order // top
        inputs = x.index_select(0, tokens)
        if self.exchange is None:
            outputs = self._products(inputs, counts)
            total = torch.zeros_like(x) if meanwhile is None else meanwhile()
        else:
            outputs, other = self.exchange(inputs, counts, self._products, meanwhile)
            total = torch.zeros_like(x) if other is None else other
        outputs = outputs * weights.flatten()[order, None]
        return total.index_add(0, tokens, outputs)

    def _products(self, inputs: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert i to its `counts[i]` rows of `inputs`, which are sorted by expert."""
        if self._is_grouped(inputs):
            ends = counts.cumsum(0).int()
            inner = F.grouped_mm(inputs, self.gate_up.weight.transpose(1, 2), offs=ends)
            return F.grouped_mm(gated(inner, self.activation), self.down.weight.transpose(1, 2), offs=ends)
        parts = inputs.split(as_sizes(counts, len(inputs)))
        return torch.cat(self.down([gated(part, self.activation) for part in self.gate_up(parts)]))

    def _is_grouped(self, inputs: Tensor) -> bool:
        layers = (self.gate_up, self.down)
        return (
            inputs.device.type != "cpu"
            and inputs.dtype == torch.bfloat16
            and all(layer.grouped and layer.multiply is None for layer in layers)
        )


class MixtureOfExperts(nn.Module):
    """A router, its experts, and an optional shared expert that processes every token.

    Args:
        shared: the shared expert, or None.
        balance: the settings for load balancing.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: nn.Module | None = None,
        balance: Balance | None = None,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.balance = balance or Balance()

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """Return the output for `x`, both of shape (..., width).

        Router losses apply if `x` is (batch, positions, width) and `info` contains `router_losses`.
        """
        flat = x.flatten(0, -2)
        routing: Routing = self.router(flat)
        kept = self._kept(routing.experts, len(x) if x.dim() > 2 else 1)
        shared = self.shared
        mixed: Tensor = self.experts(
            flat, routing.experts, routing.weights, kept, None if shared is None else lambda: shared(flat)
        )
        result = mixed.view_as(x)
        if info is not None and info.router_losses is not None and self.balance.has_losses:
            loss = self._loss(routing, len(x), info)
            result = info.router_losses.attach(result, loss, self.router.copies)
        return result

    def _kept(self, experts: Tensor, sequences: int) -> Tensor | None:
        """Return a mask of the selections to keep, or None for all; count the dropped selections."""
        if self.balance.capacity is None or not self.training or isinstance(experts, FakeTensor):
            return None
        count = self.experts.count
        capacity = math.ceil(self.balance.capacity * experts.numel() / sequences / count)
        kept = kept_within(capacity, experts, sequences, count)
        if self.router.counts_load:
            with torch.no_grad():
                self.router.load[-1] += (~kept).sum()
        return kept

    def _loss(self, routing: Routing, batch: int, info: SequenceInfo) -> Tensor:
        """Return this process's contribution to the router's loss."""
        losses = info.router_losses
        assert losses is not None
        scores = routing.scores.unflatten(0, (batch, -1))  # (batch, positions, experts)
        count = scores.shape[-1]
        real = 1.0 if info.documents is None else (info.documents >= 0).float()[..., None]
        loss = scores.new_zeros(())
        if self.balance.loss:
            with torch.no_grad():
                chosen = torch.zeros_like(scores).scatter_(-1, routing.experts.unflatten(0, (batch, -1)), 1.0)
                selected = (chosen * real).sum(1)  # (batch, experts)
                if info.shard is not None:
                    info.shard.all_reduce(selected)
                share = selected * (count / self.router.top / losses.lengths[:, None])
            per_sequence = ((scores * real).sum(1) * share).sum(-1)
            loss = loss + self.balance.loss * (losses.weights * per_sequence).sum()
        if self.balance.z_loss:
            squares = routing.logits.float().logsumexp(-1).square().view(batch, -1, 1) * real
            loss = loss + self.balance.z_loss * (losses.weights * squares.sum((1, 2))).sum()
        return loss
