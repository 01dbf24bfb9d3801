"""Whether a plan fits, and how long a step of it takes, before a rank has started."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from farandole.data.wording import size
from farandole.memory.estimate.data_axis import DataAxis
from farandole.memory.estimate.heap import excess
from farandole.memory.estimate.machine import Machine
from farandole.memory.estimate.seconds import seconds_of
from farandole.memory.estimate.trace import Trace
from farandole.memory.estimate.workload import Workload
from farandole.plan import Plan, PlanError


@dataclass(frozen=True)
class Estimate:
    """What a plan needs on the rank that needs most.

    `parts`: bytes of a step, by name, of which the sum is that of its worst moment (what is then not there at once is taken
    off); `start`: bytes while the model is being divided, before the first step; `times`: seconds of a step by what they are
    spent on.
    """

    plan: Plan
    parts: dict[str, int]
    start: int
    times: dict[str, float]

    @property
    def peak(self) -> int:
        """The most bytes at any moment."""
        return max(self.start, sum(self.parts.values()))

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.times.values())

    def fits(self, memory: int) -> bool:
        """Whether `memory` bytes for each rank are enough."""
        return self.peak <= memory

    def verdict(self, memory: int) -> str:
        """`fits`, `fits with offload` or `does not fit (needs X more)`, with `memory` bytes for each rank."""
        if not self.fits(memory):
            return f"does not fit (needs {size(self.peak - memory)} more)"
        return "fits" if self.plan.offload == "none" else "fits with offload"


def estimate(
    model: nn.Module, plan: Plan, ranks: int, *, example: Any, machine: Machine, **workload: Any
) -> Estimate:
    """What `plan` needs for training `model` on `ranks` ranks of `machine`.

        machine = Machine(memory=16 << 30)
        estimate(model, Plan(zero=2), 8, example=tokens, loss=loss_of, machine=machine).verdict(machine.memory)

    `example` is a rank's micro-batch; further keywords are those of `Workload` (`loss`, `micro_batches`, ...).
    Nothing is computed, and the model may lie on the meta device; afterwards it recomputes nothing.

    Raises `PlanError` where the plan is not one for so many ranks or for this machine.
    """
    return estimate_workload(Workload(model=model, example=example, **workload), plan, ranks, machine)


def estimate_workload(
    workload: Workload, plan: Plan, ranks: int, machine: Machine, traced: Trace | None = None
) -> Estimate:
    """The same of a workload; `traced` is its trace under this plan, if that is known already."""
    plan.check(ranks)
    if plan.offload.startswith("disk:") and machine.disk is None:
        raise PlanError(
            f"offload={plan.offload!r} and a machine without a disk: give Machine(disk=Bandwidth(...))"
        )
    if plan.swap != "none":
        raise PlanError(
            f"swap={plan.swap!r}: what is swapped depends on how fast it is copied, which is not predicted; "
            f"plan with swap='none', and run with it"
        )
    if plan.precision not in machine.flops:
        known = ", ".join(machine.flops)
        raise PlanError(
            f"precision={plan.precision!r} and Machine(flops=) has speeds of {known} only: give its own"
        )
    traced = traced or workload.trace(plan)
    axis = DataAxis(workload.model, plan, ranks, workload.weight_type(plan), machine)
    parts = {
        "process": machine.process + machine.libraries * machine.hosts // ranks,
        "parameters": axis.weights() + _buffers(workload.model),
        "gradients": axis.gradients(),
        "optimizer": _optimizer(workload, plan, axis, machine),
        "communication": axis.lent() + axis.gathered(),
        "activations": traced.saved,
        "transient": traced.transient,
        "taken over": -_taken_over(workload, plan, axis, traced),
        "allocator": _allocator(workload, plan, axis, traced) if machine.host else 0,
        "checkpoint": _copies(workload, plan, axis) if workload.checkpoints and machine.host else 0,
    }
    return Estimate(
        plan,
        parts,
        _start(workload, plan, axis, parts["process"]),
        seconds_of(workload, plan, axis, traced, machine),
    )


def plan_candidates(
    workload: Workload, ranks: int, machine: Machine, plans: Iterable[Plan]
) -> list[Estimate]:
    """The estimates of `plans`: those that fit, the fastest first; then the others, those that lack least first.

    Of equally fast ones the smallest comes first.
    """
    traces: dict[tuple[str, str, int | None], Trace] = {}
    found = []
    for plan in plans:
        key = (plan.recompute, plan.precision, plan.activation_bytes)
        if key not in traces:
            traces[key] = workload.trace(plan)
        found.append(estimate_workload(workload, plan, ranks, machine, traces[key]))
    fitting = [one for one in found if one.fits(machine.memory)]
    others = [one for one in found if not one.fits(machine.memory)]
    return [
        *sorted(fitting, key=lambda one: (_about(one.seconds), one.peak)),
        *sorted(others, key=lambda one: (one.peak, one.seconds)),
    ]


def _about(seconds: float) -> float:
    """Seconds to three digits: closer than a prediction is."""
    return float(f"{seconds:.2e}")


def _start(workload: Workload, plan: Plan, axis: DataAxis, process: int) -> int:
    """Bytes while the model is being divided.

    Each rank makes the whole model, and lets go of a bucket when it has been copied to where it belongs; or it has room for
    all that it keeps, and a block of the model beside it.  Masters are made in memory, also where they go to a disk from then
    on; gradients are there before them with stages 0 and 1, which keep them whole.
    """
    buffers = _buffers(workload.model)
    divided = axis.weights() + buffers + axis.masters() + (axis.gradients() if plan.zero < 2 else 0)
    if workload.block_by_block:
        return process + divided + axis.largest_block()
    return process + max(divided, axis.whole + buffers)


def _taken_over(workload: Workload, plan: Plan, axis: DataAxis, traced: Trace) -> int:
    """Bytes that are gradients' when they have been activations'.

    Stages 2 and 3 have memory for their gradients from when they are reduced until the next step (`parallel.bucket`).
    With one pass in a step there are none at the loss, where most activations are; and no activations at its end.
    """
    if plan.zero < 2 or workload.micro_batches > 1:
        return 0
    return min(axis.gradients(), traced.peak)


def _optimizer(workload: Workload, plan: Plan, axis: DataAxis, machine: Machine) -> int:
    """States and masters; offloaded, what of them is in the memory of the plan's device."""
    if plan.offload == "none" or (plan.offload == "host" and machine.host):
        return axis.states(workload.states) + axis.masters()
    return axis.records(workload.states) if plan.offload.startswith("disk:") else 0


def _copies(workload: Workload, plan: Plan, axis: DataAxis) -> int:
    """Of weights and states, on rank 0, of which a checkpoint is written (`train.checkpoint`)."""
    copied = axis.states(workload.states + 1)
    return copied if plan.zero == 0 else copied + axis.whole


def _allocator(workload: Workload, plan: Plan, axis: DataAxis, traced: Trace) -> int:
    """What the C library of the host adds, with its gaps between blocks."""
    states = [] if plan.offload.startswith("disk:") else axis.pieces() * workload.states
    before = axis.sizes if axis.moves else []
    kept = axis.private(gradients=workload.micro_batches > 1)
    return excess(tuple(before), traced.events, tuple(states), tuple(kept), workload.micro_batches)


def _buffers(model: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in model.buffers())
