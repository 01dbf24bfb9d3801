"""The seconds of a step: work and bytes over the speeds of a machine.

compute        products at the speed of products, everything else at that of memory (Williams et al., 2009,
               "Roofline"), for each micro-batch
communication  by the ring's cost: an all-reduce of S bytes among n ranks moves 2 (n - 1) / n S through each, a
               reduce-scatter or all-gather half of that; what goes on beside the backward pass is not waited for
update         the optimizer reads and writes each of its numbers once
disk           states that are read and written back in each step, by all ranks on one disk
"""

from __future__ import annotations

from farandole.memory.estimate.data_axis import DataAxis
from farandole.memory.estimate.machine import Machine
from farandole.memory.estimate.trace import Trace
from farandole.memory.estimate.workload import Workload
from farandole.plan import Plan

_BACKWARD = 2 / 3
"""The part of the computation in which gradients become ready: each product has two in the backward pass."""


def seconds_of(
    workload: Workload, plan: Plan, axis: DataAxis, traced: Trace, machine: Machine
) -> dict[str, float]:
    """Seconds of a step by what they are spent on."""
    speed = machine.flops[plan.precision]
    compute = workload.micro_batches * (traced.flops / speed + traced.moved / machine.stream)
    communication = _reduction(workload, plan, axis, machine, _BACKWARD * compute)
    communication += _gathering(workload, plan, axis, machine)
    found = {"compute": compute, "communication": communication}
    owned = axis.states(1)
    # the norm reads gradients, clipping reads and writes them; each state and weight is read and written
    found["update"] = owned * (1 + 2 + 1 + 2 * (workload.states + 1)) / machine.stream
    if plan.offload.startswith("disk:"):
        on_host = axis.divided * axis.copies // machine.hosts
        moved = on_host * (axis.states(workload.states) + axis.masters())
        assert machine.disk is not None  # `estimate` has seen to it
        found["disk"] = moved / machine.disk.read + moved / machine.disk.write
    return found


def _reduction(workload: Workload, plan: Plan, axis: DataAxis, machine: Machine, behind: float) -> float:
    """Of the gradients; `behind` are the seconds in which it may go on unnoticed."""
    factor = _among(axis.divided) * (2 if plan.zero == 0 else 1)
    factor += 2 * _among(axis.copies) / axis.divided  # each rank's shard, with those that have the same
    passes = workload.micro_batches if plan.zero >= 2 else 1
    whole = passes * factor * axis.reduced() / machine.bandwidth
    if not machine.overlap:
        return whole
    last = factor * axis.last() / machine.bandwidth
    return max(last, whole - behind * passes / workload.micro_batches)


def _gathering(workload: Workload, plan: Plan, axis: DataAxis, machine: Machine) -> float:
    """Of the weights, where ranks do not have one copy in common."""
    if plan.zero == 0 or axis.divided == 1 or axis.shared:
        return 0.0
    whole = axis.weights() * (axis.divided if axis.gathers else 1)
    times = 2 * workload.micro_batches if axis.gathers else 1
    return times * _among(axis.divided) * whole / machine.bandwidth


def _among(ranks: int) -> float:
    """The part of a tensor that a rank sends in one half of a ring all-reduce."""
    return (ranks - 1) / ranks
