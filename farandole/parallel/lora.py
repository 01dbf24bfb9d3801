"""LoRA: a large model is fine-tuned by training small matrices in place of its weights, which are frozen.

A Linear layer with the frozen weight W (out, in) computes x (W + s B A)^T, where A is (rank, in), B is
(out, rank) and s = alpha / rank (Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models").

    lora = LoRA(rank=8, alpha=16, targets=("*.qkv", "*.out"))
    engine = farandole.parallelize(model, Plan(zero=2, lora=lora))      # or add_lora(model, lora) without an engine
    ...                                         # train: only the adapters have gradients
    save_adapter(model, "adapter")              # two files, in the format of PEFT (`peft_adapter`)
    merge(model)                                # as fast as the model was
    remove(model)                               # plain nn.Linear layers again, with what was merged

    load_adapter(model, "adapter")              # elsewhere: the same base model, and the adapter on it
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.data.wording import counted, short, size
from farandole.parallel.quantized import dense, frozen_linear, is_wrapper, quantized_weights, stored_bytes
from farandole.plan import ALL_LINEAR, LoRA, Pattern, as_patterns

# ---- the layer ----


class LoRALinear(nn.Linear):
    """(..., in) to (..., out) by x (W + s B A)^T + bias, where W is frozen and s is `lora.scaling`.

    Parameters: `weight` (out, in) and `bias` (out) of the layer that it was, `lora_A` (rank, in), `lora_B` (out,
    rank). A layer becomes one and stops being one in place (`adapt`, `restore`): what else refers to it, its
    hooks, and the names and objects of its parameters stay.

    Raises RuntimeError when it is to be trained while the update is merged: `lora_A` and `lora_B` would get no
    gradient.
    """

    lora: LoRA
    lora_A: nn.Parameter  # noqa: N815 - the name in the paper and in files
    lora_B: nn.Parameter  # noqa: N815
    merged: bool
    """Whether `weight` is W + s B A."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        rows = input.reshape(-1, self.in_features)
        if is_wrapper(self.weight.data):
            result = frozen_linear(rows, self.weight, self.bias)
        else:
            result = F.linear(rows, self.weight, self.bias)
        if not self.merged:
            result = self._updated(result, F.dropout(rows, self.lora.dropout, self.training))
        elif self.training and torch.is_grad_enabled():
            raise RuntimeError("LoRA is merged and cannot be trained: call unmerge(model), or model.eval()")
        return result.view(*input.shape[:-1], self.out_features)

    def _updated(self, result: Tensor, rows: Tensor) -> Tensor:
        """`result` with s `rows` A^T B^T added."""
        if not torch.is_autocast_enabled(rows.device.type):  # there the products choose their type
            rows = rows.to(self.lora_A.dtype)
        low = F.linear(rows, self.lora_A)
        if low.dtype == result.dtype:  # in place: a third of the time of a product and a sum
            return result.addmm_(low, self.lora_B.to(low.dtype).T, alpha=self.lora.scaling)
        return torch.add(result, F.linear(low, self.lora_B).to(result.dtype), alpha=self.lora.scaling)

    def extra_repr(self) -> str:
        """What `print(model)` says of it."""
        state = ", merged" if self.merged else ""
        return f"{super().extra_repr()}, rank={self.lora.rank}, alpha={self.lora.alpha:g}{state}"

    def update(self) -> Tensor:
        """s B A, (out, in), in fp32 or the type of the weight if that is larger."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(self.lora_A.device.type, enabled=False):
            return (self.lora_B.to(dtype) @ self.lora_A.to(dtype)).mul_(self.lora.scaling)

    def add_to_weight(self, sign: int) -> None:
        """Add `sign` times the update to the weight, in place; a quantized weight becomes an ordinary one."""
        update = self.update()
        with torch.no_grad():
            if is_wrapper(self.weight.data):
                self.weight = nn.Parameter(dense(self.weight), requires_grad=False)
            # Rounded once, to the type of the weight.
            self.weight.copy_(self.weight.to(update.dtype).add_(update, alpha=sign))


def adapt(linear: nn.Linear, lora: LoRA, frozen_weight: Tensor | None = None) -> None:
    """Make `linear` a `LoRALinear` that computes what it did; its weight becomes `frozen_weight` if one is given.

    A starts as the weight of a new Linear would, uniform in +-1/sqrt(in), drawn from torch's global generator;
    B at zero. Beside a weight of bf16 or fp16 both are fp32: small steps would be lost in them.
    """
    weight = linear.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a = torch.empty(lora.rank, linear.in_features, dtype=dtype, device=weight.device)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    b = torch.zeros(linear.out_features, lora.rank, dtype=dtype, device=weight.device)
    linear.__class__ = LoRALinear
    assert isinstance(linear, LoRALinear)
    if frozen_weight is not None:
        linear.weight = nn.Parameter(frozen_weight, requires_grad=False)
    linear.lora = lora
    linear.merged = False
    linear.lora_A, linear.lora_B = nn.Parameter(a), nn.Parameter(b)


def restore(layer: LoRALinear) -> None:
    """Make `layer` a plain `nn.Linear` with the weight that it has now."""
    del layer.lora, layer.merged, layer.lora_A, layer.lora_B
    layer.__class__ = nn.Linear  # type: ignore[assignment]


# ---- models get LoRA, fold it into their weights and back, and lose it ----


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
    """Freeze `model` but for adapters beside the layers that `lora` names (and what else it trains).

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


