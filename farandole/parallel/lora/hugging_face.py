"""Convert LoRA adapters between the layer names of a farandole model and the layer names in `transformers`.

This module applies to models that were created from a Hugging Face folder.

A fused layer of the model can correspond to several layers in `transformers`, such as queries, keys and values.  The
fused layer's adapter has one A (rank, in) and one B (out, rank).  In PEFT format, each of the `transformers` layers has
the same A and its own rows of B.

Experts are stacked both in the model and in `transformers`.  PEFT adapts the parameters `gate_up_proj` and `down_proj`
of the module `experts` (`target_parameters`).  PEFT wraps this module once for each parameter, so the adapter tensors
for the first parameter have the path `experts.base_layer`.  PEFT can also train all parameters of `experts` in full
(`modules_to_save`).

In an adapter that PEFT trained, the `transformers` layers can have different matrices A.  When such an adapter is read,
the fused layer's A is the concatenation of these matrices, and B is zero in the blocks that combine the rows of one
layer with the A of another layer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from farandole.models.hf.mapping import Part, Table
from farandole.models.hf.pretrained import Pretrained
from farandole.parallel.lora.stacked import matrix_from_peft

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


_KINDS = ("lora_A", "lora_B")

_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj"})
"""The names of the projections in experts.

In models with experts, PEFT treats all target modules with these names as experts.  It finds other layers with these
names, such as shared experts, only by the names of their parameters.
"""


def origin_of(model: nn.Module) -> Pretrained | None:
    """Return `model.pretrained`, which describes the model's Hugging Face folder, or None if it does not exist."""
    origin = getattr(model, "pretrained", None)
    return origin if isinstance(origin, Pretrained) else None


