"""Task "masked-text": a BERT restores masked tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farandole.data.cache import Progress
from farandole.data.masking import masking_for
from farandole.data.tokenizer import MASK
from farandole.models.bert import BERTConfig, build_bert
from farandole.models.loss import token_loss
from farandole.train.config import TrainConfig
from farandole.train.run_folder import TOKENIZER
from farandole.train.tasks import Mean, Task
from farandole.train.text import open_text

Batch = tuple[Tensor, Tensor, Tensor]
"""Masked tokens (samples, positions), flat indices of masked positions (n), and the original tokens there (n)."""


class MaskedBERT(nn.Sequential):
    """A BERT whose head runs only at masked positions, because logits are the largest tensor of a small model."""

    def forward(self, tokens: Tensor, indices: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits (n, vocabulary) at n flat `indices` of `tokens` (samples, positions), both int64."""
        *body, head = self
        x: Any = tokens
        for block in body:
            x = block(x)
        logits: Tensor = head(x.flatten(0, 1).index_select(0, indices))
        return logits


class MaskedTextTask(Task):
    """A BERT on windows of tokens.  15 % of the tokens are masked, different ones in each epoch."""

    unit = "tokens"

    def __init__(self, config: TrainConfig, progress: Progress = lambda what, share: None) -> None:
        text = open_text(config, progress, special_tokens=(MASK,))
        self._tokenizer = text.folder / TOKENIZER
        self.train, self.validation = text.train, text.validation
        self._masking = masking_for(text.tokenizer, config.seed)
        self.units_per_sample = config.model.context

    def build(self, config: TrainConfig) -> nn.Module:
        """Return a BERT without padding, because all windows are full."""
        return MaskedBERT(*build_bert(BERTConfig(**config.model.model_dump())))

    def batch(self, samples: Any, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """Return masked tokens, the indices of masked positions, and the original tokens."""
        inputs, targets = self._masking.mask(samples.read(numbers)[:, :-1], numbers, epochs)
        indices = np.flatnonzero(targets >= 0)
        return (
            torch.from_numpy(inputs),
            torch.from_numpy(indices),
            torch.from_numpy(targets.reshape(-1)[indices]),
        )

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the masked tokens and the indices."""
        return batch[:2]

    def loss(self, output: Tensor, batch: Batch) -> Mean:
        """Return the summed cross-entropy in nats, and the number of masked tokens."""
        return token_loss(output, batch[2])

    def files(self) -> dict[str, Any]:
        """Return the tokenizer."""
        return {TOKENIZER: self._tokenizer}
