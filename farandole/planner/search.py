"""Many plans: in the order in which to try them, and what fits where a plan did not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from farandole.data.wording import counted, size
from farandole.plan import Plan
from farandole.planner.estimate import Estimate, estimate_workload
from farandole.planner.trace import Trace
from farandole.planner.workload import Machine, Workload

_OFFERED = 3
_SURE = 0.9
"""The share of memory that an offered plan is predicted to need at most: predictions are within 10 %."""


def estimates_of(
    workload: Workload, ranks: int, machine: Machine, plans: Iterable[Plan]
) -> Iterator[Estimate]:
    """Estimate `plans` in their order; plans with equal passes are traced once."""
    traces: dict[tuple[str, str, int | None], Trace] = {}
    for plan in plans:
        key = (plan.recompute, plan.precision, plan.activation_bytes)
        if key not in traces:
            traces[key] = workload.trace(plan)
        yield estimate_workload(workload, plan, ranks, machine, traces[key])


def plan_candidates(
    workload: Workload, ranks: int, machine: Machine, plans: Iterable[Plan]
) -> list[Estimate]:
    """Return the estimates of `plans`: those that fit, the fastest first; then the others, those that lack least first.

    Of equally fast ones the smallest comes first.
    """
    found = list(estimates_of(workload, ranks, machine, plans))
    return [
        *sorted(
            (one for one in found if one.fits(machine.memory)),
            key=lambda one: (float(f"{one.seconds:.2e}"), one.peak),  # closer than a prediction is
        ),
        *sorted(
            (one for one in found if not one.fits(machine.memory)),
            key=lambda one: (one.peak, one.seconds),
        ),
    ]


def estimated_plans(workload: Workload, ranks: int, machine: Machine) -> Iterator[Estimate]:
    """Yield estimates of plans that recompute whole blocks, the simplest first.

    States go to a disk where the machine has one; `FOLDER` stands for a folder there.
    """
    stages = (0, 1, 3) if machine.shared else (0, 1, 2, 3)  # in shared memory 2 is the same as 3
    places = ("none", "disk:FOLDER") if machine.disk else ("none",)
    yield from estimates_of(
        workload,
        ranks,
        machine,
        (
            Plan(zero=zero, offload=offload, precision=precision, recompute="block")
            for offload in places
            for precision in ("fp32", "bf16")
            for zero in stages
        ),
    )


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
