"""Task "masked-text": train a BERT to predict masked tokens."""

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
from farandole.train.config import TrainConfig
from farandole.train.run_folder import TOKENIZER
from farandole.train.tasks import Mean, Task
from farandole.train.text import open_text

Batch = tuple[Tensor, Tensor]
"""Masked tokens and targets, both int64 of shape (samples, positions).  Targets are -100 at unmasked positions."""


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
        """Return a BERT that does not use padding, because all windows are full."""
        return build_bert(BERTConfig(**config.model.sizes()))

    def batch(self, samples: Any, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """Return the masked tokens, and the original tokens at masked positions."""
        inputs, targets = self._masking.mask(samples.read(numbers)[:, :-1], numbers, epochs)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def inputs(self, batch: Batch) -> tuple[Tensor, None, Tensor]:
        """Return the masked tokens and targets.  Given targets, the model computes the loss."""
        return batch[0], None, batch[1]

    def loss(self, output: Mean, batch: Batch) -> Mean:
        """Return the summed cross-entropy in nats, and the number of masked tokens."""
        return output

    def files(self) -> dict[str, Any]:
        """Return the tokenizer file."""
        return {TOKENIZER: self._tokenizer}
