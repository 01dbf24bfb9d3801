"""Recompute activations in the backward pass instead of keeping them.

    apply_recompute(model, "block")                       # every block: least memory, one additional forward pass
    apply_recompute(model, "selective")                   # everything except weight products and fused attention
    apply_recompute(model, "attention", example=tokens)   # attention only
    apply_recompute(model, "auto", example=tokens, budget_bytes=2 << 30)
    apply_recompute(model, "none")                        # undo

Names in `state_dict` do not change.  Gradients are bitwise identical to gradients without recomputation, because
each recomputation starts from the random states and buffers of the forward pass.  Keyword arguments, nested and
repeated calls, autocast, `retain_graph`, inputs that require no gradients, and forward passes in `torch.no_grad`
mode are supported.  A block must depend only on its inputs, parameters, buffers and random numbers.  PyTorch raises
an error only if the shapes or dtypes of recomputed tensors differ.

Engines that change `parameter.data` between the forward and the backward pass (ZeRO-3) can use module hooks.
Forward pre-hooks of the block and its submodules run again before a recomputation uses the parameters.  A
recomputation stops when all saved tensors are recomputed.  Therefore, forward hooks of the block do not run again,
and some forward hooks of its submodules might not run again.  `recomputing()` is true in hooks that run during a
recomputation.  These hooks must not free gathered parameters, because the backward pass of the block follows.

Reference: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
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
    """The result of `apply_recompute`.

    `modules` maps the name of each recomputed module to its mode.  In mode "block", a module keeps only its inputs.
    In mode "selective", a module also keeps the outputs of weight products and fused attention.  In mode
    "attention", a module keeps its inputs and the outputs of weight products.

    `before` and `after` are the numbers of bytes saved for the backward pass without and with recomputation.
    `flops` is the number of repeated operations in matrix products and attention.  Without an example, `before`,
    `after` and `flops` are None.
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
    blocks: Collection[str] | None = None,
    kept: Callable[[SavedBytes], int] | None = None,
) -> Recomputed:
    """Recompute parts of `model` in its backward passes.

    Each call replaces the effect of earlier calls.

    Args:
        mode: "none" recomputes nothing.  "block" recomputes every block of `blocks_of(model)`.  "selective" also
            recomputes every block, but keeps the outputs of weight products and fused attention.  "attention"
            recomputes the modules that compute attention, except their weight products.  "auto" recomputes blocks,
            selectively or entirely, until at most `budget_bytes` are kept, starting with the blocks that free the
            most bytes per repeated operation.
        example: a model input for a dry run, in a form that `saved_bytes` accepts; required for "attention" and
            "auto".  The dry run must use the same autocast settings as training.  With an example, the result
            includes byte counts.  Without an example, "selective" keeps additional outputs in the first step.
        loss: a function of the model's output.  The byte counts include the tensors that this function saves.
        dtype: the model's dtype in training, if it differs from the current dtype.
        blocks: for "auto", the names of the blocks that may be recomputed; by default all blocks.
        kept: for "auto", a function that returns the number of bytes to compare with the budget, given the
            `SavedBytes` of a forward pass; by default, the total.

    Raises:
        ValueError: if the mode is unknown, an argument is missing or not applicable, the model has no attention, or no
            choice of blocks meets the budget (the message states the smallest possible budget).  In the last two
            cases, recomputation is disabled.
    """
    _check(mode, example, loss, budget_bytes)
    saved = partial(saved_bytes, model, example, loss=loss, dtype=dtype)
    repeated = partial(recomputed_flops, model, example, dtype)
    recompute_modules(model, {})
    if budget_bytes is not None:
        names = [name for name, _ in blocks_of(model)] if blocks is None else blocks
        return _within_budget(
            model, saved, repeated, budget_bytes, names, kept or (lambda found: found.total)
        )
    modes: dict[str, str] = {}
    if mode == "attention":
        modes = {name: mode for name, _ in attention_modules(model, example, dtype)}
        if not modes:
            raise ValueError(
                "recompute='attention': no module of this model computes attention; use 'selective' or 'block'"
            )
    elif mode != "none":
        modes = {name: mode for name, _ in blocks_of(model)}
    if example is None:
        recompute_modules(model, modes)
        return Recomputed(mode, modes)
    before = saved().total
    recompute_modules(model, modes)
    flops = sum(repeated().values())
    return Recomputed(mode, modes, before, saved().total, flops)


