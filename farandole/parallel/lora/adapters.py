"""Add adapters to a model, merge them into its weights, and remove them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from farandole.data.wording import counted, short, size
from farandole.parallel.lora.layer import Adaptable, AdaptedLayer, adapt, restore
from farandole.parallel.lora.quantized import quantized_weights, stored_bytes
from farandole.parallel.lora.targets import find_targets, find_trained, held_elsewhere
from farandole.parallel.whole_parameters import check_editable
from farandole.plan import LoRA


@dataclass(frozen=True)
class Summary:
    """A summary of an adapted model.

    Args:
        layers: the paths of the adapted layers.
        trained: the number of trainable parameters.
        total: the total number of parameters.
        bytes: the size of all parameters in bytes.
    """

    layers: tuple[str, ...]
    trained: int
    total: int
    bytes: int

    def __str__(self) -> str:
        share = f"{100 * self.trained / self.total:.3g} %"
        return (
            f"{counted(len(self.layers), 'layer')} adapted: {short(self.trained)} of {short(self.total)} parameters "
            f"trained ({share}), weights of {size(self.bytes)}"
        )


def add_lora(model: nn.Module, lora: LoRA) -> Summary:
    """Freeze `model` and add trainable adapters to the layers in `lora.targets`.

    The modules in `lora.also_train` and the biases selected by `lora.bias` are also trained.  Layers are changed in
    place, so call this before the optimizer or `Engine` collects parameters.  The output of the model does not change,
    because B starts at zero; with a quantized `lora.base`, it changes by the quantization error.  A is drawn from
    torch's global generator, and `Engine` copies the values of rank 0 to all ranks.

    Raises:
        ValueError: if a pattern matches nothing, or matches a module that cannot be adapted; if the model already has
            adapters; or if tied weights would be untied.  The model is then unchanged.
        ImportError: if torchao is required and missing.
    """
    present = lora_layers(model)
    if present:
        raise ValueError(
            f"the model already has LoRA, in {counted(len(present), 'layer')} ({next(iter(present))}, ...): "
            f"call remove(model) first; to keep the effect of the adapters, call merge(model) before remove(model)"
        )
    targets = find_targets(model, lora)
    trained = find_trained(model, lora)
    _check_trained_alone(model, trained)
    weights: dict[str, Tensor] = {}
    if lora.base is not None:
        _check_not_tied(model, targets, "a quantized weight cannot be tied; exclude it from the targets")
        linears = {path: layer for path, layer in targets.items() if isinstance(layer, nn.Linear)}
        weights = quantized_weights(linears, lora.base)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for path, layer in targets.items():
        adapt(layer, lora, weights.pop(path, None))
    for parameter in (*_parameters(trained.values()), *_biases(model, lora, targets).values()):
        parameter.requires_grad_(True)
    return summarize(model)


def summarize(model: nn.Module) -> Summary:
    """Return a summary of the model's adapted layers, parameter counts and size."""
    parameters = list(model.parameters())
    return Summary(
        layers=tuple(lora_layers(model)),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        total=sum(p.numel() for p in parameters),
        bytes=sum(stored_bytes(p.data) for p in parameters),
    )


def merge(model: nn.Module, untie: bool = False) -> None:
    """Add the adapters' updates to the weights, so that the model is as fast as the base model.

    Weights are changed in place.  The output changes only by rounding: bf16 and fp16 weights lose the part of the
    update below their precision.  Quantized weights become dense tensors.  Adapters are kept for `unmerge`,
    `save_adapter` and `remove`.

    Args:
        untie: copy each weight that is tied to another module, so that merging changes only the adapted layers.

    Raises:
        ValueError: if a weight is tied to another module and `untie` is False, or if an update is not finite.
        RuntimeError: if adapters are already merged, or if an engine stores the weights and this is called outside
            `engine.edit_parameters()`.  After any of these errors, the model is unchanged.
    """
    layers = _layers(model)
    for path, layer in layers.items():
        check_editable(
            layer, path, "engine.save_pretrained(folder) writes merged weights without changing the model"
        )
    if merged := [path for path, layer in layers.items() if layer.merged]:
        raise RuntimeError(f"LoRA is already merged in {merged[0]}: call unmerge(model) before merging again")
    for path, layer in layers.items():
        if not layer.update().isfinite().all():
            raise ValueError(
                f"the LoRA update of {path} is not finite, because the training has diverged; load an earlier adapter"
            )
    if not untie:
        _check_not_tied(model, layers, "merging would change all tied weights; use merge(model, untie=True)")
    for layer in layers.values():
        if untie and held_elsewhere(model, layer.weight, [layer]):
            layer.weight = nn.Parameter(layer.weight.detach().clone(), layer.weight.requires_grad)
        layer.add_to_weight(1)
        layer.merged = True


