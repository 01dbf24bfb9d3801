"""Random models: blocks with unusual but legal features in random order, some of them shared, tied or frozen."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH = 11, 6


class Residual(nn.Module):
    """A usual block; subclasses change one feature of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Unused(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)


class Alternative(Residual):
    """Uses other parameters on ranks with an odd number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(x) if len(x) % 2 else super().forward(x)


class Skipped(Residual):
    """Is skipped by all ranks if the number of tokens is odd."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[1] % 2 else super().forward(x)


class SometimesDetached(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach() if x.shape[1] % 2 else x)


class Detached(nn.Module):
    """Passes no gradient on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * self.scale


class BatchNorm(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


class RunningMean(Residual):
    """Replaces a buffer in each forward pass, and changes another one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + x.detach().mean((0, 1)) * 0.1
            self.passes += 1
        return super().forward(x - self.mean)


class UsedTwice(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(F.relu(self.linear(self.norm(x))))


class UnusualParameters(nn.Module):
    """A transposed matrix, an expanded vector, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.expanded = nn.Parameter(torch.randn(1).expand(WIDTH).clone())
        self.scalar, self.empty = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix) * self.scalar + x * self.expanded + self.empty.sum()


class Checkpointed(Residual):
    """Recomputes a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.reentrant = nn.Linear(WIDTH, WIDTH), random.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(
            lambda y: self.last(torch.tanh(self.linear(y))), x, use_reentrant=self.reentrant
        )


class InPlace(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).mul_(0.5)
        y[:1].add_(1.0)
        return F.leaky_relu_(y, 0.2) + x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = random.choice([nn.LSTM, nn.GRU, nn.RNN])(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)[0]


class WeightNorm(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x.tanh(), x, x)[0]


class Force(Residual):
    """Adds the derivative of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x
        y = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.linear(y).square().sum(), y, create_graph=True)
        return x + force.tanh()


class Functional(Residual):
    """Calls a layer with parameters as arguments, for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        parameters = dict(self.linear.named_parameters())
        return x + torch.vmap(lambda y: torch.func.functional_call(self.linear, parameters, (y,)))(x).tanh()


class Hooked(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda gradient: gradient * 0.5)
        self.linear.register_full_backward_hook(_scale)


def _scale(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor | None]:
    return (None if inputs[0] is None else inputs[0] * 0.7,)


class Routed(nn.Module):
    """Adds one of several embeddings, so that most rows have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding((x.detach()[..., 0] * 3).long().abs() % 9)


class Lists(nn.Module):
    """Uses all layers of a list but one, which the number of samples selects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != len(x) % 3:
                x = x + layer(x).tanh() * self.scales[number % 2]
        return x


class Double(Residual):
    """Computes in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.double()).tanh().to(x.dtype)


class Fork(Residual):
    """Returns several objects: outputs with and without gradients, booleans and None."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), None, x > 0, x.detach()


class Pass(Residual):
    def forward(self, inputs: Any) -> Any:
        x, nothing, positive, constant = inputs
        return x + self.linear(x).tanh() * positive, nothing, positive, constant


class Join(Residual):
    def forward(self, inputs: Any) -> Tensor:
        x, _, _, constant = inputs
        return self.linear(x) * 0.5 + constant


class GiveWeights(nn.Module):
    """Returns parameters, which the next block uses."""

    def __init__(self) -> None:
        super().__init__()
        self.vector, self.matrix = (
            nn.Parameter(torch.randn(WIDTH)),
            nn.Parameter(torch.randn(WIDTH, WIDTH)),
        )

    def forward(self, x: Tensor) -> Any:
        return x @ self.matrix, self.vector, self.matrix


class TakeWeights(Residual):
    def forward(self, inputs: Any) -> Tensor:
        x, vector, matrix = inputs
        return torch.tanh(self.linear(x * vector) @ matrix)


def _fork() -> list[nn.Module]:
    return [Fork(), *(Pass() for _ in range(random.randint(0, 2))), Join()]


def _shared() -> list[nn.Module]:
    block = Residual()
    return [block, Residual(), block]


def _alone(block: Callable[[], nn.Module]) -> list[nn.Module]:
    return [block()]


BLOCKS: list[Callable[[], list[nn.Module]]] = [
    *(
        partial(_alone, block)
        for block in (
            Residual, Residual, Unused, Alternative, Skipped, SometimesDetached, Detached, BatchNorm, RunningMean,
            UsedTwice, UnusualParameters, Checkpointed, InPlace, Recurrent, WeightNorm, Attention, Force, Functional,
            Hooked, Routed, Lists, Double, partial(nn.LeakyReLU, 0.2),
        )
    ),
    _fork,
    _shared,
    lambda: [GiveWeights(), TakeWeights()],
]  # fmt: skip


def random_model(seed: int) -> nn.Sequential:
    """Return an embedding, at least six blocks, and a head for `WORDS` classes; the same model for each `seed`."""
    random.seed(seed)
    torch.manual_seed(seed)
    blocks: list[nn.Module] = []
    while len(blocks) < 6:
        blocks += random.choice(BLOCKS)()
    embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    if random.random() < 0.3:
        head.weight = embedding.weight
    model = nn.Sequential(embedding, *blocks, head)
    frozen = random.choice(["none", "none", "none", "first blocks", "some parameters"])
    if frozen == "first blocks":
        for block in list(model)[: random.randint(1, len(model) - 1)]:
            block.requires_grad_(False)
    for parameter in model.parameters():
        if frozen == "some parameters" and random.random() < 0.4:
            parameter.requires_grad_(False)
    head.bias.requires_grad_(True)
    return model
