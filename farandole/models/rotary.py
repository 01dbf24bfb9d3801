"""Rotary positions: a query and a key meet at an angle that grows with the distance between them.

Pairs of values of each head are rotated by position times a frequency, so that the product of a query and
a key depends on where they are only through their distance (Su et al., 2021, "RoFormer: Enhanced
Transformer with Rotary Position Embedding").  Value i is paired with value i + width / 2, as GPT-NeoX does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BASE = 10_000.0
"""The slowest pair turns once in 2 pi times this many positions."""


class _Rotate(torch.autograd.Function):
    """Written out, because its gradient is the same rotation backwards: half the work of what is derived."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(grad_outputs[0], cosine, -sine), None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    to_first, to_second = turned.chunk(2, -1)
    torch.addcmul(first * cosine, second, sine, value=-1, out=to_first)
    torch.addcmul(second * cosine, first, sine, out=to_second)
    return turned


def rotate(x: Tensor) -> Tensor:
    """Rotate x (..., positions, width) by its positions 0, 1, ...; the width is even."""
    positions, width = x.shape[-2:]
    frequencies = BASE ** -(torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.outer(torch.arange(positions, device=x.device), frequencies)
    turned: Tensor = _Rotate.apply(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    return turned
