"""A model with unusual parameters, its loss, and the communicator of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.comm.communicator import Communicator

SHARE = 4
"""The number of sequences per rank in a batch."""


class Odd(nn.Module):
    """A model with uneven shapes, a scalar, and tied, frozen, unused and sometimes used parameters."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.hidden = nn.Linear(width, 5)
        self.hidden.bias.requires_grad_(False)
        self.back = nn.Linear(5, width)
        self.sometimes = nn.Linear(width, width)
        self.never = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("offset", torch.randn(width))

    def forward(self, tokens: Tensor, use: bool) -> Tensor:
        x = self.back(torch.tanh(self.hidden(self.embedding(tokens)))) * self.scale + self.offset
        if use:
            x = x + self.sometimes(x)
        return F.linear(x, self.embedding.weight)


def make_odd(seed: int, width: int = 7) -> Odd:
    torch.manual_seed(seed)
    return Odd(width)


def loss_of(model: Any, tokens: Tensor, use: bool = False) -> Tensor:
    """Return the loss of predicting each sequence's previous token; `use` uses all parameters."""
    return F.cross_entropy(model(tokens, use).flatten(0, 1), tokens.roll(1, -1).flatten())


def world() -> Communicator:
    """Return the communicator of all ranks."""
    assert dist.group.WORLD is not None
    return Communicator(dist.group.WORLD)
