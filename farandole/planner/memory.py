"""Compute the memory of a rank, excluding activations, from the buckets of the sharded model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from farandole.comm.compression import compression_named
from farandole.comm.compression.base import Compressor
from farandole.comm.hierarchical.windows import WINDOW_BYTES
from farandole.memory.blocks import blocks_of
from farandole.memory.offloaded_tensor import WRITES
from farandole.parallel.zero.buffer_pool import DEPTH, buffer_lengths
from farandole.parallel.zero.gatherer import CAPACITY, READ_AHEAD
from farandole.parallel.zero.sharding import (
    BucketPlan,
    ShardingPlan,
    box_mesh,
    moves_parameters,
    plan_sharding,
    ranks_of,
    replicated_layouts,
)
from farandole.plan import Plan, PlanError
from farandole.planner.workload import Machine, Workload, weight_type

RECORD_BUFFERS = 3
"""The number of offloaded records in memory at the same time (`memory.record_stream`)."""


@dataclass(frozen=True)
class StateBytes:
    """The memory that one rank needs for a sharded model, excluding activations.

    All sizes are in bytes.

    Args:
        sharding: the buckets.
        weights: the weights with which the model computes, and the model's buffers.
        gradients: the gradients that are kept until the update.
        masters: the master weights, which the optimizer updates.
        updated: the parameters that this rank updates, in the dtype of the master weights.
        optimizer: optimizer states and master weights in device memory; if they are offloaded to a disk, the transfer
            buffers.
        records: offloaded states and master weights.
        compression: compression errors and factors that are kept until the next step.
        pools: with `zero` 2 and 3, unsharded gradients before their reduction, and gradient shards being offloaded.
        gathered: with `zero=3`, gathered weights, and shards prefetched from an offload store.
        copies: copies of weights and states for a checkpoint.  States that are offloaded to a disk are not copied.
        whole: the full model while the rank builds it.
        largest_block: the largest block of the model.
    """

    sharding: ShardingPlan
    weights: int
    gradients: int
    masters: int
    updated: int
    optimizer: int
    records: int
    compression: int
    pools: int
    gathered: int
    copies: int
    whole: int
    largest_block: int


def state_bytes(workload: Workload, plan: Plan, ranks: int, machine: Machine) -> StateBytes:
    """Shard the model of `workload` as the engine would, and return the memory of rank `workload.rank`.

    Raises:
        PlanError: if the plan is invalid for this number of ranks, or hosts would have different numbers of ranks.
    """
    plan.sizes(ranks)
    if ranks % machine.hosts:
        raise PlanError(
            f"{ranks} ranks cannot be split equally over {machine.hosts} hosts; use a multiple of {machine.hosts} ranks"
        )
    model, parameters = workload.model, list(workload.model.parameters())
    sharding = _sharding(workload, plan, ranks, machine)
    trained, frozen = sharding.trained, sharding.frozen
    moved = {id(parameter) for bucket in (*trained, *frozen) for parameter in bucket.parameters}
    weights = sum(p.nbytes for p in parameters if id(p) not in moved)
    away = "optimizer" if plan.offload_folder is None and machine.host else plan.offloaded
    for bucket in (*trained, *frozen) if away != "parameters" else ():
        sharing = len(bucket.ranks.shards) if plan.zero and shares_memory(bucket, ranks, machine) else 1
        length = bucket.layout.shard_length if sharding.gathered else bucket.layout.length // sharing
        weights += length * bucket.dtype.itemsize
    elsewhere = plan.offload != "none" and not machine.host
    masters = [0] * len(trained)
    if plan.rounding == "nearest":
        copied = has_master_copies(sharding, plan)
        masters = [shard_bytes(b) if elsewhere or copied or b.dtype != b.master_dtype else 0 for b in trained]
    records = [workload.states * shard_bytes(b) + own for b, own in zip(trained, masters, strict=True)]
    if plan.offload_folder is not None:
        optimizer = min(RECORD_BUFFERS, max(2, len(records))) * max(records, default=0)
    else:
        optimizer = 0 if elsewhere else sum(records)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    gradients = sum(shard_bytes(b) if b.every_pass else whole_bytes(b) for b in trained)
    return StateBytes(
        sharding,
        weights=weights + buffers,
        gradients=gradients if away == "optimizer" else 0,
        masters=sum(masters),
        updated=sum(map(shard_bytes, trained)),
        optimizer=optimizer,
        records=sum(records) if plan.offload != "none" else 0,
        compression=sum(_compression(b, workload.rank, plan, ranks, machine) for b in trained),
        pools=_pools(model, sharding)
        + (sum(_largest(map(shard_bytes, trained), DEPTH + WRITES)) if away != "optimizer" else 0),
        gathered=_gathered(sharding, ahead=READ_AHEAD + 1 if away == "parameters" else 0),
        copies=_copies(workload, plan) * sum(map(shard_bytes, trained)),
        whole=sum(parameter.nbytes for parameter in parameters) + buffers,
        largest_block=max(
            (sum(p.nbytes for p in block.parameters()) for _, block in blocks_of(model)), default=0
        ),
    )


def bytes_per_parameter(plan: Plan, ranks: int, machine: Machine, *, checkpoints: bool = False) -> float:
    """Return the bytes per parameter, summed over all ranks, when a large model is trained with Adam.

    By default, the sum includes the weights, gradients and optimizer states in device memory.  With `checkpoints`, it
    includes only the copies from which checkpoints are written.
    """
    model = nn.Linear(1024, 1024, bias=False)
    state = state_bytes(Workload(model=model, example=None), plan, ranks, machine)
    if checkpoints:
        kept = ranks * state.copies
    else:
        optimizer = state.optimizer if plan.offload_folder is None else 0
        kept = ranks * (state.weights + state.gradients + optimizer)
    return kept / model.weight.numel()


def has_master_copies(sharding: ShardingPlan, plan: Plan) -> bool:
    """Return whether offloaded weights have master copies in another dtype."""
    return plan.offloaded == "parameters" and any(b.dtype != b.master_dtype for b in sharding.trained)


def _copies(workload: Workload, plan: Plan) -> int:
    """Return the number of values per parameter that are copied for a checkpoint."""
    if plan.offload_folder is None:
        return 1 + workload.states
    return 0 if plan.offloaded == "parameters" else 1


def _largest(sizes: Iterable[int], count: int) -> list[int]:
    return sorted(sizes)[-count:] if count else []


def shares_memory(bucket: BucketPlan, ranks: int, machine: Machine) -> bool:
    """Return whether the ranks that shard a bucket share memory."""
    return machine.shared and len({machine.host_of(rank, ranks) for rank in bucket.ranks.shards}) == 1


def compressor_of(bucket: BucketPlan, plan: Plan, ranks: int, machine: Machine) -> Compressor | None:
    """Return the compressor of a bucket, or None if its gradient is not compressed.

    A gradient is compressed only if its replicas are on several hosts.
    """
    compression = compression_named(plan.compression)
    if compression is None or len(machine.members_by_host(bucket.ranks.replicas, ranks)) == 1:
        return None
    layout = bucket.layout
    return compression.for_tensor(layout.length, list(zip(layout.starts, layout.shapes, strict=True)))


def _compression(bucket: BucketPlan, rank: int, plan: Plan, ranks: int, machine: Machine) -> int:
    """Return the size in bytes of the compression state of `rank`."""
    compressor = compressor_of(bucket, plan, ranks, machine)
    if compressor is None:
        return 0
    hosts = machine.members_by_host(bucket.ranks.replicas, ranks)
    leaders, leader = min(map(len, hosts.values())), hosts[machine.host_of(rank, ranks)].index(rank)
    if leader >= leaders:
        return 0
    return compressor.state_bytes(leaders, leader, WINDOW_BYTES // bucket.master_dtype.itemsize)


def _sharding(workload: Workload, plan: Plan, ranks: int, machine: Machine) -> ShardingPlan:
    model = workload.model
    hosts = [machine.host_of(rank, ranks) for rank in range(ranks)]
    mesh = workload.mesh or box_mesh(ranks, hosts or (), data_shard=plan.data_shard)
    layouts = workload.layouts or replicated_layouts(model)
    dtype = weight_type(plan)
    dividing = {
        ranks_of(mesh, layouts[name], workload.rank, plan.zero).shards for name, _ in model.named_parameters()
    }
    apart = not machine.shared or any(len({hosts[rank] for rank in shards}) > 1 for shards in dividing)
    return plan_sharding(
        model,
        mesh,
        layouts,
        workload.rank,
        zero=plan.zero,
        dtype=dtype,
        flat=moves_parameters(plan.zero, dtype, plan.offload, layouts),
        gathered=plan.zero == 3
        and (plan.offloaded == "parameters" or (apart and any(len(shards) > 1 for shards in dividing))),
    )


def shard_bytes(bucket: BucketPlan) -> int:
    """Return the size in bytes of this rank's shard in the dtype of the master weights."""
    return bucket.layout.shard_length * bucket.master_dtype.itemsize


