"""Build AdamW with warm-up and cosine decay (Loshchilov and Hutter, 2019, "Decoupled Weight Decay Regularization").

Weight decay applies to matrices but not to vectors (biases and normalization weights), as in GPT-3.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from farandole.train.config import OptimizerSection


def build_optimizer(model: nn.Module, config: OptimizerSection) -> torch.optim.Optimizer:
    """Return a fused AdamW optimizer with two groups, for the trainable parameters of `model`."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=1e-8, fused=True
    )


def learning_rate(step: int, steps: int, config: OptimizerSection) -> float:
    """Return the learning rate for `step` (0 to steps - 1): linear warm-up, then cosine decay to the final share."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.learning_rate * (config.final_share + (1 - config.final_share) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate in all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
