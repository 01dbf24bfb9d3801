"""Self-attention, causal or over all positions, by the route that is fastest where the tensors are.

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
    if _explicit(query):
        positions = query.shape[-2]
        future = query.new_full((positions, positions), float("-inf")).triu(1)
        return _by_products(query, key, value, future)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, real: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Softmax(query key^T / sqrt(width)) value, where a position sees all, or all that are `real`.

    The first three are (batch, heads, positions, width), and so is the result.  `real` is (batch, positions) of
    bool, False where there is padding, which nobody sees; what stands there in the result is finite and
    means nothing.  `dropout` is the probability with which an attention weight is dropped.
    """
    if not _explicit(query):
        mask = None if real is None else real[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, mask, dropout)
    batch, heads, positions, _ = query.shape
    bias = query.new_zeros(1, 1, 1)
    if real is not None:
        # Half of the lowest number, not -inf: a window of nothing but padding would give NaN.
        low = torch.finfo(query.dtype).min / 2
        bias = query.new_zeros(batch, 1, 1, positions).masked_fill_(~real[:, None, None], low)
        bias = bias.expand(-1, heads, -1, -1).reshape(batch * heads, 1, positions)
    return _by_products(query, key, value, bias, dropout)


def _explicit(query: Tensor) -> bool:
    short = query.shape[-2] <= LONGEST_EXPLICIT
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cpu" and half and short and torch.is_grad_enabled()


def _by_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float = 0.0) -> Tensor:
    """`bias` is added to the scores, (batch * heads, positions, positions), to which it is broadcast."""
    batch, heads, positions, width = query.shape
    flat = (batch * heads, positions, width)
    scores = torch.baddbmm(bias, query.reshape(flat), key.reshape(flat).transpose(1, 2), alpha=width**-0.5)
    weights = F.dropout(scores.softmax(-1), dropout)
    return torch.bmm(weights, value.reshape(flat)).view(query.shape)
