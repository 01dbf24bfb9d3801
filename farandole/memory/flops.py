"""Floating-point operations of matrix products and attention, as torch's `FlopCounterMode` counts them.

torch's table lacks the CPU's fused attention; it is counted here like the others: two products forward, five backward
(Dao et al., 2022, "FlashAttention": the scores are computed once more).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from farandole.memory.selective import FUSED_ATTENTION

_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def operations(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Of one call of `kind`, an `OpOverloadPacket`; 0 for what is neither a product nor attention."""
    if kind in FUSED_ATTENTION:
        return _attention(args[0], args[1], args[2], score_products=1, value_products=1)
    if kind is _CPU_BACKWARD:
        return _attention(args[1], args[2], args[3], score_products=3, value_products=2)
    if kind in flop_registry:
        return int(flop_registry[kind](*args, **kwargs, out_val=output))
    return 0


def _attention(query: Any, key: Any, value: Any, score_products: int, value_products: int) -> int:
    """Products of (positions, width) with (width, positions), and of as many positions with values."""
    scores = 2 * query[..., 0].numel() * key.shape[-2]
    return int(scores * (score_products * query.shape[-1] + value_products * value.shape[-1]))
