"""Whether a plan fits, and how long a step of it takes, before a rank has started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from farandole.data.wording import size
from farandole.memory.swap import BEHIND_BYTES
from farandole.plan import Plan, PlanError
from farandole.planner.memory import StateBytes, shard_bytes, state_bytes
from farandole.planner.step_time import step_time
from farandole.planner.trace import Trace
from farandole.planner.workload import Machine, Workload

ALLOCATOR_BYTES = 45 << 20
"""Of the C library: gaps between blocks, small objects, and what kernels allocate inside a call, but at most as much as the tensors of a
pass.  The median over 19 trainings of GPTs of 8 and 15 M parameters on 2 ranks (docs/explanation/planner.md; torch 2.13, glibc 2.36)."""


@dataclass(frozen=True)
class Estimate:
    """What a plan needs on the rank that needs most.

    Args:
        parts: bytes of a step, by name, of which the sum is that of its worst moment; bytes that are not in use at once are negative.
        start: bytes while the model is being divided, before the first step.
        times: seconds of a step by what they are spent on.
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

    def outcome(self, memory: int) -> str:
        """Return `fits`, `fits with offload` (or swap) or `does not fit (needs X more)`, with `memory` bytes for each rank."""
        if not self.fits(memory):
            return f"does not fit (needs {size(self.peak - memory)} more)"
        moved = [name for name in ("offload", "swap") if getattr(self.plan, name) != "none"]
        return " ".join(["fits", *(["with", " and ".join(moved)] if moved else [])])


def estimate(
    model: nn.Module, plan: Plan, ranks: int, *, example: Any, machine: Machine, **workload: Any
) -> Estimate:
    """Return what `plan` needs for training `model` on `ranks` ranks of `machine`.

        machine = Machine(memory=16 << 30)
        estimate(model, Plan(zero=2), 8, example=tokens, loss=loss_of, machine=machine).outcome(machine.memory)

    Nothing is computed, and the model may lie on the meta device; afterwards it recomputes nothing.

    Args:
        example: a rank's micro-batch.
        workload: further keywords of `Workload` (`loss`, `micro_batches`, ...).

    Raises:
        PlanError: where the plan is not one for so many ranks or for this machine.
    """
    return estimate_workload(Workload(model=model, example=example, **workload), plan, ranks, machine)


def estimate_workload(
    workload: Workload, plan: Plan, ranks: int, machine: Machine, traced: Trace | None = None
) -> Estimate:
    """The same of a workload; `traced` is its trace under this plan, if that is known already."""
    _check(plan, machine)
    state = state_bytes(workload, plan, ranks, machine)
    traced = traced or workload.trace(plan)
    process = machine.process + machine.libraries * machine.hosts // ranks
    swapped = _swapped(plan, traced)
    copies = workload.checkpoints and machine.host
    parts = {
        "process": process,
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "buffers": state.pools + state.gathered,
        "activations": traced.saved - swapped,
        "backward": traced.transient,
        "reused": -_reused(workload, plan, state, traced.peak - swapped),
        "allocator": _allocator(workload, plan, state, traced) if machine.host else 0,
        "checkpoint": state.copies if copies else 0,
    }
    times = step_time(workload, plan, ranks, state, traced, machine)
    return Estimate(plan, parts, process + _start(workload, plan, state), times)


def _check(plan: Plan, machine: Machine) -> None:
    for name in ("offload", "swap"):
        place = getattr(plan, name)
        if place.startswith("disk:") and machine.disk is None:
            raise PlanError(
                f"{name}={place!r} and a machine without a disk: give Machine(disk=Bandwidth(...))"
            )
    if plan.swap != "none" and machine.host == (plan.swap == "host"):
        where, works = ("a host", "disk:FOLDER") if machine.host else ("an accelerator", "host")
        raise PlanError(f"swap={plan.swap!r} for models on {where}: swap={works!r} works there")
    if plan.lora is not None:
        raise PlanError(
            "lora: adapters are not added here; add them to the model with `parallel.lora.add_lora`, and plan without lora"
        )
    if plan.offloaded != "optimizer" and plan.offload_folder is not None and not machine.host:
        raise PlanError(
            f"offloaded={plan.offloaded!r} with offload={plan.offload!r} for models on an accelerator: offload='host' or "
            f"offloaded='optimizer' works there"
        )
    if plan.precision not in machine.flops:
        raise PlanError(
            f"precision={plan.precision!r} and Machine(flops=) has speeds of {', '.join(machine.flops)} only: give its own"
        )


def _allocator(workload: Workload, plan: Plan, state: StateBytes, traced: Trace) -> int:
    """The measured allowance, and freed memory that the C library keeps.

    With a swap it maps most blocks one by one.  States that go to a disk are allocated in the first step and then copied.
    """
    found = min(ALLOCATOR_BYTES, traced.peak)
    if plan.swap == "none":
        found += traced.resident_peak - traced.peak
    if plan.offload_folder is not None:
        found += workload.states * max(map(shard_bytes, state.sharding.trained), default=0)
    return found


def _start(workload: Workload, plan: Plan, state: StateBytes) -> int:
    """Bytes while the model is being divided.

    Each rank makes the whole model, and frees a bucket when it has been copied; or it has memory for all that it keeps,
    and for a block of the model.  Master weights are made in memory, also where they are offloaded afterwards; with stages 0 and
    1 gradients exist before them.
    """
    divided = state.weights + state.masters + (state.gradients if plan.zero < 2 else 0)
    return divided + state.largest_block if workload.block_by_block else max(divided, state.whole)


def _swapped(plan: Plan, traced: Trace) -> int:
    """Saved bytes that are surely not in memory: at most `BEHIND_BYTES` of what is swapped wait for their copies.

    What a selective recomputation keeps is not swapped.
    """
    if plan.swap == "none" or plan.recompute in ("selective", "attention", "auto"):
        return 0
    return max(0, traced.swappable - BEHIND_BYTES)


def _reused(workload: Workload, plan: Plan, state: StateBytes, activations: int) -> int:
    """Gradient bytes that reuse activation memory.

    With stages 2 and 3 gradients have memory from their reduction until the next step (`parallel.bucket`).  With one pass in
    a step there are none at the loss, where most activations are, and no activations at its end.
    """
    return min(state.gradients, activations) if plan.zero >= 2 and workload.micro_batches == 1 else 0
