"""Checks of ZeRO: after several steps, the parameters match the parameters from a single process in plain torch."""

from __future__ import annotations

import math
from typing import Any

import torch

import farandole
from benchmarks.gpu.reference import (
    SMALL,
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
from farandole.models.gpt import build_gpt
from farandole.parallel.engine import Engine
from farandole.plan import Plan

_TOLERANCE = 2e-3
"""fp32 sums are computed in a different order than in the reference, and a smaller batch may use other GPU kernels."""


def _compare(context: Context, stage: int, accumulate: int = 1) -> Figures:
    config = small(context)
    expected, losses = train_alone(context, sgd, config=config)
    reset_peak(context)

    def inspect(engine: Any, _: Any) -> None:
        gathers = stage == 3 and context.on_cuda and context.comm.size > 1
        expect(
            (engine._gatherer is not None) == gathers,
            f"stage {stage}: expected gathered weights: {gathers}, got: {not gathers}",
        )

    found, own_losses, seconds = train_planned(
        context, Plan(zero=stage), sgd, config=config, accumulate=accumulate, inspect=inspect
    )
    peak = peak_mib(context)
    difference = largest_difference(found, expected)
    expect(
        difference < _TOLERANCE, f"stage {stage}: expected a difference below {_TOLERANCE}, got {difference}"
    )
    expect(
        all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(losses, own_losses, strict=True)),
        f"stage {stage}: expected losses {losses}, got {own_losses}",
    )
    figures = {"difference": (difference, ""), "step": (1e3 * seconds, "ms")}
    return figures | ({"peak": (peak, "MiB")} if context.on_cuda else {})


@check()
def one_rank(context: Context) -> Figures:
    """Compare all stages on one rank, over NCCL on a GPU."""
    return {
        f"stage {stage} {name}": value
        for stage in range(4)
        for name, value in _compare(context, stage).items()
    }


@check(ranks=2)
def stage_0(context: Context) -> Figures:
    """Compare replicated states on ranks that share a device."""
    return _compare(context, 0)


@check(ranks=2)
def stage_1(context: Context) -> Figures:
    """Compare sharded optimizer states on ranks that share a device."""
    return _compare(context, 1)


@check(ranks=2)
def stage_2(context: Context) -> Figures:
    """Compare sharded gradients on ranks that share a device."""
    return _compare(context, 2)


@check(ranks=2)
def stage_3(context: Context) -> Figures:
    """Compare sharded weights, which are gathered block by block on a GPU."""
    return _compare(context, 3)


@check(ranks=2, deadline_s=90.0)
def accumulation(context: Context) -> Figures:
    """Compare all stages with two backward passes per step."""
    return {
        f"stage {stage} difference": _compare(context, stage, accumulate=2)["difference"]
        for stage in range(4)
    }


@check(ranks=2)
def deferred(context: Context) -> Figures:
    """Initialize a model on the meta device block by block, and train it with stage 3."""
    whole = make(context)
    values = {name: p.detach().clone() for name, p in whole.named_parameters(remove_duplicate=False)}
    expected = {name: values[name] for name, _ in whole.named_parameters()}

    def fill(name: str, block: Any) -> None:
        for own, parameter in block.named_parameters():
            parameter.copy_(values[f"{name}.{own}" if name else own])

    with torch.device("meta"):
        model = build_gpt(SMALL)
    before = torch.get_default_device()
    torch.set_default_device(context.device)
    try:
        engine = farandole.parallelize(model, Plan(zero=3), context.comm, initialize=fill)
    finally:
        torch.set_default_device(before)
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    found = {names[id(p)]: value.detach().clone() for p, value in engine.whole_parameters()}
    difference = largest_difference(found, expected)
    expect(difference == 0.0, f"expected equal parameters, got a difference of {difference}")
    optimizer = engine.optimizer(sgd(model.parameters()))
    tokens = batches(context)[0].chunk(context.comm.size)[context.comm.rank]
    first = float(loss_of(engine, tokens).detach())
    engine.backward(loss_of(engine, tokens))
    optimizer.step()
    optimizer.zero_grad()
    second = float(loss_of(engine, tokens).detach())
    engine.close()
    expect(second < first, f"expected a loss below {first} after a step, got {second}")
    return {"loss before": (first, ""), "loss after": (second, "")}


@check(ranks=2)
def locates_infinity(context: Context) -> Figures:
    """Locate the rank and the parameter of a gradient that is not finite."""
    model = make(context)
    engine = Engine(model, context.comm, zero=1, watch=True)
    name, parameter = next((n, p) for n, p in model.named_parameters() if p.dim() == 1)
    bad = context.comm.size - 1
    if context.comm.rank == bad:
        parameter.register_hook(lambda gradient: gradient * math.inf)
    loss_of(engine, batches(context)[0]).backward()
    norm = engine.gradient_norm()
    expect(not math.isfinite(norm), f"expected a norm that is not finite, got {norm}")
    found = engine.locate_nonfinite()
    expect((found.rank, found.parameter) == (bad, name), f"expected rank {bad} and {name}, got {found}")
    engine.close()
    return {"rank": (float(bad), "")}
