"""Save and load LoRA adapters in PEFT format.

An adapter is a folder with two files:

    adapter_model.safetensors   base_model.model.PATH.lora_A.weight   (rank, in)
                                base_model.model.PATH.lora_B.weight   (out, rank)
                                base_model.model.PATH.base_layer.bias (out), a trained bias of an adapted layer
                                base_model.model.NAME                 other trained tensors, by their names in the model
    adapter_config.json         {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [PATH, ...],
                                 "lora_dropout": ..., "use_rslora": ..., "bias": ..., "modules_to_save": ..., ...}

Stacked matrices of experts have the shapes of PEFT's `target_parameters` (see `stacked`).

PATH is the layer's path in the model or, if the model was loaded from a Hugging Face folder, its path in the
corresponding `transformers` model.  Each file is written under a temporary name, flushed and then renamed.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from farandole._extras import optional_import
from farandole.data.cache import flush
from farandole.data.wording import disk_failure
from farandole.models.moe import StackedLinear
from farandole.parallel.lora.adapters import Summary, add_lora, lora_layers, other_trained, summarize
from farandole.parallel.lora.description import Adapter, describe_adapter, trained_tensors
from farandole.parallel.lora.hugging_face import (
    config_for_peft,
    for_peft,
    from_peft,
    origin_of,
    peft_stacks,
)
from farandole.parallel.lora.layer import Adaptable, AdaptedLayer
from farandole.parallel.lora.stacked import matrix_for_peft, matrix_from_peft
from farandole.parallel.zero.hidden_parameters import is_hidden
from farandole.plan import LoRA

with optional_import():
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def save_adapter(model: nn.Module, folder: str | Path, base_model: str | None = None) -> None:
    """Write the adapters and other trained tensors of `model` to `folder`.

    The folder is created if it is missing.  Call this on one rank only.  For a sharded model, call
    `Engine.save_adapter` on all ranks.  Adapters may be merged or not.  PEFT compares the paths in `modules_to_save`
    with the ends of module paths, so "2" also matches "12".

    Args:
        base_model: the name of the base model to write into the configuration.

    Raises:
        ValueError: if the model has no LoRA, or if only some of the parameters of a Hugging Face model's experts are
            trained in full.
        RuntimeError: if this rank has only its shards of the adapters.
        AdapterError: if the files cannot be written.  An existing adapter in the folder is then unchanged.
    """
    model = _unwrapped(model)
    adapter = describe_adapter(model)
    if adapter is None:
        raise ValueError("the model has no LoRA adapters to save: call add_lora(model, LoRA(...)) first")
    values = trained_tensors(model, adapter)
    if hidden := [name for name, tensor in values.items() if is_hidden(tensor)]:
        raise RuntimeError(
            f"cannot save the adapter: this rank has only its shard of {hidden[0]}; call engine.save_adapter(folder), "
            "or engine.save_pretrained(folder) for merged weights, on all ranks"
        )
    write_adapter(adapter, values, folder, base_model)


def write_adapter(
    adapter: Adapter, values: Mapping[str, Tensor], folder: str | Path, base_model: str | None = None
) -> None:
    """Write an adapter to `folder`, given the values of `adapter.tensors`; see `save_adapter`.

    Raises:
        AdapterError: if the files cannot be written.
        ValueError: if only some of the parameters of a Hugging Face model's experts are trained in full.
    """
    tensors: dict[str, Tensor] = {}
    for path in adapter.layers:
        for kind in ("lora_A", "lora_B"):
            tensors[f"{path}.{kind}.weight"] = values[f"{path}.{kind}"]
    for name in adapter.others:
        path, _, last = name.rpartition(".")
        tensors[f"{path}.base_layer.{last}" if path in adapter.layers else name] = values[name]
    stacks = [path for path in adapter.layers if values[f"{path}.lora_A"].dim() > 2]
    config = _config(adapter, stacks, base_model)
    if adapter.origin is not None:
        tensors = for_peft(adapter.origin, tensors)
        config = config_for_peft(adapter.origin, config, tensors)
    _write(
        Path(folder).expanduser(),
        {PREFIX + n: _copy(matrix_for_peft(n, t)) for n, t in tensors.items()},
        config,
    )


def load_adapter(model: nn.Module, folder: str | Path) -> Summary:
    """Load the adapter in `folder` into `model`.

    If the model has no adapters, they are added; otherwise, their values are replaced.  For a quantized base, call
    `add_lora` first.

    Raises:
        AdapterError: if files are missing or damaged, require an unsupported feature, or do not match the model's
            names, shapes, rank or scaling.  The model is then unchanged.
        ValueError: as in `add_lora`.
    """
    model = _unwrapped(model)
    saved = read_adapter(model, folder)
    layers = lora_layers(model)
    lora = next(iter(layers.values())).lora if layers else lora_of(saved)
    check_fits(model, lora, saved, has_lora=bool(layers))
    if not layers:
        add_lora(model, lora)
    return put_into(model, lora, saved)


def read_adapter(model: nn.Module, folder: str | Path) -> Saved:
    """Return the adapter in `folder`, with tensor names and shapes as in `model`.

    Raises:
        AdapterError: if files are missing or damaged, or require an unsupported feature.
        ValueError: if the adapter's shapes do not match the layers that the model fuses or stacks.
    """
    folder = Path(folder).expanduser()
    config, found = _read(folder)
    if (origin := origin_of(model)) is None:
        return Saved(folder, config, _stacked(model, found))
    stacks = peft_stacks(origin, config)
    saved = Saved(folder, *from_peft(origin, config, found))
    saved = Saved(folder, saved.config, _stacked(model, saved.tensors))
    for name, tensor in found.items():
        stem = name.removesuffix(".lora_A.weight")
        if stem != name and stem not in stacks and len(tensor) != config.get("r"):
            raise AdapterError(
                f"{folder}: {name} has rank {len(tensor)}, but {CONFIG} has r={config.get('r')}; save or download the "
                "adapter again"
            )
    return saved


def _stacked(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors`, with the matrices of stacked layers reshaped to three dimensions as in the model."""
    counts = {path: each.count for path, each in model.named_modules() if isinstance(each, StackedLinear)}
    found = {}
    for name, tensor in tensors.items():
        path, _, kind = name.removesuffix(".weight").rpartition(".")
        is_flat = path in counts and kind in ("lora_A", "lora_B") and tensor.dim() == 2
        found[name] = matrix_from_peft(name, tensor, counts[path]) if is_flat else tensor
    return found


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `torch.compile` and DDP wrappers, which change parameter names."""
    compiled = getattr(model, "_orig_mod", None)  # its class takes seconds to import
    inner = model.module if isinstance(model, DistributedDataParallel) else compiled
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


def _copy(tensor: Tensor) -> Tensor:
    # a parameter may be a view of a tensor that also contains other parameters
    return tensor.detach().to("cpu", copy=True).contiguous()


def _config(adapter: Adapter, stacks: Sequence[str], base_model: str | None) -> dict[str, Any]:
    """Return the PEFT configuration of an adapter; `stacks` are the paths of its stacked layers."""
    lora = adapter.lora
    linears = [path for path in adapter.layers if path not in stacks]
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "revision": None,
        "auto_mapping": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "bias": lora.bias,
        "target_modules": _exactly(linears, adapter.modules),
        "target_parameters": [f"{path}.weight" for path in stacks] or None,
        "modules_to_save": list(adapter.also_trained) or None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
    }


def _exactly(paths: Sequence[str], modules: Sequence[str]) -> list[str] | str:
    """Return PEFT's `target_modules`: a list or regular expression that matches only `paths` among `modules`."""
    # PEFT compares the paths in a list with the ends of module paths, and a regular expression with whole paths
    wanted = set(paths)
    endings = tuple(f".{path}" for path in paths)
    if any(module.endswith(endings) for module in modules if module not in wanted):
        return "|".join(re.escape(path) for path in paths)
    return list(paths)


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    text = json.dumps(config, indent=2) + "\n"
    weights, description = folder / WEIGHTS, folder / CONFIG
    partial = [path.with_name(path.name + ".tmp") for path in (weights, description)]
    needed = sum(tensor.nbytes for tensor in tensors.values()) + len(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            partial[1].write_text(text)
            save_file(tensors, partial[0], metadata={"format": "pt"})
            shutil.copymode(
                partial[1], partial[0]
            )  # safetensors creates files that only their owner can read
            for path in partial:
                flush(path)
            if description.exists() and description.read_text() != text:
                description.unlink()  # the configuration never describes the weights of another save
            partial[0].rename(weights)
            partial[1].rename(description)
            flush(folder)
        finally:
            for path in partial:
                path.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        why = disk_failure(error if isinstance(error, OSError) else str(error), folder, needed)
        raise AdapterError(f"cannot save the adapter to {folder}: {why}") from error


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the adapter's configuration, and its tensors by name without the prefix `base_model.model.`."""
    if not folder.is_dir():
        raise AdapterError(
            f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}: expected a folder with "
            f"{CONFIG} and {WEIGHTS}"
        )
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            has = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
            pickled = (
                "; adapter_model.bin is a pickle, which is not loaded: save the adapter with safetensors"
            )
            hint = pickled if (folder / "adapter_model.bin").is_file() else ""
            raise AdapterError(f"{folder} is not an adapter: {name} is missing; found: {has}{hint}")
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except OSError as error:
        raise AdapterError(f"{folder / CONFIG} cannot be read: {error.strerror}; check the file") from error
    except ValueError as error:
        raise AdapterError(
            f"{folder / CONFIG} is damaged: {error}; save or download the adapter again"
        ) from error
    if not isinstance(config, dict):
        raise AdapterError(
            f"{folder / CONFIG} is damaged: expected a JSON object, found {type(config).__name__}; save or download "
            "the adapter again"
        )
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    except OSError as error:
        raise AdapterError(f"{folder / WEIGHTS} cannot be read: {error}; check the file") from error
    except SafetensorError as error:
        raise AdapterError(
            f"{folder / WEIGHTS} is damaged: {error}; save or download the adapter again"
        ) from error
    strange = [name for name in named if not name.startswith(PREFIX)]
    if strange or not named:
        found = f"{strange[0]!r} does not begin with {PREFIX!r}" if strange else "it has no tensors"
        raise AdapterError(f"{folder / WEIGHTS} is not in PEFT format: {found}; save the adapter with PEFT")
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in named.items()}