def trained_beside(model: nn.Module, lora: LoRA, layers: Iterable[str] | None = None) -> dict[str, Tensor]:
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


# ---- which modules patterns mean, and what else holds their weights ----


def find_targets(model: nn.Module, lora: LoRA) -> dict[str, nn.Linear]:
    """The layers that `lora` adapts, by path, in the order of the model.

    Raises ValueError where a pattern matches nothing, or what cannot be adapted.
    """
    if isinstance(model, nn.Linear):
        raise ValueError(
            "the model is itself an nn.Linear, a layer without a name: adapt nn.Sequential(model)"
        )
    inside_trained = {inner for module in find_trained(model, lora).values() for inner in module.modules()}
    modules = {path: module for path, module in _modules(model).items() if module not in inside_trained}
    linear = [path for path, module in modules.items() if _why_not(module) is None]
    found: dict[str, nn.Module] = {}
    for pattern in as_patterns("targets", lora.targets):
        matched = linear if pattern == ALL_LINEAR else _matching(pattern, modules)
        if not matched:
            has = f"its Linear layers: {_listed(linear)}" if linear else "it has no plain nn.Linear"
            raise ValueError(
                f"LoRA targets: {_shown(pattern)} matches no module{_near(pattern, linear)}; {has}"
            )
        found |= {path: modules[path] for path in matched}
    wrong = {path: why for path, module in found.items() if (why := _why_not(module)) is not None}
    if wrong:
        said = "; ".join(f"{path} is {why}" for path, why in list(wrong.items())[:4])
        others = [path for path in found if path not in wrong]
        rest = f"; Linear layers that match: {_listed(others)}" if others else f"{_inside(found, linear)}"
        raise ValueError(f"LoRA targets: only a plain nn.Linear can be adapted: {said}{rest}")
    _check_fast_path(model, found)
    wanted = set(found.values())
    return {path: m for path, m in model.named_modules() if m in wanted and isinstance(m, nn.Linear)}


def find_trained(model: nn.Module, lora: LoRA) -> dict[str, nn.Module]:
    """The modules that are trained whole, by path.  Raises ValueError where a pattern matches nothing."""
    modules = _modules(model)
    found: dict[str, nn.Module] = {}
    for pattern in as_patterns("also_train", lora.also_train):
        matched = _matching(pattern, modules)
        if not matched:
            near = _near(pattern, modules)
            raise ValueError(
                f"LoRA also_train: {_shown(pattern)} matches no module{near}; {_listed(list(modules))}"
            )
        found |= {path: modules[path] for path in matched}
    return found


