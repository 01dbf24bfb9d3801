"""Describe an adapter by its layer and tensor names.

With this description, ranks that have different pipeline stages can write one adapter together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from farandole.models.hf.pretrained import Pretrained
from farandole.parallel.lora.adapters import lora_layers, other_trained
from farandole.parallel.lora.hugging_face import origin_of
from farandole.parallel.lora.targets import find_trained
from farandole.plan import LoRA


@dataclass(frozen=True)
class Adapter:
    """A description of a model's LoRA adapter, without tensor values.

    Args:
        layers: the paths of the adapted layers.
        others: the names of other trained tensors.
        also_trained: the paths of the modules in `lora.also_train`.
        modules: the paths of all modules of the model.
        origin: a description of the model's Hugging Face folder, if there is one.
    """

    lora: LoRA
    layers: tuple[str, ...]
    others: tuple[str, ...]
    also_trained: tuple[str, ...]
    modules: tuple[str, ...]
    origin: Pretrained | None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of all tensors in the adapter, including `others`."""
        return (*(f"{path}.lora_{kind}" for path in self.layers for kind in "AB"), *self.others)


def describe_adapter(model: nn.Module) -> Adapter | None:
    """Return a description of the adapter of `model`, or None if the model has no LoRA.

    `model` must contain all pipeline stages.
    """
    layers = lora_layers(model)
    if not layers:
        return None
    lora = next(iter(layers.values())).lora
    return Adapter(
        lora,
        layers=tuple(layers),
        others=tuple(other_trained(model, lora)),
        also_trained=tuple(find_trained(model, lora)),
        modules=tuple(path for path, _ in model.named_modules()),
        origin=origin_of(model),
    )


def trained_tensors(model: nn.Module, adapter: Adapter) -> dict[str, Tensor]:
    """Return the adapter's tensors that `model` contains, by name.

    `model` can be a complete model or a rank's pipeline stages.
    """
    wanted = set(adapter.tensors)
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in tensors if name in wanted}
