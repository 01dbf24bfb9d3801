"""Task "sft": fine-tune a language model on conversations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farandole.data.cache import Progress
from farandole.data.chat import Chat, prepare_chat
from farandole.models.generate import generate
from farandole.models.hf.architecture import decoders
from farandole.models.sequence import SequenceInfo
from farandole.train.config import ConfigError, TrainConfig
from farandole.train.folders import (
    check_context,
    describe_folder,
    folder_of,
    model_files,
    open_folder_model,
    position_limit,
)
from farandole.train.tasks import Mean, Task

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens, document numbers and targets, (samples, positions) of int64."""


class ChatTask(Task):
    """Trains a language model on packed conversations.  Only the assistant's tokens contribute to the loss."""

    unit = "tokens"

    def __init__(self, config: TrainConfig, progress: Progress = lambda what, share: None) -> None:
        if not config.model.folder:
            raise ConfigError("task='sft' fine-tunes an existing model; set its folder with model=FOLDER")
        self._config = config
        origin = describe_folder(config, decoders())
        check_context(config, origin)
        self._limit = position_limit(origin)
        open_folder_model(config)  # rejects a damaged folder
        self._chat: Chat = prepare_chat(
            config.data.path,
            folder_of(config),
            context=config.model.context,
            vocabulary=origin.config.vocabulary,
            field=config.data.field if config.data.field != "text" else "messages",
            template=config.data.template,
            validation_share=config.data.validation_share,
            cache=Path(config.data.cache).expanduser() if config.data.cache else None,
            progress=progress,
        )
        self.train, self.validation = self._chat.train, self._chat.validation
        self.units_per_sample = config.model.context

    def build(self, config: TrainConfig) -> nn.Module:
        """Return the model from the configured folder."""
        return open_folder_model(self._config)

    def batch(self, samples: Any, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """Return the tokens, document numbers and targets."""
        tokens, documents, targets = (torch.from_numpy(part) for part in samples.read(numbers))
        return tokens, documents, targets

    def inputs(self, batch: Batch) -> tuple[Tensor, SequenceInfo, Tensor]:
        """Return the tokens, documents and targets.  Given targets, the model computes the loss."""
        tokens, documents, targets = batch
        return tokens, SequenceInfo(documents=documents), targets

    def loss(self, output: Mean, batch: Batch) -> Mean:
        """Return the summed cross-entropy over the assistant's tokens in nats, and the number of these tokens."""
        return output

    def report(self, model: nn.Module) -> str:
        """Return the configured prompt as a user message, followed by the model's answer."""
        asked, tokenizer = self._config.sample, self._chat.tokenizer
        if not asked.tokens:
            return ""
        if self._chat.template is None:
            text = asked.prompt
        else:
            text = self._chat.template.render([{"role": "user", "content": asked.prompt}], prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids or [0]
        assert isinstance(model, nn.Sequential)
        context = max(self._config.model.context, len(prompt) + asked.tokens)
        written = []
        for token in generate(
            model,
            prompt,
            asked.tokens,
            context=min(context, self._limit or context),
            temperature=asked.temperature,
            top_k=asked.top_k,
            seed=self._config.seed,
        ):
            written.append(token)
            if token == self._chat.end:
                break
        answer: str = tokenizer.decode(written)
        return f"{asked.prompt}\n\n{answer.strip()}"

    def files(self) -> Mapping[str, Path]:
        """Return the model's configuration and tokenizer files."""
        return model_files(folder_of(self._config))