def whole_bytes(bucket: BucketPlan) -> int:
    """Return the size in bytes of the unsharded gradient in the dtype of the master weights."""
    return bucket.layout.length * bucket.master_dtype.itemsize


def _pools(model: nn.Module, sharding: ShardingPlan) -> int:
    """Return the size in bytes of pooled buffers and of zero-copy gradients before their reduction."""
    several = Counter(group for _, groups in sharding.needs for group in groups)
    several += Counter(group for module, groups in sharding.needs if module is model for group in groups)
    kinds: dict[object, list[BucketPlan]] = defaultdict(list)
    for bucket in filter(lambda bucket: bucket.every_pass, sharding.trained):
        kinds[bucket.master_dtype, bucket.device, bucket.filling, bucket.ranks.shards].append(bucket)
    total = 0
    for buckets in kinds.values():
        sizes = [whole_bytes(bucket) for bucket in buckets]
        if buckets[0].filling == "zero-copy":  # no computation overlaps the last reduction
            total += max((sum(sizes[at : at + DEPTH]) for at in range(len(sizes) - 1)), default=0)
            continue
        total += sum(buffer_lengths(sizes))
        # A bucket used by several blocks or by no block keeps its buffer from its first gradient to the end of the
        # pass. Buckets that would use the same buffer then have separate buffers.
        for at, bucket in enumerate(buckets):
            if several[bucket.group] > 1 and bucket.filling == "copied":
                total += max(sizes[at % DEPTH : at : DEPTH], default=0)
    return total


def _gathered(sharding: ShardingPlan, ahead: int) -> int:
    """Return the peak size in bytes of gathered weights and `ahead` prefetched shards."""
    whole: dict[int, int] = defaultdict(int)
    shards: dict[int, int] = defaultdict(int)
    for bucket in (*sharding.trained, *sharding.frozen) if sharding.gathered else ():
        whole[bucket.group] += bucket.layout.length * bucket.dtype.itemsize
        shards[bucket.group] += bucket.layout.shard_length * bucket.dtype.itemsize
    return sum(_largest(whole.values(), CAPACITY)) + sum(_largest(shards.values(), ahead))
