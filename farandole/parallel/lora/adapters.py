"""Adapters are added to a model, merged into its weights and removed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from farandole.data.wording import counted, short, size
from farandole.parallel.lora.layer import LoRALinear, adapt, restore
from farandole.parallel.lora.quantized import quantized_weights, stored_bytes
from farandole.parallel.lora.targets import find_targets, find_trained, held_elsewhere
from farandole.plan import LoRA


@dataclass(frozen=True)
class Summary:
    """What is trained of a model: the adapted layers by path, parameters, and the bytes of all parameters."""

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
    """Freeze `model`, and add trained adapters to the layers that `lora` names (and train what else it names).

    Layers are changed in place, before anything that collects parameters is made: an optimizer, `Engine`.
    The model computes what it did, since B starts at zero, and with a quantized `lora.base` nearly that. Draws A
    from torch's global generator: `Engine` gives all ranks those of rank 0.

    Raises ValueError, with the model as it was, where a pattern matches nothing or no plain `nn.Linear`, where the
    model has adapters already, or where tied weights would not stay so; ImportError where torchao is missing.
    """
    present = lora_layers(model)
    if present:
        raise ValueError(
            f"the model has LoRA already, in {counted(len(present), 'layer')} ({next(iter(present))}, ...): "
            f"remove(model) first, after merge(model) if it is to be kept"
        )
    targets = find_targets(model, lora)
    trained = find_trained(model, lora)
    _check_trained_alone(model, trained)
    weights: dict[str, Tensor] = {}
    if lora.base is not None:
        _check_not_tied(
            model, targets, "a quantized weight would not be tied any more; leave it out of the targets"
        )
        weights = quantized_weights(targets, lora.base)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for path, linear in targets.items():
        adapt(linear, lora, weights.pop(path, None))
    for parameter in (*_parameters(trained.values()), *_biases(model, lora, targets).values()):
        parameter.requires_grad_(True)
    return summarize(model)


def summarize(model: nn.Module) -> Summary:
    """What is trained of `model` now."""
    parameters = list(model.parameters())
    return Summary(
        layers=tuple(lora_layers(model)),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        total=sum(p.numel() for p in parameters),
        bytes=sum(stored_bytes(p.data) for p in parameters),
    )


def merge(model: nn.Module, untie: bool = False) -> None:
    """Add the updates to the weights: the model computes the same (fp32: to rounding) without adapters' work.

    The weight is changed in place and rounded once; bf16 and fp16 weights lose what they cannot hold of the
    update. A quantized weight becomes an ordinary one. Adapters stay, for `unmerge`, `save_adapter` and `remove`.

    A weight that something else of the model uses is refused, as that would change too; with `untie` the layer
    gets its own copy first. Raises ValueError for that and for updates that are not finite, RuntimeError if
    already merged; the model is then as it was.
    """
    layers = _layers(model)
    if merged := [path for path, layer in layers.items() if layer.merged]:
        raise RuntimeError(f"LoRA is merged already, in {merged[0]}")
    for path, layer in layers.items():
        if not layer.update().isfinite().all():
            raise ValueError(f"the LoRA update of {path} is not finite: the training has diverged")
    if not untie:
        _check_not_tied(
            model, layers, "merging would change that too; merge(model, untie=True) copies the weight"
        )
    for layer in layers.values():
        if untie and held_elsewhere(model, layer.weight, [layer]):
            layer.weight = nn.Parameter(layer.weight.detach().clone(), layer.weight.requires_grad)
        layer.add_to_weight(1)
        layer.merged = True


def unmerge(model: nn.Module) -> None:
    """Take the updates out of the weights again, which are then what they were but for rounding.

    A weight that was quantized stays an ordinary one. Raises RuntimeError if it was not merged.
    """
    layers = _layers(model)
    if apart := [path for path, layer in layers.items() if not layer.merged]:
        raise RuntimeError(f"LoRA is not merged, in {apart[0]}")
    for layer in layers.values():
        layer.add_to_weight(-1)
        layer.merged = False


def remove(model: nn.Module) -> None:
    """Make all layers plain `nn.Linear` again: with the updates if they are merged, and without otherwise.

    What else was trained stays as it is, and what was frozen stays frozen.  Raises ValueError without LoRA.
    """
    for layer in _layers(model).values():
        restore(layer)


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers of `model` that have adapters, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}


def other_trained(model: nn.Module, lora: LoRA, layers: Iterable[str] | None = None) -> dict[str, Tensor]:
    """What is trained besides adapters, by name; of modules trained whole also their buffers that are saved.

    `layers` are the paths of those with adapters, where the model is to get them only now.
    """
    whole = {
        f"{path}.{name}": tensor.detach()
        for path, module in find_trained(model, lora).items()
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    layers = lora_layers(model) if layers is None else layers
    biases = _biases(model, lora, layers)
    return whole | {name: bias.detach() for name, bias in biases.items()}


def _layers(model: nn.Module) -> dict[str, LoRALinear]:
    layers = lora_layers(model)
    if not layers:
        raise ValueError(
            "the model has no LoRA: add_lora(model, LoRA(...)) or load_adapter(model, folder) first"
        )
    return layers


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters() if p.is_floating_point()]


def _biases(model: nn.Module, lora: LoRA, layers: Iterable[str]) -> dict[str, nn.Parameter]:
    """The biases that `lora` trains, by name; what is called one is one, as in PEFT."""
    named = dict(model.named_parameters())
    if lora.bias == "all":
        return {name: p for name, p in named.items() if "bias" in name.rpartition(".")[2]}
    if lora.bias == "lora_only":
        return {f"{path}.bias": named[f"{path}.bias"] for path in layers if f"{path}.bias" in named}
    return {}


def _check_trained_alone(model: nn.Module, trained: dict[str, nn.Module]) -> None:
    """Refuse to train a part of what is tied: saved without the rest, it would be loaded into that part only."""
    inside = {module for outer in trained.values() for module in outer.modules()}
    for path, outer in trained.items():
        for name, parameter in outer.named_parameters():
            if others := held_elsewhere(model, parameter, inside):
                holder = others[0].rpartition(".")[0] or "the model itself"
                raise ValueError(
                    f"LoRA also_train: {path}.{name} is tied to {others[0]}: name {holder} in also_train as well, "
                    f"or leave out {path}"
                )


def _check_not_tied(model: nn.Module, linears: Iterable[str], why: str) -> None:
    for path in linears:
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        if others := held_elsewhere(model, linear.weight, [linear]):
            raise ValueError(f"the weight of {path} is tied to {', '.join(others)}: {why}")
