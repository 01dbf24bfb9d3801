"""Frozen 8-bit or 4-bit weights, quantized by torchao, and matrix products with these weights.

A product dequantizes the weight temporarily: in the forward pass, and again in the backward pass to compute the
gradient of the input (Dettmers et al., 2023, "QLoRA").
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NF4_UNIT = 64 * 256
"""The block size: 64 weights share a scale, and 256 scales share a second-level scale.

Torchao supports only multiples of this size.
"""


def quantized_weights(linears: Mapping[str, nn.Linear], base: str) -> dict[str, Tensor]:
    """Quantize the weight of each layer to the format `base`, and return the quantized weights by path.

    Raises:
        ImportError: if torchao is missing.
        ValueError: if a weight cannot be quantized to this format.
    """
    try:
        with _quiet():
            from torchao import quantization
    except ImportError as error:
        raise ImportError(
            f"LoRA base={base!r} needs torchao ({error}): pip install 'farandole[qlora]', or omit base"
        ) from error
    return {
        path: _quantized(path, linear.weight.detach(), base, quantization) for path, linear in linears.items()
    }


def _quantized(path: str, weight: Tensor, base: str, torchao: Any) -> Tensor:
    if not weight.isfinite().all():
        raise ValueError(
            f"LoRA base={base!r}: the weight of {path} contains non-finite values: exclude it from the targets, or load "
            "finite weights"
        )
    if base == "nf4":
        if weight.numel() % _NF4_UNIT:
            raise ValueError(
                f"LoRA base='nf4': the weight of {path} has {weight.numel():,} values, not a multiple of "
                f"{_NF4_UNIT:,}: exclude it from the targets, or use base='int8'"
            )
        made: Tensor = torchao.to_nf4(weight.contiguous())
        return made
    if base == "int4":
        return _int4(path, weight, torchao)
    return _through_config(weight, torchao.Int8WeightOnlyConfig(set_inductor_config=False), torchao)


def _int4(path: str, weight: Tensor, torchao: Any) -> Tensor:
    """Quantize `weight` to torchao's int4 format for the device of `weight`."""
    group = next((size for size in (128, 64, 32) if weight.shape[1] % size == 0), None)
    if group is None:
        raise ValueError(
            f"LoRA base='int4': {path} has {weight.shape[1]} inputs, not a multiple of 32: use base='int8' or 'nf4'"
        )
    config = torchao.Int4WeightOnlyConfig(group_size=group, set_inductor_config=False)
    try:  # fails on CPUs with torchao up to 0.18, which has no int4 format for them
        made = _through_config(weight, config, torchao)
        restored = dense(made)
    except (
        ImportError,
        NotImplementedError,
        AssertionError,
        RuntimeError,
        ValueError,
        AttributeError,
    ) as error:
        raise ValueError(
            f"LoRA base='int4': torchao cannot quantize the {weight.dtype} weight of {path} to int4 on {weight.device} "
            f"({error}); use base='int8', or base='nf4', which also uses 4 bits"
        ) from error
    if restored.shape != weight.shape or (restored - weight).norm() > 0.3 * weight.norm():
        raise ValueError(f"LoRA base='int4': torchao cannot dequantize the weight of {path}; use base='int8'")
    return made


def _through_config(weight: Tensor, config: Any, torchao: Any) -> Tensor:
    # in a temporary layer, because torchao adds methods to the layer, and the methods cannot be pickled
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    torchao.quantize_(layer, config)
    return layer.weight.detach()


def dense(weight: Tensor) -> Tensor:
    """Return the dequantized values of `weight`."""
    restore = getattr(weight, "get_original_weight", None) or weight.dequantize  # NF4 has the first method
    with torch.no_grad():
        restored: Tensor = restore()
    return restored


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor wraps other tensors, as quantized tensors do."""
    return hasattr(tensor, "__tensor_flatten__")


def stored_bytes(tensor: Tensor) -> int:
    """Return the size in bytes of a tensor, or of the tensors that it wraps."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(stored_bytes(getattr(tensor, name)) for name in names)


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` (..., out) for `x` (..., in) and a frozen quantized weight.

    The output has the dtype of `x` or, under autocast, the autocast dtype.
    """
    result: Tensor = _FrozenLinear.apply(x, weight, bias)
    return result


class _FrozenLinear(torch.autograd.Function):
    """A matrix product that saves only the quantized weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        ctx.weight, ctx.x_dtype = weight, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x.to(dtype), dense(weight).to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (gradient,) = gradients
        for_x = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = (gradient @ dense(ctx.weight).to(gradient.dtype)).to(ctx.x_dtype)
        if ctx.needs_input_grad[2]:
            for_bias = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return for_x, None, for_bias


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torchao's import warnings about kernels for other devices."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
