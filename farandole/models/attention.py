"""Compute attention with grouped heads, masks, windows and biases, using the fastest implementation for the device.

`torch.nn.functional.scaled_dot_product_attention` (SDPA) is almost always fastest.  There are three exceptions on a
CPU:

- Training in bf16 or fp16 with at most `MAX_PRODUCT_POSITIONS` positions.  The flash kernel's backward pass takes twice
  as long as two batched matrix products and a softmax (measured with AMX and AVX-512, for 128 to 512 positions).
- Grouped heads.  `enable_gqa` takes 1.5 to 2.5 times as long as repeating the keys and values.
- Packed documents.  One call per document skips the masked scores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from farandole.models.dropout import ShardedDropout
from farandole.models.sequence import SequenceInfo

MAX_PRODUCT_POSITIONS = 512
"""The largest number of positions for which storing the score matrix is faster than recomputing it."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    info: SequenceInfo | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    heads: ShardedDropout | None = None,
) -> Tensor:
    """Return the attention output, softmax(scale query key^T + bias) value, over the visible positions.

    Args:
        query: (batch, heads, positions, width).
        key, value: (batch, key-value heads, key positions, width).  The number of heads must be a multiple of the
            number of key-value heads.  Values may have a different width.  If there are more key positions than
            queries, the queries are the last positions.
        info: the packed documents; by default, each sequence is one document.
        causal: whether a position attends only to itself and earlier positions.
        scale: the factor applied to the scores, by default 1 / sqrt(width).
        window: a position attends only to positions at a distance of less than `window`; None for no limit.
        bias: (1 or batch, heads, positions, key positions), added to the scores.
        dropout: the probability of dropping an attention weight.
        heads: the dropout for this process's shard of the heads, if heads are split over processes.

    Returns:
        (batch, heads, positions, value width).
    """
    info = info or SequenceInfo()
    if info.shard is not None:
        return info.shard.attend(query, key, value, causal=causal, scale=scale, window=window)
    if info.cache is not None and info.cache.attend is not None:
        return info.cache.attend(query, key, value, causal=causal, scale=scale, window=window)
    positions, keys = query.shape[2], key.shape[2]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if window is not None and window >= keys:
        window = None
    packed = info.documents is not None
    if packed and query.device.type == "cpu" and bias is None and positions == keys:
        spans = info.spans()
        if spans is not None and len(spans) > len(query):
            return _by_document(query, key, value, spans, causal, scale, window, dropout, heads)
    mask = None
    if packed or window is not None or (causal and 1 < positions < keys):
        mask = info.shared(
            ("mask", positions, keys, causal, window),
            lambda: visible(positions, keys, info.documents, causal, window, query.device),
        )
    return masked_attention(
        query, key, value, mask, causal and positions == keys, scale, bias, dropout, heads
    )


def visible(
    positions: int,
    keys: int,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """Return the boolean mask of visible positions, of shape (1 or batch, 1, positions, keys)."""
    at = torch.arange(keys - positions, keys, device=device)[:, None]
    distance = at - torch.arange(keys, device=device)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance < window)
        if not causal:
            seen = seen & (distance > -window)
    seen = seen[None, None]
    if documents is not None:
        seen = seen & (documents[:, None, -positions:, None] == documents[:, None, None, :])
    return seen


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    heads: ShardedDropout | None = None,
) -> Tensor:
    """Return the attention output over the positions where `mask` is true; 0 for a query with no such position.

    `causal` applies only if `mask` is None.  If `mask` is None and `causal` is false, all positions are visible.
    """
    groups = query.shape[1] // key.shape[1]
    on_cpu = query.device.type == "cpu"
    if groups > 1 and on_cpu:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    short = max(query.shape[2], key.shape[2]) <= MAX_PRODUCT_POSITIONS
    half = query.dtype in (torch.bfloat16, torch.float16)
    if (on_cpu and half and short and torch.is_grad_enabled()) or (heads is not None and dropout):
        if groups > 1 and not on_cpu:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if mask is None:
            return _by_products(query, key, value, _added(query, mask, causal, bias), scale, dropout, heads)
        # softmax of only -inf is NaN, so a fully masked row attends to all keys, and its output is set to 0
        fully_masked = ~mask.any(-1, keepdim=True)
        added = _added(query, mask | fully_masked, causal, bias)
        return _by_products(query, key, value, added, scale, dropout, heads).masked_fill(fully_masked, 0)
    if bias is not None:
        mask, causal = _added(query, mask, causal, bias), False
    elif mask is not None:
        causal = False
    if causal and query.shape[2] == 1:
        causal = False  # a single query sees all keys
    grouped = groups > 1 and not on_cpu
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped
    )


def _added(query: Tensor, mask: Tensor | None, causal: bool, bias: Tensor | None) -> Tensor:
    """Return the mask and the bias as one tensor to add to the scores."""
    added = query.new_zeros(1, 1, 1, 1) if bias is None else bias.to(query.dtype)
    if mask is not None:
        return added.masked_fill(~mask, float("-inf"))
    if causal:
        size = query.shape[2]
        return added + query.new_full((size, size), float("-inf")).triu(1)
    return added


def _by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor,
    scale: float,
    dropout: float,
    shard: ShardedDropout | None,
) -> Tensor:
    """Compute attention with explicit matrix products; `added` is added to the scores."""
    batch, heads, positions, width = query.shape
    count = batch * heads
    if added.shape[0] == added.shape[1] == 1:
        added = added[0]
    else:
        added = added.expand(batch, heads, *added.shape[2:]).reshape(count, *added.shape[2:])
    flat_key, flat_value = key.reshape(count, -1, width), value.reshape(count, -1, value.shape[3])
    scores = torch.baddbmm(
        added, query.reshape(count, positions, width), flat_key.transpose(1, 2), alpha=scale
    )
    weights = scores.softmax(-1)
    if shard is None:
        weights = F.dropout(weights, dropout)
    else:
        weights = shard(weights.view(batch, heads, *weights.shape[1:]), dropout).flatten(0, 1)
    return torch.bmm(weights, flat_value).view(batch, heads, positions, -1)


def _by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: list[tuple[int, int, int]],
    causal: bool,
    scale: float,
    window: int | None,
    dropout: float,
    heads: ShardedDropout | None,
) -> Tensor:
    """Compute attention for each document separately."""
    rows: list[list[Tensor]] = [[] for _ in range(len(query))]
    for row, start, end in spans:
        place = (slice(row, row + 1), slice(None), slice(start, end))
        length = end - start
        mask = None
        if window is not None and window < length:
            mask = visible(length, length, None, causal, window, query.device)
        rows[row].append(
            masked_attention(
                query[place], key[place], value[place], mask, causal, scale, None, dropout, heads
            )
        )
    return torch.cat([torch.cat(row, 2) for row in rows])
