"""Linear layers with a LoRA adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.models.dropout import dropout
from farandole.models.moe import StackedLinear
from farandole.parallel.lora.quantized import dense, frozen_linear, is_wrapper
from farandole.plan import LoRA


class AdaptedLayer(nn.Module):
    """Base class of linear layers with a LoRA adapter.

    Its parameters are the frozen `weight` (..., out, in), the trained `lora_A` (..., rank, in), and the trained
    `lora_B` (..., out, rank).  `adapt` and `restore` change the class of a layer in place, so references to the layer,
    its hooks and its parameters remain valid.
    """

    weight: Any
    in_features: int
    out_features: int
    lora: LoRA
    lora_A: nn.Parameter  # noqa: N815 - the name in the paper and in files
    lora_B: nn.Parameter  # noqa: N815
    merged: bool
    """Whether the update s B A has been added to `weight`."""

    def update(self) -> Tensor:
        """Return s B A (..., out, in) in fp32 or higher precision, where s is `lora.scaling`."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(self.lora_A.device.type, enabled=False):
            return (self.lora_B.to(dtype) @ self.lora_A.to(dtype)).mul_(self.lora.scaling)

    def add_to_weight(self, sign: int) -> None:
        """Add `sign * update()` to the weight in place; a quantized weight becomes a dense tensor."""
        update = self.update()
        with torch.no_grad():
            if is_wrapper(self.weight.data):
                self.weight = nn.Parameter(dense(self.weight), requires_grad=False)
            # rounded once, to the weight's type
            self.weight.copy_(self.weight.to(update.dtype).add_(update, alpha=sign))

    def extra_repr(self) -> str:
        """Return the settings that `print(model)` shows."""
        state = ", merged" if self.merged else ""
        return f"{super().extra_repr()}, rank={self.lora.rank}, alpha={self.lora.alpha:g}{state}"

    def _adapts(self) -> bool:
        """Return whether a forward pass adds the adapter's output."""
        if self.merged and self.training and torch.is_grad_enabled():
            raise RuntimeError(
                "merged LoRA adapters cannot be trained: call unmerge(model) to train, or model.eval() for inference"
            )
        return not self.merged

    def _updated(self, result: Tensor, rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return `result + scaling * rows @ a.T @ b.T`; this may change `result` in place."""
        if not torch.is_autocast_enabled(rows.device.type):  # autocast chooses the type of the products
            rows = rows.to(a.dtype)
        low = F.linear(rows, a)
        if low.dtype == result.dtype:  # in place, which is faster than a product and a sum
            return result.addmm_(low, b.to(low.dtype).T, alpha=self.lora.scaling)
        return torch.add(result, F.linear(low, b).to(result.dtype), alpha=self.lora.scaling)


class LoRALinear(AdaptedLayer, nn.Linear):
    """A linear layer that computes x (W + s B A)^T + bias, where W is frozen and s is `lora.scaling`.

    It maps (..., in) to (..., out).

    Raises:
        RuntimeError: in a training step while the update is merged.
    """

    sharded_dropout: Callable[[Tensor, float, bool], Tensor] | None = None
    """Dropout for this rank's part of the inputs, if they are sharded."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output (..., out) for `input` (..., in)."""
        rows = input.reshape(-1, self.in_features)
        if is_wrapper(self.weight.data):
            result = frozen_linear(rows, self.weight, self.bias)
        else:
            result = F.linear(rows, self.weight, self.bias)
        if self._adapts():
            dropped = self._dropout(rows, self.lora.dropout, self.training)
            result = self._updated(result, dropped, self.lora_A, self.lora_B)
        return result.view(*input.shape[:-1], self.out_features)

    def _dropout(self, rows: Tensor, probability: float, training: bool) -> Tensor:
        return (self.sharded_dropout or dropout)(rows, probability, training)


class LoRAStackedLinear(AdaptedLayer, StackedLinear):
    """Stacked linear layers of experts, each with its own adapter.

    A and B are stacked like the weights.
    """

    grouped = False

    def forward(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the output (rows, out) of each local expert; `parts` contains their inputs (rows, in)."""
        results = super().forward(parts)
        if not self._adapts():
            return results
        each = zip(results, parts, self.lora_A, self.lora_B, strict=True)
        return [self._updated(*arguments) for arguments in each]


Adaptable = nn.Linear | StackedLinear
"""A layer that can have an adapter."""


def adapt(layer: Adaptable, lora: LoRA, frozen_weight: Tensor | None = None) -> None:
    """Turn `layer` into an `AdaptedLayer` in place.

    A is initialized like the weight of a new Linear: uniform in +-1/sqrt(in), drawn from torch's global generator.  B
    is initialized to zeros.  Both are fp32 if the weight is bf16 or fp16, because these dtypes lose small updates.

    Args:
        frozen_weight: the new weight of the layer, by default its current weight.
    """
    weight = layer.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    # weights that are read later are on the meta device, but the adapter needs values now
    device = torch.get_default_device() if weight.is_meta else weight.device
    stack = weight.shape[:-2]
    a = torch.empty(*stack, lora.rank, layer.in_features, dtype=dtype, device=device)
    nn.init.kaiming_uniform_(a.flatten(0, -2), a=math.sqrt(5))
    b = torch.zeros(*stack, layer.out_features, lora.rank, dtype=dtype, device=device)
    layer.__class__ = LoRALinear if isinstance(layer, nn.Linear) else LoRAStackedLinear
    assert isinstance(layer, AdaptedLayer)
    if frozen_weight is not None:
        layer.weight = nn.Parameter(frozen_weight, requires_grad=False)
    layer.lora = lora
    layer.merged = False
    layer.lora_A, layer.lora_B = nn.Parameter(a), nn.Parameter(b)


def restore(layer: AdaptedLayer) -> None:
    """Turn `layer` back into a plain layer in place, without changing its weight."""
    del layer.lora, layer.merged, layer.lora_A, layer.lora_B
    layer.__class__ = nn.Linear if isinstance(layer, LoRALinear) else StackedLinear  # type: ignore[assignment]
