"""Read a model, its tokenizer and its chat template from a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from farandole.data.errors import DataError
from farandole.data.template import Template, find_template, read_tokenizer_config, token_text
from farandole.data.tokenizer import END_OF_TEXT, load_tokenizer
from farandole.models.hf.fields import FolderError
from farandole.models.hf.pretrained import CONFIG, from_pretrained, read_config
from farandole.models.sequence import Transformer
from farandole.serve.lora import Adapter, read_adapters
from farandole.serve.request import RequestError
from farandole.serve.runner import check_weights
from farandole.train.run_folder import METADATA, TOKENIZER, newest_checkpoint
from farandole.train.weights import load_model

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ModelFolder:
    """A model that can be served.

    Args:
        folder: the folder with the weights.
        context: the maximum number of tokens of a sequence.
        end_tokens: the tokens that end a sequence.
        template: the chat template, or None.
        no_template: the reason why `template` is None, or an empty string.
        adapters: the LoRA adapters by name.
        weights: "int8" to compute matrix products with int8 weights, or "" to use the weights of the model; see `Runner`.
        largest: the argument `largest` of `Runner`, if the model is sharded over ranks.
    """

    folder: Path
    model: Transformer
    tokenizer: Tokenizer
    context: int
    end_tokens: frozenset[int]
    template: Template | None
    no_template: str
    adapters: Mapping[str, Adapter]
    weights: str = ""
    largest: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def runner_options(self) -> dict[str, Any]:
        """Return all arguments of `Runner` except the model.

        `owned` is True, so the runner may free the weights of the model.
        """
        return {"adapters": self.adapters, "weights": self.weights, "largest": self.largest, "owned": True}


def is_hugging_face(path: Path) -> bool:
    """Return whether a folder is a Hugging Face folder, and not a checkpoint of a run."""
    return (path / CONFIG).is_file() and not (path / METADATA).is_file()


def find_model(folder: str | Path) -> Path:
    """Return the folder with the weights: a Hugging Face folder, or the newest checkpoint of a run.

    Raises:
        CheckpointError: if there is no checkpoint.
    """
    path = Path(folder).expanduser()
    return path if is_hugging_face(path) else newest_checkpoint(path)


def read_model(
    folder: str | Path,
    *,
    precision: str = "fp32",
    context: int | None = None,
    template: str = "",
    lora: Mapping[str, str | Path] | None = None,
    weights: str = "",
    lazy: bool = False,
) -> ModelFolder:
    """Read a Hugging Face folder, or the newest checkpoint of a run of `farandole train`.

    Args:
        folder: a Hugging Face folder, a checkpoint, a run, or a folder of runs.
        precision: "fp32" or "bf16".
        context: the maximum number of tokens of a sequence, by default the model's context.
        template: a file with a chat template, or "chatml"; by default the model's own template.
        lora: a dict that maps the names of LoRA adapters to their folders.
        weights: "int8" to compute matrix products with int8 weights, or "" to compute with weights in `precision`.
        lazy: whether to create the model of a Hugging Face folder on the meta device, for `shards.shard_model`.

    Raises:
        FolderError, CheckpointError, DataError: if a file is missing or damaged, or the model is not supported.
        RequestError: if an argument is invalid.
    """
    path = find_model(folder)
    if precision not in PRECISIONS:
        raise RequestError("precision", f"expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    if weights:
        check_weights(weights)
    if is_hugging_face(path):
        model, tokenizer, limit, choice = _hugging_face(path, precision, lazy)
    else:
        loaded, tokenizer, config = load_model(path)
        model = cast(Transformer, loaded.to(PRECISIONS[precision]))
        limit, choice = config.model.context, getattr(config.data, "template", "")
    if context is not None and not 0 < context <= limit:
        raise RequestError(
            "context", f"expected a value from 1 to {limit} (the model's context), got {context}"
        )
    found, reason = None, ""
    try:
        found = find_template(path, template or choice)
    except DataError as error:
        reason = str(error).replace("data.template=", "--chat-template ")
        if template:
            raise DataError(reason) from None
    adapters = read_adapters(model, lora or {})
    ends = _end_tokens(path, tokenizer)
    return ModelFolder(path, model, tokenizer, context or limit, ends, found, reason, adapters, weights)


def _hugging_face(path: Path, precision: str, lazy: bool) -> tuple[Transformer, Tokenizer, int, str]:
    origin = read_config(path)
    if not origin.architecture.is_decoder:
        raise FolderError(
            f"{path} contains a {origin.architecture.name} model, which does not generate text; expected a decoder"
        )
    tokenizer = read_tokenizer(path)
    limit = next(
        (origin.values[name] for name in ("max_position_embeddings", "n_positions") if name in origin.values),
        getattr(origin.config, "context", 0),
    )
    if not limit:
        raise FolderError(
            f"{path / CONFIG} does not contain the maximum context length; add max_position_embeddings to this file"
        )
    model = from_pretrained(path, dtype=PRECISIONS[precision], lazy=lazy).eval()
    return model, tokenizer, int(limit), ""


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder.

    Raises:
        FolderError: if the tokenizer file is missing or damaged.
    """
    if not (path / TOKENIZER).is_file():
        raise FolderError(
            f"{path} has no {TOKENIZER}; save the tokenizer with transformers' AutoTokenizer.save_pretrained"
        )
    try:
        return load_tokenizer(path / TOKENIZER)
    except Exception as error:  # the library raises plain Exception
        raise FolderError(
            f"cannot load the tokenizer {path / TOKENIZER}: {error}; check the file, or download it again"
        ) from None


def _end_tokens(path: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the end-of-sequence tokens from the configuration files, or else from the tokenizer."""
    for name in ("generation_config.json", CONFIG):
        if (path / name).is_file():
            ends: Any = json.loads((path / name).read_text()).get("eos_token_id")
            if ends is not None:
                return frozenset(ends if isinstance(ends, list) else [ends])
    text = token_text(read_tokenizer_config(path), "eos_token") or END_OF_TEXT
    token = tokenizer.token_to_id(text)
    return frozenset() if token is None else frozenset([token])