# ---- checks before the model is changed ----


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
    *("exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
    *(
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
    ),  # have an effect only together with other fields
}
"""Ignored fields: they describe the adapter's origin, or its layers, which are known from its tensors."""

_STARTS = (True, False, "gaussian", "orthogonal")
"""Supported initializations of A and B; other initializations change the base model's weights."""

_SHOWN = 6


class AdapterError(RuntimeError):
    """Raised if an adapter cannot be written or read, or does not match the model."""


@dataclass
class Saved:
    """A saved adapter.

    `a` and `b` map layer paths to the matrices A and B.  `others` maps names in the model to the other trained tensors.

    Args:
        folder: the folder of the adapter.
        config: the PEFT configuration.
        tensors: all tensors, by their names without the prefix `base_model.model.`.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    a: dict[str, Tensor] = field(init=False)
    b: dict[str, Tensor] = field(init=False)
    others: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.a, self.b, self.others = {}, {}, {}
        for name, tensor in self.tensors.items():
            if name.endswith(".lora_A.weight"):
                self.a[name.removesuffix(".lora_A.weight")] = tensor
            elif name.endswith(".lora_B.weight"):
                self.b[name.removesuffix(".lora_B.weight")] = tensor
            else:
                path, _, last = name.rpartition(".base_layer.")
                self.others[f"{path}.{last}" if path else name] = tensor
        self._check_config()

    def _check_config(self) -> None:
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise AdapterError(
                f"{self.folder} has peft_type={kind!r}: expected 'LORA', the only supported type"
            )
        more = {
            name: value
            for name, value in self.config.items()
            if name not in _UNDERSTOOD | _HARMLESS and value not in (None, False, {}, [], 0, "")
        }
        if (start := self.config.get("init_lora_weights", True)) not in _STARTS:
            more["init_lora_weights"] = start
        if more:
            said = ", ".join(f"{name}={value!r}" for name, value in more.items())
            raise AdapterError(
                f"{self.folder} uses unsupported options: {said}; train the adapter without these options"
            )
        strange = [
            name
            for name in self.tensors
            if ".lora_" in name and not name.endswith(("_A.weight", "_B.weight"))
        ]
        if strange:
            raise AdapterError(
                f"{self.folder} has unsupported tensors: {_listed(strange)}; only adapters of linear layers are supported"
            )
        if not self.a:
            raise AdapterError(
                f"{self.folder} adapts no layer, because it contains no lora_A; save the adapter again"
            )


def lora_of(saved: Saved) -> LoRA:
    """Return the LoRA options of a saved adapter.

    The targets are the layers for which the adapter has tensors.

    Raises:
        AdapterError: if the configuration is incomplete or invalid, or a tensor does not belong to a submodule.
    """
    config = saved.config
    bias = config.get("bias", "none")
    names = [name for name in saved.others if not (bias == "all" and "bias" in name.rpartition(".")[2])]
    if bias == "lora_only":
        names = [name for name in names if name.rpartition(".")[0] not in saved.a]
    trained = dict.fromkeys(name.rpartition(".")[0] for name in names)
    if "" in trained:
        raise AdapterError(
            f"{saved.folder} has tensors that do not belong to a submodule: {_listed([n for n in names if '.' not in n])}; train only "
            "parameters of submodules"
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
        raise AdapterError(
            f"{saved.folder / CONFIG} has no field {error.args[0]}; save or download the adapter again"
        ) from None
    except (TypeError, ValueError) as error:
        raise AdapterError(f"{saved.folder / CONFIG} has an invalid setting: {error}") from error


def check_fits(model: nn.Module, lora: LoRA, saved: Saved, has_lora: bool) -> None:
    """Raise `AdapterError` if an adapter does not match a model; the message lists the differences."""
    problems = [*_layers_that_differ(model, saved, has_lora), *_settings_that_differ(lora, saved)]
    problems += _shapes_that_differ(model, saved)
    if not problems:
        problems += _others_that_differ(model, lora, saved)
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise AdapterError(
            f"the adapter {saved.folder} does not match the model: {'; '.join(problems[:_SHOWN])}{more}; load the adapter "
            "into its base model, with the LoRA options that were used to train it"
        )


def put_into(model: nn.Module, lora: LoRA, saved: Saved) -> Summary:
    """Copy the values of an adapter into the model, and return a summary of the model."""
    others = other_trained(model, lora)
    with torch.no_grad():
        for path, matrix in saved.a.items():
            layer = model.get_submodule(path)
            assert isinstance(layer, AdaptedLayer)
            layer.lora_A.copy_(matrix)
            layer.lora_B.copy_(saved.b[path])
        for name, tensor in saved.others.items():
            others[name].copy_(tensor)
    return summarize(model)


def _layers_that_differ(model: nn.Module, saved: Saved, has_lora: bool) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))  # a shared layer has several paths
    problems = []
    for path in saved.a | saved.b:
        module = modules.get(path)
        if module is None:
            near = difflib.get_close_matches(path, list(modules), n=1)
            problems.append(f"the model has no {path}" + (f" (nearest: {near[0]})" if near else ""))
        elif not isinstance(module, Adaptable):
            problems.append(f"{path} is a {type(module).__name__}, not an nn.Linear")
        elif has_lora and not isinstance(module, AdaptedLayer):
            problems.append(f"{path} has no LoRA in this model")
        elif path not in saved.a or path not in saved.b:
            problems.append(f"the adapter has no lora_{'B' if path in saved.a else 'A'} for {path}")
        elif isinstance(module, AdaptedLayer) and module.merged:
            problems.append(f"{path} is merged: call unmerge(model) first")
    covered = {modules.get(path) for path in saved.a}
    missing = [path for path, layer in lora_layers(model).items() if layer not in covered]
    return problems + ([f"the adapter has no tensors for {_listed(missing)}"] if missing else [])


def _settings_that_differ(lora: LoRA, saved: Saved) -> list[str]:
    there = lora_of(saved)
    problems = []
    if there.rank != lora.rank:
        problems.append(f"the adapter has rank {there.rank}, but the model has rank {lora.rank}")
    elif not math.isclose(there.scaling, lora.scaling):
        problems.append(
            f"the adapter has scaling {there.scaling:g}, but the model has {lora.scaling:g} (check alpha)"
        )
    if there.bias != lora.bias:
        problems.append(f"the adapter has bias={there.bias!r}, but the model has bias={lora.bias!r}")
    return problems


def _shapes_that_differ(model: nn.Module, saved: Saved) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    rank = lora_of(saved).rank
    problems = []
    for path in saved.a.keys() & saved.b.keys():
        layer = modules.get(path)
        if isinstance(layer, Adaptable):
            stack = (layer.count,) if isinstance(layer, StackedLinear) else ()
            wanted = {
                "lora_A": (*stack, rank, layer.in_features),
                "lora_B": (*stack, layer.out_features, rank),
            }
            found = {"lora_A": saved.a[path], "lora_B": saved.b[path]}
            problems += [_shape(f"{path}.{name}", found[name], wanted[name]) for name in wanted]
    return sorted(filter(None, problems))


def _others_that_differ(model: nn.Module, lora: LoRA, saved: Saved) -> list[str]:
    try:
        wanted = other_trained(model, lora, saved.a)
    except ValueError as error:  # a module that the model does not have
        return [str(error)]
    problems = []
    if missing := [name for name in wanted if name not in saved.others]:
        problems.append(f"the adapter has no {_listed(missing)}, which the model trains")
    if more := [name for name in saved.others if name not in wanted]:
        problems.append(f"the adapter has {_listed(more)}, which the model does not train")
    both = [name for name in wanted if name in saved.others]
    shapes = [_shape(name, saved.others[name], tuple(wanted[name].shape)) for name in both]
    return problems + [problem for problem in shapes if problem]


def _shape(name: str, found: Tensor, wanted: tuple[int, ...]) -> str:
    """Return a description of a shape mismatch, or "" if the shapes are equal."""
    if tuple(found.shape) == wanted:
        return ""
    return f"{name} is {_times(found.shape)} in the adapter, but {_times(wanted)} in the model"


def _times(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
