"""Find the modules that match LoRA patterns, and other modules that share weights with them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from farandole.models.moe import StackedLinear
from farandole.parallel.lora.layer import Adaptable
from farandole.parallel.lora.quantized import is_wrapper
from farandole.plan import ALL_LINEAR, LoRA, Pattern, as_patterns


def find_targets(model: nn.Module, lora: LoRA) -> dict[str, Adaptable]:
    """Return the layers that `lora` adapts, by path, in model order.

    Raises:
        ValueError: if a pattern matches no module, or matches a module that cannot be adapted.
    """
    if isinstance(model, nn.Linear):
        raise ValueError(
            "the model is a single nn.Linear, which has no name: adapt nn.Sequential(model) instead"
        )
    inside_trained = {inner for module in find_trained(model, lora).values() for inner in module.modules()}
    modules = {path: module for path, module in _modules(model).items() if module not in inside_trained}
    adaptable = [path for path, module in modules.items() if _why_not(module, lora) is None]
    linear = [path for path in adaptable if isinstance(modules[path], nn.Linear)]
    found: dict[str, nn.Module] = {}
    for pattern in as_patterns("targets", lora.targets):
        matched = linear if pattern == ALL_LINEAR else _matching(pattern, modules)
        if not matched:
            has = (
                f"the model's layers: {_listed(adaptable)}"
                if adaptable
                else "the model has no plain nn.Linear"
            )
            raise ValueError(
                f"LoRA targets: {_shown(pattern)} matches no module{_near(pattern, adaptable)}; {has}"
            )
        found |= {path: modules[path] for path in matched}
    wrong = {path: why for path, module in found.items() if (why := _why_not(module, lora)) is not None}
    if wrong:
        said = "; ".join(f"{path} is {why}" for path, why in list(wrong.items())[:4])
        others = [path for path in found if path not in wrong]
        rest = f"; layers that match: {_listed(others)}" if others else f"{_inside(found, adaptable)}"
        raise ValueError(
            f"LoRA targets: only a plain nn.Linear or StackedLinear can be adapted: {said}{rest}"
        )
    _check_fast_path(model, found)
    wanted = set(found.values())
    return {path: m for path, m in model.named_modules() if m in wanted and isinstance(m, Adaptable)}


def find_trained(model: nn.Module, lora: LoRA) -> dict[str, nn.Module]:
    """Return the modules in `lora.also_train`, by path.

    Raises:
        ValueError: if a pattern matches nothing.
    """
    modules = _modules(model)
    found: dict[str, nn.Module] = {}
    for pattern in as_patterns("also_train", lora.also_train):
        matched = _matching(pattern, modules)
        if not matched:
            near = _near(pattern, modules)
            raise ValueError(
                f"LoRA also_train: {_shown(pattern)} matches no module{near}; modules: {_listed(list(modules))}"
            )
        found |= {path: modules[path] for path in matched}
    return found


def held_elsewhere(model: nn.Module, tensor: Tensor, owners: Iterable[nn.Module]) -> list[str]:
    """Return the names of parameters and buffers outside `owners` that share memory with `tensor`."""
    own = set(owners)
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if module not in own
        for name, other in (*module._parameters.items(), *module._buffers.items())
        if other is not None and (other is tensor or _overlap(other, tensor))
    ]


def _overlap(a: Tensor, b: Tensor) -> bool:
    # not the storages, because an engine stores parameters as views of a shared flat tensor
    if a.device != b.device:
        return False
    first, second = _extent(a), _extent(b)
    return max(first[0], second[0]) < min(first[1], second[1])


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the address range of a tensor, which is empty for meta and quantized tensors."""
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.is_meta or is_wrapper(tensor):
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return all submodules of `model` by path; a shared module has several paths."""
    return {path: module for path, module in model.named_modules(remove_duplicate=False) if path}


def _matching(pattern: Pattern, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if _matches(pattern, path)]


def _matches(pattern: Pattern, path: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(path) is not None
    if any(character in pattern for character in "*?["):
        return fnmatchcase(path, pattern) or fnmatchcase(f".{path}", pattern)
    return path == pattern or path.endswith(f".{pattern}")


def _why_not(module: nn.Module, lora: LoRA) -> str | None:
    """Return a description of `module` if it cannot be adapted, otherwise None."""
    if type(module) is StackedLinear:
        return _why_not_stacked(lora)
    if type(module) is not nn.Linear:
        derived = isinstance(
            module, nn.Linear
        )  # such as the `out_proj` of nn.MultiheadAttention, which is never called
        return f"a {type(module).__name__}{', whose weight may be used without calling the layer' * derived}"
    weight = module._parameters.get("weight")
    if weight is None:  # computed before each call, as `nn.utils.weight_norm` does
        return "an nn.Linear whose weight is not a parameter"
    if is_wrapper(weight.data):
        return f"an nn.Linear whose weight is already of type {type(weight.data).__name__}"
    if weight.numel() == 0:
        return f"an nn.Linear with {weight.shape[1]} inputs and {weight.shape[0]} outputs"
    if not weight.is_floating_point():
        return f"an nn.Linear with a weight of dtype {weight.dtype}"
    return None


def _why_not_stacked(lora: LoRA) -> str | None:
    # the order of the rows depends on the ranks that share the experts; PEFT supports no dropout here either
    if lora.dropout:
        return f"a StackedLinear, whose adapters have no dropout, but dropout={lora.dropout}"
    if lora.base is not None:
        return f"a StackedLinear, whose weight cannot be quantized, but base={lora.base!r}"
    return None


def _check_fast_path(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Raise ValueError if `found` contains layers that torch's encoder does not call during inference."""
    targets = set(found.values())
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.TransformerEncoderLayer)
            and module.self_attn.batch_first
            and targets & {module.linear1, module.linear2}
            and torch.backends.mha.get_fastpath_enabled()
        ):
            raise ValueError(
                f"LoRA targets: {path or 'the model'} is an nn.TransformerEncoderLayer.  During inference, this class "
                f"uses the weights of linear1 and linear2 without calling these layers, so adapters would have no "
                f"effect: call torch.backends.mha.set_fastpath_enabled(False) in every program that uses the adapter"
            )


def _inside(found: Iterable[str], adaptable: Sequence[str]) -> str:
    """Suggest the adaptable layers inside the modules `found`; if there are none, suggest all adaptable layers."""
    within = [path for path in adaptable if any(path.startswith(f"{outer}.") for outer in found)]
    return f"; layers inside: {_listed(within)}" if within else f"; layers: {_listed(adaptable)}"


def _near(pattern: Pattern, paths: Iterable[str]) -> str:
    """Suggest paths similar to `pattern` for an error message; return "" if there are none."""
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
