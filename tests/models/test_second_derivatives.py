"""Functions with a backward pass of their own refuse second derivatives, which would lack terms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from farandole.models.layers import gated, rms_norm
from farandole.models.loss import head_loss, next_token_loss
from farandole.models.rotary import rotate

WIDTH = 8
WEIGHT = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
TARGETS = torch.tensor([0, 2, 1, 1])
ANGLES = torch.linspace(0, 1, 4 * WIDTH // 2).view(4, -1)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, torch.ones(WIDTH), 1e-6).square().sum(),
    "gated": lambda x: gated(x, "silu").square().sum(),
    "rotate": lambda x: rotate(x[None, None], ANGLES.cos(), ANGLES.sin(), False).pow(3).sum(),
    "next_token_loss": lambda x: next_token_loss(x, TARGETS),
    "head_loss": lambda x: head_loss(x, TARGETS, WEIGHT)[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_are_refused(name: str) -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(FUNCTIONS[name](x), x, create_graph=True)
