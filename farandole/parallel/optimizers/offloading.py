"""An optimizer whose masters and states are kept elsewhere, as the engine's ranks update their pieces with it.

Every bucket is a unit: its masters and states come, are updated with this rank's share of the averaged gradients, and
go, while those of the next bucket are on their way.  What the model computes with gets the new values meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.comm.host import host_identity
from farandole.memory.disk import OffloadError, require_space
from farandole.memory.mmap_allocator import MmapAllocator
from farandole.memory.offloaded_optimizer import OffloadedOptimizer, ShardState
from farandole.memory.record_stream import RecordStream, disk_records, host_records
from farandole.memory.tracker import memory_tag
from farandole.parallel.building import Allocators
from farandole.parallel.optimizers.shards import OptimizerShards
from farandole.plan import Offloaded, Place

Records = Callable[[Sequence[int]], RecordStream]


def records_at(place: Place, comm: Communicator, *, pinned: bool) -> Records:
    """Return what makes records of given sizes at `Plan.offload`, for all ranks of `comm`, which call it together.

    The call raises `OffloadError` on all of them where there is no space for one.
    """
    if place.kind != "disk":
        return partial(host_records, pinned=pinned)

    def on_disk(record_bytes: Sequence[int]) -> RecordStream:
        _require_space(place.folder, sum(record_bytes), comm)
        return disk_records(place.folder, record_bytes, "master weights and states of the optimizer")

    return on_disk


def allocators_at(place: Place, offloaded: Offloaded, comm: Communicator, *, accelerator: bool) -> Allocators:
    """Return where gradients and weights are made, by `Plan.offload` and `Plan.offloaded`, on the ranks of `comm`."""
    if offloaded == "optimizer":
        return Allocators()
    if place.kind != "disk":
        raise OffloadError(
            f"offloaded={offloaded!r} with offload={place.kind!r}: it works with offload='disk:FOLDER'"
        )
    if accelerator:
        raise OffloadError(
            f"offloaded={offloaded!r} for a model on an accelerator: its gradients and weights stay there; "
            f"offloaded='optimizer' works"
        )
    allocator = MmapAllocator(place.folder, comm)
    return Allocators(gradients=allocator, weights=allocator if offloaded == "parameters" else None)


def _require_space(folder: str, needed: int, comm: Communicator) -> None:
    """Refuse on all ranks what does not fit on one; nobody has made a file before."""
    here = host_identity()
    wanted = comm.all_gather_object((here, needed))
    refusal = None
    try:
        require_space(folder, sum(size for host, size in wanted if host == here))
    except OffloadError as error:
        refusal = error
    refusals = comm.all_gather_object(None if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    for rank, other in enumerate(refusals):
        if other is not None:
            raise OffloadError(f"rank {rank}: {other}")


class OffloadedUpdate:
    """Has `optimizer`, which knows this rank's pieces, keep their masters and states in a home.

    Its `step` becomes that of the whole engine: `before` has all ranks' gradients averaged, `after` gives all ranks
    the new weights.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[OptimizerShards],
        records: Records,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        own = {id(piece) for group in optimizer.param_groups for piece in group["params"]}
        self._shards: list[OptimizerShards] = []
        units: list[list[nn.Parameter]] = []
        for each in shards:
            mine = [piece for piece in each.tensors if piece is not None and id(piece) in own]
            if mine:
                self._shards.append(each)
                units.append(mine)
        weights = [each.weights for each in self._shards if each.weights is not None]
        apart = any(weight.has_master_copy for weight in weights)
        self._elsewhere = any(each.parameters[0].is_cuda for each in self._shards)
        replaced = optimizer.step
        with memory_tag("masters and states"):
            self.state = OffloadedOptimizer(optimizer, units, records, weights=apart or self._elsewhere)
        for weight in weights:
            if self.state.weights:
                weight.master = None
        self._before, self._after = before, after
        # a bound method, as schedulers expect it
        step = MethodType(_step_of(self), optimizer)
        step.__func__.__dict__.update(getattr(replaced, "__dict__", {}))
        optimizer.step = step  # type: ignore[method-assign]

    def step(self) -> None:
        """All of it: gradients averaged, pieces updated, weights published."""
        self._before()
        with memory_tag("masters and states"):
            self.state.step(
                before=self._bring_gradients if self._elsewhere else None,
                after=self._take_weights if self.state.weights else None,
            )
        self._after()

    def saved(self) -> Iterator[tuple[nn.Parameter, ShardState]]:
        """Each piece with its weights and states, to be copied before the next one is asked for."""
        for unit, states in self.state.saved():
            yield from zip(self.state.units[unit], states, strict=True)

    def close(self) -> None:
        """Give the space back; masters and states are gone with it."""
        self.state.close()

    def _bring_gradients(self, unit: int) -> None:
        self._shards[unit].move_gradients()

    def _take_weights(self, unit: int) -> None:
        self._shards[unit].update_weights(self.state.units[unit])


def _step_of(update: OffloadedUpdate) -> Callable[..., Any]:
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's pieces of the parameters, whose states are kept elsewhere."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update.step()
        return loss

    return step
