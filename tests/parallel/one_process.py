"""The reference for language models: training in one process on the samples of all replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of a model of ours or of transformers."""
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


def losses_of(model: Any, steps: Iterable[Tensor], rate: float) -> list[float]:
    """Train with SGD and clipped gradients to predict the next tokens; return the loss of each step."""
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, rate)
    losses = []
    for tokens in steps:
        logits = logits_of(model, tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
