"""Trace a forward and backward pass on fake tensors: its peak memory and its work.

    traced = trace(model, tokens, loss=lambda logits: next_token_loss(logits, targets))
    traced.saved, traced.peak, traced.flops, traced.moved

Fake tensors need no memory, and no values are computed.  The memory of every tensor that an operation returns,
including gradients of activations, counts until the tensor is freed, as in a real pass.  The gradient of a tied weight
counts until autograd has added both contributions.  Memory that a kernel allocates and frees inside one call is not
tracked.

The gradient of a parameter is released immediately, because `parallel.bucket` copies gradients into buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from farandole.memory.dry_run import call_arguments, device_of, fake_model
from farandole.memory.swap import THRESHOLD_BYTES
from farandole.memory.tracker import MemoryTracker


@dataclass(frozen=True)
class Trace:
    """The memory and the work of a forward and backward pass of one micro-batch.

    Args:
        saved: bytes kept for the backward pass.
        peak: peak of the allocated bytes, without parameters, buffers and the example.
        flops: floating-point operations of matrix products and attention, including recomputation.
        moved: bytes that all other operations read and write.
        resident_peak: peak of the bytes in use if the C library keeps freed memory for later allocations.
        swappable: bytes of `saved` that `Plan.swap` moves: tensors of at least `THRESHOLD_BYTES` that the model saves.
    """

    saved: int
    peak: int
    flops: int
    moved: int
    resident_peak: int
    swappable: int

    @property
    def transient(self) -> int:
        """The bytes by which the peak exceeds `saved`."""
        return max(0, self.peak - self.saved)


def trace(
    model: nn.Module,
    example: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    scaled: bool = False,
) -> Trace:
    """Trace `model(example)`, its `loss` (by default the sum of its outputs) and the backward pass.

    Args:
        example: a micro-batch, in a form that `saved_bytes` accepts.
        dtype: the dtype of weights and inputs; with None, their dtypes do not change.
        scaled: whether the loss is multiplied by a factor (several micro-batches, fp16), which requires a copy of its
            gradient.
    """
    where = device_of(model, device)
    with ExitStack() as stack:
        fake = stack.enter_context(fake_model(model, example, where, dtype))
        stack.enter_context(torch.enable_grad())
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(_clear_gradient).remove)
        living = (*model.parameters(), *model.buffers(), *tree_leaves(fake))
        tracker = stack.enter_context(MemoryTracker(living))
        args, kwargs = call_arguments(fake)
        output = model(*args, **kwargs)
        of_model = tracker.live(THRESHOLD_BYTES, without=_tensors(output))
        value = _sum(output) if loss is None else loss(output)
        del output
        saved = tracker.now  # only the graph still uses memory
        swappable = sum(nbytes for key, nbytes in tracker.live(THRESHOLD_BYTES).items() if key in of_model)
        if value.requires_grad:
            # a constant, because a loss function may read its gradient (`models.loss`)
            value.backward(torch.tensor(0.5 if scaled else 1.0, dtype=value.dtype, device=where))
        del value
    return Trace(saved, tracker.peak, tracker.flops, tracker.moved, tracker.resident_peak, swappable)


def _sum(output: Any) -> Tensor:
    """Return the sum of all floating-point tensors in an output, the default loss."""
    return torch.stack([one.sum() for one in _tensors(output) if one.is_floating_point()]).sum()


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _clear_gradient(parameter: Tensor) -> None:
    parameter.grad = None
