"""Predict the peak memory and the step time of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from farandole.data.wording import size
from farandole.memory.swap import BEHIND_BYTES
from farandole.plan import Place, Plan, PlanError
from farandole.planner.memory import StateBytes, shard_bytes, state_bytes
from farandole.planner.pipeline import PipelineStep, StagedModel, simulate_step
from farandole.planner.stage_trace import StageTracer
from farandole.planner.step_time import step_time
from farandole.planner.trace import NOTHING, Trace
from farandole.planner.workload import Machine, Workload

ALLOCATOR_BYTES = 45 << 20
"""Overhead of the C library: gaps between blocks, small objects, and memory that kernels allocate inside a call.

An estimate adds this overhead, but at most the peak size of the tensors in a pass.  The value is the median over 19
training runs of GPTs with 8 and 15 M parameters on 2 ranks (docs/explanation/planner.md; torch 2.13, glibc 2.36).
"""


@dataclass(frozen=True)
class PipelineSummary:
    """Statistics of a simulated pipeline step.

    Args:
        idle: the fraction of the step during which ranks do not compute, averaged over ranks: 0.1 for 10 %.
        sent: the maximum number of bytes that a rank sends to other stages in a step.
        message_s: the time in seconds that messages add to the step.
        imbalance: the relative excess of the largest stage over the mean size: 0.1 for 10 %.  The size of a stage is
            the number of its parameters that are used for one token.
        activations: the peak bytes of activations on each pipeline rank.
        peaks: the peak bytes of memory on each pipeline rank.
    """

    idle: float
    sent: int
    message_s: float
    imbalance: float
    activations: tuple[int, ...]
    peaks: tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """The estimated step time of a plan, and the estimated memory of the rank with the highest peak.

    Args:
        parts: a dict that maps the components of the peak memory of a step to their sizes in bytes.  A negative size
            corrects for components that are not in use at the same time.
        start: the peak bytes in use while the model is being sharded, before the first step.
        times: a dict that maps each activity to its seconds per step on the slowest rank.
        complete: False if activations are omitted because the other components alone do not fit.
        micro_batches: the number of micro-batches per rank in a step.
        pipeline: the simulated step, or None for a plan without pipeline stages.
    """

    plan: Plan
    parts: dict[str, int]
    start: int
    times: dict[str, float]
    complete: bool = True
    micro_batches: int = 1
    pipeline: PipelineSummary | None = None

    @property
    def peak(self) -> int:
        """Return the peak memory in bytes of the rank with the highest peak."""
        return max(self.start, sum(self.parts.values()))

    @property
    def mean_peak(self) -> float:
        """Return the peak memory in bytes, averaged over the ranks."""
        peaks = (self.peak,) if self.pipeline is None else self.pipeline.peaks
        return sum(peaks) / len(peaks)

    @property
    def seconds(self) -> float:
        """Return the duration of a step in seconds."""
        return sum(self.times.values())

    def fits(self, memory: int) -> bool:
        """Return whether `memory` bytes per rank are enough."""
        return self.peak <= memory

    def outcome(self, memory: int) -> str:
        """Return text that states whether the plan fits into `memory` bytes per rank.

        The text is `fits`, `fits with offload` (or `swap`, or both), or `does not fit (needs X more; most for Y)`,
        where Y is the largest component.
        """
        if not self.fits(memory):
            least = "" if self.complete else "at least "
            most = max(self.parts, key=lambda part: self.parts[part])
            return f"does not fit (needs {least}{size(self.peak - memory)} more; most for {most})"
        moved = [name for name in ("offload", "swap") if getattr(self.plan, name) != "none"]
        return " ".join(["fits", *(["with", " and ".join(moved)] if moved else [])])


def estimate(
    model: nn.Module, plan: Plan, ranks: int, *, example: Any, machine: Machine, **workload: Any
) -> Estimate:
    """Predict the memory and step time of training `model` under `plan` on `ranks` ranks of `machine`.

        machine = Machine(memory=16 << 30)
        estimate(model, Plan(zero=2), 8, example=tokens, loss=loss_of, machine=machine).outcome(machine.memory)

    No tensor values are computed, and the model may be on the meta device.  The call turns off recomputation in the
    model.

    Args:
        example: the micro-batch of one rank.
        workload: other keyword arguments of `Workload` (`loss`, `micro_batches`, ...).

    Raises:
        PlanError: if the plan is invalid for this number of ranks or for this machine.
    """
    return estimate_workload(Workload(model=model, example=example, **workload), plan, ranks, machine)


def estimate_workload(
    workload: Workload,
    plan: Plan,
    ranks: int,
    machine: Machine,
    traced: Trace | None = None,
    state: StateBytes | None = None,
) -> Estimate:
    """Predict the memory and step time of `workload`; see `estimate`.

    Args:
        traced, state: the trace and the state bytes of this workload under this plan, if they have been computed.
    """
    _check(plan, machine)
    if not workload.applied:
        workload = workload.split(plan, ranks, machine.hosts)
    if plan.pipeline > 1:
        staged = StagedModel(workload, plan)
        step = simulate_step(staged, plan, ranks, machine, StageTracer())
        return estimate_stages(staged, plan, ranks, machine, step)
    state = state or state_bytes(workload, plan, ranks, machine)
    return _estimate_rank(workload, plan, ranks, machine, traced or workload.trace(plan), state)


def _estimate_rank(
    workload: Workload, plan: Plan, ranks: int, machine: Machine, traced: Trace, state: StateBytes
) -> Estimate:
    process = machine.process + machine.libraries * machine.hosts // ranks
    swapped = _swapped(plan, traced)
    copies = workload.checkpoints and machine.host
    parts = {
        "process": process,
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "buffers": state.compression + state.pools + state.gathered,
        "activations": traced.saved - swapped,
        "backward": traced.transient,
        "reused": -_reused(workload, plan, state, traced.peak - swapped),
        "allocator": _allocator(workload, plan, state, traced) if machine.host else 0,
        "checkpoint": state.copies if copies else 0,
    }
    times = step_time(workload, plan, ranks, state, traced, machine)
    start = process + _start(workload, plan, state)
    return Estimate(plan, parts, start, times, micro_batches=workload.micro_batches)


def estimate_ranks(workload: Workload, plan: Plan, ranks: int, machine: Machine) -> dict[int, Estimate]:
    """Return a dict that maps each rank to its estimate.

    Ranks with the same pipeline stages have equal estimates.
    """
    workload = workload if workload.applied else workload.split(plan, ranks, machine.hosts)
    if plan.pipeline == 1:
        return dict.fromkeys(range(ranks), estimate_workload(workload, plan, ranks, machine))
    _check(plan, machine)
    staged = StagedModel(workload, plan)
    step = simulate_step(staged, plan, ranks, machine, StageTracer())
    states = stage_states(staged, plan, ranks, machine)
    found = _estimate_pipeline_ranks(staged, plan, ranks, machine, step, states)
    assert workload.mesh is not None
    return {rank: found[workload.mesh.pipeline_rank(rank)] for rank in range(ranks)}


def estimate_stages(
    staged: StagedModel,
    plan: Plan,
    ranks: int,
    machine: Machine,
    step: PipelineStep,
    states: Sequence[StateBytes] | None = None,
) -> Estimate:
    """Predict the memory and step time of a model that is divided into stages; see `estimate_workload`.

    Args:
        step: the simulated step of this workload under this plan.
        states: the state bytes of each pipeline rank, if they have been computed.
    """
    _check(plan, machine)
    states = states or stage_states(staged, plan, ranks, machine)
    found = _estimate_pipeline_ranks(staged, plan, ranks, machine, step, states)
    summary = PipelineSummary(
        step.timeline.idle,
        max(step.sent),
        step.waiting_s,
        staged.balance.imbalance,
        tuple(traced.peak for traced in step.traces),
        tuple(one.peak for one in found),
    )
    largest = max(found, key=lambda one: one.peak)
    slowest = max(found, key=lambda one: one.seconds)
    return replace(largest, times=slowest.times, pipeline=summary)


def _estimate_pipeline_ranks(
    staged: StagedModel,
    plan: Plan,
    ranks: int,
    machine: Machine,
    step: PipelineStep,
    states: Sequence[StateBytes],
) -> list[Estimate]:
    found = [
        _estimate_rank(workload, plan, ranks, machine, traced, state)
        for workload, traced, state in zip(staged.ranks, step.traces, states, strict=True)
    ]
    makespan, busy = step.timeline.makespan, step.timeline.busy
    for one, busy_s in zip(found, busy, strict=True):
        one.times["idle"] = max(0.0, makespan - busy_s - step.waiting_s)
        one.times["messages"] = step.waiting_s
    return found


def stage_states(staged: StagedModel, plan: Plan, ranks: int, machine: Machine) -> list[StateBytes]:
    """Return the state bytes of each pipeline rank, assuming that every rank first builds the whole model."""
    return [
        replace(state_bytes(workload, plan, ranks, machine), whole=staged.whole) for workload in staged.ranks
    ]


def least_of_stages(
    staged: StagedModel, plan: Plan, ranks: int, machine: Machine, states: Sequence[StateBytes]
) -> Estimate:
    """Return the estimate, without activations, of the pipeline rank that needs the most memory."""
    _check(plan, machine)
    found = [
        _estimate_rank(workload, plan, ranks, machine, NOTHING, state)
        for workload, state in zip(staged.ranks, states, strict=True)
    ]
    return max(found, key=lambda one: one.peak)


def _check(plan: Plan, machine: Machine) -> None:
    for name in ("offload", "swap"):
        place = getattr(plan, name)
        if Place.parse(place).kind == "disk" and machine.disk is None:
            raise PlanError(
                f"{name}={place!r} requires a machine with a disk; pass Machine(disk=Bandwidth(...))"
            )
    if plan.swap != "none" and machine.host == (plan.swap == "host"):
        where, works = ("a CPU host", "disk:FOLDER") if machine.host else ("an accelerator", "host")
        raise PlanError(f"swap={plan.swap!r} is not available for models on {where}; use swap={works!r}")
    if plan.offloaded != "optimizer" and plan.offload_folder is not None and not machine.host:
        raise PlanError(
            f"offloaded={plan.offloaded!r} with offload={plan.offload!r} is not available for models on an "
            "accelerator; use "
            f"offload='host' or offloaded='optimizer'"
        )
    if plan.precision not in machine.flops:
        raise PlanError(
            f"Machine(flops=) has no entry for precision={plan.precision!r}, only for {', '.join(machine.flops)}; "
            "add an entry"
        )


def _allocator(workload: Workload, plan: Plan, state: StateBytes, traced: Trace) -> int:
    """Return the total bytes of the C library's overhead and of the freed memory that the library keeps."""
    found = min(ALLOCATOR_BYTES, traced.peak)
    # with `swap`, most blocks are allocated with `mmap`, and returned to the kernel when they are freed
    if plan.swap == "none":
        found += traced.resident_peak - traced.peak
    # states that are offloaded to a disk are allocated in the first step and then copied
    if plan.offload_folder is not None:
        found += workload.states * max(map(shard_bytes, state.sharding.trained), default=0)
    return found


