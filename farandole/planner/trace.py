"""Measure the peak memory and the work of a forward and backward pass on fake tensors.

    traced = trace(model, tokens, loss=lambda logits: next_token_loss(logits, targets))
    traced.saved, traced.peak, traced.flops, traced.moved

Fake tensors need no memory, and their values are not computed.  Each tensor that an operation returns counts as
allocated until it is freed, as in a real pass.  Memory that a kernel allocates and frees inside one call is not
tracked.

The gradient of a parameter is released immediately, because `parallel.bucket` copies gradients into buffers.  The
gradient of a tied weight counts until autograd has added both contributions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from farandole.memory.dry_run import call_arguments, device_of, fake_model
from farandole.memory.swap import THRESHOLD_BYTES
from farandole.memory.tracker import MemoryTracker
from farandole.parallel.axes import Sent
from farandole.planner.repeats import Run, extrapolated


@dataclass(frozen=True)
class Trace:
    """The memory and the work of a forward and backward pass of one micro-batch.

    Args:
        saved: bytes kept for the backward pass.
        peak: peak of the allocated bytes, without parameters, buffers and the example.
        flops: floating-point operations of matrix products and attention, including recomputation.
        moved: bytes that all other operations read and write.
        resident_peak: peak of the resident bytes if the C library keeps freed memory for later allocations.
        swappable: bytes of `saved` that `Plan.swap` can swap out: tensors of at least `THRESHOLD_BYTES` that the model
            saves.  In a pipeline, these bytes belong to several micro-batches in flight.
        swapped: bytes that `Plan.swap` swaps out per micro-batch.
        sent: a dict that maps each group of ranks to the bytes that this rank sends in the model's collectives.
    """

    saved: int
    peak: int
    flops: int
    moved: int
    resident_peak: int
    swappable: int
    swapped: int
    sent: Mapping[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def transient(self) -> int:
        """Return the bytes by which the peak exceeds `saved`."""
        return max(0, self.peak - self.saved)


NOTHING = Trace(0, 0, 0, 0, 0, 0, 0)
"""A trace with zero memory and zero work.  With this trace, the estimate of a plan is a lower bound."""


def trace(
    model: nn.Module,
    example: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    scaled: bool = False,
    prepare: Callable[[], object] | None = None,
    runs: Sequence[Run] = (),
    sent: Sent | None = None,
) -> Trace:
    """Trace `model(example)`, its `loss` (by default the sum of its outputs) and the backward pass.

    Args:
        example: a micro-batch, in a form that `saved_bytes` accepts.
        dtype: the dtype of weights and inputs; with None, their dtypes do not change.
        scaled: whether the loss is multiplied by a factor, as with several micro-batches or fp16.
        prepare: a function to call before each pass.
        runs: the runs of equal blocks; only a few blocks of each run are traced (`planner.repeats`).
        sent: the list to which the model's collectives append the bytes that they send.
    """

    def measure() -> dict[Any, float]:
        if prepare is not None:
            prepare()
        if sent is not None:
            sent.clear()
        numbers = _measure(model, example, loss, dtype, device, scaled, runs)
        for ranks, nbytes in sent or ():
            numbers[_Group(ranks)] = numbers.get(_Group(ranks), 0.0) + nbytes
        return numbers

    found = extrapolated(runs, measure)
    heaps, mapped, peaks = (
        [found[name, part] for part in range(len(runs) + 1)] for name in ("heap", "mapped", "peak")
    )
    return Trace(
        int(found["saved"]),
        int(max(peaks)),
        int(found["flops"]),
        int(found["moved"]),
        int(max(heaps) + max(mapped)),
        int(found["swappable"]),
        int(found["swappable"]),
        {key.ranks: nbytes for key, nbytes in found.items() if isinstance(key, _Group)},
    )


@dataclass(frozen=True)
class _Group:
    """The key under which results store the bytes that this rank sends in collectives of a group."""

    ranks: tuple[int, ...]


def _measure(
    model: nn.Module,
    example: Any,
    loss: Callable[[Any], Tensor] | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    scaled: bool,
    runs: Sequence[Run],
) -> dict[Any, float]:
    """Return the memory and the work of a pass, as values that can be extrapolated (`planner.repeats`)."""
    where = device_of(model, device)
    with ExitStack() as stack:
        fake = stack.enter_context(fake_model(model, example, where, dtype))
        stack.enter_context(torch.enable_grad())
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(clear_gradient).remove)
        living = (*model.parameters(), *model.buffers(), *tree_leaves(fake))
        tracker = stack.enter_context(MemoryTracker(living))
        ends: dict[int, int] = {}
        for number, run in enumerate(runs):
            hook = partial(note_gradient, partial(note, ends, number, tracker))
            stack.callback(run.first.register_forward_pre_hook(hook, with_kwargs=True).remove)
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
    numbers: dict[Any, float] = {
        "saved": saved,
        "flops": tracker.flops,
        "moved": tracker.moved,
        "swappable": swappable,
    }
    # The first part ends when the backward pass of the last run is complete, the second part when the backward pass of
    # the run before it is complete, and so on. The peak of each part is a linear function of the lengths of the runs.
    # The peak of the whole pass is not linear: with few blocks, it may occur in the last part, for example because of
    # the gradient of a large embedding. With many blocks, it may occur in the first part.
    start = 0
    for part in range(len(runs) + 1):
        end = ends.get(len(runs) - 1 - part, start) if part < len(runs) else len(tracker.history)
        changes = tracker.history[start : max(start, end)]
        numbers["peak", part] = max((heap + mapped for heap, mapped in changes), default=0)
        numbers["heap", part] = max((heap for heap, _ in changes), default=0)
        numbers["mapped", part] = max((mapped for _, mapped in changes), default=0)
        start = max(start, end)
    return numbers


def note(ends: dict[int, int], number: int, tracker: MemoryTracker, gradient: Tensor) -> None:
    """Set `ends[number]` to the current length of the tracker's history, unless it is already set."""
    ends.setdefault(number, len(tracker.history))


def note_gradient(
    noted: Callable[[Tensor], None], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Register `noted` as a gradient hook on each input tensor of a module."""
    for tensor in _tensors((args, kwargs)):
        if tensor.requires_grad:
            tensor.register_hook(noted)


def _sum(output: Any) -> Tensor:
    """Return the default loss: the sum of all floating-point tensors in `output`."""
    return torch.stack([one.sum() for one in _tensors(output) if one.is_floating_point()]).sum()


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def clear_gradient(parameter: Tensor) -> None:
    """Release the gradient of `parameter`."""
    parameter.grad = None