def _check(mode: str, example: Any, loss: Any, budget_bytes: int | None) -> None:
    if mode not in get_args(Recompute):
        raise ValueError(f"recompute={mode!r} is unknown; expected one of {', '.join(get_args(Recompute))}")
    if mode in ("attention", "auto") and example is None:
        wanted = "find attention modules" if mode == "attention" else "measure blocks"
        raise ValueError(
            f"recompute={mode!r} requires an example to {wanted} in a dry run: pass example=(an input of the model)"
        )
    if loss is not None and example is None:
        raise ValueError(
            "loss= applies only to a dry run, which requires an example: also pass example=(an input of the model)"
        )
    if mode == "auto" and budget_bytes is None:
        raise ValueError(
            "recompute='auto' needs budget_bytes; to recompute without a budget, use 'selective' or 'block'"
        )
    if mode != "auto" and budget_bytes is not None:
        raise ValueError(
            f"budget_bytes={budget_bytes} with recompute={mode!r}: only recompute='auto' uses budget_bytes; omit it"
        )
    if budget_bytes is not None and budget_bytes < 0:
        raise ValueError(f"expected budget_bytes of at least 0, got {budget_bytes}")


def recompute_modules(model: nn.Module, modes: Mapping[str, str]) -> None:
    """Recompute only the modules in `modes`, which maps module names to modes."""
    for module in model.modules():
        unwrap_calls(module, RecomputeWrapper)
    for name, mode in modes.items():
        wrap_calls(model.get_submodule(name), RecomputeWrapper(name, mode))


class Option(NamedTuple):
    """The effect of recomputing a block in one mode.

    `saved` is the number of bytes that are no longer kept for the backward pass.  `flops` is the number of repeated
    floating-point operations.
    """

    saved: int
    flops: int


def cheapest_first(blocks: Mapping[str, Mapping[str, Option]]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield choices of blocks to recompute, in order of increasing savings.

    A choice is a pair: the number of bytes saved, and a dict that maps each recomputed block to its mode.  Each
    choice differs from the previous choice in the mode of one block.  The selected change saves the most bytes per
    additional operation, as in a greedy solution of a knapsack problem.  In case of a tie, the earlier block is
    recomputed first, because its activations would otherwise be kept for the longest time.

    Args:
        blocks: the options of each block, as `blocks[name][mode]`.
    """
    chosen: dict[str, str] = {}
    total = 0
    while True:
        best: tuple[tuple[float, int], str, str] | None = None
        for name, options in blocks.items():
            now = options[chosen[name]] if name in chosen else Option(0, 0)
            for mode, option in options.items():
                saved, flops = option.saved - now.saved, option.flops - now.flops
                if saved <= 0:
                    continue
                worth = (saved / flops if flops > 0 else math.inf, saved)
                if best is None or worth > best[0]:
                    best = (worth, name, mode)
        if best is None:
            return
        (_, more), name, mode = best
        total += more
        chosen = {**chosen, name: mode}
        yield total, dict(chosen)


def _within_budget(
    model: nn.Module,
    saved: Callable[[], SavedBytes],
    repeated: Callable[[], Counter[str]],
    budget_bytes: int,
    names: Collection[str],
    kept: Callable[[SavedBytes], int],
) -> Recomputed:
    before = saved()
    options: dict[str, dict[str, Option]] = {name: {} for name in before.blocks if name in names}
    for mode in ("selective", "block"):
        recompute_modules(model, dict.fromkeys(options, mode))
        flops, now = repeated(), saved().blocks
        for name, of_block in options.items():
            of_block[mode] = Option(before.blocks[name] - now[name], flops[name])

    def estimate(modes: Mapping[str, str]) -> int:
        spared = {name: options[name][mode].saved for name, mode in modes.items()}
        blocks = {name: nbytes - spared.get(name, 0) for name, nbytes in before.blocks.items()}
        return kept(replace(before, blocks=blocks))

    choices: list[dict[str, str]] = [{}, *(modes for _, modes in cheapest_first(options))]
    # Memory shared by two blocks counts for one of them only, so the sum of the savings is an estimate.  The first
    # choice that could meet the budget and the following choices are therefore measured until one meets it.
    promising = [modes for modes in choices if estimate(modes) <= budget_bytes]
    total = least = kept(before)
    for modes in promising or [choices[-1]]:
        recompute_modules(model, modes)
        again = sum(repeated().values())  # before `saved`, so that recomputations record where they can stop
        after = kept(saved())
        if after <= budget_bytes:
            return Recomputed("auto", modes, total, after, again)
        least = min(least, after)
    recompute_modules(model, {})
    raise ValueError(
        f"budget_bytes={budget_bytes} ({size(budget_bytes)}): this model keeps {size(total)} for its backward "
        f"pass, or {size(least)} with all blocks recomputed; use at least budget_bytes={least}, or a smaller example"
    )
