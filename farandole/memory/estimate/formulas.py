"""The memory of training in closed formulas (Rajbhandari et al., 2020, "ZeRO", sections 3 and 5; Korthikanti et al.,
2022, "Reducing Activation Recomputation in Large Transformer Models", section 4), beside which `estimate` shows what it
counts; and what `farandole train` keeps for each parameter, which is known before anything is counted.

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


def trained_bytes(zero: int, ranks: int, *, common: bool, elsewhere: bool = False) -> float:
    """For each parameter what `ranks` ranks need together: itself, its gradient and AdamW's two averages.

    `common`: whether they share memory, and with it one copy of what they divide; `elsewhere`: whether averages are
    kept on a disk.
    """
    weights = 4.0 * (1 if zero == 3 or (zero and common) else ranks)
    gradients = 4.0 * (1 if zero >= 2 else ranks)
    averages = 0.0 if elsewhere else 8.0 * (1 if zero >= 1 else ranks)
    return weights + gradients + averages


def copied_bytes(zero: int, ranks: int, *, elsewhere: bool = False) -> float:
    """For each parameter the copies, in the memory of the host, of which a checkpoint is written.

    Averages that are kept `elsewhere` are not copied.
    """
    held = 4.0 if elsewhere else 12.0
    return held * ranks if zero == 0 else held + 4.0  # rank 0 copies the whole weights too
