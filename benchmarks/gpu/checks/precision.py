"""Checks of bf16, fp16 with loss scaling, stochastic rounding and fp8."""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.gpu.reference import (
    adamw,
    batches,
    expect,
    loss_of,
    make,
    sgd,
    small,
    train_alone,
    train_planned,
)
from benchmarks.gpu.registry import Context, Figures, Skip, check
from farandole.parallel.engine import Engine
from farandole.parallel.loss_scaling import LossScaler
from farandole.parallel.optimizers.rounding import round_stochastically
from farandole.parallel.precision import check_float8, use_float8
from farandole.plan import Plan, PlanError


def _losses_close(found: list[float], expected: list[float], tolerance: float) -> float:
    worst = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    expect(
        worst < tolerance,
        f"expected losses {expected} with a relative tolerance of {tolerance:g}, got {found}",
    )
    return worst


def _like_fp32(context: Context, precision: Any, tolerance: float) -> Figures:
    config = small(context)
    _, expected = train_alone(context, adamw, config=config)
    figures: Figures = {}
    for stage in (0, 2, 3):
        _, found, seconds = train_planned(
            context, Plan(zero=stage, precision=precision), adamw, config=config
        )
        figures[f"stage {stage} difference of the loss"] = (_losses_close(found, expected, tolerance), "")
        figures[f"stage {stage} step"] = (1e3 * seconds, "ms")
    return figures


@check(ranks=2)
def bf16(context: Context) -> Figures:
    """Compare training with bf16 weights and fp32 master weights against plain torch in fp32."""
    return _like_fp32(context, "bf16", 2e-2)


@check(ranks=2)
def fp16(context: Context) -> Figures:
    """Compare training with fp16 weights and loss scaling against plain torch in fp32."""
    return _like_fp32(context, "fp16", 2e-2)


@check(ranks=2)
def overflow(context: Context) -> Figures:
    """Skip and report a step that overflows, and compare the loss scale with torch's GradScaler."""
    comm, model = context.comm, make(context)
    scaler = LossScaler(scale=2.0**16, growth_interval=2)
    engine = Engine(model, comm, zero=1, dtype=torch.float16, scaler=scaler, report=False)
    optimizer = engine.optimizer(sgd(model.parameters()))
    tokens = batches(context)[0]
    overflows = (False, True, False, False)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(1))
    updates = torch.optim.SGD([weight], lr=0.0)
    for number, bad in enumerate(overflows):
        before = [p.detach().clone() for _, p, _ in engine.shards()]
        loss = loss_of(engine, tokens)
        engine.backward(loss * (math.inf if bad and comm.rank == 0 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        expect(engine.skipped == bad, f"step {number}: expected skipped: {bad}, got {engine.skipped}")
        changed = any(not torch.equal(a, p) for a, (_, p, _) in zip(before, engine.shards(), strict=True))
        expect(changed != bad, f"step {number}: expected changed weights: {not bad}, got {changed}")
        reference.scale((weight * (math.inf if bad else 1.0)).sum()).backward()
        reference.step(updates)
        reference.update()
        updates.zero_grad()
        wanted = reference.get_scale()
        expect(scaler.scale == wanted, f"step {number}: expected the scale {wanted}, got {scaler.scale}")
        if bad:
            found = engine.overflow.found if engine.overflow is not None else None
            expect(found is not None and found.rank == 0, f"expected an overflow on rank 0, got {found}")
    engine.close()
    return {"scale at the end": (scaler.scale, "")}


@check()
def stochastic_rounding(context: Context) -> Figures:
    """Check that rounded values are bf16 neighbors, unbiased, and reproducible with the same seed."""
    count = 1 << (22 if context.on_cuda else 16)
    exact = torch.rand(count, device=context.device) + 1.0
    generators = [torch.Generator(context.device).manual_seed(3) for _ in range(2)]
    rounded = [torch.empty(count, dtype=torch.bfloat16, device=context.device) for _ in generators]
    for target, generator in zip(rounded, generators, strict=True):
        round_stochastically(target, exact.clone(), generator)
    expect(torch.equal(*rounded), "expected the same values with the same seed")
    error = rounded[0].float() - exact
    spacing = 2.0**-7
    expect(
        float(error.abs().max()) <= spacing,
        f"expected an error of at most {spacing}, got {float(error.abs().max())}",
    )
    mean = float(error.double().mean())
    bound = 5 * spacing / math.sqrt(6 * count)  # five standard deviations of the mean
    expect(abs(mean) < bound, f"expected a mean error below {bound}, got {mean}")
    return {"mean error": (mean, "")}


@check(ranks=2)
def bf16_without_masters(context: Context) -> Figures:
    """Compare training with stochastically rounded bf16 weights against plain torch in fp32."""
    config = small(context)
    _, expected = train_alone(context, adamw, config=config)
    plan = Plan(zero=2, precision="bf16", rounding="stochastic")
    _, found, seconds = train_planned(context, plan, adamw, config=config)
    return {
        "difference of the loss": (_losses_close(found, expected, 3e-2), ""),
        "step": (1e3 * seconds, "ms"),
    }


@check(needs=("torchao",), deadline_s=120.0)
def fp8(context: Context) -> Figures:
    """Compare training with fp8 matrix products against training in bf16."""
    if context.on_cuda:
        try:
            check_float8(context.device)
        except PlanError as reason:
            raise Skip(str(reason)) from None
        config = small(context)
        _, expected, seconds_bf16 = train_planned(context, Plan(precision="bf16"), adamw, config=config)
        _, found, seconds = train_planned(context, Plan(precision="fp8"), adamw, config=config)
        return {
            "difference of the loss": (_losses_close(found, expected, 3e-2), ""),
            "step": (1e3 * seconds, "ms"),
            "step with bf16": (1e3 * seconds_bf16, "ms"),
        }
    model, plain = make(context).bfloat16(), make(context).bfloat16()
    names = use_float8(model, emulate=True)
    tokens = batches(context)[0]
    expected_loss, loss = loss_of(plain, tokens), loss_of(model, tokens)
    loss.backward()
    difference = _losses_close([float(loss.detach())], [float(expected_loss.detach())], 3e-2)
    return {"layers": (float(len(names)), ""), "difference of the loss": (difference, "")}


@check(needs=("pydantic",))
def automatic(context: Context) -> Figures:
    """Check the precision that `plan.precision=auto` selects."""
    from farandole.train.hardware import choose_precision

    choice = choose_precision("auto", context.comm, context.device)
    expect(choice.name in ("fp32", "bf16"), f"expected fp32 or bf16, got {choice.name}")
    return {"bf16": (float(choice.name == "bf16"), "")}
