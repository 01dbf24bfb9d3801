"""What is to be trained, apart from how ranks share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farandole.memory.estimate.trace import Trace, trace
from farandole.memory.recompute import apply_recompute
from farandole.plan import Plan

TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One rank's part of a step.

    model, example, loss: as `saved_bytes` takes them; the example is a micro-batch of a rank.  The model may be on
        the meta device.
    micro_batches: forward and backward passes of a rank in a step.
    states: numbers that the optimizer keeps for each parameter beside itself (2 for Adam, 1 for momentum).
    autocast: whether a plan's precision is that of products (`torch.autocast`, as `farandole train` does), weights
        staying as they are; else it is that of the weights (`parallelize`).
    checkpoints: whether copies of weights and states are kept in the host's memory (`farandole train`).
    block_by_block: whether no rank ever holds the whole model (`parallelize` of a model on the meta device).
    """

    model: nn.Module
    example: Any
    loss: Callable[[Any], Tensor] | None = None
    micro_batches: int = 1
    states: int = 2
    autocast: bool = False
    checkpoints: bool = False
    block_by_block: bool = False

    def weight_type(self, plan: Plan) -> torch.dtype | None:
        """The type that `plan` makes weights of; None: as they are."""
        return None if self.autocast else TYPES[plan.precision]

    def trace(self, plan: Plan) -> Trace:
        """A forward and backward pass with what `plan` recomputes.  Afterwards the model recomputes nothing."""
        needs_example = plan.recompute in ("selective", "attention", "auto")
        try:
            apply_recompute(
                self.model,
                plan.recompute,
                example=self.example if needs_example else None,
                loss=self.loss if plan.recompute == "auto" else None,
                budget_bytes=plan.activation_bytes,
            )
            return trace(
                self.model,
                self.example,
                loss=self.loss,
                autocast=TYPES[plan.precision] if self.autocast else None,
                dtype=self.weight_type(plan),
                scaled=self.micro_batches > 1 or plan.precision == "fp16",
            )
        finally:
            apply_recompute(self.model, "none")
