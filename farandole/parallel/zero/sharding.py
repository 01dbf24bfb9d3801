"""Plan the buckets: the parameters of each bucket, the ranks that reduce its gradients, and the ranks that shard it.

    plan = plan_sharding(model, mesh, layouts, rank, zero=2)
    plan.trained[0].ranks.column       # the ranks whose gradients are summed
    plan.trained[0].ranks.shards       # the ranks among which states, gradients and weights are sharded

The plan is computed from layouts without communication, with the same result on all ranks.  This also works for models
on the meta device and for any number of ranks.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from farandole.layout import Layout, LayoutError, Reduction, contains
from farandole.memory.blocks import group_by_block
from farandole.mesh import Mesh, by_host
from farandole.plan import DataShard, PlanError

BUCKET_BYTES = 4 << 20
_NO_LIMIT = 1 << 62

REPLICATE = "data.replicate"
"""The sub-axis along which hybrid sharding replicates states."""

Filling = Literal["copied", "copied at once", "zero-copy"]
"""How a bucket is filled: with several copied gradients, one copied gradient, or one gradient in autograd's memory."""


@dataclass(frozen=True)
class ReductionRanks:
    """The ranks with which a given rank reduces a gradient.

    Args:
        column: all ranks whose gradients are summed.
        shards: the ranks in the column among which the sum is sharded, in shard order.
        replicas: the ranks in the column that have the same shard as the given rank.
        weight: the coefficient of the given rank's gradient in the sum; None if the sum is the average over the
            column.
        key: a key that is equal for parameters with the same reduction.
    """

    column: tuple[int, ...]
    shards: tuple[int, ...]
    replicas: tuple[int, ...]
    weight: float | None
    key: tuple[object, ...]

    copies: tuple[int, ...]
    """All ranks that store the tensor: the union of the columns."""

    @property
    def holders(self) -> int:
        """The number of ranks, over all columns, that have the same shard of the sum as the given rank."""
        return len(self.replicas) * len(self.copies) // len(self.column)

    def number(self, rank: int) -> int:
        """Return the index of the shard of `rank`."""
        return self.shards.index(rank)


@dataclass(frozen=True)
class BucketPlan:
    """Parameters with the same dtype and device, in one flat buffer."""

    parameters: Sequence[nn.Parameter]
    names: Sequence[str]
    layout: FlatLayout
    ranks: ReductionRanks
    dtype: torch.dtype
    """The dtype in which the model computes."""
    master_dtype: torch.dtype
    """The dtype in which the optimizer updates parameters, and in which gradients are reduced."""
    group: int = 0
    """The index of the group in which these weights are gathered."""
    every_pass: bool = False
    """Whether gradients are reduced after each backward pass (`zero` 2 and 3), so that no unsharded gradient is kept.

    Ranks with different pipeline stages run backward passes at different times.  Gradients that such ranks share, for
    example the gradient of a tied embedding, are reduced once per step.
    """

    @property
    def device(self) -> torch.device:
        """The device of all parameters."""
        return self.parameters[0].device

    @property
    def filling(self) -> Filling:
        """The method of filling the bucket with gradients."""
        if len(self.parameters) > 1:
            return "copied"
        same = self.dtype == self.master_dtype
        return "zero-copy" if same and not self.layout.has_gaps else "copied at once"


@dataclass(frozen=True)
class ShardingPlan:
    """The buckets of a model.

    Buckets of trained parameters are in the order in which a backward pass completes them.
    """

    trained: list[BucketPlan]
    frozen: list[BucketPlan]
    flat: bool
    """Whether the parameters are in flat buffers, not only their gradients."""
    gathered: bool
    """Whether weights are gathered when they are needed (`gathered_weights`)."""
    needs: list[tuple[nn.Module, list[int]]] = field(default_factory=list)
    """The modules that gather weights, each with the indices of its groups."""

    @property
    def groups(self) -> int:
        """The number of groups in which weights are gathered."""
        return 1 + max((bucket.group for bucket in (*self.trained, *self.frozen)), default=-1)


