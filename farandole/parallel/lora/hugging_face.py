"""Convert adapters of models from Hugging Face folders to and from the layer names in `transformers`.

One fused layer of a model can correspond to several layers in `transformers`, such as queries, keys and values.  The
adapter of a fused layer has one A (rank, in) and one B (out, rank).  For PEFT, this adapter is written as one adapter
per layer, with the same A and the layer's rows of B.

In the other direction, layers may have different matrices A.  The fused adapter's A is then the concatenation of all
A, and B is zero in the blocks that combine the rows of one layer with the ranks of another layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from farandole.models.hf.mapping import Part, Table
from farandole.models.hf.pretrained import Pretrained

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj"})
"""The projections of experts.  In models with experts, PEFT takes all target modules with these names for experts, and
finds other layers, such as shared experts, only by the names of their parameters."""


def origin_of(model: nn.Module) -> Pretrained | None:
    """Return the Hugging Face folder of a model, or None."""
    origin = getattr(model, "pretrained", None)
    return origin if isinstance(origin, Pretrained) else None


def for_peft(origin: Pretrained, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert an adapter's tensors, which have names as in `peft_adapter`, to the names in `transformers`."""
    table, found = origin.table, {}
    for name, tensor in tensors.items():
        stem, kind = _split(name)
        if kind in ("lora_A", "lora_B"):
            for part in table.parts[f"{stem}.weight"]:
                rows = _rows(part, f"{stem}.weight")
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
    paths = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    others = {n.rpartition(".")[0] for n in tensors if ".lora_" not in n and ".base_layer." not in n}
    classes = origin.values.get("architectures") or [""]
    task = next((task for ending, task in _TASKS.items() if classes[0].endswith(ending)), None)
    if task == "SEQ_CLS" and not any(name.rpartition(".")[2] == "classifier" for name in others):
        task = None  # for this task, PEFT expects the weights of the classifier instead of an adapter
    every = [part for parts in origin.table.parts.values() for part in parts]
    parameters: list[str] = []
    if any(part.index and isinstance(part.index[0], int) for part in every):
        parameters = [f"{path}.weight" for path in paths if path.rpartition(".")[2] in _EXPERTS]
        paths = [path for path in paths if f"{path}.weight" not in parameters]
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
    table = origin.table
    modules = {_module(table, part): (ours, part) for ours, parts in table.parts.items() for part in parts}
    if not any(_split(name)[0] in modules for name in tensors):
        return dict(config), dict(tensors)
    layers: dict[str, list[tuple[Part, Tensor, Tensor]]] = {}
    found: dict[str, Tensor] = {}
    unknown = {}
    others: dict[str, list[tuple[Part, Tensor]]] = {}
    stored = {
        f"{_module(table, part)}.{part.name.rpartition('.')[2]}": (ours, part)
        for ours, parts in table.parts.items()
        for part in parts
    }
    for name, tensor in tensors.items():
        stem, kind = _split(name)
        if kind == "lora_A" and stem in modules and f"{stem}.lora_B.weight" in tensors:
            ours, part = modules[stem]
            weight = ours.rpartition(".")[0] + ".weight"
            part = next(each for each in table.parts[weight] if _module(table, each) == stem)
            layers.setdefault(weight, []).append((part, tensor, tensors[f"{stem}.lora_B.weight"]))
        elif kind == "lora_B" and stem in modules:
            continue
        elif (plain := name.replace(".base_layer.", ".")) in stored:
            ours, part = stored[plain]
            others.setdefault(ours, []).append((part, tensor))
        else:
            unknown[name] = tensor
    adapters = {weight: _fused(table.parts[weight], parts) for weight, parts in layers.items()}
    rank = max((a.shape[0] for a, _ in adapters.values()), default=0)
    for weight, (a, b) in adapters.items():
        path, more = weight.removesuffix(".weight"), rank - a.shape[0]
        found[f"{path}.lora_A.weight"] = nn.functional.pad(a, (0, 0, 0, more))
        found[f"{path}.lora_B.weight"] = nn.functional.pad(b, (0, more))
    for ours, pieces in others.items():
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
    """Return the A and B of a fused layer, given the adapters of its parts."""
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
                f"the adapter of {part.name} has matrices of {_shapes(found)}, but this model needs {_shapes(wanted)}"
            )
        b[span[0] : span[1], at : at + a.shape[0]] = own
        at += 0 if same else a.shape[0]
    return (first if same else torch.cat([a for _, a, _ in adapters])), b


def _shapes(shapes: Iterable[Sequence[int]]) -> str:
    return " and ".join(" x ".join(map(str, shape)) for shape in shapes)


def _split(name: str) -> tuple[str, str]:
    """Split a tensor name into the layer's path and "lora_A", "lora_B" or another tensor name."""
    for kind in ("lora_A", "lora_B"):
        if name.endswith(f".{kind}.weight"):
            return name.removesuffix(f".{kind}.weight"), kind
    stem, _, last = name.replace(".base_layer.", ".").rpartition(".")
    return stem, last


def _rows(part: Part, ours: str) -> tuple[int, int] | None:
    span = part.index[0] if part.index else None
    if isinstance(span, int):
        raise ValueError(
            f"{ours} is a stack of layers, which PEFT adapters do not support; exclude it from LoRA's targets"
        )
    return span


def _module(table: Table, part: Part) -> str:
    """Return the path of the layer in `transformers` that contains a part's tensor."""
    return table.module(part.name.rpartition(".")[0])
