"""Plans that fit where another did not: what an error offers instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from farandole.data.wording import counted, size
from farandole.memory.estimate.machine import Machine
from farandole.memory.estimate.plans import Estimate, estimate_workload
from farandole.memory.estimate.trace import Trace
from farandole.memory.estimate.workload import Workload
from farandole.plan import Plan

_OFFERED = 3
_SURE = 0.9
"""The share of memory that an offered plan is predicted to need at most: predictions are within 10 %."""


def estimated_plans(workload: Workload, ranks: int, machine: Machine) -> Iterator[Estimate]:
    """Estimates of plans that recompute whole blocks, the simplest first.

    States go to a disk where the machine has one; `FOLDER` stands for a folder there.
    """
    traces: dict[str, Trace] = {}
    stages = (0, 1, 3) if machine.shared else (0, 1, 2, 3)  # in common memory 2 is the same as 3
    for offload in ("none", "disk:FOLDER") if machine.disk else ("none",):
        for precision in ("fp32", "bf16"):
            for zero in stages:
                plan = replace(Plan(zero=zero, offload=offload), precision=precision, recompute="block")
                if precision not in traces:
                    traces[precision] = workload.trace(plan)
                yield estimate_workload(workload, plan, ranks, machine, traces[precision])


def what_fits(found: Sequence[Estimate], ranks: int, memory: int) -> str:
    """For an error: the three first of `found` that surely fit into `memory` bytes, a line for each, or that none does."""
    fitting = [one for one in found if one.peak <= _SURE * memory]
    if not fitting:
        least = min(one.peak for one in found)
        return (
            f"no plan fits: {counted(ranks, 'rank')} need {size(least)} each at least; more ranks need less"
        )
    lines = [
        f"  --zero {plan.zero} --precision {plan.precision} --recompute {plan.recompute} --offload {plan.offload}: "
        f"{size(one.peak)} for each rank"
        for one in fitting[:_OFFERED]
        for plan in [one.plan]
    ]
    return "\n".join(["what fits:", *lines])