def box_mesh(
    ranks: int, hosts: Sequence[object] = (), *, data_shard: DataShard = "all", **sizes: int
) -> Mesh:
    """Return a mesh whose inner axes stay within a host if possible.

    Args:
        hosts: the host of every rank.
        data_shard: see `Plan`; if not "all", the data axis is factored into "data.replicate" and "data.shard".
        sizes: the size of each axis; by default, the mesh has only a `data` axis.

    Raises:
        PlanError: with `data_shard="host"`, if hosts have different numbers of ranks or an inner axis spans hosts.
        MeshError: if `data_shard` does not divide the data axis.
    """
    sizes = sizes or {"data": ranks}
    counts = Counter(hosts)
    order = by_host(list(map(str, hosts))) if len(counts) > 1 else list(range(ranks))
    if data_shard == "all":
        return Mesh.box(order, factors=None, **sizes)
    data = sizes.get("data", 1)
    shard = _per_host(list(counts.values()), data) if data_shard == "host" else data_shard
    return Mesh.box(order, factors={"data": {"replicate": data // shard, "shard": shard}}, **sizes)


def _per_host(counts: Sequence[int], data: int) -> int:
    """Return the size of the data axis within one host; `counts` contains the number of ranks on each host."""
    if len(set(counts)) > 1:
        raise PlanError(
            "data_shard='host' requires the same number of ranks on each host, got "
            f"{', '.join(map(str, counts))}; nearest plan: data_shard='all'"
        )
    hosts = max(1, len(counts))
    if data % hosts:
        raise PlanError(
            f"data_shard='host' requires a data axis whose size is a multiple of {hosts} (the number of hosts), got "
            f"data={data}; nearest plan: data_shard='all'"
        )
    return data // hosts


def replicated_layouts(model: nn.Module) -> dict[str, Layout]:
    """Return a dict that maps parameter names to layouts, for a model that is complete on every rank.

    Tied parameters are listed once.
    """
    return {name: Layout(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()}


def plan_sharding(
    model: nn.Module,
    mesh: Mesh,
    layouts: Mapping[str, Layout],
    rank: int,
    *,
    zero: int = 0,
    dtype: torch.dtype | None = None,
    flat: bool | None = None,
    gathered: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    stages: Mapping[str, frozenset[int]] | None = None,
) -> ShardingPlan:
    """Assign the parameters on `rank` to buckets.

    Args:
        layouts: the layouts of all parameters on the mesh, in the same order on all ranks.
        dtype: the dtype in which the model computes; None for the dtypes of the parameters.
        flat: whether parameters are moved into flat buffers; by default, True if states are sharded or `dtype` is
            given.
        gathered: whether weights are gathered block by block.
        bucket_bytes: the approximate size of a bucket's parameters in bytes.
        stages: maps each parameter name to the pipeline stages that contain the parameter; the parameters of a bucket
            belong to the same stages.

    Raises:
        LayoutError: if the gradients of different parts of a tensor are summed over different groups of ranks.
    """
    flat = zero > 0 or dtype is not None if flat is None else flat
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    place = {name: number for number, name in enumerate(layouts)}
    parameters = sorted(model.parameters(), key=lambda p: place[names[id(p)]])
    kept = {id(p) for p in _of_statistics(model)} if dtype is not None else set()
    ranks = {id(p): ranks_of(mesh, layouts[names[id(p)]], rank, zero) for p in parameters}
    groups, needs = group_by_block(model) if gathered else ([], [])
    group_of = {id(p): number for number, members in enumerate(groups) for p in members}

    def plan_of(members: Sequence[nn.Parameter]) -> BucketPlan:
        first = members[0]
        # a conversion of complex parameters would discard their imaginary parts
        keeps = id(first) in kept or not first.is_floating_point()
        wanted = first.dtype if dtype is None or keeps else dtype
        shards = len(ranks[id(first)].shards) if zero else 1
        shapes = [p.shape for p in members]
        # gradients of parameters outside of flat buffers keep their strides, which fused optimizers require
        strides = None if flat else [torch.empty_like(p, device="meta").stride() for p in members]
        return BucketPlan(
            members,
            [names[id(p)] for p in members],
            FlatLayout(shapes, shards, strides),
            ranks[id(first)],
            wanted,
            master_type(first) if flat else first.dtype,
            group_of.get(id(first), 0),
            zero >= 2 and len({_stages_on(mesh, each) for each in ranks[id(first)].column}) == 1,
        )

    def buckets(members: Iterable[nn.Parameter]) -> list[BucketPlan]:
        keys = {
            id(p): (
                ranks[id(p)].key,
                id(p) in kept,
                group_of.get(id(p), 0),
                stages and stages[names[id(p)]],
            )
            for p in parameters
        }
        filled = fill(members, _NO_LIMIT if gathered else bucket_bytes, keys)
        if gathered:
            # the backward pass starts with the last block; gradients of parameters that belong to no block, or to
            # several blocks, are complete last
            order = [*reversed(range(len(groups) - 1)), len(groups) - 1]
            filled.sort(key=lambda each: order.index(group_of[id(each[0])]))
        return [plan_of(each) for each in filled]

    return ShardingPlan(
        buckets(p for p in reversed(parameters) if p.requires_grad),
        buckets(filter(_is_frozen, parameters)) if flat else [],
        flat,
        gathered,
        needs,
    )


def moves_parameters(
    zero: int, dtype: torch.dtype | None, offload: str, layouts: Mapping[str, Layout]
) -> bool:
    """Return whether parameters are moved to flat buffers.

    This is necessary if an axis shards parameters, if ZeRO shards states, or if the optimizer updates master weights.
    """
    sharded = any(layout.shards for layout in layouts.values())
    return zero > 0 or dtype is not None or offload != "none" or sharded


def ranks_of(mesh: Mesh, layout: Layout, rank: int, zero: int) -> ReductionRanks:
    """Return the ranks that reduce and shard the gradient of a tensor on `rank`.

    Raises:
        LayoutError: if these ranks differ between elements of the tensor.
    """
    # tensors with equal layouts share the cached result; without shards, shapes do not matter either
    alike = replace(layout, name="", shape=layout.shape if layout.shards else ())
    try:
        return _ranks_of(mesh, alike, rank, zero)
    except LayoutError:
        return _ranks_of(mesh, layout, rank, zero)  # the message contains the name


@functools.lru_cache(maxsize=4096)
def _ranks_of(mesh: Mesh, layout: Layout, rank: int, zero: int) -> ReductionRanks:
    own = [box for cell in mesh.of_rank(rank) for box in layout.boxes(mesh, cell)]
    pieces = [piece for piece in layout.pieces(mesh) if any(contains(box, piece) for box in own)]
    found = [layout.reduction(mesh, piece) for piece in pieces or own[:1]]
    if any(other != found[0] for other in found[1:]):
        raise LayoutError(
            f"{layout.name}: the gradients of the parts that rank {rank} stores are reduced over different groups of "
            "ranks; store these parts as separate parameters"
        )
    return _ranks(mesh, found[0], rank, zero)


def _ranks(mesh: Mesh, reduction: Reduction, rank: int, zero: int) -> ReductionRanks:
    column = reduction.columns[reduction.column_of(rank)]
    shards, replicas = (column, (rank,)) if zero else ((rank,), column)
    if zero:
        parts = _divided(mesh, column, zero)
        if len({len(members) for members in parts}) == 1:
            shards = next(members for members in parts if rank in members)
            replicas = tuple(sorted(members[shards.index(rank)] for members in parts))
    losses = mesh.losses
    weights = {each: weight / losses for each, weight in reduction.weights.items()}
    even = all(weights[each] == 1 / len(column) for each in column)
    return ReductionRanks(
        column,
        shards,
        replicas,
        None if even else weights[rank],
        (reduction.columns, tuple(sorted(reduction.weights.items()))),
        tuple(sorted(each for ranks in reduction.columns for each in ranks)),
    )


@functools.lru_cache(maxsize=1024)
def _divided(mesh: Mesh, column: tuple[int, ...], zero: int) -> list[tuple[int, ...]]:
    """Divide the ranks of a column into groups; each group shards one copy of the sum."""
    parts: dict[tuple[object, ...], list[int]] = {}
    for each in column:
        cells = mesh.of_rank(each)
        replica = mesh.coordinate(cells[0], REPLICATE) if REPLICATE in mesh.sub_axes else 0
        # each stage has its own copy of gathered weights, because stages compute different blocks
        stages = _stages_on(mesh, each) if zero == 3 else ()
        parts.setdefault((replica, stages), []).append(each)
    return [tuple(members) for members in parts.values()]


def _stages_on(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the pipeline coordinates of a rank: one, or one per direction in a mirrored pipeline."""
    return tuple(cell.pipeline for cell in mesh.of_rank(rank))


def fill(
    parameters: Iterable[nn.Parameter], bucket_bytes: int, keys: Mapping[int, object] | None = None
) -> list[list[nn.Parameter]]:
    """Group parameters into buckets of about `bucket_bytes`, in order; a bucket has one dtype, device and key.

    A parameter of at least `bucket_bytes` gets a separate bucket, so that its gradient need not be copied (`bucket`).

    Args:
        keys: maps the `id` of each parameter to a key.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device, object], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for parameter in parameters:
        if parameter.nbytes >= bucket_bytes:
            full.append([parameter])
            continue
        kind = (parameter.dtype, parameter.device, None if keys is None else keys[id(parameter)])
        members = open_buckets.setdefault(kind, [])
        members.append(parameter)
        if sum(member.nbytes for member in members) >= bucket_bytes:
            full.append(open_buckets.pop(kind))
    return full + list(open_buckets.values())


def master_type(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's master weights: the parameter's dtype, but at least fp32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _of_statistics(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of BatchNorm and similar layers, which must stay fp32."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.parameters(recurse=False)


def _is_frozen(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is frozen and an ordinary floating-point tensor."""
    plain = parameter.is_floating_point() and type(parameter.data) is torch.Tensor
    return not parameter.requires_grad and plain


# ---- flat buffers ----

ALIGNMENT = 16
"""The alignment of tensors in a flat buffer, in elements (in fp32, a cache line).

Kernels then treat a tensor in the buffer like a separately allocated tensor.
"""


@dataclass(frozen=True)
class FlatRange:
    """The part of a tensor that is in a shard: `length` consecutive elements of the flattened tensor.

    The part begins at element `start` of tensor `index`, and at element `offset` of the shard.
    """

    index: int
    start: int
    offset: int
    length: int


class FlatLayout:
    """The positions of tensors with `shapes` in a flat buffer that consists of `shards` shards of equal length.

    A shard may end within a tensor.  Elements between tensors and after the last tensor are padding.  With several
    shards, tensors are contiguous; with one shard, they can have other dense `strides`.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        shards: int = 1,
        strides: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.shards, self._strides = shards, strides
        self.counts = [math.prod(shape) for shape in self.shapes]
        self.starts: list[int] = []
        end = 0
        for count in self.counts:
            self.starts.append(end)
            end += -(-count // ALIGNMENT) * ALIGNMENT
        self.shard_length = -(-end // (shards * ALIGNMENT)) * ALIGNMENT
        self.length = self.shard_length * shards

    @property
    def has_gaps(self) -> bool:
        """Whether the buffer has padding."""
        return self.length != sum(self.counts)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors as views of a buffer."""
        if self._strides is not None:
            offset = int(buffer.storage_offset())
            return [
                buffer.as_strided(shape, stride, offset + start)
                for start, shape, stride in zip(self.starts, self.shapes, self._strides, strict=True)
            ]
        return [
            buffer[start : start + count].view(shape)
            for start, count, shape in zip(self.starts, self.counts, self.shapes, strict=True)
        ]

    def zero_gaps(self, buffer: Tensor) -> None:
        """Set the padding in a buffer to zero, without touching the tensors' memory."""
        ends = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        for end, start in zip([0, *ends], [*self.starts, self.length], strict=True):
            if end < start:
                buffer[end:start].zero_()

    def shard(self, buffer: Tensor, number: int) -> Tensor:
        """Return shard `number` of a buffer."""
        return buffer[number * self.shard_length : (number + 1) * self.shard_length]

    def ranges(self, number: int) -> list[FlatRange]:
        """Return the parts of tensors that are in shard `number`, in order; empty tensors are omitted."""
        low, high = number * self.shard_length, (number + 1) * self.shard_length
        found = []
        for index, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            first, last = max(start, low), min(start + count, high)
            if first < last:
                found.append(FlatRange(index, first - start, first - low, last - first))
        return found
