"""Apply a plan's precision: cast inputs, and use 8-bit matrix multiplications from torchao.

With fp8, weights and the activations between layers are bf16.  Linear layers and experts scale each operand of a matrix
product by the operand's largest absolute value, and cast the operand to 8 bits (Micikevicius et al., 2022, "FP8 Formats
for Deep Learning"): to e4m3 in the forward pass, and to e5m2 for gradients.  Parameters remain the same objects, so
they can be sharded and offloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.models.moe import StackedLinear
from farandole.plan import PlanError

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""The dtype in which the model computes, for each value of `Plan.precision`."""

_UNIT = 16
"""Both sizes of an 8-bit matrix must be multiples of this number on accelerators."""

_CAPABILITY = (8, 9)
_AMD = ("gfx94", "gfx95", "gfx12")


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Convert all floating-point tensors in nested tuples, lists and dictionaries to `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floating(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    return value


# ---- 8-bit floats ----


def check_float8(device: torch.device) -> None:
    """Raise `PlanError` unless `device` supports 8-bit matrix multiplications and torchao is installed."""
    if not _multiplies(device):
        raise PlanError(
            f"precision='fp8': {_name(device)} does not support products of 8-bit floats, which require an NVIDIA "
            "accelerator with compute capability 8.9 or higher (L4, RTX 4090, H100), or an AMD MI300 or "
            "later; nearest plan: precision='bf16'"
        )
    _torchao()


def use_float8(model: nn.Module, *, emulate: bool = False) -> list[str]:
    """Make linear layers and experts in `model` use 8-bit matrix multiplications.

    Layers whose input or output size is not a multiple of 16, and subclasses of `nn.Linear`, are not changed.  Each
    expert has separate scales for its weights and inputs.

    Args:
        emulate: whether to round values to 8 bits and multiply in the original dtype, which is slow but works on any
            device.

    Returns:
        The names of the changed modules.

    Raises:
        PlanError: if torchao is missing, or no layer can be converted.
    """
    float8 = _torchao()
    names = [name for name, module in model.named_modules() if name and _is_suitable(module)]
    if not names:
        raise PlanError(
            f"precision='fp8' requires a model that contains an nn.Linear with sizes that are multiples of {_UNIT}, "
            "but this model contains none; nearest plan: precision='bf16'"
        )
    # the gradient of a weight is a sum over tokens, whose number is padded
    config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    float8.convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: (
            bool(name) and isinstance(module, nn.Linear) and _is_suitable(module)
        ),
        config=config,
    )
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, StackedLinear):
            module.multiply = _Float8Product(float8, config)
    return names


class _Float8Product:
    """Multiplies rows by a weight with torchao's linear layer."""

    def __init__(self, float8: Any, config: Any) -> None:
        layer = nn.Sequential(nn.Linear(_UNIT, _UNIT, bias=False, device="meta"))
        self._layer: nn.Module = float8.convert_to_float8_training(layer, config=config)[0]

    def __call__(self, rows: Tensor, weight: Tensor) -> Tensor:
        if not len(rows):  # without rows, there is no largest value
            return F.linear(rows, weight)
        product: Tensor = torch.func.functional_call(self._layer, {"weight": weight}, (rows,))
        return product


def check_float8_sizes(model: nn.Module, names: Iterable[str]) -> None:
    """Raise `PlanError` if this rank's shard of a converted weight has a size that is not a multiple of 16."""
    for name in names:
        for key, weight in model.get_submodule(name).named_parameters():
            rows, columns = weight.shape[-2:] if weight.dim() > 1 else (_UNIT, _UNIT)
            if rows % _UNIT or columns % _UNIT:
                raise PlanError(
                    f"precision='fp8': {name}.{key} has {rows} x {columns} elements on this rank, but both sizes must be "
                    f"multiples of {_UNIT}; nearest plans: a smaller tensor axis, or precision='bf16'"
                )


def _is_suitable(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear | StackedLinear) or type(module) not in (nn.Linear, StackedLinear):
        return False
    return module.in_features % _UNIT == 0 and module.out_features % _UNIT == 0


def _multiplies(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(_AMD)
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def _name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"this machine's {device.type.upper()}"
    )


def _torchao() -> Any:
    try:
        from torchao import float8
    except ImportError as error:
        raise PlanError(
            f"precision='fp8' needs torchao ({error}): pip install 'farandole[fp8]'; nearest plan: precision='bf16'"
        ) from error
    return float8
