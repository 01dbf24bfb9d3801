"""Define the text tasks.

"text" trains a language model, "masked-text" trains a BERT, and "sft" trains a language model on conversations.
"""

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
from farandole.data.masking import masking_for
from farandole.data.template import read_tokenizer_config, token_text
from farandole.data.text import Text, prepare_text
from farandole.data.tokenizer import END_OF_TEXT, MASK
from farandole.models.bert import BERTConfig, build_bert
from farandole.models.generate import generate
from farandole.models.hf.registry import decoder_names
from farandole.models.sequence import SequenceInfo
from farandole.train.config import ConfigError, TrainConfig
from farandole.train.folders import (
    build_language_model,
    check_context,
    describe_folder,
    folder_of,
    model_files,
    open_folder_model,
    position_limit,
)
from farandole.train.run_folder import TOKENIZER, tokenizer_file
from farandole.train.tasks import Mean, Task


def open_text(
    config: TrainConfig,
    progress: Progress = lambda what, share: None,
    special_tokens: tuple[str, ...] = (),
) -> Text:
    """Return the configured text as tokens.  Raises `DataError` or `ConfigError`."""
    vocabulary, tokenizer, end = config.model.vocabulary, tokenizer_file(config), END_OF_TEXT
    if config.model.folder:
        folder = folder_of(config)
        origin = describe_folder(config, decoder_names())
        check_context(config, origin)
        vocabulary = origin.config.vocabulary
        tokenizer = folder / TOKENIZER
        found = token_text(read_tokenizer_config(folder), "eos_token")
        if found is None:
            raise ConfigError(
                f"model={config.model.folder}: tokenizer_config.json has no eos_token; add this token, which marks the end "
                "of documents"
            )
        end = found
    return prepare_text(
        config.data.path,
        vocabulary=vocabulary,
        context=config.model.context,
        text_field=config.data.field,
        validation_share=config.data.validation_share,
        special_tokens=special_tokens,
        tokenizer=tokenizer,
        end=end,
        cache=Path(config.data.cache).expanduser() if config.data.cache else None,
        progress=progress,
    )


class TextTask(Task):
    """Trains a language model on token windows of `text`, or of the configured text by default."""

    unit = "tokens"

    def __init__(
        self,
        config: TrainConfig,
        progress: Progress = lambda what, share: None,
        text: Text | None = None,
    ) -> None:
        self._config = config
        self.text = text or open_text(config, progress)
        if config.model.folder:
            open_folder_model(config)  # rejects a damaged folder
        self.train, self.validation = self.text.train, self.text.validation
        self.units_per_sample = config.model.context

    def build(self, config: TrainConfig) -> nn.Module:
        """Return the model from the configured folder, or a GPT if no folder is configured."""
        return build_language_model(self._config)

    def batch(
        self, samples: Any, numbers: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens and the next tokens, both int64 of shape (samples, positions)."""
        windows = torch.from_numpy(samples.read(numbers))
        return windows[:, :-1], windows[:, 1:]

    def inputs(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, None, Tensor]:
        """Return the tokens, and the next tokens as targets.

        With targets, the model returns the loss without storing all logits.
        """
        return batch[0], None, batch[1]

    def loss(self, output: Mean, batch: tuple[Tensor, Tensor]) -> Mean:
        """Return the summed cross-entropy in nats, and the number of tokens."""
        return output

    def report(self, model: nn.Module) -> str:
        """Return the configured prompt, followed by the model's continuation."""
        assert isinstance(model, nn.Sequential)
        asked, tokenizer = self._config.sample, self.text.tokenizer
        if not asked.tokens:
            return ""
        prompt = tokenizer.encode(asked.prompt).ids or [0]
        written = generate(
            model,
            prompt,
            asked.tokens,
            context=self._config.model.context,
            temperature=asked.temperature,
            top_k=asked.top_k,
            seed=self._config.seed,
        )
        text: str = tokenizer.decode([*prompt, *written])
        return text

    def files(self) -> Mapping[str, Path]:
        """Return the tokenizer file, and the model folder's files if a model folder is configured."""
        own = {TOKENIZER: self.text.folder / TOKENIZER}
        return own | dict(model_files(folder_of(self._config))) if self._config.model.folder else own


MaskedBatch = tuple[Tensor, Tensor]
"""Masked tokens and targets, both int64 of shape (samples, positions).  Targets are -100 where no token is selected."""


class MaskedTextTask(Task):
    """Trains a BERT on token windows.  In each epoch, 15 % of the tokens are selected at random and masked."""

    unit = "tokens"

    def __init__(self, config: TrainConfig, progress: Progress = lambda what, share: None) -> None:
        text = open_text(config, progress, special_tokens=(MASK,))
        self._tokenizer = text.folder / TOKENIZER
        self.train, self.validation = text.train, text.validation
        self._masking = masking_for(text.tokenizer, config.seed)
        self.units_per_sample = config.model.context

    def build(self, config: TrainConfig) -> nn.Module:
        """Return a BERT model.  The model does not use padding, because all windows are full."""
        return build_bert(BERTConfig(**config.model.sizes()))

    def batch(self, samples: Any, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> MaskedBatch:
        """Return the masked tokens and the targets, which are the original tokens at the selected positions."""
        inputs, targets = self._masking.mask(samples.read(numbers)[:, :-1], numbers, epochs)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def inputs(self, batch: MaskedBatch) -> tuple[Tensor, None, Tensor]:
        """Return the masked tokens and the targets.  With targets, the model returns the loss."""
        return batch[0], None, batch[1]

    def loss(self, output: Mean, batch: MaskedBatch) -> Mean:
        """Return the summed cross-entropy in nats, and the number of selected tokens."""
        return output

    def files(self) -> dict[str, Any]:
        """Return the tokenizer file."""
        return {TOKENIZER: self._tokenizer}


ChatBatch = tuple[Tensor, Tensor, Tensor]
"""Tokens, document numbers and targets, all int64 of shape (samples, positions)."""


class ChatTask(Task):
    """Trains a language model on packed conversations.  Only the assistant's tokens contribute to the loss."""

    unit = "tokens"

    def __init__(self, config: TrainConfig, progress: Progress = lambda what, share: None) -> None:
        if not config.model.folder:
            raise ConfigError(
                "task='sft' requires a model to fine-tune; set the model's folder with model=FOLDER"
            )
        self._config = config
        origin = describe_folder(config, decoder_names())
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

    def batch(self, samples: Any, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> ChatBatch:
        """Return the tokens, the document number of each token, and the targets."""
        tokens, documents, targets = (torch.from_numpy(part) for part in samples.read(numbers))
        return tokens, documents, targets

    def inputs(self, batch: ChatBatch) -> tuple[Tensor, SequenceInfo, Tensor]:
        """Return the tokens, the document numbers and the targets.  With targets, the model returns the loss."""
        tokens, documents, targets = batch
        return tokens, SequenceInfo(documents=documents), targets

    def loss(self, output: Mean, batch: ChatBatch) -> Mean:
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
