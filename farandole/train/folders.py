"""Create models from Hugging Face folders, and list the files to copy from these folders to checkpoints."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.data.wording import disk_failure
from farandole.models.bert import BERTConfig
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.hf import FolderError, from_pretrained
from farandole.models.hf.pretrained import (
    CONFIG,
    COPIED,
    Pretrained,
    Request,
    read_config,
    with_changes,
    write_description,
)
from farandole.models.layers import initialize
from farandole.models.meta import meta_device
from farandole.models.moe import Balance
from farandole.models.sequence import Transformer
from farandole.parallel.checkpoint.folder import fail_on_all
from farandole.parallel.engine import Engine
from farandole.train.config import ConfigError, TrainConfig
from farandole.train.run_folder import BASE, MODEL

_log = logging.getLogger(__name__)


def folder_of(config: TrainConfig) -> Path:
    """Return the configured model folder."""
    return Path(config.model.folder).expanduser()


def describe_folder(config: TrainConfig, families: tuple[str, ...]) -> Pretrained:
    """Read the model's family and configuration from its folder.

    Raises:
        ConfigError: if the folder is damaged or unsupported, or the model's family is not in `families`.
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
    """Return the number of learned position embeddings, or None for a model without such embeddings."""
    sizes = origin.config
    learned = isinstance(sizes, BERTConfig) or (isinstance(sizes, GPTConfig) and sizes.positions == "learned")
    return sizes.context if learned else None


def check_context(config: TrainConfig, origin: Pretrained) -> None:
    """Raise `ConfigError` if `model.context` exceeds the number of learned position embeddings.

    For a model without such embeddings, warn if `model.context` exceeds the context length used to train the model.
    """
    limit = position_limit(origin)
    if limit is not None and config.model.context > limit:
        raise ConfigError(
            f"model.context={config.model.context} exceeds the {limit} positions of model={config.model.folder}; "
            f"use model.context={limit}"
        )
    trained = origin.values.get("max_position_embeddings")
    if limit is None and isinstance(trained, int) and config.model.context > trained:
        _warn_context(config.model.context, trained, config.model.folder)


@cache  # warn only once, although a task is created several times
def _warn_context(context: int, trained: int, folder: str) -> None:
    _log.warning(
        "farandole: model.context=%d exceeds max_position_embeddings=%d in model=%s: the model was not "
        "trained on sequences of this length; use a smaller model.context, or rope_parameters that extend the context",
        context,
        trained,
        folder,
    )


def open_folder_model(config: TrainConfig, classes: int | None = None, **changes: Any) -> Transformer:
    """Create the model from the configured folder, with `changes` to the model's configuration.

    The model is on the meta device, and `parallelize` later reads the weights.  If `model.pretrained` is false or
    `weights` is set, the folder's weights are not used: the model has random weights and is on torch's default device.

    Raises:
        ConfigError: if the folder is damaged or incomplete.
    """
    folder = folder_of(config)
    try:
        reads_weights = config.model.pretrained and not config.weights
        origin = read_config(folder, with_weights=reads_weights)
        changes = _router_changes(config, origin) | changes
        if config.model.is_restored:
            return _without_weights(with_changes(origin, classes, changes))
        if reads_weights:
            return from_pretrained(folder, lazy=True, classes=classes, seed=config.seed, **changes)
        origin = with_changes(origin, classes, changes)
    except FolderError as error:
        raise ConfigError(f"model={config.model.folder}: {error}") from None
    model = origin.architecture.build(origin.config)
    if torch.get_default_device().type != "meta":
        initialize(model)
    model.pretrained = origin  # type: ignore[assignment]
    return model


def _without_weights(origin: Pretrained) -> Transformer:
    """Return a meta-device model whose weights will be loaded from a checkpoint."""
    with meta_device():
        model = origin.architecture.build(origin.config)
    model.pretrained = origin  # type: ignore[assignment]
    model.weight_source = _NoWeights(origin.folder or Path())  # type: ignore[assignment]
    return model


@dataclass(frozen=True)
class _NoWeights:
    """A `WeightSource` that contains no weights."""

    folder: Path

    def __contains__(self, name: str) -> bool:
        return False

    def read(self, requests: Sequence[Request]) -> None:
        """Read nothing."""


def _router_changes(config: TrainConfig, origin: Pretrained) -> dict[str, Any]:
    """Return the changes to the model's configuration that the router keys in section [model] specify."""
    routers = config.model.routers()
    if not routers:
        return {}
    if not hasattr(origin.config, "balance"):
        name, value = next(iter(routers.items()))
        raise ConfigError(
            f"model.{name}={value:g} requires a mixture of experts, but model={config.model.folder} is a "
            f"{origin.architecture.name} model without experts; use model.{name}=0"
        )
    section = config.model
    return {"balance": Balance(section.balance_loss, section.z_loss, section.capacity or None)}


def build_language_model(config: TrainConfig) -> Transformer:
    """Create the model for task "text" or "sft": the model in the folder, or a GPT configured in section [model]."""
    return open_folder_model(config) if config.model.folder else build_gpt(config.model.gpt())


def save_base(model: nn.Module, run: Path, comm: Communicator) -> Mapping[str, Path]:
    """Write a pretrained model's configuration and tokenizer files to RUN/base, and return their paths, keyed by name.

    Files in an existing RUN/base are kept.  The run can then be resumed without the original folder.  Collective call.

    Raises:
        ConfigError: on all ranks, if the files cannot be written.
    """
    origin, base = getattr(model, "pretrained", None), run / BASE
    if origin is None:
        return {}
    refusal = ""
    if comm.rank == 0 and not base.is_dir():
        partial = base.with_name(f"{BASE}.tmp")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write_description(origin, partial, torch.get_default_dtype())
            partial.rename(base)
        except OSError as error:
            refusal = f"cannot write to {base}: {disk_failure(error, run)}"
    if refusal := comm.broadcast_object(refusal):
        raise ConfigError(refusal)
    return model_files(base)


def model_files(folder: Path) -> Mapping[str, Path]:
    """Return the files to copy from a model folder to each checkpoint, keyed by name."""
    return {name: folder / name for name in (CONFIG, *COPIED) if (folder / name).is_file()}


def save_model(engine: Engine, model: nn.Module, run: Path, comm: Communicator) -> Path | None:
    """Write the trained model to RUN/model, and return this folder.  Collective call.

    An existing RUN/model is replaced after the new model has been written.  If the model has no Hugging Face format,
    nothing is written, and the result is None.

    Raises:
        CheckpointError: on all ranks, if the model cannot be written.
    """
    if getattr(model, "pretrained", None) is None:
        return None
    folder, new = run / MODEL, run / f"{MODEL}.new"
    with fail_on_all(comm, new):
        if comm.rank == 0 and new.exists():  # left behind by a killed run
            shutil.rmtree(new)
    engine.save_pretrained(new)
    with fail_on_all(comm, folder):
        if comm.rank == 0:
            if folder.exists():
                shutil.rmtree(folder)
            new.rename(folder)
    return folder
