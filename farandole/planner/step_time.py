"""Predict the seconds per step by dividing the work and the transferred bytes by the machine's speeds.

compute        for each micro-batch, matrix products at the machine's FLOP/s, and all other operations at its memory
               bandwidth (Williams et al., 2009, "Roofline")
communication  ring algorithms: each of n ranks sends 2 (n - 1) / n S bytes in an all-reduce of S bytes, and half as
               many in a reduce-scatter or all-gather; time that overlaps the backward pass does not count
update         the reads and writes of gradients, optimizer states and weights in the gradient norm, gradient clipping
               and the optimizer, at the machine's memory bandwidth
offload        in each step, offloaded data pass through the disk or the link between accelerator and host; transfers of
               gradients and weights overlap the passes, and count only if they take longer than the passes
swap           activations are copied out and back during the passes; only the time beyond the passes counts
"""

from __future__ import annotations

from collections.abc import Sequence

from farandole.parallel.zero.sharding import BucketPlan
from farandole.plan import Plan
from farandole.planner.memory import StateBytes, compressor_of, has_master_copies, shares_memory, whole_bytes
from farandole.planner.trace import Trace
from farandole.planner.workload import Machine, Workload

_BACKWARD = 2 / 3
"""The fraction of the computation that belongs to the backward pass: two of the three matrix products per weight."""


def step_time(
    workload: Workload, plan: Plan, ranks: int, state: StateBytes, traced: Trace, machine: Machine
) -> dict[str, float]:
    """Return a dict that maps each activity to its predicted seconds per step.

    The keys are "compute", "communication" and "update", and, if the plan uses them, "offload" and "swap".
    """
    one_pass = traced.flops / machine.flops[plan.precision] + traced.moved / machine.stream
    compute = workload.micro_batches * one_pass
    passes = workload.micro_batches if plan.zero >= 2 else 1
    hidden = _BACKWARD * one_pass * passes if machine.overlap else 0.0
    reduction = passes * _reduction_s(state.sharding.trained, plan, ranks, machine)
    # no computation overlaps the reduction of the last bucket
    last = _reduction_s(state.sharding.trained[-1:], plan, ranks, machine) if machine.overlap else 0.0
    between_layers = sum(
        nbytes / machine.bandwidth_among(group, ranks) for group, nbytes in traced.sent.items()
    )
    communication = max(last, reduction - hidden)
    communication += workload.micro_batches * between_layers
    communication += _gathering_s(workload, plan, ranks, state, machine)
    # the norm reads gradients, clipping reads and writes them, and the update reads them; each state and weight is read
    # and written
    update = state.updated * (1 + 2 + 1 + 2 * (workload.states + 1)) / machine.stream
    found = {"compute": compute, "communication": communication, "update": update}
    if plan.offload != "none":
        found["offload"] = _offload(workload, plan, ranks, state, machine, compute)
    if plan.swap != "none":
        found["swap"] = workload.micro_batches * _swap(traced, ranks, machine, one_pass)
    return found


def _reduction_s(buckets: Sequence[BucketPlan], plan: Plan, ranks: int, machine: Machine) -> float:
    """Return the seconds needed to reduce every bucket over the ranks that shard it and then over its replicas."""
    total = 0.0
    for bucket in buckets:
        shards, replicas = bucket.ranks.shards, bucket.ranks.replicas
        compressor = compressor_of(bucket, plan, ranks, machine)
        hosts = len(machine.members_by_host(replicas, ranks))
        sent_fraction = 1.0 if compressor is None else compressor.sent_fraction(hosts)
        seconds = _ring(len(shards)) / machine.bandwidth_among(shards, ranks)
        seconds += (
            2 * _ring(len(replicas)) / len(shards) / machine.bandwidth_among(replicas, ranks, sent_fraction)
        )
        total += seconds * whole_bytes(bucket)
    return total


def _gathering_s(workload: Workload, plan: Plan, ranks: int, state: StateBytes, machine: Machine) -> float:
    """Return the seconds per step that this rank needs to send weights."""
    sharding = state.sharding
    if plan.zero == 0:
        return 0.0
    gathered = [*sharding.trained, *sharding.frozen] if sharding.gathered else sharding.trained
    # `gathered` weights are sent in each forward and backward pass, other updated weights once per step
    times = 2 * workload.micro_batches if sharding.gathered else 1
    return sum(
        times
        * _ring(len(bucket.ranks.shards))
        * bucket.layout.length
        * bucket.dtype.itemsize
        / machine.bandwidth_among(bucket.ranks.shards, ranks)
        for bucket in gathered
        if sharding.gathered or not shares_memory(bucket, ranks, machine)
    )


def _offload(
    workload: Workload, plan: Plan, ranks: int, state: StateBytes, machine: Machine, compute: float
) -> float:
    passes, gradients = workload.micro_batches, state.updated
    back = _stored(state.sharding.trained)
    early_read = early_written = 0  # during the passes
    if plan.offloaded != "optimizer":  # a pass adds to the gradients of earlier passes
        early_read, early_written = (passes - 1) * gradients, passes * gradients
    if plan.offloaded == "parameters":
        early_read += 2 * passes * (back + _stored(state.sharding.frozen))
    if plan.offload_folder is None:
        if machine.host:
            return 0.0
        moved = gradients if plan.offloaded == "optimizer" else 0
        moved += back if plan.offloaded != "parameters" else 0
        early = (early_read + early_written) / machine.host_link
        return moved / machine.host_link + max(0.0, early - compute)
    read = written = state.records
    if plan.offloaded != "optimizer":
        read += gradients
    if plan.offloaded == "parameters":
        read += 0 if has_master_copies(state.sharding, plan) else back
        written += back
    early = _disk(early_read, early_written, ranks, machine)
    return _disk(read, written, ranks, machine) + max(0.0, early - compute)


def _stored(buckets: Sequence[BucketPlan]) -> int:
    """Return the size in bytes of this rank's weight shards."""
    return sum(bucket.layout.shard_length * bucket.dtype.itemsize for bucket in buckets)


def _swap(traced: Trace, ranks: int, machine: Machine, one_pass: float) -> float:
    """Return the seconds that the forward and backward passes of one micro-batch wait for swapped activations."""
    moved = traced.swapped
    if machine.host:
        away, back = _disk(0, moved, ranks, machine), _disk(moved, 0, ranks, machine)
    else:
        away = back = moved / machine.host_link
    return max(0.0, away - (1 - _BACKWARD) * one_pass) + max(0.0, back - _BACKWARD * one_pass)


def _disk(read: float, written: float, ranks: int, machine: Machine) -> float:
    """Return the seconds that a host's disk needs if each of its ranks reads `read` and writes `written` bytes."""
    assert machine.disk is not None  # checked by `estimate`
    return ranks // machine.hosts * (read / machine.disk.read + written / machine.disk.write)


def _ring(ranks: int) -> float:
    """Return the fraction of a tensor that each rank sends in one of the two phases of a ring all-reduce."""
    return (ranks - 1) / ranks
