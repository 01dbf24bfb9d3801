"""Offload optimizer states, gradients and weights as a plan specifies, and update offloaded shards.

Every bucket is one unit of the update.  Its records are read, updated with this rank's shard of the averaged gradients,
and written.  Meanwhile, the records of the next unit are read.  The updated values are also copied to the model's
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.comm.host import host_identity
from farandole.memory.disk import OffloadError, require_space
from farandole.memory.divided_step import replace_step
from farandole.memory.offload_store import DiskStore, HostStore, OffloadStore
from farandole.memory.offloaded_optimizer import OffloadedOptimizer, ShardState
from farandole.memory.offloaded_tensor import OffloadedTensors
from farandole.memory.record_stream import RecordStream, disk_records, host_records
from farandole.memory.tracker import memory_tag
from farandole.parallel.optimizers.shards import OptimizerShards
from farandole.parallel.zero.building import Stores
from farandole.parallel.zero.sharding import ShardingPlan
from farandole.plan import Offloaded, Place

Records = Callable[[Sequence[int]], RecordStream]
T = TypeVar("T")

_AHEAD = 2
"""The number of units whose gradients and weights are prefetched in an update."""


def records_at(place: Place, comm: Communicator, *, pinned: bool) -> Records:
    """Return a function that creates records of given sizes in the storage that `Plan.offload` names.

    Calling the returned function is a collective call.  It raises `OffloadError` on all ranks if any rank has too
    little space.
    """
    if place.kind != "disk":
        return partial(host_records, pinned=pinned)

    def on_disk(record_bytes: Sequence[int]) -> RecordStream:
        _require_space(place.folder, sum(record_bytes), comm)
        name = "master weights and states of the optimizer"
        return _together(comm, lambda: disk_records(place.folder, record_bytes, name))

    return on_disk


def stores_at(
    place: Place, offloaded: Offloaded, plan: ShardingPlan, comm: Communicator, *, accelerator: bool
) -> Stores:
    """Return the stores for offloaded gradients and weights.  This is a collective call.

    Args:
        place: where to store the tensors, from `Plan.offload`.
        offloaded: which tensors to offload, from `Plan.offloaded`.

    Raises:
        OffloadError: on all ranks, if any rank has too little space.
    """
    if offloaded == "optimizer":
        return Stores()
    if place.kind == "disk" and accelerator:
        raise OffloadError(
            f"offloaded={offloaded!r} with offload='disk:{place.folder}' is not supported for models on an "
            "accelerator, because data from a disk are read into host memory: use offload='host' or "
            "offloaded='optimizer'"
        )
    sizes = {"gradients": [b.layout.shard_length * b.master_dtype.itemsize for b in plan.trained]}
    if offloaded == "parameters":
        every = (*plan.trained, *plan.frozen)
        sizes["weights"] = [b.layout.shard_length * b.dtype.itemsize for b in every]
    if place.kind == "disk":
        _require_space(place.folder, sum(map(sum, sizes.values())), comm)

    def make() -> dict[str, OffloadStore]:
        if place.kind != "disk":
            return {name: HostStore(name, pinned=accelerator) for name in sizes}
        stores: dict[str, OffloadStore] = {name: DiskStore(place.folder, name) for name in sizes}
        for name, store in stores.items():  # records of these sizes will use the space that is reserved here
            store.allocate(sizes[name])
        return stores

    return Stores(**{name: OffloadedTensors(store) for name, store in _together(comm, make).items()})


def _require_space(folder: str, needed: int, comm: Communicator) -> None:
    """Raise OffloadError on all ranks if any host's disk is too small for the records of its ranks."""
    here = host_identity()
    wanted = comm.all_gather_object((here, needed))
    _together(comm, lambda: require_space(folder, sum(size for host, size in wanted if host == here)))


def _together(comm: Communicator, make: Callable[[], T]) -> T:
    """Return `make()`; if it raises OffloadError on any rank, raise OffloadError on all ranks."""
    made: list[T] = []
    refusal = None
    try:
        made.append(make())
    except OffloadError as error:
        refusal = error
    refusals = comm.all_gather_object(None if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    for rank, other in enumerate(refusals):
        if other is not None:
            raise OffloadError(f"rank {rank}: {other}")
    return made[0]


class OffloadedUpdate:
    """Updates this rank's shards with `optimizer`; master weights and states are stored in offloaded records.

    The optimizer's step hooks finish averaging the gradients before an update, and distribute the updated weights
    after it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[OptimizerShards],
        records: Records,
    ) -> None:
        own = {id(shard) for group in optimizer.param_groups for shard in group["params"]}
        self._shards: list[OptimizerShards] = []
        units: list[list[nn.Parameter]] = []
        for each in shards:
            updated = [shard for shard in each.tensors if shard is not None and id(shard) in own]
            if updated:
                self._shards.append(each)
                units.append(updated)
        weights = [each.weights for each in self._shards if each.weights is not None]
        apart = any(weight.has_master_copy for weight in weights)
        self._elsewhere = any(each.parameters[0].is_cuda for each in self._shards)
        self._brings = self._elsewhere or any(each.bucket.is_offloaded for each in self._shards)
        # contexts that keep the offloaded gradients and values of a unit in memory during its update
        self._in_place = ExitStack()
        with memory_tag("masters and states"):
            self.state = OffloadedOptimizer(optimizer, units, records, weights=apart or self._elsewhere)
        for weight in weights:
            if self.state.weights:
                weight.master = None
        replace_step(optimizer, self.step)

    def step(self) -> None:
        """Update all shards; `optimizer.step` calls this method."""
        with memory_tag("masters and states"):
            if any(shard.grad is not None for unit in self.state.units for shard in unit):
                for shards in self._shards[:_AHEAD]:
                    shards.prefetch()
                with self._in_place:  # `_end_unit` closes it, unless a unit fails
                    self.state.step(self._begin_unit if self._brings else None, self._end_unit)

    def check(self, unit: int, states: Sequence[ShardState]) -> None:
        """Raise ValueError if the states do not match the shards of a unit."""
        self.state.check(unit, states)

    def invalidate(self) -> None:
        """Refuse further steps until every unit has been loaded.

        Call this after a failed load, which may have changed only some of the units.
        """
        self.state.invalidate()

    def load(self, unit: int, states: Sequence[ShardState]) -> None:
        """Set the shards of `unit` to `states`, as yielded by `saved`.

        Raises:
            ValueError: if the states do not match the shards.
        """
        with self._shards[unit].values_in_place(write=True):
            self.state.load(unit, states)

    def saved(self) -> Iterator[tuple[nn.Parameter, ShardState]]:
        """Yield (shard, weights and states) for each shard.  The values are valid until the next iteration."""
        for unit, states in self.state.saved():
            with self._shards[unit].values_in_place(write=False):
                for shard, kept in zip(self.state.units[unit], states, strict=True):
                    yield shard, kept if self.state.weights else ShardState(shard.data, kept.state)

    def close(self) -> None:
        """Free the offloaded records."""
        self.state.close()

    def _begin_unit(self, unit: int) -> None:
        shards = self._shards[unit]
        self._in_place.enter_context(shards.gradients_in_place())
        self._in_place.enter_context(shards.values_in_place(write=True))
        for following in self._shards[unit + 1 : unit + 1 + _AHEAD]:
            following.prefetch()

    def _end_unit(self, unit: int) -> None:
        if self.state.weights:
            self._shards[unit].update_weights(self.state.units[unit])
        self._in_place.close()
