"""One forward and backward pass on fake tensors: the bytes that are alive at its worst moment, and its work.

    traced = trace(model, tokens, loss=lambda logits: next_token_loss(logits, targets))
    traced.saved, traced.peak, traced.flops, traced.moved

Nothing is computed or allocated.  Every storage that an operation returns is counted from then until it is freed, as
the real ones would be; so a gradient of an activation that stands beside what is saved is seen, and the gradient of a tied
weight, which waits for its other half.  What a kernel takes and gives back before it returns is not seen.

The gradient of a parameter is taken away as soon as it is there: `parallel.bucket` copies it into a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from farandole.memory.dry_run import call_arguments, device_of, fake_model
from farandole.memory.estimate.heap import Events
from farandole.memory.tracker import MemoryTracker


@dataclass(frozen=True)
class Trace:
    """What a forward and backward pass of one micro-batch needs.

    `saved`: bytes kept for the backward pass.  `peak`: the most bytes alive at once, beside parameters, buffers and
    the example.  `flops`: operations of matrix products and attention, those of recomputations included.  `moved`:
    bytes that all other operations read and write.  `events`: what is taken and given back, in order (`heap`).
    """

    saved: int
    peak: int
    flops: int
    moved: int
    events: Events = field(default=(), repr=False)

    @property
    def transient(self) -> int:
        """What the worst moment needs beyond what is saved."""
        return max(0, self.peak - self.saved)


def trace(
    model: nn.Module,
    example: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    scaled: bool = False,
) -> Trace:
    """Trace `model(example)`, its `loss` (by default the sum of its outputs) and the backward pass.

    `example` is what `saved_bytes` takes; `autocast` is the type of products, None without autocast; `dtype` that of
    weights and inputs, None as they are; `scaled` says
    that the loss is multiplied by a factor (several micro-batches, fp16), which costs a copy of its gradient.
    """
    where = device_of(model, device)

    def casting() -> torch.autocast:
        return torch.autocast(where.type, autocast or torch.bfloat16, enabled=autocast is not None)

    with ExitStack() as stack:
        fake = stack.enter_context(fake_model(model, example, where, dtype))
        stack.enter_context(torch.enable_grad())
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(_take_away).remove)
        alive = stack.enter_context(
            MemoryTracker((*model.parameters(), *model.buffers(), *tree_leaves(fake)))
        )
        args, kwargs = call_arguments(fake)
        with casting():
            output = model(*args, **kwargs)
            value = _sum(output) if loss is None else loss(output)
        del output
        saved = alive.now  # what only the graph holds
        if value.requires_grad:
            # a constant: a loss may ask for the number that its gradient is
            value.backward(torch.tensor(0.5 if scaled else 1.0, dtype=value.dtype, device=where))
        del value
    return Trace(saved, alive.peak, alive.flops, alive.moved, tuple(alive.events))


def _take_away(parameter: Tensor) -> None:
    parameter.grad = None


def _sum(output: Any) -> Tensor:
    tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.is_floating_point()]
    return torch.stack([one.sum() for one in tensors]).sum()
