"""Checks of the planner: the predicted memory of ranks against the measured memory."""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.gpu.reference import expect
from benchmarks.gpu.registry import Context, Figures, check

_TOLERANCE = 0.1
"""The largest allowed relative deviation of the predicted peak."""


def _check(context: Context, ranks: int, zero: int) -> Figures:
    from farandole.bench.planning import PlanSetup, plan
    from farandole.bench.planning import check as check_plan

    os.environ["XDG_CACHE_HOME"] = str(
        context.folder
    )  # do not keep speeds that are measured while this process runs
    words = ["tiny"]
    if context.on_cuda:
        words += ["model.width=512", "model.layers=8", "model.heads=8", "model.context=512", "batch=16"]
    setup = PlanSetup(
        words=tuple(words),
        ranks=ranks,
        choices={"zero": [zero], "recompute": ["none"], "precision": ["fp32"]},
        flops=1e12,
        bandwidth=1e9,
    )
    planned = plan(setup)
    predicted, seen = check_plan(planned, steps=3)
    figures: Figures = {}
    errors = []
    for rank, one in enumerate(seen):
        peak = max(one["start"], one["peak"]) + one["libraries"] / ranks
        figures[f"rank {rank}"] = (peak / 2**20, "MiB")
        figures[f"rank {rank}, predicted"] = (predicted[rank].peak / 2**20, "MiB")
        errors.append(predicted[rank].peak / peak - 1)
    figures["difference"] = (max(errors, key=abs), "")
    expect(
        all(abs(error) <= _TOLERANCE for error in errors),
        f"expected a deviation of at most {_TOLERANCE:.0%}, got {figures}",
    )
    return figures


@check(needs=("pydantic", "tokenizers"), on_cpu=True, deadline_s=120.0)
def one_rank(context: Context) -> Figures:
    """Compare predicted and measured memory on one rank, with stage 0."""
    return _check(context, 1, 0)


@check(needs=("pydantic", "tokenizers"), on_cpu=False, deadline_s=120.0)
def shared_device(context: Context) -> Figures:
    """Compare predicted and measured memory on two ranks that share the device, with stage 2."""
    return _check(context, 2, 2)


@check(needs=("pydantic", "tokenizers"))
def step_fits(context: Context) -> Figures:
    """Compare the estimated tensor memory of a step with the engine's tensors."""
    from farandole.bench.plan_check import _parts, make_trainer
    from farandole.plan import Plan
    from farandole.planner import Machine, estimate_workload
    from farandole.train.config import load_config
    from farandole.train.workload import workload_of

    config = load_config("tiny", [])
    comm = context.comm
    trainer: Any = make_trainer(config, "fp32", comm, context.device)
    for _ in range(2):
        trainer.step()
    found = _parts(trainer)
    machine = Machine(memory=1 << 40, shared=not context.on_cuda, host=not context.on_cuda)
    predicted = estimate_workload(workload_of(config, comm.size), Plan(precision="fp32"), comm.size, machine)
    figures: Figures = {}
    for name in ("weights", "gradients", "optimizer"):
        figures[name] = (found[name] / 2**20, "MiB")
        figures[f"{name}, predicted"] = (predicted.parts[name] / 2**20, "MiB")
        error = predicted.parts[name] / max(1, found[name]) - 1
        expect(abs(error) <= _TOLERANCE, f"{name}: expected {predicted.parts[name]} bytes, got {found[name]}")
    if context.on_cuda:
        torch.cuda.synchronize(context.device)
    trainer.engine.close()
    return figures
