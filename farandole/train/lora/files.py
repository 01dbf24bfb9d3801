"""Adapters alone, on the disk, in the format of the library PEFT.

A folder with two files:

    adapter_model.safetensors   base_model.model.PATH.lora_A.weight   (rank, in)
                                base_model.model.PATH.lora_B.weight   (out, rank)
                                base_model.model.PATH.base_layer.bias (out), a trained bias of an adapted layer
                                base_model.model.NAME                 what else was trained, by its name in the model
    adapter_config.json         {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [PATH, ...],
                                 "lora_dropout": ..., "use_rslora": ..., "bias": ..., "modules_to_save": ..., ...}

PATH is that of the layer in the model. Each file is written to a temporary name, flushed and renamed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from farandole.data.cache import flush
from farandole.train.lora.adapt import Summary, add_lora, lora_layers, trained_beside
from farandole.train.lora.config import LoRA
from farandole.train.lora.fitting import AdapterError, Saved, check_fits, lora_of, put_into
from farandole.train.lora.targets import find_trained
from farandole.train.run_folder import reason

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def save_adapter(model: nn.Module, folder: str | Path, base_model: str | None = None) -> None:
    """Write the adapters of `model`, and what else was trained, to `folder`, which is made if it is not there.

    Whether they are merged makes no difference. `base_model` is noted as the name of the model that they are for.
    Of several ranks one calls this. (PEFT takes the names in `modules_to_save`, which are whole paths, for endings:
    "2" would be "12" as well there.) Raises ValueError without LoRA, `AdapterError` where it cannot be written:
    an adapter that was in the folder is then still there.
    """
    model = _unwrapped(model)
    layers = lora_layers(model)
    if not layers:
        raise ValueError("the model has no LoRA to save")
    lora = next(iter(layers.values())).lora
    tensors: dict[str, Tensor] = {}
    for path, layer in layers.items():
        tensors |= {f"{path}.lora_A.weight": layer.lora_A, f"{path}.lora_B.weight": layer.lora_B}
    for name, tensor in trained_beside(model, lora).items():
        path, _, last = name.rpartition(".")
        tensors[f"{path}.base_layer.{last}" if path in layers else name] = tensor
    config = _config(model, lora, list(layers), base_model)
    _write(Path(folder).expanduser(), {PREFIX + name: _copy(t) for name, t in tensors.items()}, config)


def load_adapter(model: nn.Module, folder: str | Path) -> Summary:
    """Put the adapter in `folder` on `model`: a plain one gets LoRA as it was saved, one with LoRA the values.

    For a quantized base, call `add_lora` with it first. Raises `AdapterError`, with the model as it was, where
    files are missing or damaged, or ask for what is not supported, or where names, shapes, rank or scaling are not
    those of the model; ValueError where `add_lora` does.
    """
    model, folder = _unwrapped(model), Path(folder).expanduser()
    saved = _read(folder)
    layers = lora_layers(model)
    lora = next(iter(layers.values())).lora if layers else lora_of(saved)
    check_fits(model, lora, saved, has_lora=bool(layers))
    if not layers:
        add_lora(model, lora)
    return put_into(model, lora, saved)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model whose names are in files: not what `torch.compile` or DDP has put around it."""
    compiled = getattr(model, "_orig_mod", None)  # its class takes seconds to import
    inner = model.module if isinstance(model, DistributedDataParallel) else compiled
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, with memory of its own: a parameter may be a view of one tensor with others."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _config(model: nn.Module, lora: LoRA, paths: list[str], base_model: str | None) -> dict[str, Any]:
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
        "target_modules": _exactly(paths, (path for path, _ in model.named_modules())),
        "modules_to_save": list(find_trained(model, lora)) or None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
    }


def _exactly(paths: list[str], modules: Iterable[str]) -> list[str] | str:
    """`paths` as a list; as a regular expression where PEFT would take one for the ending of another path too."""
    wanted = set(paths)
    endings = tuple(f".{path}" for path in paths)
    if any(module.endswith(endings) for module in modules if module not in wanted):
        return "|".join(re.escape(path) for path in paths)
    return paths


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
            shutil.copymode(partial[1], partial[0])  # safetensors makes it readable by its owner only
            for path in partial:
                flush(path)
            if description.exists() and description.read_text() != text:
                description.unlink()  # at no moment does it lie beside weights that it does not describe
            partial[0].rename(weights)
            partial[1].rename(description)
            flush(folder)
        finally:
            for path in partial:
                path.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        why = reason(error if isinstance(error, OSError) else str(error), there, needed)
        raise AdapterError(f"cannot save the adapter to {folder}: {why}") from error


def _read(folder: Path) -> Saved:
    """What is in `folder`, checked to be an adapter."""
    if not folder.is_dir():
        raise AdapterError(
            f"{folder} is {'no folder' if folder.exists() else 'not there'}: name that of an adapter"
        )
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            has = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
            pickled = "; adapter_model.bin is a pickle, which is not read: save it with safetensors"
            hint = pickled if (folder / "adapter_model.bin").is_file() else ""
            raise AdapterError(f"{folder} is no adapter: {name} is missing; it has: {has}{hint}")
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder / CONFIG} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{folder / CONFIG} is damaged: it is a {type(config).__name__}, not an object")
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{folder / WEIGHTS} is damaged: {error}") from error
    strange = [name for name in named if not name.startswith(PREFIX)]
    if strange or not named:
        found = f"{strange[0]!r} does not begin with {PREFIX!r}" if strange else "it has no tensors"
        raise AdapterError(f"{folder / WEIGHTS} is no adapter of PEFT's format: {found}")
    return Saved(folder, config, {name.removeprefix(PREFIX): tensor for name, tensor in named.items()})
