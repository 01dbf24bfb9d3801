"""Compute embeddings of texts with a BERT model, as specified by the Sentence Transformers files in its folder.

The sequences of a batch are packed into one row, without padding.  In fp32, the embedding of a sequence does not
depend on the other sequences (`rows.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from farandole.models.hf.fields import FolderError
from farandole.models.hf.pretrained import from_pretrained, read_config
from farandole.models.sequence import SequenceInfo, Transformer
from farandole.serve.folder import PRECISIONS, is_hugging_face, read_tokenizer
from farandole.serve.request import RequestError
from farandole.serve.rows import IndependentRows

POOLINGS = ("mean", "cls")
"""How the hidden states of a sequence become one vector: their mean, or the state of the first token."""


@dataclass(frozen=True)
class Encoder:
    """A model that computes embeddings.

    Args:
        folder: the folder with the weights.
        model: a BERT model.
        context: the maximum number of tokens of a sequence.
        pooling: one of `POOLINGS`.
    """

    folder: Path
    model: Transformer
    tokenizer: Tokenizer
    context: int
    pooling: str

    @property
    def width(self) -> int:
        """Return the dimension of the embeddings."""
        return int(self.model.config.width)

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens in the vocabulary."""
        return int(self.model.config.vocabulary)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the normalized fp32 embeddings of token sequences, with shape (sequences, width)."""
        lengths = torch.tensor([len(each) for each in sequences])
        tokens = torch.tensor([[token for each in sequences for token in each]])
        documents = torch.arange(len(sequences)).repeat_interleave(lengths)[None]
        info = SequenceInfo(documents=documents if len(sequences) > 1 else None)
        hidden: Any = tokens
        with IndependentRows():
            for block in list(self.model)[:-1]:
                hidden = block(hidden, info)
        states = hidden[0].float().split(lengths.tolist())
        pooled = torch.stack([each[0] if self.pooling == "cls" else each.mean(0) for each in states])
        return torch.nn.functional.normalize(pooled)


def is_encoder(path: Path) -> bool:
    """Return whether a folder contains a BERT model."""
    return is_hugging_face(path) and read_config(path).architecture.name == "bert"


def read_encoder(path: Path, *, precision: str = "fp32", context: int | None = None) -> Encoder:
    """Read an encoder from a `transformers` or Sentence Transformers folder.

    Args:
        precision: "fp32" or "bf16".
        context: the maximum number of tokens of a sequence, by default the value in the Sentence Transformers files, or
            else the model's context.

    Raises:
        FolderError: if a file is missing or damaged, or the encoder uses a module or a setting that is not supported.
        RequestError: if an argument is invalid.
    """
    if precision not in PRECISIONS:
        raise RequestError("precision", f"expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    limit = int(read_config(path).config.context)
    if context is not None and not 0 < context <= limit:
        raise RequestError(
            "context", f"expected a value from 1 to {limit} (the model's context), got {context}"
        )
    pooling = _read_pooling(path)
    settings = _read_json(path / "sentence_bert_config.json") or {}
    if settings.get("do_lower_case"):
        raise FolderError(
            f"{path}/sentence_bert_config.json: do_lower_case=true is not supported; use a model whose tokenizer.json "
            "lowercases the text"
        )
    if (_read_json(path / "config_sentence_transformers.json") or {}).get("default_prompt_name"):
        raise FolderError(
            f"{path}/config_sentence_transformers.json: default_prompt_name is not supported; remove it, and add the "
            "prompt to the inputs"
        )
    default = min(limit, settings.get("max_seq_length") or limit)
    # if the folder has no head, the head's weights are random, but they are not used
    model = from_pretrained(path, dtype=PRECISIONS[precision], classes=1).eval()
    return Encoder(path, model, read_tokenizer(path), context or default, pooling)


def _read_pooling(path: Path) -> str:
    """Return the pooling of a Sentence Transformers folder, or "mean" for any other folder."""
    found = "mean"
    for module in _read_json(path / "modules.json") or []:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            config = _read_json(path / module["path"] / "config.json") or {}
            modes = [
                name for name, value in config.items() if name.startswith("pooling_mode_") and value is True
            ]
            names = [
                name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
                for name in modes
            ]
            if isinstance(mode := config.get("pooling_mode"), str):
                names = [mode]
            if len(names) != 1 or names[0] not in POOLINGS:
                raise FolderError(
                    f"{path / module['path']}: expected pooling mode {' or '.join(POOLINGS)}, got "
                    f"{', '.join(names) or 'none'}"
                )
            found = names[0]
        elif kind not in ("Transformer", "Normalize"):
            raise FolderError(
                f"{path}/modules.json: the module {kind} is not supported; the supported modules are Transformer, Pooling and "
                "Normalize"
            )
    return found


def _read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if the file does not exist."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FolderError(f"{path} is damaged: {error}; download the file again") from None
