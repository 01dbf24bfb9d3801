"""Rotary position embeddings (Su et al., 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding").

Pairs of values of each head are rotated by position times a frequency, so the product of a query and a key
depends only on their distance.  Value i is paired with value i + width / 2, as in GPT-NeoX.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BASE = 10_000.0
"""The slowest pair rotates once in about 2 pi times this many positions."""


class _Rotate(torch.autograd.Function):
    """Rotation with an explicit backward pass, the inverse rotation, which is half the work of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate_pairs(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate_pairs(grad_outputs[0], cosine, -sine), None, None


def _rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    to_first, to_second = rotated.chunk(2, -1)
    torch.addcmul(first * cosine, second, sine, value=-1, out=to_first)
    torch.addcmul(second * cosine, first, sine, out=to_second)
    return rotated


def rotate(x: Tensor) -> Tensor:
    """Rotate `x` (..., positions, width) by positions 0, 1, ...; the width must be even."""
    positions, width = x.shape[-2:]
    frequencies = BASE ** -(torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.outer(torch.arange(positions, device=x.device), frequencies)
    rotated: Tensor = _Rotate.apply(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    return rotated
