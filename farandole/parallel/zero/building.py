"""Create the buckets, weights and shards of a `ShardingPlan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.layout import Layout
from farandole.memory.offloaded_tensor import OffloadedTensors
from farandole.mesh import Groups, Mesh
from farandole.parallel.bucket import Bucket
from farandole.parallel.optimizers.shards import OptimizerShards
from farandole.parallel.zero.buffer_pool import BufferPool
from farandole.parallel.zero.gathered_weights import GatheredWeights
from farandole.parallel.zero.gatherer import Gatherer
from farandole.parallel.zero.sharding import BucketPlan, Filling, ShardingPlan, ranks_of
from farandole.parallel.zero.weights import FlatWeights, Masters, WholeWeights


@dataclass(frozen=True)
class Stores:
    """The stores for offloaded gradients and weights."""

    gradients: OffloadedTensors | None = None
    weights: OffloadedTensors | None = None

    def close(self) -> None:
        """Close the stores."""
        for tensors in (self.gradients, self.weights):
            if tensors is not None:
                tensors.close()


@dataclass
class BuiltBuckets:
    """The result of `build`.

    Args:
        buckets: the gradient buckets of the trained parameters.
        shards: for each bucket, the tensors that the optimizer updates.
        weights: the flat weights of all parameters.
        gatherer: the object that gathers sharded weights; None if no weights are gathered.
    """

    buckets: list[Bucket] = field(default_factory=list)
    shards: list[OptimizerShards] = field(default_factory=list)
    weights: list[FlatWeights] = field(default_factory=list)
    gatherer: Gatherer | None = None


def build(
    model: nn.Module,
    plan: ShardingPlan,
    groups: Groups,
    *,
    zero: int,
    masters: Masters = "memory",
    compression: Compression | None = None,
    stores: Stores | None = None,
) -> BuiltBuckets:
    """Create the buckets and weights of `plan` for `model`.  This is a collective call.

    Args:
        groups: the groups of ranks that reduce and shard each bucket.
        masters: where master weights are stored.
        stores: the stores of offloaded gradients and weights; offloaded weights require `plan.gathered`.
    """
    rank, stores, built = groups.comm.rank, stores or Stores(), BuiltBuckets()
    copied = any(bucket.dtype != bucket.master_dtype for bucket in plan.trained)

    def weights_of(bucket: BucketPlan, *, trained: bool) -> FlatWeights:
        number, shards = _number(bucket, rank, zero), groups.of_ranks(bucket.ranks.shards)
        if plan.gathered and (shards is not None or stores.weights is not None):
            return GatheredWeights(
                bucket,
                number,
                shards,
                trained=trained,
                masters=masters,
                offload=stores.weights,
                master_copy=copied and stores.weights is not None,
            )
        return WholeWeights(bucket, number, shards, trained=trained, masters=masters)

    if plan.flat:
        built.weights += [weights_of(bucket, trained=False) for bucket in plan.frozen]
        trained = [weights_of(bucket, trained=True) for bucket in plan.trained]
        built.weights += trained
    pools = _pools(plan.trained, groups)
    for number, (bucket_plan, (pool, place)) in enumerate(zip(plan.trained, pools, strict=True)):
        bucket = Bucket(
            bucket_plan,
            _number(bucket_plan, rank, zero),
            groups.of_ranks(bucket_plan.ranks.shards),
            groups.of_ranks(bucket_plan.ranks.replicas),
            pool=pool,
            place=place,
            compression=compression,
            offload=stores.gradients,
        )
        weights = trained[number] if plan.flat else None
        built.buckets.append(bucket)
        built.shards.append(
            OptimizerShards(
                bucket, weights, _number(bucket_plan, rank, zero), offloaded=masters == "offloaded"
            )
        )
    if plan.gathered:
        built.gatherer = _gatherer(model, plan, groups, built)
    return built


def connect(mesh: Mesh, comm: Communicator, layouts: Iterable[Layout], zero: int) -> Groups:
    """Create the groups of ranks that reduce and shard the tensors in `layouts`.

    This is a collective call.
    """
    alike = {(layout.stages, layout.shards, layout.same): layout for layout in layouts}
    sets = {
        ranks
        for layout in alike.values()
        for rank in sorted({cell.rank for cell in layout.cells(mesh)})
        for found in (ranks_of(mesh, layout, rank, zero),)
        for ranks in (found.shards, found.replicas, found.copies)
    }
    axes = {tuple(axis for axis, _ in layout.shards) for layout in alike.values()}
    return mesh.connect(comm, axes - {()}, sets)


def _number(bucket: BucketPlan, rank: int, zero: int) -> int:
    return bucket.ranks.number(rank) if zero else 0


def _pools(plans: Sequence[BucketPlan], groups: Groups) -> list[tuple[BufferPool | None, int]]:
    """Return (pool, index in the pool) for each bucket; a bucket that is reduced once per step has no pool."""
    kinds: dict[tuple[torch.dtype, torch.device, Filling, tuple[int, ...]], list[int]] = {}
    for number, plan in enumerate(plans):
        if not plan.every_pass:
            continue
        kind = (plan.master_dtype, plan.device, plan.filling, plan.ranks.shards)
        kinds.setdefault(kind, []).append(number)
    found: dict[int, tuple[BufferPool | None, int]] = {}
    for (dtype, device, filling, ranks), numbers in kinds.items():
        lengths = [plans[number].layout.length for number in numbers]
        pool = BufferPool(groups.of_ranks(ranks), lengths, dtype, device, zero_copy=filling == "zero-copy")
        found |= {number: (pool, place) for place, number in enumerate(numbers)}
    return [found.get(number, (None, 0)) for number in range(len(plans))]


def _gatherer(model: nn.Module, plan: ShardingPlan, groups: Groups, built: BuiltBuckets) -> Gatherer:
    """Create the gatherer of the weights.  This is a collective call."""
    # the gatherer gets separate communicators, so that gathers do not wait for gradient reductions
    gathered: list[list[GatheredWeights]] = [[] for _ in range(plan.groups)]
    copies: dict[tuple[int, ...], Communicator] = {}
    for each in built.weights:
        if not isinstance(each, GatheredWeights):
            continue
        gathered[each.plan.group].append(each)
        ranks = each.plan.ranks.shards
        comm = groups.of_ranks(ranks)
        if comm is None:
            continue
        if ranks not in copies:
            copies[ranks] = comm.create_group(range(comm.size))
        each.gather_over(copies[ranks])
    mesh = groups.mesh
    stages = {rank: [cell.pipeline for cell in mesh.of_rank(rank)] for rank in range(mesh.size)}
    alike = [rank for rank, held in stages.items() if held == stages[groups.comm.rank]]
    return Gatherer(model, gathered, built.buckets, plan.needs, groups.comm.create_group(alike))