def for_peft(origin: Pretrained, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the names of an adapter's tensors to the names in `transformers`, and split fused layers.

    The names in `tensors` have the format in the docstring of `peft_adapter`, without the prefix `base_model.model.`.

    Raises:
        ValueError: if only some of the parameters of a module with experts are trained in full.
    """
    table, found = origin.table, {}
    adapted = [stem for stem, kind in map(_split, tensors) if kind in _KINDS]
    stacks = {ours: path for path, ours in _wrapped(table, adapted).items()}
    parameters = _stack_parameters(table)
    _check_whole_modules(parameters, tensors)
    for name, tensor in tensors.items():
        stem, kind = _split(name)
        if stem in stacks:
            found[f"{stacks[stem]}.{kind}.weight"] = tensor
            continue
        if name in parameters:
            found[parameters[name]] = tensor
            continue
        if kind in _KINDS:
            for part in table.parts[f"{stem}.weight"]:
                rows = _rows(part)
                own = tensor if kind == "lora_A" or rows is None else tensor[rows[0] : rows[1]]
                found[f"{_module(table, part)}.{kind}.weight"] = own.contiguous()
            continue
        ours = f"{stem}.{kind}" if kind else name
        for part in table.parts[ours]:
            values = tensor[tuple(slice(a, b) for a, b in part.box(tensor.shape))]
            for _ in range(part.dropped()):
                values = values[0]
            values = values.transpose(-2, -1) if part.transposed else values
            last = part.name.rpartition(".")[2]
            middle = ".base_layer." if ".base_layer." in name else "."
            found[f"{_module(table, part)}{middle}{last}"] = values.contiguous()
    return found


def config_for_peft(
    origin: Pretrained, config: dict[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the PEFT configuration for the tensors that `for_peft` returned."""
    adapted = [name.removesuffix(".weight") for name in config.get("target_parameters") or ()]
    stacks = _wrapped(origin.table, adapted)
    paths = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    paths = [path for path in paths if path not in stacks]
    others = {n.rpartition(".")[0] for n in tensors if ".lora_" not in n and ".base_layer." not in n}
    classes = origin.values.get("architectures") or [""]
    task = next((task for ending, task in _TASKS.items() if classes[0].endswith(ending)), None)
    if task == "SEQ_CLS" and not any(name.rpartition(".")[2] == "classifier" for name in others):
        task = None  # for this task, PEFT expects the weights of the classifier instead of an adapter
    every = [part for parts in origin.table.parts.values() for part in parts]
    parameters = [_parameter(origin.table, ours) for ours in adapted]
    if any(_is_stacked(part) for part in every):
        shared = [path for path in paths if path.rpartition(".")[2] in _EXPERTS]
        parameters += [f"{path}.weight" for path in shared]
        paths = [path for path in paths if path not in shared]
    if parameters:
        config = config | {
            "target_parameters": parameters,
            "lora_dropout": 0.0,
        }  # PEFT supports no dropout here
    return config | {
        "task_type": task,
        "base_model_name_or_path": config["base_model_name_or_path"]
        or (str(origin.folder.absolute()) if origin.folder is not None else None),
        "target_modules": paths,
        "modules_to_save": sorted(others) or None,
        "fan_in_fan_out": any(part.transposed for part in every),
    }


def from_peft(
    origin: Pretrained, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert a PEFT configuration and its tensors to the model's names.

    Adapters that already use the model's names are returned unchanged.
    """
    table, stacks = origin.table, peft_stacks(origin, config)
    modules = {_module(table, part): (ours, part) for ours, parts in table.parts.items() for part in parts}
    if not any(_split(name)[0] in modules | stacks for name in tensors):
        return dict(config), dict(tensors)
    layers: dict[str, list[tuple[Part, Tensor, Tensor]]] = {}
    found: dict[str, Tensor] = {}
    unknown = {}
    stacked: dict[str, dict[str, Tensor]] = {}
    others: dict[str, list[tuple[Part, Tensor]]] = {}
    stored = {
        f"{_module(table, part)}.{part.name.rpartition('.')[2]}": (ours, part)
        for ours, parts in table.parts.items()
        for part in parts
    }
    weights = {parameter: weight for weight, parameter in _stack_parameters(table).items()}
    for name, tensor in tensors.items():
        stem, kind = _split(name)
        if kind in _KINDS and stem in stacks:
            weight = f"{stacks[stem]}.weight"
            experts = len({part.index[0] for part in table.parts[weight]})
            stacked.setdefault(weight, {})[kind] = matrix_from_peft(name, tensor, experts)
        elif kind == "lora_A" and stem in modules and f"{stem}.lora_B.weight" in tensors:
            ours, part = modules[stem]
            weight = ours.rpartition(".")[0] + ".weight"
            part = next(each for each in table.parts[weight] if _module(table, each) == stem)
            layers.setdefault(weight, []).append((part, tensor, tensors[f"{stem}.lora_B.weight"]))
        elif kind == "lora_B" and stem in modules:
            continue
        elif name in weights:
            found[weights[name]] = tensor
        elif (plain := name.replace(".base_layer.", ".")) in stored:
            ours, part = stored[plain]
            others.setdefault(ours, []).append((part, tensor))
        else:
            unknown[name] = tensor
    adapters = {weight: _fused(table.parts[weight], parts) for weight, parts in layers.items()}
    adapters |= {
        weight: (each["lora_A"], each["lora_B"]) for weight, each in stacked.items() if len(each) == 2
    }
    rank = max((a.shape[-2] for a, _ in adapters.values()), default=0)
    for weight, (a, b) in adapters.items():
        path, more = weight.removesuffix(".weight"), rank - a.shape[-2]
        found[f"{path}.lora_A.weight"] = nn.functional.pad(a, (0, 0, 0, more))
        found[f"{path}.lora_B.weight"] = nn.functional.pad(b, (0, more))
    for ours, pieces in others.items():
        pieces.sort(key=lambda piece: table.parts[ours].index(piece[0]))  # a file sorts tensors by name
        values = [tensor.transpose(-2, -1) if part.transposed else tensor for part, tensor in pieces]
        path, _, last = ours.rpartition(".")
        middle = ".base_layer." if f"{path}.lora_A.weight" in found else "."
        found[f"{path}{middle}{last}"] = torch.cat(values) if len(values) > 1 else values[0]
    changed = dict(config)
    if rank and (r := config.get("r")):
        factor = math.sqrt(rank / r) if config.get("use_rslora") else rank / r
        changed |= {"r": rank, "lora_alpha": config["lora_alpha"] * factor, "fan_in_fan_out": False}
    return changed, found | unknown


def _fused(parts: tuple[Part, ...], adapters: list[tuple[Part, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combine the adapters of several layers into the matrices A and B of their fused layer."""
    first = adapters[0][1]
    if len(parts) == 1:
        return first, adapters[0][2]
    rows = max(part.index[0][1] for part in parts if part.index and isinstance(part.index[0], tuple))
    same = all(a.shape == first.shape and torch.equal(a, first) for _, a, _ in adapters)
    columns = first.shape[0] if same else sum(a.shape[0] for _, a, _ in adapters)
    b = first.new_zeros(rows, columns)
    at = 0
    for part, a, own in adapters:
        span = part.index[0]
        assert isinstance(span, tuple)
        wanted, found = ((a.shape[0], first.shape[1]), (span[1] - span[0], a.shape[0])), (a.shape, own.shape)
        if found != wanted:
            raise ValueError(
                f"the adapter of {part.name} has matrices of size {_shapes(found)}, but this model needs "
                f"{_shapes(wanted)}"
            )
        b[span[0] : span[1], at : at + a.shape[0]] = own
        at += 0 if same else a.shape[0]
    return (first if same else torch.cat([a for _, a, _ in adapters])), b


def _shapes(shapes: Iterable[Sequence[int]]) -> str:
    return " and ".join(" x ".join(map(str, shape)) for shape in shapes)


def _split(name: str) -> tuple[str, str]:
    """Split a tensor name into the layer's path and the last component: "lora_A", "lora_B", "bias" or similar."""
    for kind in _KINDS:
        if name.endswith(f".{kind}.weight"):
            return name.removesuffix(f".{kind}.weight"), kind
    stem, _, last = name.replace(".base_layer.", ".").rpartition(".")
    return stem, last


def _rows(part: Part) -> tuple[int, int] | None:
    span = part.index[0] if part.index else None
    assert not isinstance(span, int)  # the caller handles stacks
    return span


def peft_stacks(origin: Pretrained, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a dict that maps the paths of stacked layers in a PEFT adapter to their paths in the model."""
    targets = [f".{target}" for target in config.get("target_parameters") or ()]
    ours = [
        path
        for path in _stacks(origin.table)
        if f".{_parameter(origin.table, path)}".endswith(tuple(targets))
    ]
    return _wrapped(origin.table, ours)


def _wrapped(table: Table, adapted: Iterable[str]) -> dict[str, str]:
    """Return a dict that maps the PEFT path of each adapted stack to its path in the model."""
    modules: dict[str, list[str]] = {}
    for path in (path for path in _stacks(table) if path in set(adapted)):
        modules.setdefault(_parameter(table, path).rpartition(".")[0], []).append(path)
    # PEFT wraps a module once per adapted parameter; each wrapper adds `.base_layer` to the wrapped module's path
    return {
        module + ".base_layer" * (len(paths) - 1 - number): path
        for module, paths in modules.items()
        for number, path in enumerate(paths)
    }


def _stack_parameters(table: Table) -> dict[str, str]:
    """Return a dict that maps the weight of each stack to its parameter in `transformers`."""
    return {f"{path}.weight": _parameter(table, path) for path in _stacks(table)}


def _check_whole_modules(parameters: Mapping[str, str], trained: Collection[str]) -> None:
    """Raise ValueError if `trained` contains some but not all stacks of a module, because PEFT saves whole modules."""
    full = {parameters[name].rpartition(".")[0]: name for name in trained if name in parameters}
    for weight, parameter in parameters.items():
        name = full.get(parameter.rpartition(".")[0])
        if name is not None and weight not in trained:
            raise ValueError(
                f"cannot save the adapter: {name} is trained in full, but {weight} is not, and PEFT has no format for "
                "this; use also_train='*.experts' or targets='*.experts.*', or write merged weights with "
                "engine.save_pretrained(folder)"
            )


def _stacks(table: Table) -> list[str]:
    """Return the paths of the model's stacked layers."""
    return [ours.removesuffix(".weight") for ours, parts in table.parts.items() if _is_stacked(parts[0])]


def _is_stacked(part: Part) -> bool:
    return bool(part.index) and isinstance(part.index[0], int)


def _parameter(table: Table, stack: str) -> str:
    """Return the name of a stack's parameter in `transformers`, such as `model.layers.0.mlp.experts.down_proj`."""
    expert = table.parts[f"{stack}.weight"][0].name.rsplit(".", 3)[
        0
    ]  # without the expert's index, the layer and "weight"
    return f"{table.module(expert)}.{stack.rpartition('.')[2]}_proj"


def _module(table: Table, part: Part) -> str:
    """Return the path of the `transformers` module that contains the tensor of `part`."""
    return table.module(part.name.rpartition(".")[0])
