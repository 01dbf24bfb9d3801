"""Estimate and sort many plans, and suggest plans that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from farandole._troubleshooting import see
from farandole.data.wording import counted, size
from farandole.parallel.pipeline.apply import check, schedule_of
from farandole.plan import MODEL_AXES, Plan, PlanError
from farandole.planner.estimate import (
    Estimate,
    estimate_stages,
    estimate_workload,
    least_of_stages,
    stage_states,
)
from farandole.planner.memory import StateBytes, state_bytes
from farandole.planner.pipeline import PipelineStep, StagedModel, simulate_step
from farandole.planner.stage_trace import StageTracer
from farandole.planner.trace import NOTHING, Trace
from farandole.planner.workload import Machine, Workload

_OFFERED = 3
_SURE = 0.9
"""A suggested plan needs at most this fraction of the memory, because predictions are accurate to within 10 %."""


def estimates_of(
    workload: Workload,
    ranks: int,
    machine: Machine,
    plans: Iterable[Plan],
    tracer: StageTracer | None = None,
) -> Iterator[Estimate]:
    """Yield the estimates of `plans` in order.

    Plans with equal forward and backward passes are traced once.  A plan is not traced if its weights, gradients and
    optimizer states alone do not fit.

    Args:
        tracer: a tracer to share among several calls, so that equal pipeline stages are traced once.
    """
    parts: dict[tuple[object, ...], Workload] = {}
    traces: dict[tuple[object, ...], Trace] = {}
    known: dict[tuple[object, ...], StateBytes] = {}
    stages = _StageEstimates(workload, ranks, machine, tracer or StageTracer())
    found, refusal = False, cast(PlanError | None, None)
    for plan in plans:
        if plan.pipeline > 1:
            try:
                estimated = stages.estimate(plan)
            except PlanError as error:  # the model or the number of micro-batches does not suit the stages
                refusal = error
                continue
            found = True
            yield estimated
            continue
        axes = (plan.data, plan.data_shard, *_model_axes(plan))
        if axes not in parts:
            parts[axes] = workload.split(plan, ranks, machine.hosts)
        part = parts[axes]
        states = (axes, *_state_fields(plan))
        if states not in known:
            known[states] = state_bytes(part, plan, ranks, machine)
        estimate = partial(estimate_workload, part, plan, ranks, machine, state=known[states])
        least = estimate(NOTHING)
        if not least.fits(machine.memory):
            found = True
            yield replace(least, complete=False)
            continue
        key = (axes, plan.recompute, plan.precision, plan.activation_bytes)
        if key not in traces:
            try:
                traces[key] = part.trace(plan)
            except PlanError as error:  # this recomputation does not suit the model
                refusal = error
                continue
        found = True
        yield estimate(traces[key])
    if refusal is not None and not found:
        raise refusal


def _model_axes(plan: Plan) -> tuple[object, ...]:
    """Return the fields of a plan that divide or change the model, except `pipeline`."""
    return plan.sequence, plan.ring, plan.lora, *(getattr(plan, axis) for axis in MODEL_AXES)


def _state_fields(plan: Plan) -> tuple[object, ...]:
    """Return the fields of a plan, except the axes, that determine the result of `state_bytes`."""
    return plan.zero, plan.precision, plan.rounding, plan.offload, plan.offloaded, plan.compression


class _StageEstimates:
    """Estimates plans with pipeline stages, and caches stages, states and steps."""

    def __init__(self, workload: Workload, ranks: int, machine: Machine, tracer: StageTracer) -> None:
        self._workload, self._ranks, self._machine, self._tracer = workload, ranks, machine, tracer
        self._parts: dict[object, Workload] = {}
        self._staged: dict[object, StagedModel] = {}
        self._states: dict[object, list[StateBytes]] = {}
        self._steps: dict[object, PipelineStep] = {}

    def estimate(self, plan: Plan) -> Estimate:
        workload, ranks, machine = self._workload, self._ranks, self._machine
        check(workload.model, plan)
        schedule = schedule_of(plan, workload.micro_batches)
        divided = (plan.pipeline, *_model_axes(plan))
        axes = (plan.data, plan.data_shard, schedule.mirrored, *divided)
        if axes not in self._parts:
            self._parts[axes] = workload.split(plan, ranks, machine.hosts)
        # with a limit, the activations in flight and their dtype determine the division
        limit = None if plan.stage_bytes is None else (plan.stage_bytes, plan.schedule, plan.precision)
        placed = (axes, schedule.placement, limit)
        if placed not in self._staged:
            self._staged[placed] = StagedModel(self._parts[axes], plan)
        staged = self._staged[placed]
        states = (placed, *_state_fields(plan))
        if states not in self._states:
            self._states[states] = stage_states(staged, plan, ranks, machine)
        least = least_of_stages(staged, plan, ranks, machine, self._states[states])
        if not least.fits(machine.memory):
            return replace(least, complete=False)
        key = (
            divided,
            plan.schedule,
            plan.recompute,
            plan.precision,
            plan.activation_bytes,
            plan.stage_bytes,
        )
        if key not in self._steps:
            self._steps[key] = simulate_step(staged, plan, ranks, machine, self._tracer)
        return estimate_stages(staged, plan, ranks, machine, self._steps[key], self._states[states])


def plan_candidates(
    workload: Workload, ranks: int, machine: Machine, plans: Iterable[Plan]
) -> list[Estimate]:
    """Return the estimates of `plans` in order of preference.

    Plans that fit come first, sorted by time and then by memory.  The other plans are sorted by memory.
    """
    return in_order(estimates_of(workload, ranks, machine, plans), machine.memory)


def in_order(estimates: Iterable[Estimate], memory: int) -> list[Estimate]:
    """Sort estimates as `plan_candidates` does, for `memory` bytes per rank."""
    found = list(estimates)
    return [
        *sorted(
            (one for one in found if one.fits(memory)),
            # predictions are accurate to fewer than three digits
            key=lambda one: (float(f"{one.seconds:.2e}"), one.peak),
        ),
        *sorted((one for one in found if not one.fits(memory)), key=lambda one: (one.peak, one.seconds)),
    ]


def estimated_plans(workload: Workload, ranks: int, machine: Machine) -> Iterator[Estimate]:
    """Yield estimates of plans that recompute entire blocks, starting with the simplest.

    If the machine has a disk, some plans offload states to the placeholder `disk:FOLDER`.
    """
    stages = (0, 1, 3) if machine.shared else (0, 1, 2, 3)  # in shared memory, stages 2 and 3 are equal
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
    """Return error text that lists the first three plans that fit into `memory` with a margin.

    If no plan fits, the text states the smallest memory that a plan needs.
    """
    fitting = [one for one in found if one.peak <= _SURE * memory]
    if not fitting:
        least = min(one.peak for one in found)
        return (
            f"no plan fits with a margin of {100 * (1 - _SURE):.0f} %: plans for {counted(ranks, 'rank')} need at "
            f"least {size(least)} per rank; use more ranks{see('does-not-fit')}"
        )
    lines = [
        f"  --zero {plan.zero} --precision {plan.precision} --recompute {plan.recompute} --offload {plan.offload}: "
        f"{size(one.peak)} per rank"
        for one in fitting[:_OFFERED]
        for plan in [one.plan]
    ]
    return "\n".join(["what fits:", *lines])
