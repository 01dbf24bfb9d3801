"""What `farandole train` would do, as a workload that can be estimated."""

from __future__ import annotations

import torch
from torch import Tensor

from farandole.models.gpt import build_gpt
from farandole.models.loss import PIECE_BYTES, next_token_loss
from farandole.planner import Workload
from farandole.train.config import TrainConfig

_PIECES = 32
"""In how many pieces the loss of a micro-batch is traced: fewer than it has, which takes less time."""


def workload_of(config: TrainConfig, ranks: int) -> Workload:
    """One rank's part of a step of `config` on `ranks` ranks.  Raises `ConfigError` where they cannot share it."""
    count, samples = config.micro_batches(ranks)
    with torch.device("meta"):
        model = build_gpt(config.model.gpt())
        tokens = torch.empty(samples, config.model.context, dtype=torch.int64)

    def loss(logits: Tensor) -> Tensor:
        targets = torch.zeros(tokens.shape, dtype=torch.int64, device=logits.device)
        return next_token_loss(logits, targets, max(PIECE_BYTES, 4 * logits.numel() // _PIECES))

    return Workload(model=model, example=tokens, loss=loss, micro_batches=count, checkpoints=True)