def unmerge(model: nn.Module) -> None:
    """Subtract the adapters' updates from the weights, to restore the original weights up to rounding.

    Weights that were quantized before merging remain dense tensors.

    Raises:
        RuntimeError: if adapters are not merged, or if an engine stores the weights and this is called outside
            `engine.edit_parameters()`.
    """
    layers = _layers(model)
    for path, layer in layers.items():
        check_editable(layer, path)
    if apart := [path for path, layer in layers.items() if not layer.merged]:
        raise RuntimeError(f"LoRA is not merged in {apart[0]}: call merge(model) first")
    for layer in layers.values():
        layer.add_to_weight(-1)
        layer.merged = False


def remove(model: nn.Module) -> None:
    """Turn all adapted layers back into plain layers.

    Merged updates remain in the weights, and frozen parameters remain frozen.

    Raises:
        ValueError: if the model has no LoRA.
    """
    for layer in _layers(model).values():
        restore(layer)


def lora_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Return the layers of `model` that have adapters, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, AdaptedLayer)}


def other_trained(model: nn.Module, lora: LoRA, layers: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return the trained tensors other than adapters, by name.

    The result includes the persistent buffers of the modules in `lora.also_train`.

    Args:
        layers: the paths of the layers to adapt, if the model has no adapters yet.
    """
    whole = {
        f"{path}.{name}": tensor.detach()
        for path, module in find_trained(model, lora).items()
        for name, tensor in _saved_tensors(module)
    }
    layers = lora_layers(model) if layers is None else layers
    biases = _biases(model, lora, layers)
    return whole | {name: bias.detach() for name, bias in biases.items()}


def _saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors that `module.state_dict()` contains."""
    # `state_dict` raises an error if an engine shards the parameters
    yield from module.named_parameters(remove_duplicate=False)
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    layers = lora_layers(model)
    if not layers:
        raise ValueError(
            "the model has no LoRA adapters: call add_lora(model, LoRA(...)) or load_adapter(model, folder) first"
        )
    return layers


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters() if p.is_floating_point()]


def _biases(model: nn.Module, lora: LoRA, layers: Iterable[str]) -> dict[str, nn.Parameter]:
    """Return the biases that `lora` trains, by name."""
    named = dict(model.named_parameters())
    if lora.bias == "all":  # as in PEFT, a bias is a parameter with "bias" in its name
        return {name: p for name, p in named.items() if "bias" in name.rpartition(".")[2]}
    if lora.bias == "lora_only":
        return {f"{path}.bias": named[f"{path}.bias"] for path in layers if f"{path}.bias" in named}
    return {}


def _check_trained_alone(model: nn.Module, trained: dict[str, nn.Module]) -> None:
    """Raise ValueError if a trained module is tied to a module that is not trained."""
    # loading the adapter would untie these modules
    inside = {module for outer in trained.values() for module in outer.modules()}
    for path, outer in trained.items():
        for name, parameter in outer.named_parameters():
            if others := held_elsewhere(model, parameter, inside):
                holder = others[0].rpartition(".")[0] or "the model itself"
                raise ValueError(
                    f"LoRA also_train: {path}.{name} is tied to {others[0]}: also name {holder} in also_train, "
                    f"or omit {path}"
                )


def _check_not_tied(model: nn.Module, layers: Iterable[str], why: str) -> None:
    for path in layers:
        layer = model.get_submodule(path)
        assert isinstance(layer, Adaptable)
        if others := held_elsewhere(model, layer.weight, [layer]):
            raise ValueError(f"the weight of {path} is tied to {', '.join(others)}: {why}")
