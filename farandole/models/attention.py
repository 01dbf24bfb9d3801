"""Causal and bidirectional self-attention, with the fastest implementation for the device.

`torch.nn.functional.scaled_dot_product_attention` is the fastest nearly everywhere.  The exception is training
on a CPU in bf16 or fp16 with sequences that fit in the cache: the backward pass of the flash kernel takes
twice as long as two batched matrix products and a softmax (measured with AMX and AVX-512, 128 to 512
positions).  These sequences use the explicit products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PRODUCT_POSITIONS = 512
"""The largest number of positions for which storing the score matrix is cheaper than recomputing it."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return softmax(query key^T / sqrt(width)) value with a causal mask.

    The arguments and the result are (batch, heads, positions, width).
    """
    if _use_products(query):
        positions = query.shape[-2]
        future = query.new_full((positions, positions), float("-inf")).triu(1)
        return _by_products(query, key, value, future)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return softmax(query key^T / sqrt(width)) value over all positions, or over the positions in `attention_mask`.

    Args:
        query, key, value: (batch, heads, positions, width).
        attention_mask: (batch, positions) of bool, False for padding.
        dropout: the probability of dropping an attention weight.

    Returns:
        (batch, heads, positions, width); values at padding are finite but meaningless.
    """
    if not _use_products(query):
        mask = None if attention_mask is None else attention_mask[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, mask, dropout)
    batch, heads, positions, _ = query.shape
    bias = query.new_zeros(1, 1, 1)
    if attention_mask is not None:
        # Half of the lowest number instead of -inf, which would give NaN for a window of only padding.
        low = torch.finfo(query.dtype).min / 2
        bias = query.new_zeros(batch, 1, 1, positions).masked_fill_(~attention_mask[:, None, None], low)
        bias = bias.expand(-1, heads, -1, -1).reshape(batch * heads, 1, positions)
    return _by_products(query, key, value, bias, dropout)


def _use_products(query: Tensor) -> bool:
    short = query.shape[-2] <= MAX_PRODUCT_POSITIONS
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cpu" and half and short and torch.is_grad_enabled()


def _by_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float = 0.0) -> Tensor:
    """Compute attention with explicit products; `bias` broadcasts to scores (batch * heads, positions, positions)."""
    batch, heads, positions, width = query.shape
    flat = (batch * heads, positions, width)
    scores = torch.baddbmm(bias, query.reshape(flat), key.reshape(flat).transpose(1, 2), alpha=width**-0.5)
    weights = F.dropout(scores.softmax(-1), dropout)
    return torch.bmm(weights, value.reshape(flat)).view(query.shape)
