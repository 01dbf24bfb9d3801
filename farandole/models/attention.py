"""Causal self-attention, by the route that is fastest where the tensors are.

`torch.nn.functional.scaled_dot_product_attention` is the right call nearly everywhere.  The exception is
training on a CPU in bf16 or fp16: the backward pass of its flash kernel takes twice the time of two
batched matrix products and a softmax for sequences that fit in the cache (measured with AMX and AVX-512,
128 to 512 positions), so short sequences take those there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST_EXPLICIT = 512
"""Positions up to which the score matrix (positions squared) is cheaper to keep than to recompute."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax(query key^T / sqrt(width)) value, where a position sees itself and what came before.

    All three are (batch, heads, positions, width), and so is the result.
    """
    short = query.shape[-2] <= LONGEST_EXPLICIT
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.device.type == "cpu" and half and short and torch.is_grad_enabled():
        return _by_products(query, key, value)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _by_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, heads, positions, width = query.shape
    flat = (batch * heads, positions, width)
    future = query.new_full((positions, positions), float("-inf")).triu(1)
    scores = torch.baddbmm(future, query.reshape(flat), key.reshape(flat).transpose(1, 2), alpha=width**-0.5)
    return torch.bmm(scores.softmax(-1), value.reshape(flat)).view(query.shape)
