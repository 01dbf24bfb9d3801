"""The memory of training in closed formulas (Rajbhandari et al., 2020, "ZeRO", sections 3 and 5; Korthikanti et al.,
2022, "Reducing Activation Recomputation in Large Transformer Models", section 4), beside which `estimate` shows what it
counts.

p parameters, k_l bytes of a number in low and k_h in high precision, d ranks of the data axis, z the stage of ZeRO.
"""

from __future__ import annotations


def state_bytes(p: float, z: int, d: int, k_l: int = 2, k_h: int = 4) -> dict[str, float]:
    """Parameters, gradients (in low precision) and optimizer (fp32 master, momentum, variance) of a rank, in bytes."""
    return {
        "parameters": k_l * p / (d if z == 3 else 1),
        "gradients": k_l * p / (d if z >= 2 else 1),
        "optimizer": 3 * k_h * p / (d if z >= 1 else 1),
    }


def activation_bytes(
    s: int, b: int, h: int, layers: int, heads: int, k_l: int = 2, *, fused_attention: bool = False
) -> float:
    """Of a transformer without recomputation: s positions, micro-batch b, width h.

    s b h L ((16 k_l + 2) + (2 k_l + 1) a s / h).  A fused attention keeps no scores, and has no a s / h.
    """
    scores = 0.0 if fused_attention else (2 * k_l + 1) * heads * s / h
    return s * b * h * layers * ((16 * k_l + 2) + scores)
