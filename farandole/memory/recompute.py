"""Recompute activations in the backward pass instead of keeping them (Chen et al., 2016, "Training Deep Nets with
Sublinear Memory Cost").

    apply_recompute(model, "block")                       # every block: least memory, one more forward pass
    apply_recompute(model, "selective")                   # all but matrix products: half of the memory, little time
    apply_recompute(model, "attention", example=tokens)   # the inside of attention only
    apply_recompute(model, "auto", example=tokens, budget_bytes=2 << 30)
    apply_recompute(model, "none")                        # undo

Names in `state_dict` stay.  Gradients are the same to the bit: random states are those of the forward pass, and so are
buffers (a batch norm counts a batch once).  A forward pass without gradients runs as usual.  Keyword arguments,
nested and repeated calls, autocast, inputs without gradients and `retain_graph` work.  A block must do the same both
times, from its inputs, parameters, buffers and random numbers alone; torch raises if shapes or types differ.

For engines that change `parameter.data` between forward and backward (ZeRO-3): a recomputation calls the block as the
forward pass did, so forward pre-hooks of the block and of everything inside it run again, before the parameters are
used.  It ends as soon as it has what was saved, so forward hooks of the block itself do not run, and those inside it may
run.  `recomputing()` is true in all of them: do not free gathered parameters then, the backward pass of
the block follows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from farandole.data.wording import size
from farandole.memory.blocks import blocks_of
from farandole.memory.call_wrappers import unwrap_calls, wrap_calls
from farandole.memory.dry_run import SavedBytes, attention_modules, recomputed_flops, saved_bytes
from farandole.memory.recompute_wrapper import RecomputeWrapper, recomputing
from farandole.plan import Recompute

__all__ = ["Recomputed", "apply_recompute", "recomputing"]


@dataclass(frozen=True)
class Recomputed:
    """What `apply_recompute` did: `modules` maps the name of each module to how it is recomputed.

    "block" keeps its inputs only, "selective" the outputs of products with weights and of fused attention too,
    "attention" those of products with weights.  `before` and `after` are the bytes kept for the backward pass without
    and with it, `flops` the operations of matrix products and attention that are done once more; all three
    are None if no example was given.
    """

    mode: Recompute
    modules: dict[str, str]
    before: int | None = None
    after: int | None = None
    flops: int | None = None


def apply_recompute(
    model: nn.Module,
    mode: Recompute,
    *,
    example: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    budget_bytes: int | None = None,
    dtype: torch.dtype | None = None,
) -> Recomputed:
    """Recompute parts of `model` from now on, in place of what an earlier call asked for.

    Args:
        mode: "none": nothing.  "block": every block of `blocks_of(model)`.  "selective": every block, except that what
            products with weights and fused attention return is kept.  "attention": modules that compute attention,
            all but their products with weights.  "auto": the blocks that save most bytes for each repeated operation,
            selectively or as a whole, until at most `budget_bytes` are kept.
        example: an input of the model as for `saved_bytes`, for a dry run (no memory, hardly any time) under the
            autocast of the training.  "attention" and "auto" need it.  With it, bytes are reported, those of `loss`
            included, and a selective recomputation knows from the first step what it need not keep (without, from the
            second).
        dtype: the type that the model will have in training, if that is another one.

    Raises:
        ValueError: for an unknown mode, a missing or superfluous argument, a model without attention, and a budget
            that no choice keeps, naming the least possible; then nothing is recomputed.
    """
    _check(mode, example, loss, budget_bytes)
    saved = partial(saved_bytes, model, example, loss=loss, dtype=dtype)
    repeated = partial(recomputed_flops, model, example, dtype)
    _wrap(model, {})
    if budget_bytes is not None:
        return _within_budget(model, saved, repeated, budget_bytes)
    ways: dict[str, str] = {}
    if mode == "attention":
        ways = {name: mode for name, _ in attention_modules(model, example, dtype)}
        if not ways:
            raise ValueError(
                "recompute='attention': no module of this model computes attention; 'selective' and 'block' work for any"
            )
    elif mode != "none":
        ways = {name: mode for name, _ in blocks_of(model)}
    if example is None:
        _wrap(model, ways)
        return Recomputed(mode, ways)
    before = saved().total
    _wrap(model, ways)
    flops = sum(repeated().values())
    return Recomputed(mode, ways, before, saved().total, flops)


def _check(mode: str, example: Any, loss: Any, budget_bytes: int | None) -> None:
    if mode not in get_args(Recompute):
        raise ValueError(f"recompute={mode!r} is not known; it is one of {', '.join(get_args(Recompute))}")
    if mode in ("attention", "auto") and example is None:
        wanted = "finds attention" if mode == "attention" else "measures blocks"
        raise ValueError(
            f"recompute={mode!r} {wanted} in a forward pass: give example=(an input of the model)"
        )
    if loss is not None and example is None:
        raise ValueError(
            "loss= is for the forward pass that measures: give example=(an input of the model) too"
        )
    if mode == "auto" and budget_bytes is None:
        raise ValueError(
            "recompute='auto' chooses for a budget: give budget_bytes, or mode 'selective' or 'block'"
        )
    if mode != "auto" and budget_bytes is not None:
        raise ValueError(
            f"budget_bytes={budget_bytes} is for recompute='auto'; {mode!r} has no choice to make"
        )
    if budget_bytes is not None and budget_bytes < 0:
        raise ValueError(f"budget_bytes={budget_bytes} is negative")


def _wrap(model: nn.Module, ways: dict[str, str]) -> None:
    for module in model.modules():
        unwrap_calls(module, RecomputeWrapper)
    for name, way in ways.items():
        wrap_calls(model.get_submodule(name), RecomputeWrapper(name, way))


class Option(NamedTuple):
    """One way to recompute a block: the bytes that it saves and the floating-point operations that it repeats."""

    saved: int
    flops: int


def cheapest_first(blocks: Mapping[str, Mapping[str, Option]]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield choices that save more and more bytes: (bytes saved by all, way by block).

    `blocks` gives the options of each block, by way.  A choice differs from the one before it in one block, by the
    change that saves most bytes for each further operation: the greedy solution of a knapsack, where a
    block may be taken in part (one way) or whole (another).  Equals are taken in the order given: the first
    blocks keep their activations longest.
    """
    chosen: dict[str, str] = {}
    total = 0
    while True:
        best: tuple[tuple[float, int], str, str] | None = None
        for name, options in blocks.items():
            now = options[chosen[name]] if name in chosen else Option(0, 0)
            for way, option in options.items():
                saved, flops = option.saved - now.saved, option.flops - now.flops
                if saved <= 0:
                    continue
                worth = (saved / flops if flops > 0 else math.inf, saved)
                if best is None or worth > best[0]:
                    best = (worth, name, way)
        if best is None:
            return
        (_, more), name, way = best
        total += more
        chosen = {**chosen, name: way}
        yield total, dict(chosen)


