"""Read models and weights from checkpoints, to generate text or to initialize another run."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from farandole._troubleshooting import see
from farandole.data.tokenizer import load_tokenizer
from farandole.models.gpt import build_gpt
from farandole.models.hf.pretrained import read_config, tensors_of
from farandole.train.config import ConfigError, TrainConfig, saved_config
from farandole.train.run_folder import (
    METADATA,
    TOKENIZER,
    WEIGHTS,
    CheckpointError,
    read_metadata,
    weights_file,
)


def load_model(checkpoint: Path) -> tuple[nn.Sequential, Tokenizer, TrainConfig]:
    """Load the model, tokenizer and configuration from folder `checkpoint`, in one process.

    The weights come from `model.safetensors`.  Pickle files are not read.

    Raises:
        CheckpointError: if a file is missing or damaged, or the task is neither "text" nor "sft".
    """
    config = saved_config(read_metadata(checkpoint).config)
    if config.task not in ("text", "sft"):
        raise CheckpointError(
            f"checkpoint {checkpoint} belongs to task={config.task!r}: expected task='text' or 'sft', "
            "which can generate text"
        )
    if config.model.folder:
        origin = read_config(checkpoint)
        model: nn.Sequential = origin.architecture.build(origin.config)
    else:
        model = build_gpt(config.model.gpt())
    weights = read_weights(checkpoint / WEIGHTS)
    try:
        tokenizer = load_tokenizer(checkpoint / TOKENIZER)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            f"cannot load the tokenizer {checkpoint / TOKENIZER}: {error}; use another checkpoint{see('is-damaged')}"
        ) from None
    expected = tensors_of(model)
    if weights.keys() != expected.keys():
        odd = sorted(weights.keys() ^ expected.keys())
        raise CheckpointError(
            f"checkpoint {checkpoint} does not match its configuration: missing or unexpected tensors "
            f"{', '.join(odd[:5])}; use another checkpoint"
        )
    for name, tensor in expected.items():
        tensor.data.copy_(weights[name])
    return model.eval(), tokenizer, config


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read parameters and buffers from a safetensors file, and merge LoRA adapters into the weights.

    Raises:
        CheckpointError: if the file cannot be read or is damaged.
    """
    try:
        tensors = load_file(file)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}; check the path and the permissions") from None
    except SafetensorError as error:
        raise CheckpointError(
            f"checkpoint {file.parent} is damaged: {error}; use another checkpoint{see('is-damaged')}"
        ) from None
    paths = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    if paths:
        if not (file.parent / METADATA).is_file():
            raise CheckpointError(
                f"{file} contains LoRA adapters, but {METADATA}, which contains their scaling, is missing; restore "
                f"{METADATA}"
            )
        lora = saved_config(read_metadata(file.parent).config).plan.lora()
        assert lora is not None
        for path in paths:
            weight, down, up = (tensors[f"{path}.{name}"] for name in ("weight", "lora_A", "lora_B"))
            update = (up.float() @ down.float()).mul_(lora.scaling)
            tensors[f"{path}.weight"] = (weight.float() + update).to(weight.dtype)
            del tensors[f"{path}.lora_A"], tensors[f"{path}.lora_B"]
    return tensors


@torch.no_grad()
def load_initial_weights(model: nn.Module, config: TrainConfig) -> None:
    """Copy the weights from `config.weights` into `model`, if this key is set.

    Raises:
        ConfigError: if names or shapes do not match the model.
        CheckpointError: if the checkpoint is missing or damaged.
    """
    file = weights_file(config)
    if file is None:
        return
    saved = read_weights(file)
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in expected.items():
        if name in saved and saved[name].shape != tensor.shape:
            raise ConfigError(
                f"weights={config.weights}: {name} has shape {tuple(saved[name].shape)} in {file}, but "
                f"{tuple(tensor.shape)} in the model; use the [model] section of the run that saved the "
                "weights"
            )
    parameters = {name for name, _ in model.named_parameters()}
    if odd := sorted((saved.keys() - expected.keys()) | (parameters - saved.keys())):
        raise ConfigError(
            f"weights={config.weights}: {file} belongs to another model: missing or unexpected tensors "
            f"{', '.join(odd[:5])}; use the [model] section of the run that saved the weights{see('belongs-to-another-model')}"
        )
    for name, tensor in saved.items():
        expected[name].copy_(tensor)
