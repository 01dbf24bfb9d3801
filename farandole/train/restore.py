"""A trained model from its checkpoint, on one process: for generating, evaluating, exporting."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn

from farandole.data.tokenizer import load_tokenizer
from farandole.models.gpt import build_gpt
from farandole.train.checkpoint_folder import TOKENIZER, WEIGHTS, CheckpointError, read_facts
from farandole.train.config import TrainConfig, parse_config


def load_model(checkpoint: Path) -> tuple[nn.Sequential, Tokenizer, TrainConfig]:
    """The model, tokenizer and configuration in folder `checkpoint`.

    Reads `model.safetensors`, no pickles.  Raises `CheckpointError` where a file is missing or damaged.
    """
    config = parse_config(read_facts(checkpoint).config)
    model = build_gpt(config.model.gpt())
    try:
        weights = load_file(checkpoint / WEIGHTS)
        tokenizer = load_tokenizer(checkpoint / TOKENIZER)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {checkpoint} is damaged: {error}") from None
    expected = dict(model.named_parameters())
    if weights.keys() != expected.keys():
        odd = sorted(weights.keys() ^ expected.keys())
        raise CheckpointError(f"checkpoint {checkpoint} does not fit its configuration: {', '.join(odd[:5])}")
    for name, parameter in expected.items():
        parameter.data.copy_(weights[name])
    return model.eval(), tokenizer, config