def _start(workload: Workload, plan: Plan, state: StateBytes) -> int:
    """Return the peak number of bytes in use while the model is being sharded."""
    # Each rank builds the full model, and frees the parameters of each bucket after copying them. With
    # `block_by_block`, it builds one block at a time. Master weights count even if they are offloaded afterwards.
    # With ZeRO stages 0 and 1, gradients are allocated before master weights.
    divided = state.weights + state.masters + (state.gradients if plan.zero < 2 else 0)
    return divided + state.largest_block if workload.block_by_block else max(divided, state.whole)


def _swapped(plan: Plan, traced: Trace) -> int:
    """Return a lower bound on the number of activation bytes that are swapped out."""
    # tensors kept by selective recomputation are not swapped; at most `BEHIND_BYTES` still wait to be copied
    if plan.swap == "none" or plan.recompute in ("selective", "attention", "auto"):
        return 0
    return max(0, traced.swappable - BEHIND_BYTES)


def _reused(workload: Workload, plan: Plan, state: StateBytes, activations: int) -> int:
    """Return the number of gradient bytes that reuse activation memory."""
    # With ZeRO stages 2 and 3, gradients occupy memory from their reduction until the next step (`parallel.bucket`).
    # With one pass per step, there are no gradients when activations peak, and no activations at the end of the step.
    return min(state.gradients, activations) if plan.zero >= 2 and workload.micro_batches == 1 else 0
