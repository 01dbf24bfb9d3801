"""Support models from Hugging Face folders: checks, construction and checkpoint files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.models.bert import BERTConfig
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.hf import FolderError, from_pretrained
from farandole.models.hf.pretrained import CONFIG, COPIED, Pretrained, read_config
from farandole.models.layers import initialize
from farandole.models.sequence import Transformer
from farandole.parallel.engine import Engine
from farandole.train.config import ConfigError, TrainConfig


def folder_of(config: TrainConfig) -> Path:
    """Return the configured model folder."""
    return Path(config.model.folder).expanduser()


def describe_folder(config: TrainConfig, families: tuple[str, ...]) -> Pretrained:
    """Read the model's family and configuration from its folder.

    Raises:
        ConfigError: if the folder is damaged or unsupported, or belongs to another family.
    """
    try:
        origin = read_config(folder_of(config), with_weights=config.model.pretrained)
    except FolderError as error:
        raise ConfigError(f"model={config.model.folder}: {error}") from None
    if origin.architecture.name not in families:
        raise ConfigError(
            f"model={config.model.folder} is a {origin.architecture.name} model, but task={config.task!r} supports only "
            f"{', '.join(families)}; choose another model or task"
        )
    return origin


def position_limit(origin: Pretrained) -> int | None:
    """Return the number of learned positions, or None for a model without learned positions."""
    sizes = origin.config
    learned = isinstance(sizes, BERTConfig) or (isinstance(sizes, GPTConfig) and sizes.positions == "learned")
    return sizes.context if learned else None


def check_context(config: TrainConfig, origin: Pretrained) -> None:
    """Raise `ConfigError` if `model.context` exceeds the model's learned positions."""
    limit = position_limit(origin)
    if limit is not None and config.model.context > limit:
        raise ConfigError(
            f"model.context={config.model.context} exceeds the {limit} positions of model={config.model.folder}; "
            f"use model.context={limit}"
        )


def open_folder_model(config: TrainConfig, **changes: Any) -> Transformer:
    """Create the folder's model on the meta device; `parallelize` reads the weights.

    With `model.pretrained=false`, the weights are random.

    Raises:
        ConfigError: if the folder is damaged or incomplete.
    """
    folder = folder_of(config)
    try:
        if config.model.pretrained:
            return from_pretrained(folder, lazy=True, seed=config.seed, **changes)
        origin = read_config(folder, with_weights=False)
    except FolderError as error:
        raise ConfigError(f"model={config.model.folder}: {error}") from None
    model = origin.architecture.build(replace(origin.config, **changes))
    if torch.get_default_device().type != "meta":
        initialize(model)
    model.pretrained = origin  # type: ignore[assignment]
    return model


def build_language_model(config: TrainConfig) -> Transformer:
    """Create the model for task "text" or "sft": from a folder, or a GPT configured in section [model]."""
    return open_folder_model(config) if config.model.folder else build_gpt(config.model.gpt())


def model_files(folder: Path) -> Mapping[str, Path]:
    """Return the model files that are copied to checkpoints."""
    return {name: folder / name for name in (CONFIG, *COPIED) if (folder / name).is_file()}


def save_model(engine: Engine, model: nn.Module, run: Path, comm: Communicator) -> Path | None:
    """Write the trained model to RUN/model, if it has a Hugging Face format.  Collective call."""
    if getattr(model, "pretrained", None) is None:
        return None
    folder = run / "model"
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # the model may have been saved before
    comm.barrier()
    engine.save_pretrained(folder)
    return folder
