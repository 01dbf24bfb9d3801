"""Read the LoRA adapters that requests select.

All requests share the base model's weights.  An adapter adds the low-rank update s B A to a weight.  For the rows of a
batch that use the adapter, the product with the update is computed separately, and added to the product with the weight
(`rows.IndependentRows`).  A batch can therefore contain requests with different adapters.

Y. Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA Adapters" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from farandole.serve.request import RequestError

Adapter = Mapping[str, tuple[Tensor, Tensor]]
"""The matrices A (LoRA rank, inputs) and s B (outputs, LoRA rank), keyed by the path of the linear layer."""


def parse_adapters(lora: Sequence[str]) -> dict[str, Path]:
    """Parse entries of the form "NAME=FOLDER", and return the adapters' folders, keyed by name.

    Raises:
        RequestError: if an entry has a different format, or if two adapters have the same name.
    """
    found: dict[str, Path] = {}
    for entry in lora:
        name, _, folder = entry.partition("=")
        if not (name and folder):
            raise RequestError("lora", f"expected NAME=FOLDER, got {entry!r}")
        if name in found:
            raise RequestError("lora", f"expected different names, got {name} twice")
        found[name] = Path(folder)
    return found


def read_adapters(model: nn.Module, folders: Mapping[str, str | Path]) -> dict[str, Adapter]:
    """Read LoRA adapters in PEFT format for a model.

    Args:
        model: the model; its parameters may be on the meta device.
        folders: the adapters' folders, keyed by name.

    Raises:
        RequestError: if an adapter is damaged, does not match the model, or changes modules other than linear layers.
    """
    if not folders:
        return {}
    # imported here, because a server without adapters does not need these modules
    from farandole.parallel.lora.peft_adapter import AdapterError

    found = {}
    for name, folder in folders.items():
        try:
            found[name] = _read(model, folder)
        except (AdapterError, ValueError) as error:
            raise RequestError("lora", f"{name}: {error}") from None
    return found


def _read(model: nn.Module, folder: str | Path) -> Adapter:
    from farandole.parallel.lora.peft_adapter import AdapterError, check_fits, lora_of, read_adapter

    saved = read_adapter(model, folder)
    if saved.others:
        names = ", ".join(sorted(saved.others)[:4])
        raise AdapterError(
            f"{folder} also contains {names}, which are not supported; expected an adapter with bias='none' and without "
            "modules_to_save"
        )
    lora = lora_of(saved)
    check_fits(model, lora, saved, has_lora=False)
    found = {}
    for path, a in saved.a.items():
        if a.dim() > 2:
            raise AdapterError(
                f"{folder} changes the experts {path}, which is not supported; use an adapter for linear layers only, or "
                "merge the adapter into the model's weights"
            )
        dtype = model.get_parameter(f"{path}.weight").dtype
        found[path] = a.to(dtype), (saved.b[path].float() * lora.scaling).to(dtype)
    return found
