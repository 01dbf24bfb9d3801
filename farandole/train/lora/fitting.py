"""Whether a saved adapter fits a model, said before anything is changed."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farandole.train.lora.adapt import Summary, lora_layers, summarize, trained_beside
from farandole.train.lora.config import LoRA
from farandole.train.lora.layer import LoRALinear

_UNDERSTOOD = {
    *(
        "peft_type",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "bias",
        "target_modules",
        "modules_to_save",
    ),
    "init_lora_weights",
}
_HARMLESS = {
    *("task_type", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version"),
    *("exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "qalora_group_size", "runtime_config"),  # mean something only beside others
}
"""Fields that say where an adapter comes from, or which layers it has, as its tensors do."""

_STARTS = (True, False, "gaussian", "orthogonal")
"""How A and B may have begun: other ways change the weights of the base model, which are then not those here."""

_SHOWN = 6


class AdapterError(RuntimeError):
    """An adapter cannot be written or read, or does not fit; the message says which and why."""


@dataclass
class Saved:
    """An adapter as it was read: what its files say, tensors by their names without the prefix.

    `a` and `b` are matrices by path, `beside` what else was trained, by its name in the model.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    a: dict[str, Tensor] = field(init=False)
    b: dict[str, Tensor] = field(init=False)
    beside: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.a, self.b, self.beside = {}, {}, {}
        for name, tensor in self.tensors.items():
            if name.endswith(".lora_A.weight"):
                self.a[name.removesuffix(".lora_A.weight")] = tensor
            elif name.endswith(".lora_B.weight"):
                self.b[name.removesuffix(".lora_B.weight")] = tensor
            else:
                path, _, last = name.rpartition(".base_layer.")
                self.beside[f"{path}.{last}" if path else name] = tensor
        self._check_config()

    def _check_config(self) -> None:
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise AdapterError(f"{self.folder} is an adapter of the kind {kind!r}; only 'LORA' is supported")
        more = {
            name: value
            for name, value in self.config.items()
            if name not in _UNDERSTOOD | _HARMLESS and value not in (None, False, {}, [], 0, "")
        }
        if (start := self.config.get("init_lora_weights", True)) not in _STARTS:
            more["init_lora_weights"] = start
        if more:
            said = ", ".join(f"{name}={value!r}" for name, value in more.items())
            raise AdapterError(f"{self.folder} uses what is not supported here: {said}")
        strange = [
            name
            for name in self.tensors
            if ".lora_" in name and not name.endswith(("_A.weight", "_B.weight"))
        ]
        if strange:
            raise AdapterError(f"{self.folder} has tensors that are not supported here: {_listed(strange)}")
        if not self.a:
            raise AdapterError(f"{self.folder} has no lora_A: it adapts no layer")


