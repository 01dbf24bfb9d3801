"""Move the parameters of a model into sharded buckets; the values come from rank 0, from a function, or from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.layout import Layout
from farandole.mesh import Groups
from farandole.parallel.optimizers.offloading import stores_at
from farandole.parallel.zero.building import BuiltBuckets, Stores, build
from farandole.parallel.zero.initial_values import (
    Initialize,
    WeightSource,
    allocate,
    broadcast_parameters,
    fill_model,
    is_deferred,
    stand_in,
)
from farandole.parallel.zero.sharding import ShardingPlan, plan_sharding, ranks_of
from farandole.parallel.zero.weights import Masters
from farandole.plan import Offloaded, Place


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """Options for sharding and storing the states of a model; see `Engine`."""

    zero: int
    dtype: torch.dtype | None
    flat: bool
    bucket_bytes: int
    masters: Masters
    place: Place
    offloaded: Offloaded
    compression: Compression | None = None
    stages: Mapping[str, frozenset[int]] | None = None
    """The pipeline stages that contain each parameter, by name."""


@dataclass(frozen=True)
class States:
    """The sharded states of a model.

    Args:
        built: the buckets, weights and shards.
        stores: the stores of offloaded gradients and weights.
        source: the files from which the weights must still be read, if the model was on the meta device.
    """

    built: BuiltBuckets
    stores: Stores
    source: WeightSource | None


def shard_states(
    model: nn.Module,
    complete: nn.Module,
    groups: Groups,
    layouts: Mapping[str, Layout],
    options: StateOptions,
    initialize: Initialize | None,
) -> States:
    """Shard the states of `model`, and give the parameters their initial values.  This is a collective call.

    A model with a `weight_source` gets its values later, from `States.source`.

    Args:
        complete: the model before its division into stages.
        groups: the groups that `building.connect` created for `layouts`.
        initialize: the function that fills a model on the meta device; see `Engine`.

    Raises:
        ValueError: if the model is on the meta device and has neither `initialize` nor a `weight_source`, or if the
            model is in memory and `initialize` is given.
    """
    deferred = is_deferred(complete)
    source: WeightSource | None = getattr(model, "weight_source", None) if deferred else None
    if deferred != (initialize is not None or source is not None):
        raise ValueError(
            "expected initialize= for a model on the meta device, and only for such a model: pass initialize=, or "
            "create the model in memory and omit initialize="
        )
    types: dict[int, torch.dtype] = {}
    in_memory: set[str] | None = None
    if deferred:
        in_memory = {name for name, p in model.named_parameters() if not p.is_meta}
        types = stand_in([complete, model], torch.get_default_device())
    if initialize is None:
        broadcast_parameters(model, groups.mesh, layouts, groups, in_memory)
    plan = _plan(model, groups, layouts, options)
    accelerator = any(p.is_cuda for p in model.parameters())
    stores = stores_at(options.place, options.offloaded, plan, groups.comm, accelerator=accelerator)
    built = build(
        model,
        plan,
        groups,
        zero=options.zero,
        masters=options.masters,
        compression=options.compression,
        stores=stores,
    )
    if initialize is not None:
        fill_model(model, complete, built.weights, groups.mesh, layouts, groups.comm, initialize, types)
    elif source is not None:
        allocate(model, built.weights, types)
    return States(built, stores, source)


def _plan(
    model: nn.Module, groups: Groups, layouts: Mapping[str, Layout], options: StateOptions
) -> ShardingPlan:
    mesh, rank, zero = groups.mesh, groups.comm.rank, options.zero
    dividing = {ranks_of(mesh, layouts[name], rank, zero).shards for name, _ in model.named_parameters()}
    apart = any(_are_apart(model, groups.of_ranks(ranks)) for ranks in dividing)
    return plan_sharding(
        model,
        mesh,
        layouts,
        rank,
        zero=zero,
        dtype=options.dtype,
        flat=options.flat,
        gathered=zero == 3 and (options.offloaded == "parameters" or apart),
        bucket_bytes=options.bucket_bytes,
        stages=options.stages,
    )


def _are_apart(model: nn.Module, shards: Communicator | None) -> bool:
    """Return whether the ranks in `shards` do not share memory, and must therefore gather weights."""
    return shards is not None and not all(shards.shares_memory(p.device) for p in model.parameters())
