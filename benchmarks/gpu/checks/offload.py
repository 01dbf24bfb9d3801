"""Checks of offloaded states, swapped activations and recomputation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import farandole
from benchmarks.gpu.reference import (
    adamw,
    batches,
    expect,
    largest_difference,
    loss_of,
    make,
    peak_mib,
    reset_peak,
    sgd,
    small,
    train_alone,
    train_planned,
)
from benchmarks.gpu.registry import Context, Figures, check
from farandole.memory.swap import swap_activations
from farandole.plan import Plan

_LIKE_ALONE = 2e-3


def _offloaded(
    context: Context,
    offload: str,
    stages: tuple[int, ...],
    precision: Any = "fp32",
    offloaded: Any = "optimizer",
) -> Figures:
    config = small(context)
    figures: Figures = {}
    for stage in stages:
        plain, _, seconds_plain = train_planned(
            context, Plan(zero=stage, precision=precision), sgd, config=config
        )
        reset_peak(context)

        def inspect(engine: Any, _: Any) -> None:
            for update in engine.offloaded:
                for record in update.state.stream.records:
                    if record.memory is not None:
                        pinned = record.memory.is_pinned()
                        expect(
                            pinned == context.on_cuda,
                            f"expected pinned memory: {context.on_cuda}, got: {pinned}",
                        )

        found, _, seconds = train_planned(
            context,
            Plan(zero=stage, precision=precision, offload=offload, offloaded=offloaded),
            sgd,
            config=config,
            inspect=inspect,
        )
        difference = largest_difference(found, plain)
        expect(
            difference < _LIKE_ALONE,
            f"stage {stage}: expected a difference below {_LIKE_ALONE}, got {difference}",
        )
        figures[f"stage {stage} difference"] = (difference, "")
        figures[f"stage {stage} step"] = (1e3 * seconds, "ms")
        figures[f"stage {stage} step, not offloaded"] = (1e3 * seconds_plain, "ms")
    return figures


@check()
def host_one_rank(context: Context) -> Figures:
    """Offload master weights and optimizer states to pinned memory, on one rank."""
    return _offloaded(context, "host", (0, 2))


@check(ranks=2, deadline_s=90.0)
def host(context: Context) -> Figures:
    """Offload master weights and optimizer states to pinned memory with all stages, on ranks that share a device."""
    return _offloaded(context, "host", (0, 1, 2, 3))


@check(ranks=2)
def host_bf16(context: Context) -> Figures:
    """Offload fp32 master weights and optimizer states to pinned memory, with bf16 weights."""
    return _offloaded(context, "host", (1, 3), "bf16")


@check()
def host_parameters_one_rank(context: Context) -> Figures:
    """Offload optimizer states, gradients and all weights to pinned memory, on one rank."""
    return _offloaded(context, "host", (3,), offloaded="parameters")


@check(ranks=2)
def host_gradients(context: Context) -> Figures:
    """Offload master weights, optimizer states and gradients to pinned memory, on ranks that share a device."""
    return _offloaded(context, "host", (2, 3), offloaded="gradients")


@check(ranks=2)
def host_parameters(context: Context) -> Figures:
    """Offload optimizer states, gradients, master weights and bf16 weights to pinned memory."""
    return _offloaded(context, "host", (3,), "bf16", "parameters")


@check(ranks=2)
def disk(context: Context) -> Figures:
    """Offload master weights and optimizer states to a disk."""
    return _offloaded(context, f"disk:{context.folder}", (2,))


def _gradients(context: Context, model: Any, steps: int = 1) -> list[Tensor]:
    found: list[Tensor] = []
    for tokens in batches(context, small(context), steps):
        model.zero_grad()
        loss_of(model, tokens).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


@check(deadline_s=90.0)
def recomputation(context: Context) -> Figures:
    """Compare the gradients of every recomputation mode with the gradients without recomputation."""
    config = small(context)
    tokens = batches(context, config)[0]
    figures: Figures = {}

    def measured(plan: Plan) -> list[Tensor]:
        model = make(context, config)
        engine = farandole.parallelize(
            model, plan, context.comm, example=None if plan.recompute in ("none", "block") else tokens[:, :-1]
        )
        reset_peak(context)
        loss_of(engine, tokens).backward()
        if context.on_cuda:
            figures[f"{plan.recompute} peak"] = (peak_mib(context), "MiB")
        found = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        engine.close()
        return found

    expected = measured(Plan())
    plans = [Plan(recompute=mode) for mode in ("block", "selective", "attention")]  # type: ignore[arg-type]
    from farandole.memory.dry_run import saved_bytes

    kept = saved_bytes(make(context, config), tokens[:, :-1]).total
    for plan in [*plans, Plan(recompute="auto", activation_bytes=kept // 2)]:
        for own, other in zip(measured(plan), expected, strict=True):
            difference = float((own - other).abs().max() / other.abs().max().clamp_min(1e-12))
            expect(
                difference <= 1e-6,
                f"{plan.recompute}: expected equal gradients, got a difference of {difference}",
            )
    return figures


@check(deadline_s=90.0)
def swap(context: Context) -> Figures:
    """Compare gradients with and without swapped activations, over steps that reuse pinned memory."""
    config, steps = small(context), 6 if context.on_cuda else 2
    model = make(context, config)
    reset_peak(context)
    expected = _gradients(context, model, steps)
    plain = peak_mib(context)
    place = "host" if context.on_cuda else f"disk:{context.folder}"
    threshold = 1 << (20 if context.on_cuda else 12)
    with swap_activations(model, place, threshold_bytes=threshold, behind_bytes=8 << 20) as swapped:
        reset_peak(context)
        found = _gradients(context, model, steps)
        own = peak_mib(context)
        expect(swapped.written_bytes > 0, "expected swapped activations, got none")
        written, read = swapped.written_bytes, swapped.read_bytes
    wrong = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if context.on_cuda:  # kernels with atomic additions may differ in the last bit
        wrong = sum(
            float((a - b).abs().max()) > 1e-6 * float(b.abs().max())
            for a, b in zip(found, expected, strict=True)
        )
    expect(wrong == 0, f"expected equal gradients, but {wrong} of {len(found)} gradients differ")
    figures = {"written": (written / 2**20, "MiB"), "read": (read / 2**20, "MiB")}
    if context.on_cuda:
        figures |= {"peak": (own, "MiB"), "peak without": (plain, "MiB")}
    return figures


@check(ranks=2)
def swap_and_recomputation(context: Context) -> Figures:
    """Combine swapping and recomputation with stage 3."""
    place = "host" if context.on_cuda else f"disk:{context.folder}"
    expected, _ = train_alone(context, sgd, config=small(context))
    plan = Plan(zero=3, recompute="block", swap=place)
    found, _, seconds = train_planned(context, plan, sgd, config=small(context))
    difference = largest_difference(found, expected)
    expect(difference < _LIKE_ALONE, f"expected a difference below {_LIKE_ALONE}, got {difference}")
    return {"difference": (difference, ""), "step": (1e3 * seconds, "ms")}


@check()
def fused_adamw(context: Context) -> Figures:
    """Compare losses with AdamW on the host and AdamW on the device."""
    config = small(context)
    _, expected, _ = train_planned(context, Plan(), adamw, config=config)
    _, found, _ = train_planned(context, Plan(offload="host"), adamw, config=config)
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    expect(worst < 5e-3, f"expected losses {expected}, got {found}")
    return {"largest difference of the loss": (worst, "")}
