"""Read the LoRA adapters that requests select.

The base model's weights are shared by all requests.  An adapter adds s B A to a weight, and its rows of a batch get
the two small products in addition (`rows.IndependentRows`), so requests with different adapters share a batch.

Y. Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA Adapters" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from farandole.parallel.lora.peft_adapter import AdapterError, check_fits, lora_of, read_adapter
from farandole.serve.request import RequestError
from farandole.serve.rows import WeightKey, weight_key


@dataclass(frozen=True)
class Adapter:
    """An adapter's matrices A (rank, inputs) and s B (outputs, rank), by weight."""

    updates: Mapping[WeightKey, tuple[Tensor, Tensor]]


def read_adapters(model: nn.Module, folders: Mapping[str, str | Path]) -> dict[str, Adapter]:
    """Read adapters in PEFT format for a model.

    Args:
        folders: the adapters' folders by name.

    Raises:
        RequestError: if an adapter is damaged, does not match the model, or changes more than linear layers.
    """
    found = {}
    for name, folder in folders.items():
        try:
            found[name] = _read(model, folder)
        except (AdapterError, ValueError) as error:
            raise RequestError("lora", f"{name}: {error}") from None
    return found


def _read(model: nn.Module, folder: str | Path) -> Adapter:
    saved = read_adapter(model, folder)
    if saved.others:
        names = ", ".join(sorted(saved.others)[:4])
        raise AdapterError(
            f"{folder} also trains {names}, which requests cannot select; expected an adapter with bias='none' and "
            "without modules_to_save"
        )
    lora = lora_of(saved)
    check_fits(model, lora, saved, has_lora=False)
    updates = {}
    for path, a in saved.a.items():
        if a.dim() > 2:
            raise AdapterError(
                f"{folder} changes the experts {path}, which requests cannot select; expected an adapter of linear layers, "
                "or save a model with the merged adapter"
            )
        weight = model.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        b = saved.b[path].float() * lora.scaling
        updates[weight_key(weight)] = a.to(weight.dtype).contiguous(), b.to(weight.dtype).contiguous()
    return Adapter(updates)
