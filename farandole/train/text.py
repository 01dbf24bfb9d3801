"""Task "text": train a GPT to predict the next token, and load trained GPTs from checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from farandole._troubleshooting import see
from farandole.data.cache import Progress
from farandole.data.template import read_tokenizer_config, token_text
from farandole.data.text import Text, prepare_text
from farandole.data.tokenizer import END_OF_TEXT, load_tokenizer
from farandole.models.generate import generate
from farandole.models.gpt import build_gpt
from farandole.models.hf.architecture import decoders
from farandole.models.hf.pretrained import read_config, tensors_of
from farandole.train.config import ConfigError, TrainConfig, saved_config
from farandole.train.folders import (
    build_language_model,
    check_context,
    describe_folder,
    folder_of,
    model_files,
    open_folder_model,
)
from farandole.train.run_folder import TOKENIZER, WEIGHTS, CheckpointError, read_metadata, tokenizer_file
from farandole.train.tasks import Mean, Task
from farandole.train.weights import read_weights


def open_text(
    config: TrainConfig,
    progress: Progress = lambda what, share: None,
    special_tokens: tuple[str, ...] = (),
) -> Text:
    """Return the configured text, tokenized.  Raises `DataError`."""
    vocabulary, tokenizer, end = config.model.vocabulary, tokenizer_file(config), END_OF_TEXT
    if config.model.folder:
        folder = folder_of(config)
        origin = describe_folder(config, decoders())
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
    """Trains a GPT on token windows from `text` if given, else from the configured text."""

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
        """Return the GPT."""
        return build_language_model(self._config)

    def batch(
        self, samples: Any, numbers: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens and the next tokens, both int64 of shape (samples, positions)."""
        windows = torch.from_numpy(samples.read(numbers))
        return windows[:, :-1], windows[:, 1:]

    def inputs(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, None, Tensor]:
        """Return the tokens and next tokens.  Given targets, the model computes the loss without storing all logits."""
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
        """Return the tokenizer file."""
        own = {TOKENIZER: self.text.folder / TOKENIZER}
        return own | dict(model_files(folder_of(self._config))) if self._config.model.folder else own


def load_model(checkpoint: Path) -> tuple[nn.Sequential, Tokenizer, TrainConfig]:
    """Load the model, tokenizer and configuration from folder `checkpoint`, in one process.

    The weights come from `model.safetensors`.  Pickle files are not read.

    Raises:
        CheckpointError: if a file is missing or damaged, or the task is not "text".
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
            f"checkpoint {checkpoint} is damaged: {error}; use another checkpoint{see('is-damaged')}"
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