def lora_of(saved: Saved) -> LoRA:
    """The LoRA that an adapter is of; its layers are those that it has tensors for."""
    config = saved.config
    bias = config.get("bias", "none")
    names = [name for name in saved.beside if not (bias == "all" and "bias" in name.rpartition(".")[2])]
    if bias == "lora_only":
        names = [name for name in names if name.rpartition(".")[0] not in saved.a]
    trained = dict.fromkeys(name.rpartition(".")[0] for name in names)
    if "" in trained:
        raise AdapterError(
            f"{saved.folder} has tensors of no module: {_listed([n for n in names if '.' not in n])}"
        )
    try:
        return LoRA(
            rank=config["r"],
            alpha=float(config["lora_alpha"]),
            targets=[re.compile(re.escape(path)) for path in saved.a],
            dropout=float(config.get("lora_dropout", 0.0)),
            use_rslora=bool(config.get("use_rslora", False)),
            bias=bias,
            also_train=[re.compile(re.escape(path)) for path in trained],
        )
    except KeyError as error:
        raise AdapterError(f"{saved.folder} does not say {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise AdapterError(f"{saved.folder}: {error}") from error


def check_fits(model: nn.Module, lora: LoRA, saved: Saved, has_lora: bool) -> None:
    """Raise `AdapterError` with all that does not fit, of layers first, then of what else was trained."""
    problems = [*_layers_that_differ(model, saved, has_lora), *_settings_that_differ(lora, saved)]
    problems += _shapes_that_differ(model, saved)
    if not problems:
        problems += _others_that_differ(model, lora, saved)
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise AdapterError(f"the adapter {saved.folder} does not fit: {'; '.join(problems[:_SHOWN])}{more}")


def put_into(model: nn.Module, lora: LoRA, saved: Saved) -> Summary:
    """Copy the values of an adapter that fits, in place."""
    beside = trained_beside(model, lora)
    with torch.no_grad():
        for path, matrix in saved.a.items():
            layer = model.get_submodule(path)
            assert isinstance(layer, LoRALinear)
            layer.lora_A.copy_(matrix)
            layer.lora_B.copy_(saved.b[path])
        for name, tensor in saved.beside.items():
            beside[name].copy_(tensor)
    return summarize(model)


def _layers_that_differ(model: nn.Module, saved: Saved, has_lora: bool) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))  # a shared layer has several paths
    problems = []
    for path in saved.a | saved.b:
        module = modules.get(path)
        if module is None:
            near = difflib.get_close_matches(path, list(modules), n=1)
            problems.append(f"the model has no {path}" + (f" (nearest: {near[0]})" if near else ""))
        elif not isinstance(module, nn.Linear):
            problems.append(f"{path} is a {type(module).__name__}, not an nn.Linear")
        elif has_lora and not isinstance(module, LoRALinear):
            problems.append(f"{path} has no LoRA in this model")
        elif path not in saved.a or path not in saved.b:
            problems.append(f"it has no lora_{'B' if path in saved.a else 'A'} for {path}")
        elif isinstance(module, LoRALinear) and module.merged:
            problems.append(f"{path} is merged: call unmerge(model) first")
    covered = {modules.get(path) for path in saved.a}
    missing = [path for path, layer in lora_layers(model).items() if layer not in covered]
    return problems + ([f"it has nothing for {_listed(missing)}"] if missing else [])


def _settings_that_differ(lora: LoRA, saved: Saved) -> list[str]:
    there = lora_of(saved)
    problems = []
    if there.rank != lora.rank:
        problems.append(f"its rank is {there.rank}, that of the model's LoRA {lora.rank}")
    elif not math.isclose(there.scaling, lora.scaling):
        problems.append(
            f"its update is multiplied by {there.scaling:g}, in the model by {lora.scaling:g} (alpha)"
        )
    if there.bias != lora.bias:
        problems.append(f"its trained biases are {there.bias!r}, in the model {lora.bias!r}")
    return problems


def _shapes_that_differ(model: nn.Module, saved: Saved) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    rank = lora_of(saved).rank
    problems = []
    for path in saved.a.keys() & saved.b.keys():
        layer = modules.get(path)
        if isinstance(layer, nn.Linear):
            wanted = {"lora_A": (rank, layer.in_features), "lora_B": (layer.out_features, rank)}
            found = {"lora_A": saved.a[path], "lora_B": saved.b[path]}
            problems += [_shape(f"{path}.{name}", found[name], wanted[name]) for name in wanted]
    return sorted(filter(None, problems))


def _others_that_differ(model: nn.Module, lora: LoRA, saved: Saved) -> list[str]:
    try:
        wanted = trained_beside(model, lora, saved.a)
    except ValueError as error:  # a module that the model has not
        return [str(error)]
    problems = []
    if missing := [name for name in wanted if name not in saved.beside]:
        problems.append(f"it has no {_listed(missing)}, trained whole")
    if more := [name for name in saved.beside if name not in wanted]:
        problems.append(f"it has {_listed(more)}, not trained in this model")
    both = [name for name in wanted if name in saved.beside]
    shapes = [_shape(name, saved.beside[name], tuple(wanted[name].shape)) for name in both]
    return problems + [problem for problem in shapes if problem]


def _shape(name: str, found: Tensor, wanted: tuple[int, ...]) -> str:
    """What is wrong with a tensor, or nothing."""
    if tuple(found.shape) == wanted:
        return ""
    return f"{name} is {_times(found.shape)}, here {_times(wanted)}"


def _times(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