def _within_budget(
    model: nn.Module, saved: Callable[[], SavedBytes], repeated: Callable[[], Counter[str]], budget_bytes: int
) -> Recomputed:
    before = saved()
    options: dict[str, dict[str, Option]] = {name: {} for name in before.blocks}
    for way in ("selective", "block"):
        _wrap(model, dict.fromkeys(before.blocks, way))
        flops = repeated()
        for name, kept in saved().blocks.items():
            options[name][way] = Option(before.blocks[name] - kept, flops[name])

    choices = [(0, {}), *cheapest_first(options)]
    # What two blocks share counts for one of them, so the sum of the savings is an estimate, a little too high or
    # too low: the first choice that could suffice is measured, and then those after it until one does.
    promising = [ways for spared, ways in choices if before.total - spared <= budget_bytes]
    least = before.total
    for ways in promising or [choices[-1][1]]:
        _wrap(model, ways)
        again = sum(repeated().values())  # before `saved`: recomputations learn how far they have to go
        after = saved().total
        if after <= budget_bytes:
            return Recomputed("auto", ways, before.total, after, again)
        least = min(least, after)
    _wrap(model, {})
    raise ValueError(
        f"budget_bytes={budget_bytes} ({size(budget_bytes)}): this model keeps {size(before.total)} for its backward "
        f"pass, and {size(least)} with all blocks recomputed; give at least budget_bytes={least}, or a smaller example"
    )