def held_elsewhere(model: nn.Module, tensor: Tensor, owners: Iterable[nn.Module]) -> list[str]:
    """The names under which modules other than `owners` hold `tensor`, or memory of it."""
    own = set(owners)
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if module not in own
        for name, other in (*module._parameters.items(), *module._buffers.items())
        if other is not None and (other is tensor or _overlap(other, tensor))
    ]


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two ordinary tensors have memory in common (engines make parameters views of one flat tensor)."""
    if a.device != b.device:
        return False
    first, second = _extent(a), _extent(b)
    return max(first[0], second[0]) < min(first[1], second[1])


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of a tensor; nothing for one without memory of its own (meta, quantized)."""
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.is_meta or is_wrapper(tensor):
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """All modules below `model` under all their paths: a shared one has several."""
    return {path: module for path, module in model.named_modules(remove_duplicate=False) if path}


def _matching(pattern: Pattern, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if _matches(pattern, path)]


def _matches(pattern: Pattern, path: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(path) is not None
    if any(character in pattern for character in "*?["):
        return fnmatchcase(path, pattern) or fnmatchcase(f".{path}", pattern)
    return path == pattern or path.endswith(f".{pattern}")


def _why_not(module: nn.Module) -> str | None:
    """What a module is that cannot be adapted, or None for one that can."""
    if type(module) is not nn.Linear:
        derived = isinstance(module, nn.Linear)  # as in nn.MultiheadAttention, which does not call it
        return f"a {type(module).__name__}{', whose weight may be used without a call of it' * derived}"
    weight = module._parameters.get("weight")
    if weight is None:  # computed before each call, as `nn.utils.weight_norm` does
        return "an nn.Linear whose weight is no parameter"
    if is_wrapper(weight.data):
        return f"an nn.Linear whose weight is a {type(weight.data).__name__} already"
    if weight.numel() == 0:
        return f"an nn.Linear of {weight.shape[1]} inputs and {weight.shape[0]} outputs"
    if not weight.is_floating_point():
        return f"an nn.Linear of {weight.dtype}"
    return None


def _check_fast_path(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Refuse layers that torch's encoder reads past: their adapters would be missing in inference."""
    targets = set(found.values())
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.TransformerEncoderLayer)
            and module.self_attn.batch_first
            and targets & {module.linear1, module.linear2}
            and torch.backends.mha.get_fastpath_enabled()
        ):
            raise ValueError(
                f"LoRA targets: {path or 'the model'} is an nn.TransformerEncoderLayer, which in inference uses the "
                f"weights of linear1 and linear2 without calling them, so that adapters would have no effect: "
                f"call torch.backends.mha.set_fastpath_enabled(False) first, here and where the adapter is used"
            )


def _inside(found: Iterable[str], linear: Sequence[str]) -> str:
    """Advice for a pattern that means a module which holds Linear layers."""
    within = [path for path in linear if any(path.startswith(f"{outer}.") for outer in found)]
    return f"; Linear layers inside: {_listed(within)}" if within else f"; Linear layers: {_listed(linear)}"


def _near(pattern: Pattern, paths: Iterable[str]) -> str:
    """`; nearest: ...`, or nothing."""
    text = (pattern.pattern if isinstance(pattern, re.Pattern) else pattern).lower()
    names = {path: path.lower() for path in paths}
    names |= {ending: ending.lower() for ending in (path.rpartition(".")[2] for path in names)}
    close = difflib.get_close_matches(text.strip("^$").lstrip("*."), list(names.values()), n=3, cutoff=0.5)
    close = close or difflib.get_close_matches(text.rpartition(".")[2], list(names.values()), n=3, cutoff=0.5)
    near = [next(name for name, lower in names.items() if lower == match) for match in close]
    return f"; nearest: {', '.join(near)}" if near else ""


def _shown(pattern: Pattern) -> str:
    return f"re.compile({pattern.pattern!r})" if isinstance(pattern, re.Pattern) else repr(pattern)


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:6]) or "none"
    return f"{shown}, ... ({len(paths)} in all)" if len(paths) > 6 else shown
