"""Normalization, gated activation and rotary embedding, each in one call to the C core, for fp32 and bf16.

Each function takes the same arguments as the corresponding model function, and returns None if the core does not
support the arguments.  For bf16 arguments, the result is computed in fp32 and rounded once.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from farandole import native

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor | None:
    """Apply RMS normalization to `x` of shape (..., width); see `layers.rms_norm`."""
    is_bf16 = _IS_BF16.get(x.dtype)
    if is_bf16 is None or weight.dtype != x.dtype:
        return None
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    rows = x.numel() // width
    native.library().frd_rms_norm(
        out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, width, ctypes.c_float(epsilon), is_bf16
    )
    return out


def gated(both: Tensor, activation: str) -> Tensor | None:
    """Return silu(gate) * up, where `both` of shape (..., 2 width) contains gate and then up; see `layers.gated`."""
    is_bf16 = _IS_BF16.get(both.dtype)
    if is_bf16 is None or activation != "silu":
        return None
    both, width = both.contiguous(), both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    rows = both.numel() // (2 * width) if width else 0
    native.library().frd_swiglu(out.data_ptr(), both.data_ptr(), rows, width, is_bf16)
    return out


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor | None:
    """Apply rotary embeddings to `x` of shape (1, heads, positions, width); see `rotary.rotate`."""
    is_bf16 = _IS_BF16.get(x.dtype)
    if is_bf16 is None or interleaved or len(x) != 1 or cosine.dtype != x.dtype:
        return None
    _, heads, positions, width = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    out = x.new_empty(positions, heads, width)
    native.library().frd_rotate(
        out.data_ptr(),
        x.data_ptr(),
        cosine.contiguous().data_ptr(),
        sine.contiguous().data_ptr(),
        positions,
        heads,
        width,
        x.stride(2),
        x.stride(1),
        is_bf16,
    )
    return out.transpose(0, 1)[None]
